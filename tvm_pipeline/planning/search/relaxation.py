"""A relaxation of pipelines: where each state can be at all, and how fast no pipeline can beat.

Transfers between devices are left out and cuts are only counted in their order, without asking whether one lies in
another. Then "the further the better" holds, and the furthest cut that a set of devices can reach with stages of at
most T is found set by set, each in O(units log M). From the far end the same tells which cuts are still early enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from tvm_pipeline.planning.search.cost_tables import StageCosts
from tvm_pipeline.planning.search.cuts import Floats, Integers
from tvm_pipeline.planning.search.space import Space
from tvm_pipeline.solvers.hot import hot


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """For each state the first and last cut it can be at; for each unit and cut the first a stage can begin at."""

    low: Integers
    high: Integers
    start: Integers


def relaxed_bottleneck(space: Space, twins: list[int], seconds: StageCosts, at_most: float) -> float:
    """A value that no pipeline's slowest stage is below; infinite where none can be done within `at_most`."""
    relaxed = _Relaxed(space, twins, seconds)
    high = min(at_most, seconds.impossible)
    if not relaxed.possible(high):
        return float("inf")
    low = 0.0
    for _ in range(40):
        middle = (low + high) / 2
        if relaxed.possible(middle):
            high = middle
        else:
            low = middle
        if high - low <= 1e-4 * high:
            break
    return low


def windows(space: Space, twins: list[int], seconds: StageCosts | None, cap: float, masks: Sequence[int]) -> Windows:
    """The windows of the states with these masks; they are narrow only where every device serves once."""
    held, capacity, count = space.held, space.capacity, len(space.cuts)
    start = np.zeros((len(space.units), count), np.int64)
    capped = seconds is not None and np.isfinite(cap)
    for index, unit in enumerate(space.units):
        start[index] = np.searchsorted(held, held - min(capacity[d] for d in unit), side="left")
        if seconds is not None and capped:
            rows = [(np.maximum.accumulate(seconds.add[d]), _least_after(seconds.add[d])) for d in unit]
            # Of n replicas the fastest must take at most n times the cap.
            early = [np.searchsorted(most, least - cap * len(unit) * (1 + 1e-9), side="left") for most, least in rows]
            start[index] = np.maximum(start[index], np.min(early, axis=0))
    low, high = np.zeros(len(masks), np.int64), np.full(len(masks), count - 1)
    high[0] = 0
    if seconds is not None and capped and len(space.once) == len(space.devices):
        relaxed = _Relaxed(space, twins, seconds)
        furthest, earliest = relaxed.reach(cap * (1 + 1e-9))
        high = np.minimum(high, [furthest[relaxed.place(mask)] for mask in masks])
        left = _best_subsets(relaxed, earliest, space.most_devices)
        everything = (1 << len(space.devices)) - 1
        for state, mask in enumerate(masks):
            low[state] = left[max(space.most_devices - mask.bit_count(), 0)][relaxed.place(everything & ~mask)]
    return Windows(low, high, start)


def _best_subsets(relaxed: _Relaxed, earliest: Integers, most: int) -> list[list[int]]:
    """[r][set]: the earliest cut that r devices of the set, or fewer, can go on from."""
    best = []
    for size in range(most + 1):
        row: list[int] = []
        for place, mask in enumerate(relaxed.sets):
            if mask.bit_count() <= size:
                row.append(int(earliest[place]))
            else:
                bits = [1 << device for device in range(mask.bit_length()) if mask >> device & 1]
                row.append(min(row[relaxed.place(mask & ~bit)] for bit in bits))
        best.append(row)
    return best


