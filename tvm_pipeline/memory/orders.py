"""Orders that cost no search, and the answer that every method gives.

The program order is the order in which the graph lists its operators. Next: `exact_order.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tvm_pipeline.core.topology import successors, topological_order
from tvm_pipeline.memory.memory_graph import MemoryGraph, predecessors


@dataclass(frozen=True, slots=True)
class Ordering:
    """An order of a memory graph's operators, and what is proven of it.

    Attributes:
        order: indices of operators, first to run first.
        peak_bytes: the most bytes alive at the same time in this order.
        bound_bytes: no order needs less.
        status: `optimal` if the two are equal.
    """

    order: tuple[int, ...]
    peak_bytes: int
    bound_bytes: int

    @property
    def status(self) -> Literal["optimal", "feasible"]:
        return "optimal" if self.peak_bytes == self.bound_bytes else "feasible"

    @property
    def gap(self) -> float:
        """Return the excess of the peak over the bound, as a share of the bound."""
        return (self.peak_bytes - self.bound_bytes) / self.bound_bytes if self.peak_bytes > self.bound_bytes else 0.0


def program_order(graph: MemoryGraph) -> tuple[int, ...]:
    """Return the order in which the graph lists its operators."""
    return tuple(range(len(graph)))


def kahn_order(graph: MemoryGraph) -> tuple[int, ...]:
    """Return the order of Kahn's algorithm with a queue: the operator that became ready first runs first."""
    before = predecessors(graph)
    return tuple(topological_order(before, successors(before), "first"))


def dfs_order(graph: MemoryGraph) -> tuple[int, ...]:
    """Return the order of Kahn's algorithm with a stack, which follows each branch to its end.

    The operator that became ready last runs first.
    """
    before = predecessors(graph)
    return tuple(topological_order(before, successors(before), "last"))
