"""The one entry to all methods that order a memory graph; `exact_order.py` is the search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

from tvm_pipeline.errors import OptionError
from tvm_pipeline.memory.exact_order import exact_order, largest_operator
from tvm_pipeline.memory.memory_graph import MemoryGraph, peak_bytes
from tvm_pipeline.memory.orders import Ordering, dfs_order, kahn_order, program_order

Method = Literal["exact", "program", "kahn", "dfs"]
_FREE: dict[str, Callable[[MemoryGraph], Sequence[int]]] = {
    "program": program_order,
    "kahn": kahn_order,
    "dfs": dfs_order,
}


def minimum_peak(graph: MemoryGraph, method: Method = "exact", time_limit_s: float | None = 60.0) -> Ordering:
    """Return an order of the graph's operators with a low peak of bytes alive, found by the chosen method.

    Args:
        method: `exact` proves that no order needs less (see `exact_order.py`); the others cost no search, and
            their bound is what the largest operator needs.
        time_limit_s: after this time the best order found is the answer, with a bound; None for no limit.

    Raises:
        OptionError: there is no such method.
    """
    if method == "exact":
        return exact_order(graph, time_limit_s)
    if method not in _FREE:
        raise OptionError(
            f"there is no method {method} to order operators by; choose one of {', '.join(get_args(Method))}"
        )
    order = tuple(_FREE[method](graph))
    return Ordering(order, peak_bytes(graph, order), largest_operator(graph))
