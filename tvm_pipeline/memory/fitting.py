"""A search for a layout in an arena of given bytes, for tensors that hardly fit.

Its ideas are those of minimalloc (Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine
Learning", ASPLOS 2023). Tensors are placed from the bottom to the top, each on what lies below it. Steps between which
no tensor begins or ends are one section. A part of the search is lost if the tensors of a section that are left do not
fit above its floor: stacked by their lowest offsets, the lowest first, they reach the least height. Tensors that share
no section with the others are placed apart from them. Searches by random orders follow those by fixed ones; tensors of
sections that were often too full then tend to come first. Next: `arena.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tvm_pipeline.solvers.hot import hot

MOST_TENSORS = 1000  # the search keeps their square in memory
# What decides which tensor is tried first, the most important figure first: t, the bytes that are alive beside it; w,
# the steps; a, bytes times steps. With True its lowest offset comes before these.
ORDERS = (("taw", True), ("wat", True), ("twa", True), ("twa", False), ("taw", False))
FITS, FITS_NOT, UNKNOWN = 1, 0, -1
NODES = (5_000, 250_000)  # of one search; all orders are tried with the first number before the second
MORE_NODES = 3_000  # of each search by a random order after these


class _Tensors(NamedTuple):
    """Tensors by their first section.

    Attributes:
        first, last: the sections in which it is alive, both included.
        size: its bytes.
        rank: its place in the order in which tensors are tried.
    """

    first: Any
    last: Any
    size: Any
    rank: Any


def fitting_offsets(
    spans: Sequence[tuple[int, int]], sizes: Sequence[int], arena_bytes: int, deadline: float
) -> list[int] | None:
    """Return offsets at which tensors fit into the arena; None if there are none, or none were found.

    Args:
        spans: the first and the last step of each tensor.
        deadline: of `time.monotonic`. It is read between searches, each of which takes some seconds at most.
    """
    some = [index for index, size in enumerate(sizes) if size]
    if not some:
        return [0] * len(sizes)
    if len(some) > MOST_TENSORS:
        return None
    steps = sorted({spans[index][0] for index in some} | {spans[index][1] + 1 for index in some})
    some.sort(key=lambda index: (spans[index], sizes[index]))  # equal tensors are neighbours
    first = np.searchsorted(steps, [spans[index][0] for index in some])
    last = np.searchsorted(steps, [spans[index][1] + 1 for index in some]) - 1
    size = np.array([sizes[index] for index in some], np.int64)
    alive = np.zeros(len(steps), np.int64)
    for index in range(len(some)):
        alive[first[index] : last[index] + 1] += size[index]
    tensors = _Tensors(first, last, size, np.zeros(len(some), np.int64))
    beside = np.array([alive[a : b + 1].max() for a, b in zip(first, last, strict=True)])
    width = np.array([spans[index][1] + 1 - spans[index][0] for index in some])
    keys = {"w": -width, "a": -width * size, "t": -beside}
    orders = [
        (nodes, by_offset, np.lexsort([keys[key] for key in reversed(order)]))
        for nodes in NODES
        for order, by_offset in ORDERS
    ]
    draw, blame = np.random.default_rng(0), np.ones(len(steps))
    while time.monotonic() < deadline:
        if orders:
            nodes, by_offset, tried = orders.pop(0)
        else:
            blamed = np.array([blame[a : b + 1].max() for a, b in zip(first, last, strict=True)]) / blame.max()
            figures = np.array([0.6 * np.log(width), 1.2 * np.log(size), 3 * np.log(beside), 18 * blamed])
            nodes, by_offset = MORE_NODES, bool(draw.random() < 0.7)
            tried = np.argsort(-draw.random(4) @ figures, kind="stable")
        found = np.zeros(len(some), np.int64)
        answer = _fits(
            tensors._replace(rank=np.argsort(tried)), len(steps), arena_bytes, by_offset, nodes, found, blame
        )  # fmt: skip
        if answer == FITS:
            offsets = dict(zip(some, found.tolist(), strict=True))
            return [offsets.get(index, 0) for index in range(len(sizes))]
        if answer == FITS_NOT:
            return None
        blame *= 0.9
    return None


@hot
def _choices(
    tensors: _Tensors, inside: Any, floor: Any, low: Any, arena: int, least: int, rank: int,
    by_offset: bool, keys: Any, choices: Any, blame: Any,
) -> int:  # fmt: skip
    """Fill in the tensors of a part that may be placed next, as they are tried, and return how many there are.

    There are none if the part does not fit. A tensor above which another one of the part would end is left out: that
    one could be placed below. So is one at the offset and before the rank of the one that was placed last, because the
    two could be placed in either order, and one that equals another.

    Args:
        inside: the tensors of the part, in ascending order.
        floor: of each section, the offset above which its tensors are placed.
        low: for each tensor its lowest offset, which is filled in.
        least, rank: of the tensor that was placed last. None is placed below it.
        keys: room for the keys by which the choices are sorted.
        blame: how often each section was too full.
    """
    begin, end = len(floor), 0
    for t in inside:
        begin, end = min(begin, tensors.first[t]), max(end, tensors.last[t] + 1)
    height, many = arena + 1, 0
    for s in range(begin, end):
        floor[s] = max(floor[s], least)
    for t in inside:
        lowest = least
        for s in range(tensors.first[t], tensors.last[t] + 1):
            lowest = max(lowest, floor[s])
        low[t] = lowest
        height = min(height, lowest + tensors.size[t])
    top = floor[begin:end].copy()
    for t in inside[np.argsort(low[inside])]:
        for s in range(tensors.first[t] - begin, tensors.last[t] + 1 - begin):
            top[s] = max(top[s], low[t]) + tensors.size[t]
            if top[s] > arena:
                blame[begin + s] += 1
                return 0
    before = -1
    for t in inside:
        equal = (
            before >= 0
            and tensors.first[before] == tensors.first[t]
            and tensors.last[before] == tensors.last[t]
            and tensors.size[before] == tensors.size[t]
        )
        before = t
        if low[t] < height and (low[t] > least or tensors.rank[t] >= rank) and not equal:
            key = tensors.rank[t] + (low[t] * len(low) if by_offset else 0)
            k = many
            while k > 0 and keys[k - 1] > key:
                keys[k], choices[k] = keys[k - 1], choices[k - 1]
                k -= 1
            keys[k], choices[k] = key, t
            many += 1
    return many


@hot
def _fits(tensors: _Tensors, sections: int, arena: int, by_offset: bool, most: int, offsets: Any, blame: Any) -> int:
    """Fill the offsets and return FITS, or return FITS_NOT, or UNKNOWN after `most` nodes.

    A level is a part: tensors that are connected by sections that they share. It places one of its tensors and goes on
    with the parts into which the others fall. If one of these does not fit, the level tries its next tensor.
    """
    count = len(tensors.size)
    floor, low, keys = np.zeros(sections, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    inside, choices = np.zeros((count + 1, count), np.int64), np.zeros((count + 1, count), np.int64)
    saved, lows = np.zeros((count + 1, sections), np.int64), np.zeros((count + 1, count), np.int64)
    # Of each level: its tensors, its choices, the present one, and the first tensor of the next part.
    size, many, choice = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    part = np.zeros(count + 1, np.int64)
    level, nodes = 0, 0
    inside[0], size[0], choice[0] = np.arange(count), count, -1
    least, rank = 0, -1
    while True:
        if choice[level] < 0:  # a new level
            nodes += 1
            if nodes > most:
                return UNKNOWN
            own = inside[level, : size[level]]
            many[level] = _choices(
                tensors, own, floor, low, arena, least, rank, by_offset, keys, choices[level], blame
            )  # fmt: skip
            for k in range(many[level]):
                lows[level, k] = low[choices[level, k]]
            saved[level] = floor
        else:
            floor[:] = saved[level]
        choice[level] += 1
        if choice[level] >= many[level]:
            level -= 1
            if level < 0:
                return FITS_NOT
            continue
        t = choices[level, choice[level]]
        least, rank = lows[level, choice[level]], tensors.rank[t]
        offsets[t] = least
        floor[tensors.first[t] : tensors.last[t] + 1] = least + tensors.size[t]
        part[level] = 0
        while True:  # go down into the next part, or up where all parts of a level are placed
            own, k = inside[level, : size[level]], part[level]
            t = choices[level, choice[level]]
            if k < len(own) and own[k] == t:
                k += 1
            if k == len(own):
                level -= 1
                if level < 0:
                    return FITS
                continue
            reach, below = tensors.last[own[k]], 0
            while k < len(own) and tensors.first[own[k]] <= reach:
                if own[k] != t:
                    inside[level + 1, below] = own[k]
                    reach = max(reach, tensors.last[own[k]])
                    below += 1
                k += 1
            part[level] = k
            least, rank = lows[level, choice[level]], tensors.rank[t]
            level += 1
            size[level], choice[level] = below, -1
            break
