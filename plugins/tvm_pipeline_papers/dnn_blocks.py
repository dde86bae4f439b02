"""A bound of the latency of an instance of dnn-partitioning that has separators, and a split to begin with.

A separator is a colour class that every path passes; the classes between two of them are a block. An accelerator that
holds separators holds an interval of them with the blocks between. It also holds an end of the block in front and a
beginning of the block behind, since its set is convex. These accelerators and the separators on CPUs run one after
another. Between two of them runs what is left of one block, its middle. No other accelerator has nodes of two blocks.
So dynamic programming over the downsets of the blocks, as in `dnn_partitioning.py`, finds the least latency, given how
long each middle takes with each number of accelerators. Without any, a middle takes its longest path.

With r of them there is a bound. Along each path to a unit, each unit is on a CPU or on an accelerator, and pays for the
tensors that pass between these. The unit is done no sooner than if each path chooses for itself. And a middle falls
into groups without an edge between, such as the branches of a network. Consider the r + 1 groups that take longest on
CPUs. Either no accelerator touches one of them, and it takes that long. Or one accelerator touches two, and pays for
both: the latency is no less than along some path of the one that the accelerator touches, plus the least that a path of
the other adds to the load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tvm_pipeline.core.topology import successors, topological_order
from tvm_pipeline.planning import hot
from tvm_pipeline_papers.dnn_inference import NodeSets, bits

# A block with more units or downsets is not searched.
MOST_UNITS, MOST_DOWNSETS = 60, 20_000


class _Units(NamedTuple):
    """The colour classes as nodes, in an order in which each follows those that it reads.

    Attributes:
        members: the nodes of each, as bits.
        slow_ms, fast_ms, size_bytes: their sums. Where no accelerator can hold a class: infinite, and too many bytes.
        tensors: the unit that writes a tensor, the others that read it, and its cost.
    """

    members: list[int]
    before: list[list[int]]
    after: list[list[int]]
    slow_ms: Any
    fast_ms: Any
    size_bytes: Any
    tensors: list[tuple[int, set[int], float]]


class _Block(NamedTuple):
    """The m units behind a separator, and their M downsets in an order in which each follows those inside it.

    Attributes:
        start: the separator, or -1.
        sets: M; the downsets, as bits.
        tops: M; the units of a downset that no other unit of it reads, as bits.
        above: m; a unit and those of the block that it needs, as bits.
        edges: m x m; the cost of the tensors that the first unit reads from the second, -1 without an edge.
        enters: m; the cost of the tensors that a unit reads from the separator, -1 if it only reads units of the block.
        leaves: m; the cost of the tensors of a unit that others read.
        around: M; the cost of the tensors that cross the boundary behind a downset.
        slow, fast: m; the milliseconds of a unit.
    """

    start: int
    sets: Any
    tops: Any
    above: Any
    edges: Any
    enters: Any
    leaves: Any
    around: Any
    slow: Any
    fast: Any


class _Times(NamedTuple):
    """Bounds for each of the m units of a middle, in milliseconds from the end of the device in front.

    Attributes:
        alone: when it is done if all are on CPUs; this is exact.
        cpu: when it is done on a CPU.
        ran: when its accelerator has done it, and what else it has of the longest path, without sending.
        done: when its device is done, if no reader is on the same.
        fresh, inside, behind: when the path that takes least has done it, if the path has met no accelerator so far, is
            in one, or has met one and is on a CPU.
        part, left: what an accelerator takes at least for units of one path to it: if it holds this unit, without
            sending, and if it does not.
    """

    alone: Any
    cpu: Any
    ran: Any
    done: Any
    fresh: Any
    inside: Any
    behind: Any
    part: Any
    left: Any


def between_separators(sets: NodeSets, helped: bool = True) -> tuple[float, list[int]]:
    """Return a bound of the latency in milliseconds, and sets of accelerators to begin with.

    The bound is 0 where colour classes do not act like nodes, or a block has too many downsets.

    Args:
        helped: middles have accelerators, too. Without, the result is the best split of those where they have none.
    """
    units = _units(sets)
    blocks = units and _blocks(units)
    return _search(sets, units, blocks, helped) if units and blocks else (0.0, [])


def _units(sets: NodeSets) -> _Units | None:
    """Return the colour classes as nodes, if they act like nodes.

    They do if the work of each class is a chain, all nodes that read others are in front of it, and all that others
    read are behind it. Then each path of classes is one of nodes.
    """
    instance = sets.instance
    nodes = range(len(instance.ids))
    names = sorted(set(instance.first))
    place = {name: number for number, name in enumerate(names)}
    own = [place[first] for first in instance.first]
    before: list[set[int]] = [set() for _ in names]
    for node in nodes:
        before[own[node]] |= {own[source] for source in instance.before[node]} - {own[node]}
    for name in names:
        family = bits(sets.family[name])
        reads = [node for node in family if any(own[source] != own[node] for source in instance.before[node])]
        works = [node for node in family if instance.slow_ms[node] or instance.fast_ms[node]]
        read = [node for node in family if any(own[reader] != own[node] for reader in instance.after[node])]
        pairs = {(a, b) for a in reads for b in works + read} | {(a, b) for a in works for b in read}
        if not all(sets.descendants[a] >> b & 1 for a, b in pairs.union(pairwise(works))):
            return None
    order = topological_order(before, successors(before))
    place = {number: position for position, number in enumerate(order)}
    own = [place[number] for number in own]
    members = [sets.family[names[number]] for number in order]
    sources = [sorted(place[source] for source in before[number]) for number in order]
    readers = [{own[reader] for reader in instance.after[node]} - {own[node]} for node in nodes]

    def sums(values: Sequence[float], barred: float) -> Any:
        return np.array([barred if m & sets.barred else sum(values[node] for node in bits(m)) for m in members])

    return _Units(
        members,
        sources,
        successors(sources),
        np.array([sum(instance.slow_ms[node] for node in bits(m)) for m in members]),
        sums(instance.fast_ms, math.inf),
        sums(instance.size_bytes, instance.memory_bytes + 1),
        [(own[node], readers[node], instance.cost_ms[node]) for node in nodes if readers[node]],
    )


def _blocks(units: _Units) -> list[_Block] | None:
    """Return the blocks, and an empty one behind all units; None if one has too many downsets."""
    count = len(units.members)
    down, up = [1] * count, [1] * count
    for unit in range(count):
        down[unit] = sum(down[source] for source in units.before[unit]) or 1
    for unit in reversed(range(count)):
        up[unit] = sum(up[reader] for reader in units.after[unit]) or 1
    # All paths pass a separator.
    paths = sum(up[unit] for unit in range(count) if not units.before[unit])
    separators = [unit for unit in range(count) if down[unit] * up[unit] == paths]
    blocks = []
    for start, end in pairwise([-1, *separators, count, count + 1]):
        block = _block(units, start, range(start + 1, end))
        if block is None:
            return None
        blocks.append(block)
    return blocks


def _block(units: _Units, start: int, inner: range) -> _Block | None:
    count = len(inner)
    if count > MOST_UNITS:
        return None
    place = {unit: number for number, unit in enumerate(inner)}
    needs = [sum(1 << place[source] for source in units.before[unit] if source in place) for unit in inner]
    read = [sum(1 << place[reader] for reader in units.after[unit] if reader in place) for unit in inner]
    above = [1 << number for number in range(count)]
    for number in range(count):
        for source in bits(needs[number]):
            above[number] |= above[source]
    found, layer = [0], {0}
    while layer:
        layer = {s | 1 << n for s in layer for n in range(count) if not s >> n & 1 and not needs[n] & ~s}
        found += layer
        if len(found) > MOST_DOWNSETS:
            return None
    sets = np.array(found, np.int64)
    tops = sum(((sets >> n & 1 == 1) & (sets & read[n] == 0)).astype(np.int64) << n for n in range(count)) + 0 * sets
    edges = np.array([[0.0 if needs[a] >> b & 1 else -1.0 for b in range(count)] for a in range(count)])
    first = [start in units.before[unit] or not units.before[unit] for unit in inner]
    enters, leaves, around = np.where(first, 0.0, -1.0), np.zeros(count), np.zeros(len(sets))
    for writer, readers, cost in units.tensors:
        if writer == start or writer in place:
            within = [place[reader] for reader in readers if reader in place]
            crosses = np.full(len(sets), len(within) < len(readers)) | (sum(1 << n for n in within) & ~sets != 0)
            if writer == start:
                enters[within] += cost
            else:
                leaves[place[writer]] += cost
                edges[within, place[writer]] += cost
                crosses &= sets >> place[writer] & 1 == 1
            around[crosses] += cost
    part = slice(inner.start, inner.stop)
    return _Block(
        start,
        sets,
        tops,
        np.array(above, np.int64),
        edges.reshape(count, count),
        enters,
        leaves,
        around,
        units.slow_ms[part],
        units.fast_ms[part],
    )


def _search(sets: NodeSets, units: _Units, blocks: Sequence[_Block], helped: bool) -> tuple[float, list[int]]:
    """Return the least latency, if each middle takes its bound, and sets of accelerators that may have it."""
    instance = sets.instance
    count, accelerators = len(units.members), instance.accelerators
    # For each number of accelerators that are used, one of which is open: the bytes in front of it, the latency so far
    # if it had run all units in front of it as well, and the block and the downset where it begins. A row with more
    # bytes in front is earlier, and each row is less than those before. The first one begins in front of all.
    opened = [np.zeros((4, 0)) for _ in range(accelerators + 1)]
    if accelerators:
        opened[1] = np.array([[0.0], [0.0], [-1.0], [0.0]])
    done = np.full(accelerators + 1, math.inf)
    done[0] = ran_ms = held_bytes = 0.0
    runs_ms = np.where(np.isfinite(units.fast_ms), units.fast_ms, 0.0)
    history = []
    for number, block in enumerate(blocks):
        inner = slice(block.start + 1, block.start + 1 + len(block.slow))
        inside = block.sets[:, None] >> np.arange(len(block.slow)) & 1
        ran, held = ran_ms + inside @ runs_ms[inner], held_bytes + inside @ units.size_bytes[inner]
        value = np.full((accelerators + 1, len(block.sets)), math.inf)
        value[:, 0] = done
        begins = np.full((accelerators + 1, len(block.sets), 2), -1)
        for used in range(1, accelerators + 1):
            fitting = np.searchsorted(-opened[used][0], instance.memory_bytes - held, side="right")
            ends = np.flatnonzero(fitting)
            _, key, *begin = opened[used][:, fitting[ends] - 1]
            key = key + ran[ends] + block.around[ends]
            better = key < value[used, ends]
            value[used, ends[better]] = key[better]
            begins[used, ends[better]] = np.stack(begin, 1)[better]
        reached, middle = value.copy(), np.full(value.shape, -1)
        _middles(block, helped, _Times(*np.zeros((9, len(block.slow)))), value, reached, middle)
        history.append((begins, middle, value, reached))
        for used in range(accelerators):
            starts = np.flatnonzero(reached[used] < math.inf)
            key = (reached[used] + block.around - ran)[starts]
            rows = np.array([held[starts], key, np.full(len(starts), number), starts])
            rows = np.concatenate([opened[used + 1], rows], 1)
            rows = rows[:, np.lexsort((rows[1], -rows[0]))]
            least = np.minimum.accumulate(np.append(math.inf, rows[1]))
            opened[used + 1] = rows[:, rows[1] < least[:-1]]
        done, ran_ms, held_bytes = reached[:, -1], ran[-1], held[-1]
        if inner.stop < count:
            done = done + units.slow_ms[inner.stop]
            ran_ms, held_bytes = ran_ms + runs_ms[inner.stop], held_bytes + units.size_bytes[inner.stop]
    used = int(np.argmin(done))
    return float(done[used]), _chosen(units, blocks, history, used)


def _chosen(units: _Units, blocks: Sequence[_Block], history: Sequence[tuple[Any, ...]], used: int) -> list[int]:
    """Return the sets of accelerators of the least latency. Those of a middle hold the groups that take longer."""

    def front(number: int, cut: int) -> int:
        """Return the nodes in front of a boundary."""
        if number < 0:
            return 0
        block = blocks[number]
        inner = [block.start + 1 + unit for unit in bits(int(block.sets[cut]))]
        return sum(units.members[: block.start + 1]) + sum(units.members[unit] for unit in inner)

    chosen, number, cut = list[int](), len(blocks) - 1, 0
    while number >= 0:
        begins, middle, value, reached = history[number]
        block = blocks[number]
        if middle[used, cut] >= 0:
            helpers, start = divmod(int(middle[used, cut]), len(block.sets))
            least_ms = reached[used, cut] - value[used - helpers, start]
            groups = _groups(block, int(block.sets[cut] & ~block.sets[start]), least_ms)
            for first in range(helpers):
                held = bits(sum(groups[first::helpers]))
                chosen.append(sum(units.members[block.start + 1 + unit] for unit in held))
            used, cut = used - helpers, start
        begin, start = (int(n) for n in begins[used, cut])
        if start >= 0:
            chosen.append(front(number, cut) & ~front(begin, start))
            used, number, cut = used - 1, begin, start
        else:
            number -= 1
            cut = len(blocks[number].sets) - 1
    return chosen


def _groups(block: _Block, members: int, least_ms: float) -> list[int]:
    """Return the parts of a middle without an edge between that take more time on CPUs, the longest first."""
    alone: dict[int, float] = {}
    groups = list[int]()
    for unit in bits(members):
        alone[unit] = block.slow[unit] + max((alone[b] for b in alone if block.edges[unit, b] >= 0), default=0.0)
        joined = [group for group in groups if group & int(block.above[unit])]
        groups = [group for group in groups if group not in joined] + [sum(joined) | 1 << unit]
    longest = {group: max(alone[unit] for unit in bits(group)) for group in groups}
    return sorted(
        (group for group in groups if longest[group] > least_ms * (1 + 1e-9)), key=lambda group: -longest[group]
    )


@hot
def _time(block: _Block, cut: Any, times: _Times) -> None:
    """Fill in the times of the units of the block that are not in the downset `cut`."""
    for a in range(len(block.slow)):
        if cut >> a & 1:
            continue
        # What the accelerator of the unit receives from the device in front.
        received, begins_here = max(block.enters[a], 0.0), block.enters[a] >= 0
        alone, cpu, ran = 0.0, 0.0, 0.0
        fresh, inside, behind, part, left = np.inf, np.inf, np.inf, np.inf, np.inf
        for b in range(a):
            moved = block.edges[a, b]
            if moved >= 0 and cut >> b & 1:
                received, begins_here = received + moved, True
            elif moved >= 0:
                alone = max(alone, times.alone[b])
                cpu = max(cpu, min(times.cpu[b], times.ran[b] + moved))
                ran = max(ran, min(times.ran[b], times.cpu[b] + moved))
                fresh = min(fresh, times.fresh[b])
                inside = min(inside, times.inside[b], min(times.fresh[b], times.behind[b]) + moved)
                behind = min(behind, times.inside[b] + moved, times.behind[b])
                part = min(part, times.part[b], moved)
                left = min(left, times.part[b] + moved, times.left[b])
        if begins_here:
            fresh, inside, part = 0.0, min(inside, received), 0.0
        slow, fast, leaves = block.slow[a], block.fast[a], block.leaves[a]
        times.alone[a], times.cpu[a], times.ran[a] = slow + alone, slow + cpu, fast + max(ran, received)
        times.done[a] = min(times.cpu[a], times.ran[a] + leaves)
        times.fresh[a], times.inside[a], times.behind[a] = slow + fresh, fast + inside, slow + behind
        times.part[a], times.left[a] = fast + part, left


@hot
def _middles(block: _Block, helped: bool, times: _Times, value: Any, reached: Any, middle: Any) -> None:
    """Take the values of each downset to those around it, by what the middle between takes at least.

    Args:
        times: to be filled in.
        value: accelerators x M; the least latency of what is in a downset, where the device in front ends with it.
        reached: the same; the least latency if a middle may end with it, too.
        middle: the same; the accelerators of that middle times M, plus the downset in front of it.
    """
    units, cuts, most = len(block.slow), len(block.sets), len(value)
    alone, touched, load = np.zeros(units), np.zeros(units), np.zeros(units)  # of the groups, longest first
    for i in range(cuts):
        if not np.isfinite(value[:, i]).any():
            continue
        _time(block, block.sets[i], times)
        for j in range(i + 1, cuts):
            if block.sets[i] & ~block.sets[j]:
                continue
            tops, groups, done = block.tops[j] & ~block.sets[i], 0, 0.0
            for a in range(units):
                if not tops >> a & 1:
                    continue
                group, before = 1 << a, 0
                reach = block.above[a] & ~block.sets[i]
                while group != before:
                    before = group
                    for b in range(a + 1, units):
                        if tops >> b & 1 and block.above[b] & reach:
                            group, reach = group | 1 << b, reach | block.above[b] & ~block.sets[i]
                tops &= ~group
                longest, least, part = 0.0, np.inf, np.inf
                for b in range(a, units):
                    if group >> b & 1:
                        done, longest = max(done, times.done[b]), max(longest, times.alone[b])
                        least = min(least, times.inside[b] + block.leaves[b], times.behind[b])
                        part = min(part, times.part[b] + block.leaves[b], times.left[b])
                place = groups
                while place and alone[place - 1] < longest:
                    alone[place], touched[place], load[place] = alone[place - 1], touched[place - 1], load[place - 1]
                    place -= 1
                alone[place], touched[place], load[place] = longest, least, part
                groups += 1
            shared, before_s = np.inf, np.inf
            for helpers in range(min(groups + 1, most) if helped else 1):
                seconds = done
                if helpers < groups:
                    for other in range(helpers):
                        both = max(touched[other] + load[helpers], touched[helpers] + load[other])
                        shared = min(shared, both)
                    seconds = max(done, min(alone[helpers], shared))
                if seconds >= before_s:
                    continue
                before_s = seconds
                for used in range(most - helpers):
                    if value[used, i] + seconds < reached[used + helpers, j]:
                        reached[used + helpers, j] = value[used, i] + seconds
                        middle[used + helpers, j] = helpers * cuts + i
