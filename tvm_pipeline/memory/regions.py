"""A memory graph cut into regions that are solved one by one, as the arrays of `search.py`.

An operator that is comparable to all others has its place in every order: those before it and those after it can be
ordered apart, whatever other buffers pass by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline.core.topology import successors
from tvm_pipeline.memory.memory_graph import MemoryGraph, predecessors
from tvm_pipeline.memory.order_search import BITS, Region

NEVER = 1 << 40  # more operators than any buffer has


def split(graph: MemoryGraph) -> list[range]:
    """Ranges of operators, each but the first beginning with one that is comparable to all others."""
    count = len(graph)
    before = predecessors(graph)
    latest_read = [max(found, default=-1) for found in before]
    first_reader = [count] * count
    for index, found in enumerate(before):
        for other in found:
            first_reader[other] = min(first_reader[other], index)
    # An operator is after all those listed before it if it is the only one of them that none of them reads; and before
    # all those after it if it is the only one of them that reads none of them.
    only_sink, only_source = _only(first_reader), _only([count - 1 - index for index in reversed(latest_read)])[::-1]
    starts = [index for index in range(count) if index == 0 or (only_sink[index] and only_source[index])]
    return [range(start, end) for start, end in pairwise([*starts, count])]


def _only(first_reader: Sequence[int]) -> list[bool]:
    """For each index whether it is the only one up to itself whose first reader comes later."""
    leaving = [0] * (len(first_reader) + 1)
    for reader in first_reader:
        leaving[reader] += 1
    sinks = accumulate(1 - gone for gone in leaving[: len(first_reader)])
    return [found == 1 for found in sinks]


def region_of(graph: MemoryGraph, inside: range, *, backward: bool = False) -> Region:
    """The operators of a range as a region; those before it have run, those after it have not.

    Read backward, from the end to the start, a graph is a graph again: a buffer begins with any of the operators that
    touch it, and ends with all of those that write it. What is alive between two operators, and while one runs, is the
    same. Operators are then numbered from the last.
    """
    begins, ends, buffers, place, base = _buffers(graph, inside, backward)
    rules, saved = _rules(graph, inside, place, backward)
    before = [[other - inside.start for other in found if other in inside] for found in predecessors(graph)]
    before = before[inside.start : inside.stop]
    after = successors(before)
    workspace = list(graph.workspace_bytes[inside.start : inside.stop]) or [0] * len(inside)
    if backward:
        last = len(inside) - 1
        before, after = ([[last - other for other in found] for found in reversed(lists)] for lists in (after, before))
        begins, ends, rules = begins[::-1], ends[::-1], rules[::-1]
        saved, workspace = saved[::-1], workspace[::-1]
    fresh, dying = ([[rule[which] for rule in found] for found in rules] for which in (0, 1))
    lists = (after, begins, ends, fresh, dying, before, _near(before, begins, ends))
    starts = np.zeros((len(lists), len(inside) + 1), np.int64)
    starts[:, 1:] = np.cumsum([len(found) for kind in lists for found in kind]).reshape(len(lists), -1)
    starts[1:, 0] = starts[:-1, -1]
    links = np.array([other for kind in lists for found in kind for other in found], np.int64)
    codes = np.random.default_rng(0).integers(1 << BITS, size=len(inside))
    traits = np.array([[len(found) for found in before], workspace, saved, codes])
    return Region(starts, links, traits, buffers, base)


def _buffers(
    graph: MemoryGraph, inside: range, backward: bool
) -> tuple[list[list[int]], list[list[int]], NDArray[np.int64], dict[int, int], int]:
    """For each operator the buffers that it begins and ends, the rows of Region.buffers, the place there of each buffer
    of the graph that matters, and the bytes alive at the start."""
    begins: list[list[int]] = [[] for _ in inside]
    ends: list[list[int]] = [[] for _ in inside]
    columns: list[tuple[int, int, int]] = []
    place: dict[int, int] = {}
    base = 0
    for index, buffer in enumerate(graph.buffers):
        users = buffer.producers + buffer.consumers
        early = not buffer.producers or min(buffer.producers) < inside.start
        lasting = buffer.pinned or max(users, default=-1) >= inside.stop
        written = [op - inside.start for op in buffer.producers if op in inside]
        touched = [op - inside.start for op in users if op in inside]
        at_start, at_end = (lasting, early) if backward else (early, lasting)
        if at_start and (at_end or touched):
            base += buffer.bytes
        if not touched:
            continue
        place[index] = len(columns)
        for op in touched if backward else written:
            begins[op].append(len(columns))
        for op in written if backward else touched:
            ends[op].append(len(columns))
        columns.append((int(at_start), NEVER if at_end else len(written if backward else touched), buffer.bytes))
    return begins, ends, np.array(columns, np.int64).reshape(-1, 3).T.copy(), place, base


def _rules(
    graph: MemoryGraph, inside: range, place: dict[int, int], backward: bool
) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """For each operator its rules of running in place, see Region.starts, and what it saves by one."""
    rules: list[list[tuple[int, int]]] = [[] for _ in inside]
    saved = [0] * len(inside)
    written = {op: index for index, buffer in enumerate(graph.buffers) for op in buffer.producers}
    for op in inside if graph.in_place else ():
        for mark in graph.in_place[op]:
            old, new = graph.buffers[mark], graph.buffers[written[op]]
            if not old.pinned and old.bytes >= new.bytes:
                pair = (place[written[op]], place[mark])
                rules[op - inside.start].append(pair[::-1] if backward else pair)
                saved[op - inside.start] = new.bytes
    return rules, saved


def _near(before: list[list[int]], begins: list[list[int]], ends: list[list[int]]) -> list[set[int]]:
    """For each operator those with which it shares a buffer or a reader."""
    sharing: dict[int, set[int]] = {}
    for op, buffers in enumerate(zip(begins, ends, strict=True)):
        for buffer in (*buffers[0], *buffers[1]):
            sharing.setdefault(buffer, set()).add(op)
    near: list[set[int]] = [set() for _ in before]
    for group in (*map(set, before), *sharing.values()):
        for op in group:
            near[op] |= group
    return near
