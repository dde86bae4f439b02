"""The space of pipelines that a search considers: its cuts, its devices, and the units that may run a stage.

Next: `states.py`, which lists the states of a space.
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
from tvm_pipeline.planning.search.cost_tables import capacities
from tvm_pipeline.planning.search.cuts import Cuts, Floats, Integers

# More devices than these have too many sets of replicas for any search.
MOST_REPLICATED = 12

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


def stage_limits(devices: Sequence[Device], once: frozenset[int], most: int) -> list[float]:
    """Return how many of `most` stages each device serves; infinite where any number of them, never two in a row."""
    limits = [1 if d in once else device.most_stages or math.inf for d, device in enumerate(devices)]
    return [limit if 2 * limit < most else math.inf for limit in limits]


def is_steady(problem: Problem, devices: Sequence[Device]) -> bool:
    """Return whether no device is slower while the others work."""
    return all(busy_factor(problem, d, 1) == busy_factor(problem, d, len(devices)) for d in devices)
