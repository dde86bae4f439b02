"""The states of the search for pipelines, and the stages that lead from one to the next.

A state is the set of devices used so far and the unit that runs the last stage. If the number of stages is prescribed,
the number of stages so far belongs to it, too, and so does how often each device served if that is counted. Of equal
devices the first free one is always taken, so that six Edge TPUs make six sets of used devices and not 64.

Next: `pipelines.py`, which searches among these states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tvm_pipeline.planning.search.cost_tables import StageCosts
from tvm_pipeline.planning.search.cuts import Integers
from tvm_pipeline.planning.search.space import Space, TooManyError, Units, stage_limits

# Values and choices of all states at all cuts must fit the memory of a small board.
MOST_CELLS = 60_000_000
# The search must take a few minutes at most: this many stages suffice for 11 unequal devices, or replicas of 7.
MOST_STAGES = 60_000


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """N states, and S stages that lead from one to the next, sorted so that a stage's source comes first.

    Attributes:
        mask: N; the devices used so far, as bits.
        unit: N; the unit that runs the last stage; -1 for state 0, the empty pipeline.
        count: N; the number of stages; 0 if it is not prescribed.
        source, target: S; the state before a stage and the state behind it.
    """

    mask: Integers
    unit: Integers
    count: Integers
    source: Integers
    target: Integers


def reachable(space: Space, elders: list[int]) -> States:
    """Return all states that can be reached from the empty pipeline.

    Args:
        elders: what `elders_of` returns.

    Raises:
        TooManyError: the states would not fit into memory.
    """
    single_use = sum(1 << device for device in space.once)
    masks = [sum(1 << device for device in unit) for unit in space.units]
    # A device may be used once its elder is, or together with it.
    needs = [
        sum(1 << elders[device] for device in unit if elders[device] >= 0) & ~mask
        for unit, mask in zip(space.units, masks, strict=True)
    ]
    most = space.stages or len(space.cuts.graph)
    limits = stage_limits(space.devices, frozenset(), most) if space.counted else []
    start = 0, -1, 0, (0,) * len(limits)
    index = {start: 0}
    order = [start]
    edges = []
    for key in order:
        mask, last, count, served = key
        for unit, own in enumerate(masks):
            if unit == last or own & mask & single_use or needs[unit] & ~mask:
                continue
            times = tuple(n + (own >> d & 1) * math.isfinite(limits[d]) for d, n in enumerate(served))
            if any(n > limit for n, limit in zip(times, limits, strict=True)):
                continue
            if space.stages is not None and count == space.stages:
                continue
            if space.working is not None and (own | mask).bit_count() > space.working:
                continue
            new = (mask | own, unit, count + 1 if space.stages is not None else 0, times)
            if new not in index:
                index[new] = len(order)
                order.append(new)
            edges.append((index[key], index[new]))
        if len(order) * len(space.cuts) > MOST_CELLS or len(edges) > MOST_STAGES:
            raise TooManyError
    # Contiguous, since loops are compiled again for arrays of another layout.
    return States(
        *np.array([key[:3] for key in order], np.int64).T.copy(), *np.array(edges, np.int64).reshape(-1, 2).T.copy()
    )


def elders_of(space: Space, tables: Sequence[StageCosts]) -> list[int]:
    """Return for each device its elder, the last device before it whose costs and limits are equal, or -1."""
    size = len(space.devices)

    def equal(a: int, b: int) -> bool:
        if space.devices[a].memory_bytes != space.devices[b].memory_bytes or (a in space.once) != (b in space.once):
            return False
        swap = list(range(size + 1))
        swap[a], swap[b] = b, a
        return all(
            all(np.array_equal(row[a], row[b]) for row in (*t.table[:3], t.added, t.work, t.leave))
            and np.array_equal(t.enter, t.enter[swap][:, swap[:-1]])
            for t in tables
        )

    found = []
    for device in range(size):
        # A device that may serve several stages is never used up, so an equal device must not wait for it.
        elders = [e for e in reversed(range(device)) if device in space.once and equal(e, device)]
        found.append(elders[0] if elders else -1)
    return found


def first_free_units(units: Units, elders: list[int]) -> Units:
    """Return the units that can be the first free ones of equal devices, because they pass over no elder."""

    def passes_over(unit: tuple[int, ...]) -> bool:
        # Among equal devices of a unit, only the first may have its elder outside the unit.
        return any(
            elders[d] >= 0 and elders[d] not in unit and any(_is_elder(elders, e, elders[d]) for e in unit)
            for d in unit
        )

    return [unit for unit in units if not passes_over(unit)]


def _is_elder(elders: list[int], elder: int, device: int) -> bool:
    while device >= 0:
        if device == elder:
            return True
        device = elders[device]
    return False
