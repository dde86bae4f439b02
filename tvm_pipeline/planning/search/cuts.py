"""The cuts of a graph: all its downsets (the scheduler `ideals` is named after another word for them), or one order's.

A downset is a set of operators that contains every operator that one of them needs. The first stages of a pipeline
hold a downset, so a pipeline of k stages is a chain of k+1 nested downsets, from the empty set to the whole graph.
Neural networks are narrow, so their downsets can be listed: ResNet50 has 242, InceptionResNetV2 6603. Operators that
are comparable to all others (separators) split the graph into zones. A downset of a later zone contains all downsets
of the earlier zones, so sets are compared only within a zone. Of one order of the operators, the cuts are its prefixes.

Next: `lexicographic.py` and `pipelines.py`, which search chains of cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.topology import Neighbours, separators
from tvm_pipeline.solvers.hot import hot

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Every pair of downsets of a zone may have to be compared; this many comparisons take about one second for a stage.
MOST_PAIRS = 600_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """M cuts of a graph, the smaller cuts first: sorted by zone, then parameter bytes, then number of operators.

    Attributes:
        complete: whether these are all downsets of the graph, or only some.
        zone: M; of two cuts in different zones, the cut in the later zone contains the other.
        members: M x W words of 64 bits; cut i contains no operator that cut j of the same zone lacks if
            `members[i] & ~members[j]` is 0.
        parent, added: M; a cut consists of its parent (an earlier cut) and the added operator; -1 for the empty cut.
        param_bytes: M; parameter bytes of all operators in the cut.
        crossing_bytes: M; bytes of all tensors that are alive at the cut, which the next device receives.
        handed_on_bytes: M; the part of the crossing bytes that one operator wrote and another will read.
        together: M; whether all readers of every operator are on one side of the cut.
        needs: M x M; the bytes that a stage between two cuts holds at least; None where its parameters alone count.
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
    needs: Floats | None = None

    def __len__(self) -> int:
        return len(self.zone)

    def sums(self, weights: Sequence[float] | Floats) -> Floats:
        """Return for each of the M cuts the sum of its operators' weights (one for each operator of the graph)."""
        total = np.zeros(len(self))
        _accumulate(self.parent, self.added, np.asarray(weights, dtype=np.float64), total)
        return total

    def inside(self, inner: Integers | int, outer: Integers | int) -> npt.NDArray[np.bool_]:
        """Return whether later cuts contain earlier ones: one `outer` many `inner`, or many `outer` one `inner`."""
        same = self.zone[inner] == self.zone[outer]
        outside: npt.NDArray[np.bool_] = np.any(self.members[inner] & ~self.members[outer], axis=-1)
        contained: npt.NDArray[np.bool_] = ~(same & outside)
        return contained

    def stages(self, chosen: Sequence[int]) -> list[tuple[str, ...]]:
        """Return the operators between consecutive cuts, in the graph's order; `chosen` ascends to the whole graph."""
        stage_of = np.full(len(self.graph), len(chosen) - 1)
        for stage, cut in reversed(list(enumerate(chosen[:-1]))):
            stage_of[list(self.operators(cut))] = stage
        return grouped(self.graph, stage_of.tolist(), len(chosen))

    def operators(self, cut: int) -> Iterator[int]:
        """Yield the indices of the operators in a cut, in no particular order."""
        while self.added[cut] >= 0:
            yield int(self.added[cut])
            cut = int(self.parent[cut])


def grouped(graph: OperatorGraph, stage_of: Sequence[int], stages: int) -> list[tuple[str, ...]]:
    """Return the names of the operators of each stage, in the graph's order."""
    names: list[list[str]] = [[] for _ in range(stages)]
    for operator, stage in zip(graph.operators, stage_of, strict=True):
        names[stage].append(operator.name)
    return [tuple(group) for group in names]


@hot
def _accumulate(parent: Any, added: Any, weights: Any, total: Any) -> None:
    for i in range(1, len(total)):
        total[i] = total[parent[i]] + weights[added[i]]