class _Relaxed:
    """The problem with costs that only grow along the order of the cuts.

    Of a set of devices only how many of each kind matters: `sets` has one of each, the smaller ones first.
    """

    def __init__(self, space: Space, twins: list[int], seconds: StageCosts) -> None:
        self.seconds, self.held, self.capacity = seconds, space.held, space.capacity
        self.sizes = np.array([len(unit) for unit in space.units])
        self.members = np.full((len(space.units), max(self.sizes)), -1)
        for row, unit in zip(self.members, space.units, strict=True):
            row[: len(unit)] = unit
        self.kinds: list[list[int]] = []
        for device, elder in enumerate(twins):
            if elder < 0:
                self.kinds.append([device])
            else:
                next(kind for kind in self.kinds if elder in kind).append(device)
        every = product(*(range(len(kind) + 1) for kind in self.kinds))
        self.sets = sorted((self._first(counts) for counts in every), key=lambda mask: (mask.bit_count(), mask))
        self.index = {mask: place for place, mask in enumerate(self.sets)}
        self.allowed = np.array([mask.bit_count() <= space.most_devices for mask in self.sets])
        # What is left of each set without each unit; -1 where the unit is not in it.
        self.rest = np.full((len(self.sets), len(space.units)), -1)
        wanted = [self._counts(sum(1 << device for device in unit)) for unit in space.units]
        for place, counts in enumerate(map(self._counts, self.sets)):
            for number, wants in enumerate(wanted):
                left = [have - want for have, want in zip(counts, wants, strict=True)]
                if min(left) >= 0:
                    self.rest[place, number] = self.index[self._first(left)]
        self.most = (np.maximum.accumulate(seconds.add, axis=1), np.maximum.accumulate(seconds.work, axis=1))
        self.least = (_least_after(seconds.add), _least_after(seconds.work))

    def _counts(self, mask: int) -> list[int]:
        return [sum(mask >> device & 1 for device in kind) for kind in self.kinds]

    def _first(self, counts: Sequence[int]) -> int:
        """So many of each kind, the eldest."""
        return sum(1 << device for kind, count in zip(self.kinds, counts, strict=True) for device in kind[:count])

    def place(self, mask: int) -> int:
        """Where in `sets` the one equal to this is."""
        return self.index[self._first(self._counts(mask))]

    def reach(self, cap: float) -> tuple[Integers, Integers]:
        """For each set of devices: the furthest cut from the start, and the earliest from which they reach the end."""
        furthest = np.zeros(len(self.sets), np.int64)
        earliest = np.full(len(self.sets), len(self.held) - 1)
        _reach(
            self.members, self.sizes, self.rest, self.held, self.capacity, self.seconds.call, *self.most, *self.least,
            self.seconds.spill, self.seconds.cached, cap, furthest, earliest,
        )  # fmt: skip
        return furthest, earliest

    def possible(self, cap: float) -> bool:
        return bool(self.reach(cap)[0][self.allowed].max() == len(self.held) - 1)


def _least_after(rows: Floats) -> Floats:
    """For each place the least of the values there and later."""
    least: Floats = np.minimum.accumulate(rows[..., ::-1], axis=-1)[..., ::-1]
    return least


@hot
def _reach(
    members: Any, sizes: Any, left: Any, held: Any, capacity: Any, call: Any,
    most_add: Any, most_work: Any, least_add: Any, least_work: Any, spill: Any, cached: Any, cap: float,
    furthest: Any, earliest: Any,
) -> None:  # fmt: skip
    last = len(held) - 1
    for used in range(1, len(furthest)):
        for forward in range(2):
            best = furthest[used] if forward == 1 else earliest[used]
            for unit in range(len(sizes)):
                rest = left[used, unit]
                if rest < 0:
                    continue
                fixed = furthest[rest] if forward == 1 else earliest[rest]
                # Bisection for the furthest end of a stage that begins at `fixed`, or its earliest beginning.
                near, far = fixed, last if forward == 1 else 0
                while near != far:
                    if forward == 1:
                        middle = (near + far + 1) // 2
                        i, j = fixed, middle
                    else:
                        middle = (near + far) // 2
                        i, j = middle, fixed
                    rate = 0.0
                    possible = True
                    for m in range(sizes[unit]):
                        d = members[unit, m]
                        if held[j] - held[i] > capacity[d]:
                            possible = False
                            break
                        work = least_work[d, j] - most_work[d, i]
                        spilled = spill[d] * max(0.0, held[j] - held[i] - cached[d])
                        if spilled > work:
                            work = spilled
                        seconds = call[d] + max(0.0, least_add[d, j] - most_add[d, i]) + max(0.0, work)
                        rate += 1.0 / max(seconds, 1e-12)
                    if possible and rate * cap >= 1.0 - 1e-12:
                        near = middle
                    elif forward == 1:
                        far = middle - 1
                    else:
                        far = middle + 1
                if (forward == 1 and near > best) or (forward == 0 and near < best):
                    best = near
            if forward == 1:
                furthest[used] = best
            else:
                earliest[used] = best
