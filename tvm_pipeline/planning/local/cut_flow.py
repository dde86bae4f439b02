"""Minimum cuts of a graph, with many prices and many fixed operators: its network, and a loop that numba compiles.

A search that branches asks for thousands of cuts of the same graph. So the graph is laid out once, and operators that
are fixed are left out while the flow is searched.

Dinic, "Algorithm for solution of a problem of maximum flow in a network with power estimation", Soviet Mathematics
Doklady 11, 1970. Next: `least_crossing.py`, cuts in windows of work; `refined_chain.py`, which branches.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.planning.search.cuts import Floats, Integers
from tvm_pipeline.solvers.hot import hot

# The ancestors of so many operators take 50 MB. Nothing is known of the cuts of larger graphs.
MOST_OPERATORS = 20_000
FREE, INSIDE, OUTSIDE = 0, 1, 2
_NEVER = 1 << 58  # the capacity of an arc that no minimum cut has
_MOST_FLOW, _FINEST = 2.0**54, 2.0**20  # the units of a flow, in all and for each byte


class Network:
    """A graph as a network whose cuts are its downsets, and whose capacities are the bytes that cross them.

    Args:
        handed_on: whether only the tensors count that operators hand on to others: neither inputs nor outputs of the
            model.
        leaders: operators with the same leader stand on one side; see `staging.dag_of`.

    Attributes:
        needs: packed bits; row v marks the operators that v needs, and v itself. None for graphs that are too large.
    """

    def __init__(self, graph: OperatorGraph, *, handed_on: bool = False, leaders: list[int] | None = None) -> None:
        edges, outputs = graph.edges, set() if handed_on else set(graph.outputs)
        self.before = edges.before
        self.always = 0  # bytes that cross every cut
        self.kept = np.zeros(len(graph))
        flows: dict[tuple[int, tuple[int, ...]], int] = {}
        for name, tensor in graph.tensors.items():
            writer, readers = edges.writer.get(name, -1), edges.readers[name]
            if handed_on and writer < 0:
                continue
            if name in outputs and writer < 0:
                self.always += tensor.bytes
            elif name in outputs:
                self.kept[writer] += tensor.bytes
            elif readers:
                flows[writer, readers] = flows.get((writer, readers), 0) + tensor.bytes
        self.flows = [(writer, readers, size) for (writer, readers), size in flows.items() if size]
        self.writer = np.array([writer for writer, _, _ in self.flows], np.int64)
        self.sizes = np.array([size for _, _, size in self.flows], np.float64)
        self.readers = np.array([reader for _, readers, _ in self.flows for reader in readers], np.int64)
        self.starts = np.cumsum([0, *(len(readers) for _, readers, _ in self.flows)])[:-1]
        self.bytes = float(self.sizes.sum() + self.kept.sum())
        self.together = [(v, leader) for v, leader in enumerate(leaders or ()) if v != leader]
        self.needs = _needs(self.before) if len(graph) <= MOST_OPERATORS else None

    def __len__(self) -> int:
        return len(self.before)

    def with_needs(self, work: Floats) -> tuple[Floats, Floats]:
        """Return for each operator its work with that of all that it needs, and with that of all that need it."""
        assert self.needs is not None
        count, rows = len(self), 1024
        upstream, downstream = np.zeros(count), np.zeros(count)
        for start in range(0, count, rows):
            bits = np.unpackbits(self.needs[start : start + rows], axis=1, count=count).astype(np.float32)
            # Sums of float32 bits with float64 work are float64.
            upstream[start : start + rows] = bits @ work
            downstream += work[start : start + rows] @ bits
        return upstream, downstream

    def is_needed(self, v: int, by: int) -> bool:
        """Return whether it is known that the operator `by` needs v."""
        return self.needs is not None and bool(self.needs[by, v >> 3] & 128 >> (v & 7))

    @cached_property
    def closures(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """N x N twice: what each operator needs, and what needs it, itself included."""
        assert self.needs is not None
        needs = np.unpackbits(self.needs, axis=1, count=len(self)).astype(bool)
        return needs, np.ascontiguousarray(needs.T)

    def crossing(self, inside: npt.NDArray[np.bool_]) -> float:
        """Return the bytes that cross behind a downset."""
        kept = self.always + float(self.kept[inside].sum())
        if not self.flows:
            return kept
        read = np.logical_or.reduceat(~inside[self.readers], self.starts)
        return kept + float(self.sizes[read & np.append(inside, True)[self.writer]].sum())

    def least_cut(self, work: Floats, price: float, state: Integers) -> tuple[float, npt.NDArray[np.bool_]]:
        """Return a value just below the least X(D) - price w(D), and the D that has it, as N booleans.

        X(D) are the bytes that cross behind a downset D and w(D) the work of its operators, see `least_crossing.py`.

        Args:
            state: N; FREE, INSIDE or OUTSIDE. Each operator inside has all that it needs inside, each outside all that
                need it.
        """
        gain = price * work - self.kept
        scale = min(_FINEST, _MOST_FLOW / max(self.bytes + float(np.abs(gain).sum()), 1.0))
        # Capacities are rounded down, so the flow is never above the minimum cut.
        whole = np.floor(np.abs(gain) * scale).astype(np.int64)
        flow, side = greatest_flow(*self._arcs, scale, np.where(gain > 0, whole, -whole), state)
        inside, free = state == INSIDE, state == FREE
        least = flow / scale - float(gain[free & (gain > 0)].sum()) - float(gain[inside].sum()) + self.always
        return least - 1e-9 * abs(least), side

    @cached_property
    def _arcs(self) -> tuple[Integers, Integers, Integers, Integers]:
        """The arcs between the operators, the tensors that several of them read, and at last the model's inputs.

        Arcs come in pairs, an arc and its way back; those that leave node n are at starts[n] to starts[n + 1]. The
        arrays are `starts`, then for each arc the node it leads to, the index of its way back, and its capacity.
        """
        arcs: list[tuple[int, int, int]] = []
        count = len(self)
        several = sum(len(readers) > 1 for _, readers, _ in self.flows)
        entry, nodes = count + several, count
        for v, found in enumerate(self.before):
            arcs += ((v, u, _NEVER) for u in found)
        for v, leader in self.together:
            arcs += ((v, leader, _NEVER), (leader, v, _NEVER))
        for writer, readers, size in self.flows:
            tail = entry if writer < 0 else writer
            if len(readers) == 1:
                arcs.append((tail, readers[0], size))
                continue
            arcs.append((tail, nodes, size))
            arcs += ((nodes, reader, _NEVER) for reader in readers)
            nodes += 1
        table = np.array(arcs, np.int64).reshape(-1, 3)
        tails = np.concatenate((table[:, 0], table[:, 1]))
        heads = np.concatenate((table[:, 1], table[:, 0]))
        sizes = np.concatenate((table[:, 2], np.zeros(len(table), np.int64)))
        order = np.argsort(tails, kind="stable")
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        back = place[(order + len(table)) % (2 * len(table))] if len(table) else order
        starts = np.concatenate(([0], np.cumsum(np.bincount(tails, minlength=entry + 1)))).astype(np.int64)
        return starts, heads[order], back, sizes[order]


def _needs(before: tuple[tuple[int, ...], ...]) -> npt.NDArray[np.uint8]:
    count = len(before)
    table = np.zeros((count, (count + 7) // 8), np.uint8)
    for index, found in enumerate(before):
        for source in found:
            table[index] |= table[source]
        table[index, index >> 3] |= 128 >> (index & 7)
    return table


@hot
def greatest_flow(starts: Any, head: Any, back: Any, capacity: Any, scale: Any, gain: Any, state: Any) -> Any:
    """Return the greatest flow from the fixed operators inside to those outside, and the side of each operator.

    A free operator with a gain has an arc of that capacity from the source, and one with a loss one to the sink.
    """
    nodes, count = len(starts) - 1, len(gain)
    fixed = np.zeros(nodes, np.int64)
    fixed[:count] = state
    fixed[nodes - 1] = INSIDE
    room = np.zeros(len(head), np.int64)
    supply, demand = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    flow = 0
    free: Any = np.flatnonzero(fixed == FREE)
    for v in free:
        if v < count:
            supply[v] = max(gain[v], 0)
            demand[v] = max(-gain[v], 0)
    for v in range(nodes):
        if fixed[v] == OUTSIDE:
            continue
        for arc in range(starts[v], starts[v + 1]):
            w, size = head[arc], capacity[arc]
            if size == 0 or fixed[w] == INSIDE:
                continue
            if size < _NEVER:
                size = np.int64(np.floor(size * scale))
            if fixed[v] == INSIDE and fixed[w] == OUTSIDE:
                flow = min(flow + size, _NEVER)
            elif fixed[v] == INSIDE:
                supply[w] = min(supply[w] + size, _NEVER)
            elif fixed[w] == OUTSIDE:
                demand[v] = min(demand[v] + size, _NEVER)
            else:
                room[arc] = size
    for v in free:
        both = min(supply[v], demand[v])
        flow += both
        supply[v] -= both
        demand[v] -= both
    level, queue = np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    at, path = np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    while True:
        filled, done, found = 0, 0, False
        for v in free:
            level[v], at[v] = -1, starts[v]
            if supply[v] > 0:
                level[v] = 0
                queue[filled] = v
                filled += 1
        while done < filled:
            v = queue[done]
            done += 1
            found = found or demand[v] > 0
            for arc in range(starts[v], starts[v + 1]):
                w = head[arc]
                if room[arc] > 0 and level[w] < 0:
                    level[w] = level[v] + 1
                    queue[filled] = w
                    filled += 1
        if not found:
            break
        for source in free:
            if level[source] != 0:
                continue
            depth, v = 0, source
            while supply[source] > 0:
                if demand[v] > 0:
                    pushed = min(supply[source], demand[v])
                    for step in range(depth):
                        pushed = min(pushed, room[path[step]])
                    supply[source] -= pushed
                    demand[v] -= pushed
                    flow += pushed
                    # The search goes on in front of the first arc of the path that is full.
                    for step in range(depth - 1, -1, -1):
                        room[path[step]] -= pushed
                        room[back[path[step]]] += pushed
                        if room[path[step]] == 0:
                            depth, v = step, head[back[path[step]]]
                    continue
                advanced = False
                while at[v] < starts[v + 1]:
                    arc = at[v]
                    w = head[arc]
                    if room[arc] > 0 and level[w] == level[v] + 1:
                        path[depth] = arc
                        depth += 1
                        v = w
                        advanced = True
                        break
                    at[v] += 1
                if advanced:
                    continue
                if depth == 0:
                    break
                depth -= 1
                v = head[back[path[depth]]]
                at[v] += 1
    side = np.zeros(count, np.bool_)
    for v in range(count):
        side[v] = fixed[v] == INSIDE or (fixed[v] == FREE and level[v] >= 0)
    return flow, side
