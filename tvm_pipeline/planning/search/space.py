"""Where pipelines are looked for: which cuts, which devices, and what may run a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from tvm_pipeline.core.platform import Device
from tvm_pipeline.planning.search.cost_tables import capacities
from tvm_pipeline.planning.search.cuts import Cuts, Floats

# What runs a stage: devices by their index, one or several replicas.
Units = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """Pipelines of `units` between `cuts`.

    Attributes:
        devices: those that may be used; all of them can work at the same time.
        once: devices that serve at most one stage; the others may come again, though not in consecutive stages.
        stages: exactly so many, or None.
        working: exactly so many devices are used, or None.
        slowdown: how many times slower each device is while that many work; empty for 1.
        together: whether only cuts count that leave all readers of an operator in one stage.
    """

    cuts: Cuts
    devices: tuple[Device, ...]
    units: Units
    once: frozenset[int]
    stages: int | None = None
    working: int | None = None
    slowdown: tuple[float, ...] = ()
    together: bool = False

    @property
    def param_bytes(self) -> Floats:
        """Parameter bytes of each cut."""
        return self.cuts.param_bytes.astype(np.float64)

    @property
    def capacity(self) -> Floats:
        """Parameter bytes that fit each device, or infinity."""
        return capacities(self.devices)

    @property
    def most_devices(self) -> int:
        """No pipeline of the space uses more."""
        single = all(len(unit) == 1 for unit in self.units)
        limits = (self.working, self.stages if single else None, len(self.devices))
        return min(limit for limit in limits if limit is not None)


def single_units(devices: Sequence[Device]) -> Units:
    """Every device alone."""
    return [(index,) for index in range(len(devices))]


def replica_units(devices: Sequence[Device]) -> Units:
    """Every set of devices."""
    return [unit for size in range(1, len(devices) + 1) for unit in combinations(range(len(devices)), size)]
