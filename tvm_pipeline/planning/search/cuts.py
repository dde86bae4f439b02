"""Where a graph may be cut: its ideals (downsets), or only the prefixes of one order.

A pipeline of k stages is a chain of k+1 nested ideals, from the empty one to the whole graph: what the first stages
hold is closed under "comes before". Neural networks are narrow, so that their ideals can be listed: ResNet50 has
242, InceptionResNetV2 6603. Operators that are comparable to all others (separators) split the graph into zones; an
ideal of a later zone contains all of the earlier ones, so that only within a zone sets need be compared.

Next: `lexicographic.py` and `pipelines.py`, which search chains of cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.solvers.hot import hot

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Within a zone every pair of ideals may have to be compared: this many comparisons take about a second a stage.
MOST_PAIRS = 600_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """M cuts of a graph, the smaller ones first: sorted by zone, then parameter bytes, then number of operators.

    Attributes:
        complete: whether these are all ideals of the graph, or only some.
        zone: M; of two cuts of different zones the later contains the earlier.
        members: M x W words of 64 bits; of two cuts of one zone i lies in j where `members[i] & ~members[j] == 0`.
        parent, added: M; a cut is its parent, which stands before it, and one operator; -1 for the empty cut.
        param_bytes: M; parameters of all operators in the cut.
        crossing_bytes: M; every tensor alive at the cut: what a receiver is sent.
        handed_on_bytes: M; those of them that an operator wrote and another will read.
        together: M; whether no operator has readers on both sides.
    """

    graph: OperatorGraph
    complete: bool
    zone: Integers
    members: npt.NDArray[np.uint64]
    parent: Integers
    added: Integers
    param_bytes: Integers
    crossing_bytes: Integers
    handed_on_bytes: Integers
    together: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.zone)

    def sums(self, weights: Sequence[float] | Floats) -> Floats:
        """M; for each cut the sum of its operators' weights (one for each operator of the graph)."""
        total = np.zeros(len(self))
        _accumulate(self.parent, self.added, np.asarray(weights, dtype=np.float64), total)
        return total

    def inside(self, inner: Integers | int, outer: Integers | int) -> npt.NDArray[np.bool_]:
        """Whether cuts lie in cuts behind them: many in one, or one in many."""
        same = self.zone[inner] == self.zone[outer]
        outside: npt.NDArray[np.bool_] = np.any(self.members[inner] & ~self.members[outer], axis=-1)
        lies: npt.NDArray[np.bool_] = ~(same & outside)
        return lies

    def stages(self, chosen: Sequence[int]) -> list[tuple[str, ...]]:
        """The operators between consecutive cuts, in the graph's order; `chosen` ascends to the whole graph."""
        stage_of = np.full(len(self.graph), len(chosen) - 1)
        for stage, cut in reversed(list(enumerate(chosen[:-1]))):
            stage_of[list(self.operators(cut))] = stage
        stages: list[list[str]] = [[] for _ in chosen]
        for operator, stage in zip(self.graph.operators, stage_of.tolist(), strict=True):
            stages[stage].append(operator.name)
        return [tuple(stage) for stage in stages]

    def operators(self, cut: int) -> Iterator[int]:
        """The places of the operators in a cut, in no particular order."""
        while self.added[cut] >= 0:
            yield int(self.added[cut])
            cut = int(self.parent[cut])


@hot
def _accumulate(parent: Any, added: Any, weights: Any, total: Any) -> None:
    for i in range(1, len(total)):
        total[i] = total[parent[i]] + weights[added[i]]


def prefixes(graph: OperatorGraph) -> Cuts:
    """The N+1 prefixes of the graph's own order, each a zone of its own."""
    zones: list[_FreeAndSeparator] = [([], operator) for operator in range(len(graph))]
    cuts = _listed(graph, zones, _neighbours(graph), complete=False, most_pairs=0)
    assert cuts is not None  # no zone has a pair
    return cuts


@lru_cache(maxsize=2)
def ideals(graph: OperatorGraph, most_pairs: int = MOST_PAIRS) -> Cuts | None:
    """All ideals of the graph, or None where so many lie in one zone that comparing them would take too long.

    Kept for the last graphs, since the same one is planned again and again: for each k, and while it runs.
    """
    neighbours = _neighbours(graph)
    return _listed(graph, _zones(*neighbours), neighbours, complete=True, most_pairs=most_pairs)


