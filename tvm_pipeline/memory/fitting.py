"""A search for a layout in an arena of given bytes, for tensors that hardly fit.

Steps between which no tensor begins or ends are one section. Tensors are placed from the bottom to the top, so the
floor of each section is the top of the tensor placed last there. A valley is a run of sections of one floor between
higher ones. The leftmost section of a valley holds next either a tensor that begins there and ends within the valley,
or nothing at this height; a valley that holds nothing rises to its lower side. Any valley may be next, so the search
takes the one with the fewest tensors to try. A branch is lost if the tensors of a section that are left do not fit
above its floor: stacked by their lowest offsets, the lowest first, they reach the least height.

That bound, and placing tensors only where they rest on others, are minimalloc's ideas (Moffitt, "MiniMalloc: A
Lightweight Memory Allocator for Hardware-Accelerated Machine Learning", ASPLOS 2023). Valleys are those of the best-fit
heuristic for strips (Burke, Kendall, Whitwell, "A New Placement Heuristic for the Orthogonal Stock-Cutting Problem",
Operations Research 2004). The search begins again and again, with another random order of the tensors of a valley, and
with the steps in either direction. Next: `arena.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tvm_pipeline.solvers.hot import hot

MOST_TENSORS = 1000  # one search of more takes too long
NODES = 4_000  # of one search
FITS, FITS_NOT, UNKNOWN = 1, 0, -1
_LOST, _FULL = -1, -2  # in place of a section: the branch does not fit; the trail has no room
_WALL = 1 << 62  # the floor of what is outside, and of sections in which nothing is left to place


class _Tensors(NamedTuple):
    """N tensors in S sections, by their first section; equal ones are neighbours.

    Attributes:
        first, last: N; the sections in which a tensor is alive, both included.
        size: N; its bytes.
        key: N; in a valley the tensor with the largest is tried first.
        begins: S + 1; the first tensor of each section.
    """

    first: Any
    last: Any
    size: Any
    key: Any
    begins: Any


class _State(NamedTuple):
    """What is placed.

    Attributes:
        floor: S; the offset above which tensors of a section are placed.
        left: S; the bytes of its tensors that are not placed.
        bare: S; whether no tensor stands on its floor.
        placed: N; whether a tensor is placed.
        trail: K x 3; former sections, floors and `bare` of what was changed, to undo it.
        used: 1; the rows of the trail in use.
    """

    floor: Any
    left: Any
    bare: Any
    placed: Any
    trail: Any
    used: Any


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
    first = np.searchsorted(steps, [spans[index][0] for index in some])
    last = np.searchsorted(steps, [spans[index][1] + 1 for index in some]) - 1
    size = np.array([sizes[index] for index in some], np.int64)
    both = [_tensors(first, last, size, len(steps) - 1)]
    both.append(_tensors(len(steps) - 2 - last, len(steps) - 2 - first, size, len(steps) - 1))
    draw = np.random.default_rng(0)
    while time.monotonic() < deadline:
        order, tensors = both[draw.integers(2)]
        longer, larger, random = draw.random(3)
        width = np.log(tensors.last - tensors.first + 1.0)
        key = (2 * longer - 1) * width + (2 * larger - 1) * np.log(tensors.size) + random * draw.random(len(some))
        found = np.zeros(len(some), np.int64)
        answer = _fits(tensors._replace(key=key), arena_bytes, NODES, found)
        if answer == FITS:
            offsets = {some[index]: int(offset) for index, offset in zip(order, found, strict=True)}
            return [offsets.get(index, 0) for index in range(len(sizes))]
        if answer == FITS_NOT:
            return None
    return None


def _tensors(first: Any, last: Any, size: Any, sections: int) -> tuple[Any, _Tensors]:
    """Return the order of the tensors by their first section, and the tensors in this order."""
    order = np.lexsort([size, last, first])
    begins = np.searchsorted(first[order], np.arange(sections + 1))
    return order, _Tensors(first[order], last[order], size[order], np.zeros(len(order)), begins)


@hot
def _height(state: _State, s: int) -> Any:
    return state.floor[s] if 0 <= s < len(state.floor) and state.left[s] > 0 else _WALL


@hot
def _change(state: _State, s: int, floor: int, bare: bool) -> None:
    row = state.used[0]
    state.trail[row, 0], state.trail[row, 1], state.trail[row, 2] = s, state.floor[s], state.bare[s]
    state.used[0] = row + 1
    state.floor[s], state.bare[s] = floor, bare


@hot
def _undo(state: _State, mark: int) -> None:
    for row in range(state.used[0] - 1, mark - 1, -1):
        s = state.trail[row, 0]
        state.floor[s], state.bare[s] = state.trail[row, 1], state.trail[row, 2] > 0
    state.used[0] = mark


@hot
def _may_stand(tensors: _Tensors, state: _State, t: int, end: int, arena: int) -> Any:
    """Return whether a tensor may stand where it begins, in a valley that ends before section `end`."""
    return not state.placed[t] and tensors.last[t] < end and state.floor[tensors.first[t]] + tensors.size[t] <= arena


@hot
def _valley(tensors: _Tensors, state: _State, arena: int) -> tuple[int, int]:
    """Raise valleys that hold nothing; return the leftmost section of the one to fill next, and where it ends."""
    sections, changed, chosen, until = len(state.floor), True, _LOST, 0
    while changed:
        changed, chosen, fewest, s = False, _LOST, 0, 0
        if state.used[0] + 2 * sections > len(state.trail):
            return _FULL, 0
        while s < sections:
            begin, s = s, s + 1
            if state.left[begin] == 0:
                continue
            while s < sections and state.left[s] > 0 and state.floor[s] == state.floor[begin]:
                s += 1
            side = min(_height(state, begin - 1), _height(state, s))
            if side <= state.floor[begin]:
                continue
            at = begin
            while at < s and state.bare[at]:
                at += 1
            if at == s:
                for z in range(begin, s):
                    if side > arena - state.left[z]:
                        return _LOST, 0
                    _change(state, z, side, False)
                changed = True
                continue
            end, many = at + 1, 0
            while end < s and not state.bare[end]:
                end += 1
            for t in range(tensors.begins[at], tensors.begins[at + 1]):
                many += _may_stand(tensors, state, t, end, arena)
            if many == 0:
                _change(state, at, state.floor[at], True)
                changed = True
            elif chosen < 0 or many < fewest or (many == fewest and state.floor[at] < state.floor[chosen]):
                fewest, chosen, until = many, at, end
    return chosen, until


@hot
def _overflows(tensors: _Tensors, state: _State, arena: int) -> Any:
    """Return whether the tensors that are left cannot all fit above the floor of some section."""
    left = np.flatnonzero(~state.placed)
    low = np.zeros(len(left), np.int64)
    for k, t in enumerate(left):
        for s in range(tensors.first[t], tensors.last[t] + 1):
            low[k] = max(low[k], state.floor[s])
    top = state.floor.copy()
    for k in np.argsort(low):
        t = left[k]
        for s in range(tensors.first[t], tensors.last[t] + 1):
            top[s] = max(top[s], low[k]) + tensors.size[t]
            if top[s] > arena:
                return True
    return False


@hot
def _choices(tensors: _Tensors, state: _State, at: int, end: int, arena: int, choices: Any) -> Any:
    """Fill in the tensors that may stand at a section, in the order of trial, and -1; return how many there are.

    Of equal tensors only the first that is not placed is tried.
    """
    many = 0
    for t in range(tensors.begins[at], tensors.begins[at + 1]):
        waits = t > tensors.begins[at] and not state.placed[t - 1] and tensors.last[t - 1] == tensors.last[t]
        if (waits and tensors.size[t - 1] == tensors.size[t]) or not _may_stand(tensors, state, t, end, arena):
            continue
        k, many = many, many + 1
        while k > 0 and tensors.key[choices[k - 1]] < tensors.key[t]:
            choices[k] = choices[k - 1]
            k -= 1
        choices[k] = t
    choices[many] = -1
    return many + 1


@hot
def _fits(tensors: _Tensors, arena: int, most: int, offsets: Any) -> int:
    """Fill the offsets and return FITS, or return FITS_NOT, or UNKNOWN after `most` nodes.

    A level fills a valley: it tries one tensor after the other, and at last none, which is the choice -1.
    """
    count, sections = len(tensors.size), len(tensors.begins) - 1
    alive, widest = np.zeros(sections, np.int64), np.diff(tensors.begins).max()
    for t in range(count):
        alive[tensors.first[t] : tensors.last[t] + 1] += tensors.size[t]
    entries = 8 * (sections + (tensors.last - tensors.first + 1).sum())
    state = _State(
        np.zeros(sections, np.int64), alive, np.zeros(sections, np.bool_), np.zeros(count, np.bool_),
        np.zeros((entries, 3), np.int64), np.zeros(1, np.int64),
    )  # fmt: skip
    levels = 2 * (count + sections)
    choices, section = np.zeros((levels, widest + 1), np.int64), np.zeros(levels, np.int64)
    many, choice, mark = np.zeros(levels, np.int64), np.zeros(levels, np.int64), np.zeros(levels, np.int64)
    level, nodes, down, unplaced = 0, 0, True, count
    while True:
        if down:  # a new level
            nodes += 1
            if unplaced == 0:
                return FITS
            if nodes > most or level == levels:
                return UNKNOWN
            at, end = _valley(tensors, state, arena)
            if at == _FULL:
                return UNKNOWN
            section[level], many[level], choice[level], mark[level] = at, 0, 0, state.used[0]
            if at != _LOST and not _overflows(tensors, state, arena):
                many[level] = _choices(tensors, state, at, end, arena, choices[level])
        else:  # take back what this level chose
            _undo(state, mark[level])
            t = choices[level, choice[level]]
            if t >= 0:
                state.placed[t] = False
                unplaced += 1
                state.left[tensors.first[t] : tensors.last[t] + 1] += tensors.size[t]
            choice[level] += 1
        down = choice[level] < many[level]
        if not down:
            level -= 1
            if level < 0:
                return FITS_NOT
            continue
        t, at = choices[level, choice[level]], section[level]
        if t < 0:
            _change(state, at, state.floor[at], True)
        else:
            offsets[t] = state.floor[at]
            state.placed[t] = True
            unplaced -= 1
            for s in range(at, tensors.last[t] + 1):
                state.left[s] -= tensors.size[t]
                _change(state, s, offsets[t] + tensors.size[t], False)
        level += 1
