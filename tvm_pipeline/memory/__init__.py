"""The order of a stage's operators that needs least memory, and the layout of its buffers.

The names below are the interface of the package; `memory_graph.py` defines their terms.

memory_graph.py   buffers, the bytes alive at each step of an order, and the check of an order
orders.py         orders that cost no search
concatenation.py  graphs whose concatenations take no memory of their own
minimum_peak.py   the one entry to all methods that order a graph
exact_order.py    the order with the least peak, proven
order_search.py   its compiled search
order_arrays.py   the arrays of that search, with named fields
regions.py        the parts of a graph that can be ordered one by one
stage_memory.py   the activations that a stage of a plan needs
arena.py          the layout of an order's buffers
fitting.py        a layout in an arena of given bytes, where the tensors hardly fit
certificate.py    an order and its layout with their bounds, for a checker that trusts no line of this package
rewriting.py      graphs rewritten so that they need less
savings.py        what that saves, of a graph or a stage
traffic.py        the bytes that an order moves between on-chip memory and the memory behind it
traffic_order.py  the order that moves the least
"""

from tvm_pipeline.memory.memory_graph import (
    Buffer,
    MemoryGraph,
    check_order,
    footprint,
    memory_graph,
    peak_bytes,
    predecessors,
)
from tvm_pipeline.memory.minimum_peak import Method, minimum_peak
from tvm_pipeline.memory.orders import Ordering, kahn_order

__all__ = [
    "Buffer",
    "MemoryGraph",
    "Method",
    "Ordering",
    "check_order",
    "footprint",
    "kahn_order",
    "memory_graph",
    "minimum_peak",
    "peak_bytes",
    "predecessors",
]