# For each operator, by its place, those it reads from, and those that read from it.
_Neighbours = tuple[list[list[int]], list[list[int]]]
# The operators of a zone, and the separator behind them, or -1 behind the last.
_FreeAndSeparator = tuple[list[int], int]


def _zones(before: list[list[int]], after: list[list[int]]) -> list[_FreeAndSeparator]:
    """The operators between separators, with the separator behind them (-1 behind the last).

    An operator that is alone ready when Kahn's algorithm takes it comes before all that follow; one that is so in the
    reversed graph, too, is comparable to all others.
    """
    order = range(len(before))
    alone = _alone_ready(order, before, after) & _alone_ready(reversed(order), after, before)
    zones: list[_FreeAndSeparator] = [([], -1)]
    for operator in order:
        if operator in alone:
            zones[-1] = (zones[-1][0], operator)
            zones.append(([], -1))
        else:
            zones[-1][0].append(operator)
    return zones


def _neighbours(graph: OperatorGraph) -> _Neighbours:
    """Who reads from whom, each once."""
    writer = {tensor.name: place for place, operator in enumerate(graph.operators) for tensor in operator.outputs}
    before = [list({writer[read]: None for read in operator.inputs if read in writer}) for operator in graph.operators]
    after: list[list[int]] = [[] for _ in graph.operators]
    for place, sources in enumerate(before):
        for source in sources:
            after[source].append(place)
    return before, after


def _alone_ready(order: Iterable[int], before: list[list[int]], after: list[list[int]]) -> set[int]:
    """The operators that are alone ready when their turn in `order` comes: all later ones come behind them."""
    waiting = [len(sources) for sources in before]
    ready = sum(count == 0 for count in waiting)
    alone = set()
    for place in order:
        if ready == 1:
            alone.add(place)
        ready -= 1
        for reader in after[place]:
            waiting[reader] -= 1
            ready += waiting[reader] == 0
    return alone


class _Traffic:
    """What crossing, handed-on and split readers change by when an operator joins a cut.

    Groups number the zones (even) and separators (odd) in order; within a zone, operators are bits.
    """

    def __init__(
        self, graph: OperatorGraph, group: list[int], bit: list[int], before: list[list[int]], after: list[list[int]]
    ) -> None:
        self.graph, self.group, self.bit = graph, group, bit
        readers: dict[str, list[int]] = {}
        for place, operator in enumerate(graph.operators):
            for read in dict.fromkeys(operator.inputs):
                readers.setdefault(read, []).append(place)
        written = {tensor.name for operator in graph.operators for tensor in operator.outputs}
        results = set(graph.outputs)
        size = {name: tensor.bytes for name, tensor in graph.tensors.items()}
        self.at_first = sum(
            size[tensor.name] for tensor in graph.inputs if readers.get(tensor.name) or tensor.name in results
        )
        # For each operator: bytes that begin to cross, to be handed on, and of each tensor read (size, crossing ends,
        # handing on ends, the group of its last reader, its readers there).
        self.begins: list[tuple[int, int]] = []
        self.reads: list[list[tuple[int, int, int, int]]] = []
        last = {read: max(group[r] for r in places) for read, places in readers.items()}
        mask = {read: sum(bit[r] for r in places if group[r] == last[read]) for read, places in readers.items()}
        for operator in graph.operators:
            own = [tensor.name for tensor in operator.outputs]
            crossing = sum(size[name] for name in own if readers.get(name) or name in results)
            self.begins.append((crossing, sum(size[name] for name in own if readers.get(name))))
            self.reads.append(
                [
                    (0 if r in results else size[r], size[r] if r in written else 0, last[r], mask[r])
                    for r in dict.fromkeys(operator.inputs)
                ]
            )
        # Of each operator read from: group of its first reader, group of its last, its readers in each of the two.
        self.sources: list[list[tuple[int, int, dict[int, int]]]] = []
        families: dict[int, tuple[int, int, dict[int, int]]] = {}
        for source, places in enumerate(after):
            masks: dict[int, int] = {}
            for place in places:
                masks[group[place]] = masks.get(group[place], 0) | bit[place]
            if len(places) > 1:
                families[source] = (min(masks), max(masks), masks)
        for place in range(len(graph)):
            self.sources.append([families[source] for source in before[place] if source in families])

    def joins(self, place: int, mask: int) -> tuple[int, int, int]:
        """The change when the operator joins a cut that holds `mask` of its zone."""
        group, new = self.group[place], mask | self.bit[place]
        crossing, handed_on = self.begins[place]
        for free, passed, last, readers in self.reads[place]:
            if last == group and readers & ~new == 0:
                crossing -= free
                handed_on -= passed
        split = 0
        for first, last, masks in self.sources[place]:
            was = first < group or mask & masks[group] != 0
            left = last > group or masks[group] & ~new != 0
            split += left - was
        return crossing, handed_on, split


