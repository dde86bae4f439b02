"""Orders that cost no search, and what every method answers with.

Program order is the listing of the graph itself. Next: `exact.py`, `serenity.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tvm_pipeline.memory.memory_graph import MemoryGraph, predecessors


@dataclass(frozen=True, slots=True)
class Ordering:
    """An order of a memory graph's operators, and what is proven of it.

    Attributes:
        order: indices of operators, first to run first.
        peak_bytes: the most bytes alive at once in this order.
        bound_bytes: no order needs less.
        status: `optimal` where the two are equal.
    """

    order: tuple[int, ...]
    peak_bytes: int
    bound_bytes: int

    @property
    def status(self) -> Literal["optimal", "feasible"]:
        return "optimal" if self.peak_bytes == self.bound_bytes else "feasible"

    @property
    def gap(self) -> float:
        """How much more than the bound the order needs, as a share of the bound."""
        return (self.peak_bytes - self.bound_bytes) / self.bound_bytes if self.peak_bytes > self.bound_bytes else 0.0


def program_order(graph: MemoryGraph) -> tuple[int, ...]:
    """The order in which the graph lists its operators."""
    return tuple(range(len(graph)))


def kahn_order(graph: MemoryGraph) -> tuple[int, ...]:
    """Kahn's algorithm with a queue: what has become ready first runs first."""
    return _by_readiness(graph, last_first=False)


def dfs_order(graph: MemoryGraph) -> tuple[int, ...]:
    """Kahn's algorithm with a stack: what has become ready last runs first, so that branches are followed."""
    return _by_readiness(graph, last_first=True)


def _by_readiness(graph: MemoryGraph, *, last_first: bool) -> tuple[int, ...]:
    before = predecessors(graph)
    after = successors(before)
    missing = [len(found) for found in before]
    ready = deque(index for index, count in enumerate(missing) if count == 0)
    order = []
    while ready:
        index = ready.pop() if last_first else ready.popleft()
        order.append(index)
        for follower in after[index]:
            missing[follower] -= 1
            if missing[follower] == 0:
                ready.append(follower)
    return tuple(order)


def successors(before: Sequence[Iterable[int]]) -> list[list[int]]:
    """For each operator those that must run after it, ascending; the reverse of `predecessors`."""
    after: list[list[int]] = [[] for _ in before]
    for index, found in enumerate(before):
        for other in found:
            after[other].append(index)
    return after
