"""The activations of a stage: the memory that it needs beside its parameters.

The inputs of a stage stay where the stage before wrote them until the frame is done, and its outputs stay until the
next stage takes them, so both are alive to the end.

`order_peak` and `listed_peak` judge an order: they search nothing, and their answer depends on nothing but the graph.
`least_peak` searches for the best order within a time limit, so a slow machine may find a worse one; planners use it.
Next: `memory_graph.py`, and `cost/evaluate.py`, which checks plans by these figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.errors import GraphError
from tvm_pipeline.memory.concatenation import Concatenation, free_concatenations
from tvm_pipeline.memory.memory_graph import MemoryGraph, footprint, memory_graph, peak_bytes
from tvm_pipeline.memory.minimum_peak import minimum_peak
from tvm_pipeline.memory.orders import Ordering, kahn_order, program_order

# Nearly all stages are proven in a fraction of this time. For the others, the best order found is the answer.
TIME_LIMIT_S = 2.0


def stage_graph(graph: OperatorGraph, operators: Iterable[str] | None = None) -> MemoryGraph:
    """Return the memory graph of a stage's operators (all by default), in the order in which the graph lists them.

    Raises:
        GraphError: an operator is not in the graph, or its sizes are ones that MemoryGraph refuses.
    """
    return memory_graph(graph, operators, pin_inputs=True)


def listed_peak(graph: OperatorGraph, operators: Iterable[str]) -> int:
    """Return the peak bytes of activations of a stage whose operators run in the order in which the graph lists them.

    It takes time in proportion to the stage's operators and tensors. It searches nothing, has no time limit and keeps
    nothing, so that it can judge a plan.

    Args:
        operators: names of the stage's operators, in any order.

    Raises:
        GraphError: as `stage_graph` does.

    Examples:
        >>> from tvm_pipeline.core.graph import Operator, Tensor
        >>> a = Operator("a", "conv2d", ("x",), (Tensor("y", (8,), "int8"),))
        >>> b = Operator("b", "conv2d", ("y",), (Tensor("z", (2,), "int8"),))
        >>> graph = OperatorGraph("net", (Tensor("x", (4,), "int8"),), (a, b), ("z",))
        >>> listed_peak(graph, ["a"]), listed_peak(graph, ["a", "b"])
        (12, 14)
    """
    memory = stage_graph(graph, operators)
    return peak_bytes(memory, range(len(memory)))


def order_peak(graph: OperatorGraph, order: Sequence[str]) -> int:
    """Return the peak bytes of activations of a stage whose operators run in the given order.

    Like `listed_peak`, it can judge a plan: it searches nothing and depends on nothing but its arguments.

    Args:
        order: names of the stage's operators, first to run first.

    Raises:
        GraphError: as `stage_graph` does, or the order names an operator twice, or puts one before another whose
            output it reads.
    """
    memory = stage_graph(graph, order)
    if len(order) != len(memory):
        twice = next(name for index, name in enumerate(order) if name in order[:index])
        raise GraphError(f"graph {graph.name}: operator {twice} stands twice in an order of a stage; name it once")
    position = {name: index for index, name in enumerate(memory.operators)}
    return peak_bytes(memory, [position[name] for name in order])


def least_peak(graph: OperatorGraph, operators: Iterable[str]) -> Ordering:
    """Return the order of a stage's operators that needs the least, or the best one found within TIME_LIMIT_S."""
    return _least_peak(graph, frozenset(operators))


def activation_bytes(graph: OperatorGraph, operators: Iterable[str], capacity_bytes: int) -> int:
    """Return what a stage needs in the listed order if that fits the capacity, else in the order that needs least.

    The second answer comes from a search with a time limit (see `least_peak`), so this is for planners, not for judges.
    """
    members = frozenset(operators)
    listed = _listed_peak(graph, members)
    return listed if listed <= capacity_bytes else _least_peak(graph, members).peak_bytes


def needed(graph: OperatorGraph, operators: Iterable[str]) -> str:
    """Say in words what a stage needs in the best order and as listed, and at which operators."""
    members = tuple(operators)
    memory, best = stage_graph(graph, members), least_peak(graph, members)
    names = [memory.operators[index] for index in peak_operators(memory, best.order)]
    at = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    least = "at least" if best.status == "optimal" else f"{best.bound_bytes} or, as far as is known,"
    return (
        f"{least} {best.peak_bytes} of activations at operator{'s' * (len(names) > 1)} {at} "
        f"({listed_peak(graph, members)} in the listed order)"
    )


def peak_operators(graph: MemoryGraph, order: Sequence[int]) -> list[int]:
    """Return the operators of `order` at which the most bytes are alive, first to run first."""
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


def compare(
    name: str, graph: OperatorGraph, operators: Iterable[str] | None = None, concatenation: Concatenation = "copied"
) -> Comparison:
    """Compare the orders of a stage's operators (all by default); raise GraphError as `stage_graph` does.

    Args:
        concatenation: whether one is a copy of its parts, or `free`: see `concatenation.py`.
    """
    memory = stage_graph(graph, operators)
    if concatenation == "free":
        memory = free_concatenations(graph, memory)
    return Comparison(name, memory, program_order(memory), kahn_order(memory), minimum_peak(memory))


# Planners call these a thousand times, mostly for the same stages. A judge does not use them.
@lru_cache(maxsize=4096)
def _listed_peak(graph: OperatorGraph, operators: frozenset[str]) -> int:
    return listed_peak(graph, operators)


@lru_cache(maxsize=4096)
def _least_peak(graph: OperatorGraph, operators: frozenset[str]) -> Ordering:
    return minimum_peak(stage_graph(graph, operators), time_limit_s=TIME_LIMIT_S)
