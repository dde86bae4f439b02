"""The stage of every operator, as booleans for CP-SAT: the part that all exact models share.

`before[v][b]` says that operator v is in a stage in front of boundary b. It rises with b, and on an edge u -> v
`before[v][b]` implies `before[u][b]`. So the first stages are always downsets, and every chain of nested downsets is in
the search space. (Integer stage variables, as in the published model, were measured 10 to 100 times slower.)

Next: `least_bytes.py` (the lexicographic problem) and `least_seconds.py` (devices, links and time).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.topology import Neighbours
from tvm_pipeline.planning.local.cut_flow import Network
from tvm_pipeline.planning.search.cuts import grouped
from tvm_pipeline.solvers.cpsat import library

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

    # A sum may turn out to be a plain number.
    Expression: TypeAlias = cp_model.LinearExpr | int
    Terms: TypeAlias = list[tuple[cp_model.IntVar, int]]


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that travel together: they have one writer and the same readers.

    Attributes:
        writer: index of the operator that writes them; None for inputs of the model.
        readers: the operators that read them, without those known to come before another reader.
        kept: whether they are outputs of the model, which are alive to the end.
    """

    writer: int | None
    readers: tuple[int, ...]
    kept: bool
    bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Dag:
    """A graph of operator indices, and figures of it that need no search.

    Attributes:
        leader: operators with the same leader must share a stage (the rule `children_together`).
        upstream_bytes, downstream_bytes: parameter bytes of an operator and of all operators that it needs, and of an
            operator and of all operators that need it; for very large graphs a lower bound of these.
    """

    graph: OperatorGraph
    leader: list[int]
    flows: tuple[TensorGroup, ...]
    param_bytes: list[int]
    upstream_bytes: npt.NDArray[np.int64]
    downstream_bytes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.graph)

    def windows(self, stages: int, most_bytes: int) -> list[tuple[int, int]]:
        """Return the first and the last stage that each operator can be in if no stage has more than `most_bytes`."""
        if most_bytes <= 0:
            return [(0, stages - 1)] * len(self)
        first = np.maximum(-(-self.upstream_bytes // most_bytes) - 1, 0)
        last = np.minimum(stages - -(-self.downstream_bytes // most_bytes), stages - 1)
        np.maximum.at(first, self.leader, first.copy())
        np.minimum.at(last, self.leader, last.copy())
        return [(int(first[leader]), int(last[leader])) for leader in self.leader]


def dag_of(graph: OperatorGraph, children_together: bool) -> Dag:
    """Return the Dag of a graph."""
    network = Network(graph)
    param_bytes = [operator.param_bytes for operator in graph.operators]
    weights = np.array(param_bytes, np.float64)
    sums = (weights, weights) if network.needs is None else network.with_needs(weights)
    leader = leaders_of(graph.edges.before) if children_together else list(range(len(graph)))
    return Dag(graph, leader, _flows(graph, network), param_bytes, *(s.astype(np.int64) for s in sums))


def leaders_of(sources: Neighbours) -> list[int]:
    """Return the leader of each operator, by union-find over the readers of each operator."""
    leader = list(range(len(sources)))

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = index = leader[leader[index]]
        return index

    first_reader: dict[int, int] = {}
    for index, found in enumerate(sources):
        for source in found:
            leader[find(index)] = find(first_reader.setdefault(source, index))
    return [find(index) for index in range(len(sources))]


def _flows(graph: OperatorGraph, network: Network) -> tuple[TensorGroup, ...]:
    edges, outputs = graph.edges, set(graph.outputs)
    sizes: dict[tuple[int | None, tuple[int, ...], bool], int] = {}
    for name, tensor in graph.tensors.items():
        readers = edges.readers[name]
        readers = tuple(r for r in readers if not any(r != other and network.is_needed(r, other) for other in readers))
        if tensor.bytes and (readers or name in outputs):
            key = edges.writer.get(name), readers, name in outputs
            sizes[key] = sizes.get(key, 0) + tensor.bytes
    return tuple(TensorGroup(*key, size) for key, size in sizes.items())


class Staging:
    """The booleans of one graph in `stages` stages, and the constraints between them."""

    def __init__(
        self, model: cp_model.CpModel, dag: Dag, stages: int, windows: Sequence[tuple[int, int]] | None = None
    ) -> None:
        self.model, self.dag, self.stages = model, dag, stages
        self.true, self.false = model.new_constant(1), model.new_constant(0)
        self.before: list[list[cp_model.IntVar]] = [[] for _ in range(len(dag))]
        for index, leader in enumerate(dag.leader):
            if not self.before[leader]:
                self.before[leader] = self._row(*(windows[leader] if windows else (0, stages - 1)))
            self.before[index] = self.before[leader]
        for index, found in enumerate(dag.graph.edges.before):
            for source in found:
                for after, needed in zip(self.before[index], self.before[source], strict=True):
                    if after is not needed and needed is not self.true and after is not self.false:
                        model.add_implication(after, needed)

    def _row(self, first: int, last: int) -> list[cp_model.IntVar]:
        free = [self.model.new_bool_var("") for _ in range(first + 1, last + 1)]
        for earlier, later in pairwise(free):
            self.model.add_implication(earlier, later)
        if first > last:
            self.model.add_bool_or([self.false])
        return [*[self.false] * (first + 1), *free, *[self.true] * (self.stages - last)][: self.stages + 1]

    def prefix(self, boundary: int, weights: Sequence[int]) -> Expression:
        """Return the sum of the weights of all operators in front of the boundary."""
        row = ((self.before[index][boundary], weight) for index, weight in enumerate(weights) if weight)
        return weighted([(literal, weight) for literal, weight in row if literal is not self.false])

    def stage(self, stage: int, weights: Sequence[int]) -> Expression:
        """Return the sum of the weights of the operators of a stage."""
        return self.prefix(stage + 1, weights) - self.prefix(stage, weights)

    def fill(self, stage: int, only_if: Sequence[cp_model.IntVar] = ()) -> None:
        """Demand that the stage has an operator if all literals of `only_if` hold."""
        inside = self.stage(stage, [1] * len(self.dag))
        self.model.add(inside >= 1).only_enforce_if(*only_if)

    def crossing(self, boundary: int, flows: Sequence[TensorGroup]) -> Terms:
        """Return a literal for each flow that may cross the boundary, with its bytes. It is true if the flow crosses.

        The literal of a flow that does not cross may be true, too; an objective or a limit makes it false.
        """
        terms = [(self._crosses(boundary, flow), flow.bytes) for flow in flows]
        return [(literal, size) for literal, size in terms if literal is not self.false]

    def _crosses(self, boundary: int, flow: TensorGroup) -> cp_model.IntVar:
        written = self.true if flow.writer is None else self.before[flow.writer][boundary]
        if flow.kept or written is self.false:
            return written
        waiting = [self.before[reader][boundary] for reader in flow.readers]
        waiting = [literal for literal in dict.fromkeys(waiting) if literal is not self.true]
        if not waiting:
            return self.false
        if any(literal is self.false for literal in waiting):
            return written
        if written is self.true and len(waiting) == 1:
            return ~waiting[0]  # type: ignore[return-value]  # a negated literal works as well
        crosses = self.model.new_bool_var("")
        for literal in waiting:
            self.model.add_bool_or(crosses, ~written, literal)
        return crosses

    def enters(self, stage: int, writer: int, reader: int) -> cp_model.IntVar:
        """Return a literal that is true if the reader is in the stage, and the writer in an earlier one.

        It may be true otherwise, too, as that of `crossing`.
        """
        written, read = self.before[writer][stage], self.before[reader][stage + 1]
        earlier = self.before[reader][stage]
        if written is self.false or read is self.false or earlier is self.true:
            return self.false
        enters = self.model.new_bool_var("")
        self.model.add_bool_or(enters, ~written, ~read, earlier)
        return enters

    def hint(self, stage_of: Sequence[int]) -> None:
        """Start the search at this assignment of operators to stages."""
        for leader in set(self.dag.leader):
            for boundary, literal in enumerate(self.before[leader]):
                if literal is not self.true and literal is not self.false:
                    self.model.add_hint(literal, stage_of[leader] < boundary)

    def groups(self, solver: cp_model.CpSolver) -> list[tuple[str, ...]]:
        """Return the operators of each stage of a solution, in the graph's order."""
        found = [self.stages - sum(map(solver.boolean_value, row)) for row in self.before]
        return grouped(self.dag.graph, found, self.stages)


def stage_of(graph: OperatorGraph, stages: Sequence[Stage]) -> list[int]:
    """Return the stage of every operator, in the graph's order."""
    found = {name: index for index, stage in enumerate(stages) for name in stage.operators}
    return [found[operator.name] for operator in graph.operators]


def weighted(terms: Terms) -> Expression:
    """Return the sum of weight times literal."""
    total: Expression = library().LinearExpr.weighted_sum([t for t, _ in terms], [w for _, w in terms])
    return total
