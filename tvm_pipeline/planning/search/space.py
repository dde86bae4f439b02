"""The space of pipelines that a search considers: its cuts, its devices, the units that may run a stage, its states.

A state is the set of devices used so far and the unit that runs the last stage. If the number of stages is prescribed,
the number of stages so far belongs to it, too, and so does how often each device served if that is counted. Of equal
devices the first free one is always taken, so that six Edge TPUs make six sets of used devices and not 64.

Next: `pipelines.py`, which searches among these states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import busy_factor, cost_of
from tvm_pipeline.planning.search.cost_tables import StageCosts, capacities
from tvm_pipeline.planning.search.cuts import Cuts, Floats, Integers

# More devices than these have too many sets of replicas for any search.
MOST_REPLICATED = 12
# Values and choices of all states at all cuts must fit the memory of a small board.
MOST_CELLS = 60_000_000
# The search must take a few minutes at most: this many stages suffice for 11 unequal devices, or replicas of 7.
MOST_STAGES = 60_000

# A unit runs a stage: one device or several replicas, by their indices.
Units = list[tuple[int, ...]]


class TooManyError(Exception):
    """Say that the states of a search would not fit into memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """Pipelines of `units` between `cuts`.

    Attributes:
        devices: the devices that may be used; all of them can work at the same time.
        once: indices of the devices that serve at most one stage; another device may serve several stages, but not
            consecutive ones.
        stages: the exact number of stages; None for any.
        working: the exact number of devices that are used; None for any.
        slowdown: how many times slower each device is while `working` devices work; empty for 1.
        together: whether all readers of an operator must be in one stage.
        counted: whether `most_stages` of the devices limits how often they serve. That takes states for every count, so
            the searches leave it out until they find a pipeline that exceeds it.
    """

    cuts: Cuts
    devices: tuple[Device, ...]
    units: Units
    once: frozenset[int]
    stages: int | None = None
    working: int | None = None
    slowdown: tuple[float, ...] = ()
    together: bool = False
    counted: bool = False

    @property
    def param_bytes(self) -> Floats:
        """Return the parameter bytes of each cut."""
        return self.cuts.param_bytes.astype(np.float64)

    @property
    def ordered(self) -> Integers:
        """Return the number of ordered operators in each cut; a stage that holds one has no replicas."""
        ordered = [operator.ordered for operator in self.cuts.graph.operators]
        if not any(ordered):
            return np.zeros(len(self.cuts), np.int64)
        counts: Integers = self.cuts.sums(ordered).astype(np.int64)
        return counts

    @property
    def capacity(self) -> Floats:
        """Return the parameter bytes that fit each device; infinite where there is no limit."""
        return capacities(self.devices)

    @property
    def most_devices(self) -> int:
        """Return the largest number of devices that a pipeline of the space uses."""
        single = all(len(unit) == 1 for unit in self.units)
        limits = (self.working, self.stages if single else None, len(self.devices))
        return min(limit for limit in limits if limit is not None)


def single_units(devices: Sequence[Device]) -> Units:
    """Return every device as a unit of its own."""
    return [(index,) for index in range(len(devices))]


def replica_units(devices: Sequence[Device]) -> Units:
    """Return every set of devices as a unit of replicas; raise TooManyError for more than MOST_REPLICATED devices."""
    if len(devices) > MOST_REPLICATED:
        raise TooManyError
    return [unit for size in range(1, len(devices) + 1) for unit in combinations(range(len(devices)), size)]


def serving_once(problem: Problem, devices: Sequence[Device], apart: bool) -> frozenset[int]:
    """Return the indices of the devices that serve one stage at most: all that are to stand `apart`, or that must."""
    return frozenset(index for index, device in enumerate(devices) if apart or cost_of(problem, device).serves_once)


def is_steady(problem: Problem, devices: Sequence[Device]) -> bool:
    """Return whether no device is slower while the others work."""
    return all(busy_factor(problem, d, 1) == busy_factor(problem, d, len(devices)) for d in devices)


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
    stated = [device.most_stages or math.inf for device in space.devices] if space.counted else []
    # No device serves two stages in a row, so half of them are no limit.
    limits = [limit if 2 * limit < most else math.inf for limit in stated]
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