@hot
def is_inside(zone: Any, members: Any, i: Any, j: Any) -> Any:
    """Return whether cut j, which is later in their order, contains cut i; see `Cuts`."""
    if zone[i] == zone[j]:
        for word in range(members.shape[1]):
            if members[i, word] & ~members[j, word]:
                return False
    return True


def prefixes(graph: OperatorGraph) -> Cuts:
    """Return the N+1 prefixes of the graph's own order, each a zone of its own."""
    zones: list[_FreeAndSeparator] = [([], operator) for operator in range(len(graph))]
    cuts = _listed(graph, zones, complete=False, most_pairs=0)
    assert cuts is not None  # no zone has a pair
    return cuts


def reordered(graph: OperatorGraph, order: Sequence[int]) -> OperatorGraph:
    """Return the graph with its operators in another topological order; a profile of the one is one of the other."""
    return replace(graph, operators=tuple(graph.operators[operator] for operator in order))


@lru_cache(maxsize=2)
def ideals(graph: OperatorGraph, most_pairs: int = MOST_PAIRS) -> Cuts | None:
    """Return all downsets of the graph, or None if one zone has so many that comparing them would take too long.

    The answer is kept for the last graphs, since the same graph is planned for each k and again while it runs.
    """
    return _listed(graph, _zones(graph.edges.before, graph.edges.after), complete=True, most_pairs=most_pairs)


# The operators of a zone, and the separator behind them, or -1 behind the last.
_FreeAndSeparator = tuple[list[int], int]


def _zones(before: Neighbours, after: Neighbours) -> list[_FreeAndSeparator]:
    """Return the operators between separators, with the separator behind them (-1 behind the last)."""
    alone = separators(before, after)
    zones: list[_FreeAndSeparator] = [([], -1)]
    for operator in range(len(before)):
        if operator in alone:
            zones[-1] = (zones[-1][0], operator)
            zones.append(([], -1))
        else:
            zones[-1][0].append(operator)
    return zones


class _Traffic:
    """By how much the figures of a cut change when an operator joins it.

    The figures are the bytes that cross, the bytes that are handed on, and how many operators have readers on both
    sides. Groups number the zones (even) and separators (odd) in order; an operator of a zone is a bit.
    """

    def __init__(self, graph: OperatorGraph, group: list[int], bit: list[int]) -> None:
        self.graph, self.group, self.bit = graph, group, bit
        edges = graph.edges
        results = set(graph.outputs)
        size = {name: tensor.bytes for name, tensor in graph.tensors.items()}
        self.at_first = sum(
            size[tensor.name] for tensor in graph.inputs if edges.readers[tensor.name] or tensor.name in results
        )
        # For each operator: the bytes that begin to cross and to be handed on when it joins.
        self.begins: list[tuple[int, int]] = []
        # For each tensor that an operator reads: the bytes that cross no more and that are handed on no more once the
        # last reader joins, the group of the last reader, and the bits of the readers in that group.
        ends: dict[str, tuple[int, int, int, int]] = {}
        for name, readers in edges.readers.items():
            if readers:
                last = max([group[reader] for reader in readers])
                mask = sum([bit[reader] for reader in readers if group[reader] == last])
                free, passed = 0 if name in results else size[name], size[name] if name in edges.writer else 0
                ends[name] = free, passed, last, mask
        self.reads = [[ends[read] for read in dict.fromkeys(operator.inputs)] for operator in graph.operators]
        for operator in graph.operators:
            crossing = handed_on = 0
            for tensor in operator.outputs:
                if tensor.name in ends:
                    handed_on += size[tensor.name]
                if tensor.name in ends or tensor.name in results:
                    crossing += size[tensor.name]
            self.begins.append((crossing, handed_on))
        # For each operator with several readers: the groups of the first and the last one, the readers of each group.
        families: dict[int, tuple[int, int, dict[int, int]]] = {}
        for source, found in enumerate(edges.after):
            if len(found) > 1:
                masks: dict[int, int] = {}
                for reader in found:
                    masks[group[reader]] = masks.get(group[reader], 0) | bit[reader]
                families[source] = (min(masks), max(masks), masks)
        self.sources = [[families[source] for source in found if source in families] for found in edges.before]

    def joins(self, index: int, mask: int) -> tuple[int, int, int]:
        """Return the changes when the operator joins a cut that has the operators `mask` of its zone."""
        group, new = self.group[index], mask | self.bit[index]
        crossing, handed_on = self.begins[index]
        for free, passed, last, readers in self.reads[index]:
            if last == group and readers & ~new == 0:
                crossing -= free
                handed_on -= passed
        split = 0
        for first, last, masks in self.sources[index]:
            # With its first reader an operator gets readers on both sides; with its last one it has none outside.
            was_split = first < group or mask & masks[group] != 0
            is_split = last > group or masks[group] & ~new != 0
            split += is_split - was_split
        return crossing, handed_on, split


