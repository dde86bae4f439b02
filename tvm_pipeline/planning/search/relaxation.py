"""A relaxation of pipelines: a bound of the slowest stage, and the cuts at which each state is possible.

The relaxation leaves out transfers, and takes cuts in their order, even if one does not contain the one before. Then a
stage that ends further on is never worse. So the furthest cut that a set of devices can reach with stages of at most T
seconds is found set by set, from the smaller sets to the larger ones, in O(units log M) each. The same computation from
the last cut gives the earliest cut from which a set of devices can still reach the end.

Next: `pipelines.py`, which searches inside these windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tvm_pipeline.cost.stage_table import DeviceTable, computing, fetched
from tvm_pipeline.planning.search.cost_tables import StageCosts
from tvm_pipeline.planning.search.cuts import Floats, Integers
from tvm_pipeline.planning.search.loops import Window
from tvm_pipeline.planning.search.space import Space
from tvm_pipeline.solvers.hot import hot

NumbersT = TypeVar("NumbersT", Floats, Integers)


def relaxed_bottleneck(space: Space, elders: list[int], seconds: StageCosts, at_most: float) -> float:
    """Return a lower bound of the seconds of every pipeline's slowest stage; infinite if it exceeds `at_most`."""
    relaxed = _Relaxed(space, elders, seconds)
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


def windows(space: Space, elders: list[int], seconds: StageCosts | None, cap: float, masks: Sequence[int]) -> Window:
    """Return the windows of the states with these masks; they are narrow only where every device serves once."""
    param_bytes, capacity, count = space.param_bytes, space.capacity, len(space.cuts)
    # Replicas hold no ordered operator: their stage begins with as many before it as at its end.
    unordered_from = np.searchsorted(np.maximum.accumulate(space.ordered), space.ordered, side="left")
    start = np.zeros((len(space.units), count), np.int64)
    capped = seconds is not None and np.isfinite(cap)
    for index, unit in enumerate(space.units):
        start[index] = np.searchsorted(param_bytes, param_bytes - min(capacity[d] for d in unit), side="left")
        if len(unit) > 1:
            start[index] = np.maximum(start[index], unordered_from)
        if seconds is not None and capped:
            rows = [(np.maximum.accumulate(seconds.added[d]), _least_after(seconds.added[d])) for d in unit]
            # Of n replicas the fastest must take at most n times the cap.
            early = [np.searchsorted(most, least - cap * len(unit) * (1 + 1e-9), side="left") for most, least in rows]
            start[index] = np.maximum(start[index], np.min(early, axis=0))
    low, high = np.zeros(len(masks), np.int64), np.full(len(masks), count - 1)
    high[0] = 0
    if seconds is not None and capped and len(space.once) == len(space.devices):
        relaxed = _Relaxed(space, elders, seconds)
        furthest, earliest = relaxed.reach(cap * (1 + 1e-9))
        high = np.minimum(high, [furthest[relaxed.index_of(mask)] for mask in masks])
        left = _best_subsets(relaxed, earliest, space.most_devices)
        everything = (1 << len(space.devices)) - 1
        for state, mask in enumerate(masks):
            low[state] = left[max(space.most_devices - mask.bit_count(), 0)][relaxed.index_of(everything & ~mask)]
    return Window(low, high, start)


def _best_subsets(relaxed: _Relaxed, earliest: Integers, most: int) -> list[list[int]]:
    """Return [r][set]: the earliest cut from which r devices of the set, or fewer, can reach the end."""
    best = []
    for size in range(most + 1):
        row: list[int] = []
        for index, mask in enumerate(relaxed.sets):
            if mask.bit_count() <= size:
                row.append(int(earliest[index]))
            else:
                bits = [1 << device for device in range(mask.bit_length()) if mask >> device & 1]
                row.append(min(row[relaxed.index_of(mask & ~bit)] for bit in bits))
        best.append(row)
    return best


