"""The activations of a stage: what it needs beside its parameters, asked for again and again by the planner.

The inputs of a stage lie where the stage before wrote them until it is done with the frame, and its outputs stay until
the next one takes them, so both are alive to the end. Next: `graph.py`; `evaluate.py`, which holds a plan to this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.memory.memory_graph import MemoryGraph, check_order, footprint, memory_graph, peak_bytes
from tvm_pipeline.memory.minimum_peak import minimum_peak
from tvm_pipeline.memory.orders import Ordering, kahn_order, program_order

# Nearly all stages are proven in a fraction of this; of the others the best order found counts.
TIME_LIMIT_S = 2.0


def stage_graph(graph: OperatorGraph, operators: Iterable[str] | None = None) -> MemoryGraph:
    """The memory graph of a stage's operators (all by default), in the order in which the graph lists them.

    Raises:
        GraphError: an operator is not in the graph, or its sizes are ones that MemoryGraph refuses.
    """
    return memory_graph(graph, operators, pin_inputs=True)


def listed_peak(graph: OperatorGraph, operators: Iterable[str]) -> int:
    """Bytes of activations of a stage at its fullest, in the order in which the graph lists its operators."""
    return _listed_peak(graph, frozenset(operators))


def ordered_peak(graph: OperatorGraph, order: Sequence[str]) -> int:
    """Return the peak of a stage's activations, in bytes, where its operators run in the order given.

    Nothing is searched: this takes time in proportion to the stage.

    Raises:
        GraphError: an operator stands before one that it reads from.
    """
    memory = stage_graph(graph, order)
    index_of = {name: index for index, name in enumerate(memory.operators)}
    indices = [index_of[name] for name in order]
    check_order(memory, indices)
    return peak_bytes(memory, indices)


def least_peak(graph: OperatorGraph, operators: Iterable[str]) -> Ordering:
    """The order of a stage's operators that needs the least, as far as it was found within TIME_LIMIT_S."""
    return _least_peak(graph, frozenset(operators))


def activation_bytes(graph: OperatorGraph, operators: Iterable[str], room_bytes: int) -> int:
    """What a stage needs in the listed order where that fits into the room, else in the order that needs least."""
    members = frozenset(operators)
    listed = _listed_peak(graph, members)
    return listed if listed <= room_bytes else _least_peak(graph, members).peak_bytes


def needed(graph: OperatorGraph, operators: Iterable[str]) -> str:
    """What a stage needs, in words: in the best order and as listed, and where that is."""
    members = tuple(operators)
    memory, best = stage_graph(graph, members), least_peak(graph, members)
    names = [memory.operators[index] for index in fullest(memory, best.order)]
    at = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    least = "at least" if best.status == "optimal" else f"{best.bound_bytes} or, as far as is known,"
    return (
        f"{least} {best.peak_bytes} of activations at operator{'s' * (len(names) > 1)} {at} "
        f"({listed_peak(graph, members)} in the listed order)"
    )


def fullest(graph: MemoryGraph, order: Sequence[int]) -> list[int]:
    """The operators of `order` at which the most bytes are alive, first to run first."""
    steps = footprint(graph, order)
    peak = max(steps, default=0)
    return [index for index, alive in zip(order, steps, strict=True) if alive == peak]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A stage, or a whole model, in three orders.

    Attributes:
        listed, kahn: the graph's own order, and that of Kahn's algorithm.
        least: the order that needs the least.
    """

    name: str
    graph: MemoryGraph
    listed: tuple[int, ...]
    kahn: tuple[int, ...]
    least: Ordering

    @property
    def orders(self) -> dict[str, tuple[int, ...]]:
        return {"listed": self.listed, "kahn": self.kahn, "least": self.least.order}


def compare(name: str, graph: OperatorGraph, operators: Iterable[str] | None = None) -> Comparison:
    """The orders of a stage's operators (all by default); raises GraphError as `stage_graph` does."""
    memory = stage_graph(graph, operators)
    return Comparison(name, memory, program_order(memory), kahn_order(memory), minimum_peak(memory))


# A plan is judged a thousand times, mostly with stages that were judged before.
@lru_cache(maxsize=4096)
def _listed_peak(graph: OperatorGraph, operators: frozenset[str]) -> int:
    memory = stage_graph(graph, operators)
    return peak_bytes(memory, range(len(memory)))


@lru_cache(maxsize=4096)
def _least_peak(graph: OperatorGraph, operators: frozenset[str]) -> Ordering:
    return minimum_peak(stage_graph(graph, operators), time_limit_s=TIME_LIMIT_S)