def _listed(
    graph: OperatorGraph,
    zones: list[_FreeAndSeparator],
    *,
    complete: bool,
    most_pairs: int,
) -> Cuts | None:
    """Return the downsets of all zones, one zone after another; None if a zone has too many pairs of them."""
    group, bit = [0] * len(graph), [0] * len(graph)
    for number, (free, separator) in enumerate(zones):
        for position, index in enumerate(free):
            group[index], bit[index] = 2 * number, 1 << position
        if separator >= 0:
            group[separator], bit[separator] = 2 * number + 1, 1
    traffic = _Traffic(graph, group, bit)
    param_bytes = [operator.param_bytes for operator in graph.operators]
    words = max(1, max((len(free) + 63) // 64 for free, _ in zones))
    # One row for each cut: zone, members, parent, added, param_bytes, crossing, handed on, split readers.
    rows: list[tuple[int, int, int, int, int, int, int, int]] = []
    start = (0, -1, -1, 0, traffic.at_first, 0, 0)
    pairs = 0
    for number, (free, separator) in enumerate(zones):
        found = _zone(free, start, len(rows), traffic, bit, param_bytes, most_pairs - pairs)
        if found is None:
            return None
        pairs += len(found) ** 2 if free else 0
        rows.extend((number, *row) for row in found)
        if separator >= 0:
            crossing, handed_on, split = traffic.joins(separator, 0)
            full = rows[-1]
            start = (
                0, len(rows) - 1, separator, full[4] + param_bytes[separator],
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
    bit: list[int],
    param_bytes: list[int],
    most_pairs: int,
) -> list[_Row] | None:
    """Return all downsets of one zone, sorted; None if they have too many pairs.

    Args:
        start: the row of the downset that contains no operator of the zone.
    """
    if not free:
        return [start]
    before, after = traffic.graph.edges.before, traffic.graph.edges.after
    inside = set(free)
    index_of = {bit[index]: index for index in free}
    needs = {index: sum(bit[source] for source in before[index] if source in inside) for index in free}
    readers = {index: [reader for reader in after[index] if reader in inside] for index in free}
    at_start = sum(bit[index] for index in free if needs[index] == 0)
    # For each set of members: its row, and the operators that may join next.
    found: dict[int, tuple[_Row, int]] = {0: (start, at_start)}
    queue = [0]
    for mask in queue:
        row, ready = found[mask]
        untried = ready
        while untried:
            one = untried & -untried
            untried ^= one
            new = mask | one
            if new in found:
                continue
            index = index_of[one]
            crossing, handed_on, split = traffic.joins(index, mask)
            ready_then = ready ^ one
            for reader in readers[index]:
                if needs[reader] & ~new == 0:
                    ready_then |= bit[reader]
            found[new] = (
                (new, mask, index, row[3] + param_bytes[index], row[4] + crossing, row[5] + handed_on, row[6] + split),
                ready_then,
            )
            queue.append(new)
        if len(queue) ** 2 > most_pairs:
            return None
    listed = [found[mask][0] for mask in queue]
    listed.sort(key=lambda row: (row[3], row[0].bit_count()))
    row_of = {row[0]: offset + position for position, row in enumerate(listed)}
    return [(row[0], row_of[row[1]] if row[0] else start[1], *row[2:]) for row in listed]