class _Relaxed:
    """The relaxed problem, whose costs never fall along the order of the cuts.

    Equal devices are of one kind, and only the number of devices of each kind matters. So `sets` has one set for each
    combination of numbers, the smaller sets first.
    """

    def __init__(self, space: Space, elders: list[int], seconds: StageCosts) -> None:
        self.last = len(space.cuts) - 1
        self.kinds: list[list[int]] = []
        for device, elder in enumerate(elders):
            if elder < 0:
                self.kinds.append([device])
            else:
                next(kind for kind in self.kinds if elder in kind).append(device)
        counts_of_kinds = product(*(range(len(kind) + 1) for kind in self.kinds))
        self.sets = sorted(map(self._first, counts_of_kinds), key=lambda mask: (mask.bit_count(), mask))
        self.index = {mask: index for index, mask in enumerate(self.sets)}
        self.allowed = np.array([mask.bit_count() <= space.most_devices for mask in self.sets])
        sizes = np.array([len(unit) for unit in space.units])
        members = np.full((len(space.units), max(sizes)), -1)
        for row, unit in zip(members, space.units, strict=True):
            row[: len(unit)] = unit
        self.arrays = _Arrays(
            members,
            sizes,
            self._rest(space),
            space.param_bytes,
            space.capacity,
            seconds.table,
            np.maximum.accumulate(seconds.added, axis=1),
            np.maximum.accumulate(seconds.work, axis=1),
            _least_after(seconds.added),
            _least_after(seconds.work),
            np.maximum.accumulate(space.ordered),
            _least_after(space.ordered),
        )

    def _rest(self, space: Space) -> Integers:
        """Return sets x units: the index of the set without the unit, or -1 if the set does not contain the unit."""
        rest = np.full((len(self.sets), len(space.units)), -1)
        needed = [self._counts(sum(1 << device for device in unit)) for unit in space.units]
        for index, counts in enumerate(map(self._counts, self.sets)):
            for unit, needs in enumerate(needed):
                left = [have - need for have, need in zip(counts, needs, strict=True)]
                if min(left) >= 0:
                    rest[index, unit] = self.index[self._first(left)]
        return rest

    def _counts(self, mask: int) -> list[int]:
        """Return how many devices of each kind a set has."""
        return [sum(mask >> device & 1 for device in kind) for kind in self.kinds]

    def _first(self, counts: Sequence[int]) -> int:
        """Return the set of the first so many devices of each kind."""
        return sum(1 << device for kind, count in zip(self.kinds, counts, strict=True) for device in kind[:count])

    def index_of(self, mask: int) -> int:
        """Return the index in `sets` of the set with as many devices of each kind as this set."""
        return self.index[self._first(self._counts(mask))]

    def reach(self, cap: float) -> tuple[Integers, Integers]:
        """Return for each set the furthest cut that it reaches, and the earliest cut from which it reaches the end."""
        furthest = np.zeros(len(self.sets), np.int64)
        earliest = np.full(len(self.sets), self.last)
        _reach(self.arrays, float(cap), furthest, earliest)
        return furthest, earliest

    def possible(self, cap: float) -> bool:
        """Return whether some allowed set reaches the last cut with stages of at most `cap` seconds."""
        return bool(self.reach(cap)[0][self.allowed].max() == self.last)


def _least_after(rows: NumbersT) -> NumbersT:
    """Return for each position the least of the values there and later."""
    least: NumbersT = np.minimum.accumulate(rows[..., ::-1], axis=-1)[..., ::-1]
    return least


class _Arrays(NamedTuple):
    """The relaxed problem for the loops: U units of at most W devices, D devices, M cuts.

    Attributes:
        members: U x W; the devices of each unit, filled up with -1.
        sizes: U; how many devices a unit has.
        rest: sets x U; the index of the set without the unit, or -1 if the set does not contain the unit.
        param_bytes: M; parameter bytes of the operators before each cut.
        capacity: D; see `Space`.
        table: of the devices.
        most_added, most_work: D x M; the greatest of the cumulative costs up to a cut.
        least_added, least_work: D x M; the least of the cumulative costs from a cut on.
        most_ordered, least_ordered: M; the same of the numbers of ordered operators.
    """

    members: Any
    sizes: Any
    rest: Any
    param_bytes: Any
    capacity: Any
    table: DeviceTable
    most_added: Any
    most_work: Any
    least_added: Any
    least_work: Any
    most_ordered: Any
    least_ordered: Any


@hot
def _is_fast(arrays: _Arrays, unit: int, i: int, j: int, cap: float) -> Any:
    """Return whether a unit holds the operators between cuts i and j, and takes at most `cap` seconds for them."""
    if arrays.sizes[unit] > 1 and arrays.least_ordered[j] > arrays.most_ordered[i]:
        return False
    param_bytes = arrays.param_bytes[j] - arrays.param_bytes[i]
    rate = 0.0
    for m in range(arrays.sizes[unit]):
        d = arrays.members[unit, m]
        if param_bytes > arrays.capacity[d]:
            return False
        added = max(0.0, arrays.least_added[d, j] - arrays.most_added[d, i])
        work = max(0.0, arrays.least_work[d, j] - arrays.most_work[d, i])
        seconds = computing(arrays.table, d, added, work, fetched(arrays.table, d, param_bytes))
        rate += 1.0 / max(seconds, 1e-12)
    return rate * cap >= 1.0 - 1e-12


@hot
def _reach(arrays: _Arrays, cap: float, furthest: Any, earliest: Any) -> None:
    """Fill the furthest and the earliest cut of each set; on entry all have those of the empty set."""
    last = len(arrays.param_bytes) - 1
    for used in range(1, len(furthest)):
        for unit in range(len(arrays.sizes)):
            rest = arrays.rest[used, unit]
            if rest < 0:
                continue
            # Bisection for the furthest end of a stage that begins where the rest ends.
            near, far = furthest[rest], last
            while near < far:
                middle = (near + far + 1) // 2
                if _is_fast(arrays, unit, furthest[rest], middle, cap):
                    near = middle
                else:
                    far = middle - 1
            furthest[used] = max(furthest[used], near)
            # And for the earliest beginning of a stage that ends where the rest begins.
            near, far = earliest[rest], 0
            while near > far:
                middle = (near + far) // 2
                if _is_fast(arrays, unit, middle, earliest[rest], cap):
                    near = middle
                else:
                    far = middle + 1
            earliest[used] = min(earliest[used], near)
