"""The order of a stage's operators that needs least memory, and where its buffers then lie.

The names below are what others use; `graph.py` says what they mean.
"""

from tvm_pipeline.memory.memory_graph import (
    Buffer,
    MemoryGraph,
    check_order,
    footprint,
    memory_graph,
    peak_bytes,
)
from tvm_pipeline.memory.minimum_peak import Method, minimum_peak
from tvm_pipeline.memory.orders import Ordering

__all__ = [
    "Buffer",
    "MemoryGraph",
    "Method",
    "Ordering",
    "check_order",
    "footprint",
    "memory_graph",
    "minimum_peak",
    "peak_bytes",
]
