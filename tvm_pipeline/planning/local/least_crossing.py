"""The least bytes that cross a cut, by the work in front of it: minimum cuts in windows of work.

The first stages of a pipeline hold a downset D of the graph: with each operator all that it needs. Let w(D) be the work
of its operators and X(D) the bytes of the tensors that cross behind it. For every interval of w this module bounds X
from below, over all downsets, which are too many to list. For any price p,

    X(D) >= p w(D) + min over downsets D' of (X(D') - p w(D')),

and that minimum is a minimum cut: a tensor is a node between its writer and its readers, so that it is cut once however
many read it. In a window of work some operators stand in front of every cut (all that does not need them weighs too
little) and some behind (what they need weighs too much). They are contracted, which leaves small networks, and holds
for each window by itself, where one price for the whole graph would say little.

Minimum cuts with prices on their contents: Picard, "Maximal closure of a graph and applications to combinatorial
problems", Management Science 22(11), 1976. Next: `chain_bound.py`, which makes a bound of pipelines of this.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.planning.search.cuts import Floats, Integers
from tvm_pipeline.solvers.ortools_parts import part

# The ancestors of so many operators take 50 MB. Nothing is known of the cuts of larger graphs.
MOST_OPERATORS = 20_000
INTERVALS = 4096
# The numbers of windows, one after another, up to one for each operator. The last ones are left out where time is over.
WINDOWS = (16, 128, 512)
PRICES = 7  # that are tried in each window

_NEVER = 1 << 58  # the capacity of an arc that no minimum cut has
_MOST_FLOW = 2.0**54


@dataclass(frozen=True, slots=True, eq=False)
class Crossing:
    """Bounds of the bytes that cross a cut, for M intervals of the work in front of it.

    Attributes:
        work: M + 1; the ends of the intervals, ascending from 0 to all work.
        least: M; no cut with so much work in front of it has fewer bytes cross; infinite where there is no such cut.
    """

    work: Floats
    least: Floats


def least_crossing(network: Network, work: Floats, price: float, deadline: float = math.inf) -> Crossing:
    """Return bounds of the bytes that cross the cuts of a graph.

    Args:
        work: of each operator, none of it negative, such as seconds.
        price: bytes for a unit of work; prices up to this one are tried.
        deadline: of `time.monotonic`; the bounds are 0 where it leaves no time.

    Examples:
        >>> from tvm_pipeline.testing import example_graph
        >>> crossing = least_crossing(Network(example_graph()), np.array([1.0, 1.0]), price=100.0)
        >>> crossing.least[[0, 2048, -1]]  # in front of the first operator, between the two, and behind both
        array([4., 4., 4.])
    """
    total = float(work.sum())
    edges = np.linspace(0.0, total, INTERVALS + 1)
    least = np.zeros(INTERVALS)
    if network.needs is None or total <= 0:
        return Crossing(edges, least)
    upstream, downstream = network.with_needs(work)
    for count in WINDOWS:
        if count > max(WINDOWS[0], len(network)):
            break
        size = INTERVALS // count
        for start in range(0, INTERVALS, size):
            if time.monotonic() > deadline:
                return Crossing(edges, least)
            here = slice(start, start + size)
            ends = edges[start : start + size + 1]
            inside = upstream <= ends[-1] * (1 + 1e-9)
            outside = total - downstream >= ends[0] * (1 - 1e-9)
            if not (inside | outside).all():
                least[here] = np.inf  # an operator can stand neither in front of such a cut nor behind it
                continue
            window = network.window(~outside, ~inside)
            least[here] = np.maximum(least[here], _least_in(window, work, ends, price))
    return Crossing(edges, least)


def _least_in(window: _Window, work: Floats, ends: Floats, most_price: float) -> Floats:
    """Return bounds for the intervals between `ends`, by prices that bisection finds for the middle of the window."""
    found = np.zeros(len(ends) - 1)
    middle = (ends[0] + ends[-1]) / 2
    low, high, price = -most_price, most_price, 0.0
    for _ in range(PRICES):
        least, content = window.solve(price, work)
        line = least + price * ends
        found = np.maximum(found, np.minimum(line[:-1], line[1:]))
        if content < middle:
            low = price
        else:
            high = price
        price = (low + high) / 2
    return found


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
        self.of_operator: list[list[int]] = [[] for _ in range(len(graph))]
        for index, (writer, readers, _) in enumerate(self.flows):
            for operator in {writer, *readers}.difference({-1}):
                self.of_operator[operator].append(index)

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

    def between(self, inside: npt.NDArray[np.bool_], outside: npt.NDArray[np.bool_], others: list[int]) -> float:
        """Return the bytes from operators in front to operators behind, but for those of the flows `others`."""
        if not self.flows:
            return 0.0
        read = np.logical_or.reduceat(outside[self.readers], self.starts)
        crosses = read & np.append(inside, True)[self.writer]
        crosses[others] = False
        return float(self.sizes[crosses].sum())

    def window(self, inside: npt.NDArray[np.bool_], outside: npt.NDArray[np.bool_]) -> _Window:
        """Return the network of the cuts with some operators in front of them and some behind."""
        return _Window(self, inside, outside)


def _needs(before: tuple[tuple[int, ...], ...]) -> npt.NDArray[np.uint8]:
    count = len(before)
    table = np.zeros((count, (count + 7) // 8), np.uint8)
    for index, found in enumerate(before):
        for source in found:
            table[index] |= table[source]
        table[index, index >> 3] |= 128 >> (index & 7)
    return table


class _Window:
    """The free operators of a window, as nodes of a network; the source stands for those in front, the sink behind."""

    def __init__(self, network: Network, inside: npt.NDArray[np.bool_], outside: npt.NDArray[np.bool_]) -> None:
        self.free = np.flatnonzero(~inside & ~outside)
        count = len(self.free)
        self.source, self.sink = count, count + 1
        node = np.where(inside, self.source, self.sink)
        node[self.free] = np.arange(count)
        self.inside, self.kept = inside, network.kept
        self.always = network.always + float(network.kept[inside].sum())
        arcs: list[tuple[int, int, int]] = []
        at: list[int] = node.tolist()
        for v in self.free.tolist():
            arcs += ((at[v], at[u], _NEVER) for u in network.before[v] if at[u] != self.source)
        for v, leader in network.together:
            if at[v] != at[leader]:
                arcs += ((a, b, _NEVER) for a, b in ((at[v], at[leader]), (at[leader], at[v])) if a < count)
        crossing: list[tuple[int, int, int]] = []
        nodes = count + 2
        near = sorted({flow for v in self.free.tolist() for flow in network.of_operator[v]})
        self.always += network.between(inside, outside, near)
        for writer, readers, size in (network.flows[flow] for flow in near):
            tail = self.source if writer < 0 else at[writer]
            heads = {at[reader] for reader in readers} - {self.source}
            if tail == self.sink or not heads:
                continue
            if tail == self.source and self.sink in heads:
                self.always += size
            elif self.sink in heads:
                crossing.append((tail, self.sink, size))
            elif len(heads) == 1:
                crossing.append((tail, heads.pop(), size))
            else:
                crossing.append((tail, nodes, size))
                arcs += ((nodes, head, _NEVER) for head in heads)
                nodes += 1
        self.arcs = np.array(arcs, np.int64).reshape(-1, 3)
        self.crossing = np.array(crossing, np.int64).reshape(-1, 3)
        self.bytes = network.bytes

    def solve(self, price: float, work: Floats) -> tuple[float, float]:
        """Return a lower bound of X(D) - price w(D) over the downsets D of the window, and w of one that is least."""
        least, in_front = self._least(price, work)
        before = float(work[self.inside].sum())
        return least - 1e-9 * abs(least), before + float(work[self.free[in_front]].sum())

    def cut(self, price: float, work: Floats) -> tuple[npt.NDArray[np.bool_], float]:
        """Return the downset D of the window with the least X(D) - price w(D), and X(D) up to rounding."""
        least, in_front = self._least(price, work)
        cut = self.inside.copy()
        cut[self.free[in_front]] = True
        return cut, max(0.0, least + price * float(work[cut].sum()))

    def _least(self, price: float, work: Floats) -> tuple[float, Integers]:
        """Return a value just below the least X(D) - price w(D), and the free operators of its D."""
        gain = price * work[self.free] - self.kept[self.free]
        scale = min(64.0, _MOST_FLOW / max(self.bytes + float(np.abs(gain).sum()), 1.0))
        rising, own = gain > 0, np.arange(len(self.free))
        # Capacities are rounded down, so the flow is never above the minimum cut.
        tails = np.concatenate([self.arcs[:, 0], self.crossing[:, 0], np.where(rising, self.source, own)])
        heads = np.concatenate([self.arcs[:, 1], self.crossing[:, 1], np.where(rising, own, self.sink)])
        sizes = np.concatenate(
            [self.arcs[:, 2], np.floor(self.crossing[:, 2] * scale), np.floor(np.abs(gain) * scale)]
        ).astype(np.int64)
        flow, in_front = _max_flow(tails, heads, sizes, self.source, self.sink)
        in_front = in_front[in_front < len(self.free)]
        before = float(work[self.inside].sum())
        return flow / scale - float(gain[rising].sum()) + self.always - price * before, in_front


def _max_flow(tails: Integers, heads: Integers, sizes: Integers, source: int, sink: int) -> tuple[int, Integers]:
    """Return the greatest flow, and the nodes on the source's side of a minimum cut."""
    solver = part("ortools.graph.python", "max_flow", "these bounds need OR-tools").SimpleMaxFlow()
    # The last arc makes the nodes known where there is no other.
    solver.add_arcs_with_capacity(np.append(tails, source), np.append(heads, sink), np.append(sizes, 0))
    if solver.solve(source, sink) != solver.OPTIMAL:
        raise AssertionError("OR-tools finds no greatest flow")
    return int(solver.optimal_flow()), np.array(solver.get_source_side_min_cut(), np.int64)