def _listed(
    graph: OperatorGraph,
    zones: list[_FreeAndSeparator],
    neighbours: _Neighbours,
    *,
    complete: bool,
    most_pairs: int,
) -> Cuts | None:
    group, bit = [0] * len(graph), [0] * len(graph)
    for number, (free, separator) in enumerate(zones):
        for index, place in enumerate(free):
            group[place], bit[place] = 2 * number, 1 << index
        if separator >= 0:
            group[separator], bit[separator] = 2 * number + 1, 1
    before, after = neighbours
    traffic = _Traffic(graph, group, bit, before, after)
    held = [operator.param_bytes for operator in graph.operators]
    words = max(1, max((len(free) + 63) // 64 for free, _ in zones))
    # One row a cut: zone, members, parent, added, param_bytes, crossing, handed on, split readers.
    rows: list[tuple[int, int, int, int, int, int, int, int]] = []
    start = (0, -1, -1, 0, traffic.at_first, 0, 0)
    pairs = 0
    for number, (free, separator) in enumerate(zones):
        found = _zone(free, start, len(rows), traffic, before, after, bit, held, most_pairs - pairs)
        if found is None:
            return None
        pairs += len(found) ** 2 if free else 0
        rows.extend((number, *row) for row in found)
        if separator >= 0:
            crossing, handed_on, split = traffic.joins(separator, 0)
            full = rows[-1]
            start = (
                0, len(rows) - 1, separator, full[4] + held[separator],
                full[5] + crossing, full[6] + handed_on, full[7] + split,
            )  # fmt: skip
        elif number < len(zones) - 1:
            raise AssertionError("only the last zone has no separator behind it")
    if zones[-1][1] >= 0:
        rows.append((len(zones), *start))
    masks = b"".join(row[1].to_bytes(8 * words, "little") for row in rows)
    zone, parent, added, param, crossing_b, handed, split_b = (
        np.array([row[i] for row in rows], np.int64) for i in (0, 2, 3, 4, 5, 6, 7)
    )
    members = np.frombuffer(masks, np.uint64).reshape(len(rows), words)
    return Cuts(graph, complete, zone, members, parent, added, param, crossing_b, handed, split_b == 0)


_Row = tuple[int, int, int, int, int, int, int]


def _zone(
    free: list[int],
    start: _Row,
    offset: int,
    traffic: _Traffic,
    before: list[list[int]],
    after: list[list[int]],
    bit: list[int],
    held: list[int],
    most_pairs: int,
) -> list[_Row] | None:
    """All ideals of one zone, sorted; `start` is the one that holds nothing of it."""
    if not free:
        return [start]
    inside = set(free)
    place_of = {bit[place]: place for place in free}
    needs = {place: sum(bit[source] for source in before[place] if source in inside) for place in free}
    opens = {place: [reader for reader in after[place] if reader in inside] for place in free}
    at_start = sum(bit[place] for place in free if needs[place] == 0)
    # By members: the row, and the operators that may join next.
    found: dict[int, tuple[_Row, int]] = {0: (start, at_start)}
    queue = [0]
    for mask in queue:
        row, ready = found[mask]
        left = ready
        while left:
            one = left & -left
            left ^= one
            new = mask | one
            if new in found:
                continue
            place = place_of[one]
            crossing, handed_on, split = traffic.joins(place, mask)
            opened = ready ^ one
            for reader in opens[place]:
                if needs[reader] & ~new == 0:
                    opened |= bit[reader]
            found[new] = (
                (new, mask, place, row[3] + held[place], row[4] + crossing, row[5] + handed_on, row[6] + split),
                opened,
            )
            queue.append(new)
        if len(queue) ** 2 > most_pairs:
            return None
    listed = [found[mask][0] for mask in queue]
    listed.sort(key=lambda row: (row[3], row[0].bit_count()))
    index = {row[0]: offset + position for position, row in enumerate(listed)}
    return [(row[0], index[row[1]] if row[0] else start[1], *row[2:]) for row in listed]
