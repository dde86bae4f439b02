"""A memory graph cut into regions that are ordered one by one, as the arrays of `order_arrays.py`.

An operator that is comparable to all others has the same position in every order. So the operators before it and the
operators after it can be ordered separately, whatever buffers pass by it. Next: `exact_order.py`, which does so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline.core.topology import successors
from tvm_pipeline.memory.memory_graph import MemoryGraph, predecessors
from tvm_pipeline.memory.order_arrays import BITS, BUFFER, LISTS, NOW, OPERATOR, Region

NEVER = 1 << 40  # more operators than any buffer has


def split(graph: MemoryGraph) -> list[range]:
    """Return ranges of operators; each but the first begins with an operator that is comparable to all others."""
    count = len(graph)
    before = predecessors(graph)
    latest_read = [max(found, default=-1) for found in before]
    first_reader = [count] * count
    for index, found in enumerate(before):
        for other in found:
            first_reader[other] = min(first_reader[other], index)
    # An operator comes after all operators listed before it if it is the only sink among these and itself, that is, the
    # only one that none of them reads. In the same way it comes before all later ones if it is the only source.
    only_sink, only_source = _only(first_reader), _only([count - 1 - index for index in reversed(latest_read)])[::-1]
    starts = [index for index in range(count) if index == 0 or (only_sink[index] and only_source[index])]
    return [range(start, end) for start, end in pairwise([*starts, count])]


def _only(first_reader: Sequence[int]) -> list[bool]:
    """Return for each index whether it is the only sink of the operators up to it, which read all others."""
    leaving = [0] * (len(first_reader) + 1)
    for reader in first_reader:
        leaving[reader] += 1
    sinks = accumulate(1 - gone for gone in leaving[: len(first_reader)])
    return [found == 1 for found in sinks]


def region_of(graph: MemoryGraph, inside: range, *, backward: bool = False) -> Region:
    """Return the operators of a range as a region; those before it have run, those after it have not.

    Read backward, from the end to the start, a graph is a graph again: a buffer begins with any of the operators that
    touch it, and ends with all of the operators that write it. The bytes alive between two operators, and while one
    runs, are the same. Operators are then numbered from the last.
    """
    begins, ends, buffers, index_of, base = _buffers(graph, inside, backward)
    rules, saved = _rules(graph, inside, index_of, backward)
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
    lists: tuple[Sequence[Collection[int]], ...] = (
        after,
        begins,
        ends,
        fresh,
        dying,
        before,
        _near(before, begins, ends),
    )
    operators = np.zeros(len(inside) + 1, OPERATOR)
    links: list[int] = []
    for name, kind in zip(LISTS, lists, strict=True):
        starts = accumulate(map(len, kind), initial=len(links))
        operators[name] = list(starts)
        links += [other for found in kind for other in found]
    operators["needs"][:-1] = [len(found) for found in before]
    operators["workspace"][:-1], operators["saved"][:-1] = workspace, saved
    operators["code"][:-1] = np.random.default_rng(0).integers(1 << BITS, size=len(inside))
    return Region(np.array(links, np.int64), operators, buffers, np.array([(base, 0, 0, base)], NOW))


def _buffers(
    graph: MemoryGraph, inside: range, backward: bool
) -> tuple[list[list[int]], list[list[int]], NDArray[Any], dict[int, int], int]:
    """Return the buffers of a region.

    Returns:
        The buffers that each operator begins; those that it ends; the records of `Region.buffers`; the index in these
        of each buffer of the graph that an operator of the region touches; and the bytes alive at the start.
    """
    begins: list[list[int]] = [[] for _ in inside]
    ends: list[list[int]] = [[] for _ in inside]
    rows: list[tuple[int, int, int, int, int]] = []
    index_of: dict[int, int] = {}
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
        index_of[index] = len(rows)
        for op in touched if backward else written:
            begins[op].append(len(rows))
        for op in written if backward else touched:
            ends[op].append(len(rows))
        left = NEVER if at_end else len(written if backward else touched)
        rows.append((buffer.bytes, int(at_start), left, 0, 0))
    return begins, ends, np.array(rows, BUFFER), index_of, base


def _rules(
    graph: MemoryGraph, inside: range, index_of: dict[int, int], backward: bool
) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """Return the rules of each operator for running in place, see Region.fresh, and the bytes that it saves by one."""
    rules: list[list[tuple[int, int]]] = [[] for _ in inside]
    saved = [0] * len(inside)
    written = {op: index for index, buffer in enumerate(graph.buffers) for op in buffer.producers}
    for op in inside if graph.in_place else ():
        for mark in graph.in_place[op]:
            old, new = graph.buffers[mark], graph.buffers[written[op]]
            if not old.pinned and old.bytes >= new.bytes:
                pair = (index_of[written[op]], index_of[mark])
                rules[op - inside.start].append(pair[::-1] if backward else pair)
                saved[op - inside.start] = new.bytes
    return rules, saved


def _near(before: list[list[int]], begins: list[list[int]], ends: list[list[int]]) -> list[set[int]]:
    """Return for each operator those with which it shares a buffer or a reader."""
    sharing: dict[int, set[int]] = {}
    for op, buffers in enumerate(zip(begins, ends, strict=True)):
        for buffer in (*buffers[0], *buffers[1]):
            sharing.setdefault(buffer, set()).add(op)
    near: list[set[int]] = [set() for _ in before]
    for group in (*map(set, before), *sharing.values()):
        for op in group:
            near[op] |= group
    return near
