"""The split of an instance of dnn-partitioning with the least latency of one sample, and a proven bound of it.

The model is in `dnn_inference.py`. Two methods bound the latency; both find splits, which hill climbing improves.

Along a path: the nodes of a path run one after another, whatever the split is. An accelerator that touches the path
holds an interval of it, with all that is between in the graph, and whole colour classes. So the latency is no less than
the loads of these accelerators and the CPU nodes of the path together. The least load of an interval, over all sets
that hold it and nothing else of the path, is a minimum cut: each node is in the set or not, and a tensor costs if both
sides have it. If the set exceeds the memory, a price for each byte bounds the load (Everett, Operations Research 11(3),
1963), and branching on nodes closes what the price leaves. Dynamic programming over the path and the number of
accelerators takes the least sum. One path is the heaviest on accelerators; the other is the longest of the best split.

Between separators: see `dnn_blocks.py`.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ortools.graph.python.max_flow import SimpleMaxFlow

from tvm_pipeline_papers.dnn_blocks import between_separators
from tvm_pipeline_papers.dnn_inference import Inference, NodeSets, bits

# The rounds of branching, and what two values may differ by, relative, because of rounding.
ROUNDS = 60
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class LatencySplit:
    """A split, with the ids of the nodes on each accelerator; the others are on CPUs.

    Attributes:
        latency_ms: of one sample, in the milliseconds of the file.
        bound_ms: no split has less, up to rounding; equal to the latency if the split is proven to be the best.
    """

    latency_ms: float
    bound_ms: float
    accelerators: tuple[tuple[int, ...], ...]


def least_latency(instance: Inference) -> LatencySplit:
    """Return the best split that was found, and the greatest bound."""
    sets = NodeSets(instance)
    methods: tuple[Callable[[Sequence[int]], tuple[float, list[int]]], ...] = (
        lambda _: along_path(sets, _heaviest(instance, bits(sets.barred))),
        lambda _: between_separators(sets),
        lambda where: along_path(sets, _heaviest(instance, [n for n, number in enumerate(where) if number < 0])),
        lambda _: (0.0, between_separators(sets, helped=False)[1]),
    )
    where = [-1] * len(instance.ids)
    latency_ms, bound_ms = instance.judged_ms(where)[0], 0.0
    for method in methods:
        found_ms, chosen = method(where)
        bound_ms = max(bound_ms, found_ms)
        latency_ms, where = min((latency_ms, where), _climbed(instance, _where(instance, chosen)))
        if bound_ms > latency_ms * (1 + ROUNDING):
            raise AssertionError(f"a split takes {latency_ms} ms, below the bound of {bound_ms} ms")
        if bound_ms >= latency_ms * (1 - ROUNDING):
            bound_ms = latency_ms
            break
    held: list[list[int]] = [[] for _ in range(instance.accelerators)]
    for node, number in enumerate(where):
        if number >= 0:
            held[number].append(instance.ids[node])
    return LatencySplit(latency_ms, bound_ms, tuple(tuple(sorted(ids)) for ids in held if ids))


def _where(instance: Inference, chosen: Sequence[int]) -> list[int]:
    """Return the accelerator of each node, or -1; a node of several sets is in the first of them."""
    where = [-1] * len(instance.ids)
    for number, members in reversed(list(enumerate(chosen))):
        for node in bits(members):
            where[node] = number
    return where


def _heaviest(instance: Inference, on_cpus: Sequence[int]) -> list[int]:
    """Return the path that takes longest, if these nodes are on CPUs and the others on accelerators."""
    taken_ms = list(instance.fast_ms)
    for node in on_cpus:
        taken_ms[node] = instance.slow_ms[node]
    came = [-1] * len(taken_ms)
    for node, sources in enumerate(instance.before):
        if sources:
            came[node] = max(sources, key=lambda source: taken_ms[source])
            taken_ms[node] += taken_ms[came[node]]
    path = [max(range(len(taken_ms)), key=lambda node: taken_ms[node])] if taken_ms else []
    while path and came[path[-1]] >= 0:
        path.append(came[path[-1]])
    return path[::-1]


class _Cuts:
    """The least loads of accelerators, as minimum cuts: the side of the source is the set of the accelerator."""

    def __init__(self, sets: NodeSets) -> None:
        self.sets = sets
        instance = sets.instance
        self.nodes = range(len(instance.ids))
        own, names = instance.first, len(instance.ids)
        # Tail, head, milliseconds, bytes; the head -1 is the sink.
        arcs = [
            (own[n], -1, instance.fast_ms[n], instance.size_bytes[n]) for n in self.nodes if not sets.barred >> n & 1
        ]
        for node in self.nodes:
            if instance.cost_ms[node] and instance.after[node]:
                leaves, enters = names, names + 1
                arcs += [
                    (own[node], leaves, instance.cost_ms[node], 0.0),
                    (enters, own[node], instance.cost_ms[node], 0.0),
                ]
                for reader in instance.after[node]:
                    arcs += [(leaves, own[reader], math.inf, 0.0), (own[reader], enters, math.inf, 0.0)]
                names += 2
        # What is between the nodes that an accelerator must hold and others that it holds is in its set.
        self.edges = np.array([(a, b) for a in self.nodes for b in instance.after[a]], np.int64).reshape(-1, 2)
        firsts = np.array(own, np.int64)[self.edges]
        table = np.array(arcs, np.float64).reshape(-1, 4)
        self.source, self.sink = names, names + 1
        self.tails = np.concatenate([table[:, 0].astype(np.int64), firsts[:, 0], firsts[:, 1]])
        self.heads = np.concatenate([table[:, 1].astype(np.int64), firsts[:, 1], firsts[:, 0]])
        self.heads[self.heads < 0] = self.sink
        self.ms = np.concatenate([table[:, 2], np.full(firsts.size, math.inf)])
        self.bytes = np.concatenate([table[:, 3], np.zeros(firsts.size)])

    def least(self, hull: int, outside: int) -> tuple[float, int, int | None]:
        """Return a bound of the load of an accelerator that holds `hull` and nothing of `outside`, and a set of one.

        The set fits into the memory. If it may not be the best, the third value is a node to branch on: the largest of
        those by which it differs from the set that is the best, too, at the same price of the memory.
        """
        sets, memory = self.sets, self.sets.instance.memory_bytes
        bound, high = self._cut(hull, outside, 0.0)
        if sets.size_bytes(high) <= memory:
            return bound, high, None
        fits = hull
        while True:
            saved_bytes = sets.size_bytes(high) - sets.size_bytes(fits)
            price = (sets.load_ms(fits) - sets.load_ms(high)) / saved_bytes
            value, found = self._cut(hull, outside, price)
            bound = max(bound, value - price * memory)
            least = sets.load_ms(fits) + price * sets.size_bytes(fits)
            if value >= least * (1 - ROUNDING) or found in (fits, high):
                return bound, fits, max(bits(fits ^ high), key=lambda node: sets.instance.size_bytes[node])
            if sets.size_bytes(found) <= memory:
                fits = found
            else:
                high = found

    def _cut(self, hull: int, outside: int, price: float) -> tuple[float, int]:
        """Return the least load plus price times bytes, rounded down, and its set."""
        sets, inside = self.sets, bits(hull)
        above = below = 0
        for node in inside:
            above |= sets.ancestors[node]
            below |= sets.descendants[node]
        label = np.arange(self.sink + 1)
        label[inside], label[bits(outside)] = self.source, self.sink
        tails, heads = label[self.tails], label[self.heads]
        kept = (tails != heads) & (tails != self.sink) & (heads != self.source)
        count = len(self.edges)
        for first, side in ((-2 * count, above), (-count, below)):
            beside = np.zeros(len(self.nodes), np.bool_)
            beside[bits(side)] = True
            kept[len(kept) + first : len(kept) + first + count] &= beside[self.edges].all(1)
        tails, heads = tails[kept], heads[kept]
        cost = self.ms[kept] + price * self.bytes[kept]
        limited = cost < math.inf
        # Capacities are rounded down, so the flow is never above the minimum cut.
        scale = 2.0**50 / max(float(cost[limited].sum()), 1e-9)
        sizes = np.full(len(cost), 2**51, np.int64)
        sizes[limited] = np.floor(cost[limited] * scale)
        flow = SimpleMaxFlow()
        # The last arc makes the source and the sink known where there is no other.
        flow.add_arcs_with_capacity(np.append(tails, self.source), np.append(heads, self.sink), np.append(sizes, 0))
        if flow.solve(self.source, self.sink) != flow.OPTIMAL:
            raise AssertionError("OR-tools finds no greatest flow")
        found = sets.families(sum(1 << node for node in flow.get_source_side_min_cut() if node < len(self.nodes)))
        return flow.optimal_flow() / scale, hull | found


def along_path(sets: NodeSets, path: Sequence[int]) -> tuple[float, list[int]]:
    """Return the bound along a path in milliseconds, and the sets of accelerators that have it.

    Args:
        path: nodes of which each reads the one before. The bound holds for every path.
    """
    instance, cuts = sets.instance, _Cuts(sets)
    # Of each interval: the least bound, the least load that was found and its set, and what is left to search.
    bounds = np.full((len(path), len(path)), math.inf)
    found: dict[tuple[int, int], tuple[float, int]] = {}
    left: defaultdict[tuple[int, int], list[tuple[float, int, int, int]]] = defaultdict(list)

    def search(interval: tuple[int, int], hull: int, outside: int) -> None:
        if not hull & outside and sets.fits(hull):
            bound, fits, node = cuts.least(hull, outside)
            load_ms = bound if node is None else sets.load_ms(fits)
            found[interval] = min(found.get(interval, (math.inf, 0)), (load_ms, fits))
            if node is not None:
                heapq.heappush(left[interval], (bound, hull, outside, node))
        if interval in found:
            bounds[interval] = min([found[interval][0], *(entry[0] for entry in left[interval][:1])])

    whole = sum(1 << node for node in path)
    for start in range(len(path)):
        hull = inside = 0
        for end in range(start, len(path)):
            inside |= 1 << path[end]
            hull = sets.closed(hull | inside)
            if not sets.fits(hull):
                break
            outside = sets.barred | whole & ~inside
            outside |= sets.ancestors[path[start - 1]] if start else 0
            outside |= sets.descendants[path[end + 1]] if end + 1 < len(path) else 0
            search((start, end), hull, sets.families(outside))
    slow_ms = [instance.slow_ms[node] for node in path]
    for rounds_left in range(ROUNDS, -1, -1):
        bound, intervals = _least_sum(bounds, slow_ms, instance.accelerators)
        loose = [interval for interval in intervals if bounds[interval] < found[interval][0] * (1 - ROUNDING)]
        if not loose or not rounds_left:
            break
        for interval in loose:
            _, hull, outside, node = heapq.heappop(left[interval])
            search(interval, sets.closed(hull | 1 << node), outside)
            search(interval, hull, outside | sets.family[node])
    return bound, [found[interval][1] for interval in intervals]


def _least_sum(bounds: Any, slow_ms: Sequence[float], accelerators: int) -> tuple[float, list[tuple[int, int]]]:
    """Return the least sum of the bounds of some disjoint intervals and of the CPU nodes between, and the intervals."""
    count = len(slow_ms)
    least = np.full((count + 1, accelerators + 1), math.inf)
    came = np.full((count + 1, accelerators + 1), -1)
    least[0] = 0.0
    for end in range(count):
        sums = least[: end + 1, :-1] + bounds[: end + 1, end, None]
        least[end + 1] = least[end] + slow_ms[end]
        better = np.flatnonzero(sums.min(0) < least[end + 1, 1:])
        least[end + 1, 1 + better], came[end + 1, 1 + better] = sums.min(0)[better], sums.argmin(0)[better]
    intervals, end, used = list[tuple[int, int]](), count, accelerators
    while end:
        start = int(came[end, used])
        if start >= 0:
            intervals.append((start, end - 1))
        end, used = (start, used - 1) if start >= 0 else (end - 1, used)
    return float(least[count, accelerators]), intervals[::-1]


def _climbed(instance: Inference, where: list[int]) -> tuple[float, list[int]]:
    """Return the latency of a split and the split after hill climbing.

    A move takes a colour class, or nodes on CPUs that are connected, to a neighbour's accelerator, a free one or CPUs.
    Where several branches take longest, a move must shorten one, which the sum of all ends shows.
    """
    families: defaultdict[int, list[int]] = defaultdict(list)
    for node, first in enumerate(instance.first):
        families[first].append(node)
    near = [set(sources + readers) for sources, readers in zip(instance.before, instance.after, strict=True)]
    near = [near[node].union(families[first]) for node, first in enumerate(instance.first)]
    where, least_ms, draw, better = list(where), instance.judged_ms(where), random.Random(0), True
    while better:
        better = False
        groups = [*families.values(), *_connected({node for node, number in enumerate(where) if number < 0}, near)]
        draw.shuffle(groups)
        for group in groups:
            free = [number for number in range(instance.accelerators) if number not in where]
            for number in sorted({where[other] for node in group for other in near[node]}.union([-1], free[:1])):
                moved = list(where)
                for node in group:
                    moved[node] = number
                if moved != where and (judged_ms := instance.judged_ms(moved)) < least_ms:
                    where, least_ms, better = moved, judged_ms, True
    return least_ms[0], where


def _connected(nodes: set[int], near: Sequence[set[int]]) -> list[list[int]]:
    groups = []
    while nodes:
        stack, group = [nodes.pop()], list[int]()
        while stack:
            group.append(stack.pop())
            found = nodes & near[group[-1]]
            nodes -= found
            stack += found
        groups.append(sorted(group))
    return groups
