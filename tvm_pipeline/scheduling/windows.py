"""A relaxation of pipelines: where each state can be at all, and how fast no pipeline can beat.

Transfers between devices are left out and cuts are only counted in their order, without asking whether one lies in
another. Then "the further the better" holds, and the furthest cut that a set of devices can reach with stages of at
most T is found set by set, each in O(units log M). From the far end the same tells which cuts are still early enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_pipeline.scheduling.costs import StageCosts
from tvm_pipeline.scheduling.cuts import Floats, Integers
from tvm_pipeline.scheduling.hot import hot
from tvm_pipeline.scheduling.space import Space


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """For each state the first and last cut it can be at; for each unit and cut the first a stage can begin at."""

    low: Integers
    high: Integers
    start: Integers


def relaxed_bottleneck(space: Space, seconds: StageCosts, at_most: float) -> float:
    """A value that no pipeline's slowest stage is below; infinite where none can be done within `at_most`."""
    relaxed = _Relaxed(space, seconds)
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


def windows(space: Space, seconds: StageCosts | None, cap: float, masks: Integers) -> Windows:
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
        furthest, earliest = _Relaxed(space, seconds).reach(cap * (1 + 1e-9))
        high = np.minimum(high, furthest[masks])
        used = np.array([int(mask).bit_count() for mask in masks])
        by_size = _best_subsets(earliest, space.most_devices)
        low = by_size[np.maximum(space.most_devices - used, 0), (1 << len(space.devices)) - 1 - masks]
    return Windows(low, high, start)


def _best_subsets(earliest: Integers, most: int) -> Integers:
    """[r, mask]: the earliest cut that some r devices of `mask`, or fewer, can go on from."""
    masks = np.arange(len(earliest))
    sizes = np.array([int(mask).bit_count() for mask in masks])
    best = np.tile(np.full(len(earliest), earliest[0]), (most + 1, 1))
    for size in range(1, most + 1):
        best[size] = np.where(sizes <= size, earliest, earliest[0])
        bit = 1
        while bit < len(earliest):
            larger = masks[(masks & bit) != 0]
            best[size, larger] = np.minimum(best[size, larger], best[size, larger ^ bit])
            bit <<= 1
    return best


class _Relaxed:
    """The problem with costs that only grow along the order of the cuts."""

    def __init__(self, space: Space, seconds: StageCosts) -> None:
        self.seconds, self.held, self.capacity = seconds, space.held, space.capacity
        self.sizes = np.array([len(unit) for unit in space.units])
        self.members = np.full((len(space.units), max(self.sizes)), -1)
        self.masks = np.array([sum(1 << d for d in unit) for unit in space.units])
        for row, unit in zip(self.members, space.units, strict=True):
            row[: len(unit)] = unit
        self.most = (np.maximum.accumulate(seconds.add, axis=1), np.maximum.accumulate(seconds.work, axis=1))
        self.least = (_least_after(seconds.add), _least_after(seconds.work))
        sets = range(1 << len(space.devices))
        self.allowed = np.array([mask.bit_count() <= space.most_devices for mask in sets])

    def reach(self, cap: float) -> tuple[Integers, Integers]:
        """For each set of devices: the furthest cut from the start, and the earliest from which they reach the end."""
        furthest = np.zeros(len(self.allowed), np.int64)
        earliest = np.full(len(self.allowed), len(self.held) - 1)
        _reach(
            self.members, self.sizes, self.masks, self.held, self.capacity, self.seconds.call, *self.most, *self.least,
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
    members: Any, sizes: Any, masks: Any, held: Any, capacity: Any, call: Any,
    most_add: Any, most_work: Any, least_add: Any, least_work: Any, spill: Any, cached: Any, cap: float,
    furthest: Any, earliest: Any,
) -> None:  # fmt: skip
    last = len(held) - 1
    for used in range(1, len(furthest)):
        for forward in range(2):
            best = furthest[used] if forward == 1 else earliest[used]
            for unit in range(len(sizes)):
                if masks[unit] & ~used:
                    continue
                rest = used & ~masks[unit]
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
