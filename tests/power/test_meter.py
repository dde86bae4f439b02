"""The meter: joules between two moments, by counters that begin anew, by power that changes, and when sensors fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest

from tvm_pipeline.errors import PowerError
from tvm_pipeline.power import EnergyCounter, Meter, PowerSensor, Reading, Sensor


class Counter(EnergyCounter):
    """A counter that steps by a joule at each read and begins anew at 4 J."""

    name, covers, period_s, range_j = "counter", "the test", 0.002, 4.0

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def counter_j(self) -> float:
        self.reads += 1
        return float(self.reads % 4)


class Lamp(PowerSensor):
    """A lamp of 10 W that stops to answer at some read."""

    name, covers, period_s = "lamp", "the test", 0.002

    def __init__(self, answers: int = 10**9) -> None:
        super().__init__()
        self._answers = answers

    def watts(self) -> float:
        self._answers -= 1
        if self._answers < 0:
            raise PowerError("lamp: unplugged")
        return 10.0


class Listed(Sensor):
    """A log of which all is known at once."""

    name, covers, period_s = "log", "the test", 0.01

    def __init__(self, rows: Sequence[tuple[float, float]]) -> None:
        self._rows = [Reading(*row) for row in rows]

    def read(self) -> Sequence[Reading]:
        rows, self._rows = self._rows, []
        return rows


def test_a_counter_that_begins_anew_goes_on() -> None:
    counter = Counter()
    found = [counter.read()[0] for _ in range(11)]
    assert [reading.energy_j for reading in found] == list(range(11))
    assert all(before.time_s < after.time_s for before, after in pairwise(found))


def test_power_is_summed_up() -> None:
    with Meter(Lamp()) as meter:
        begin_s = time.perf_counter()
        threading.Event().wait(0.05)
        end_s = time.perf_counter()
        energy = meter.energy(begin_s, end_s)
    assert energy is not None
    assert energy.energy_j == pytest.approx(10 * (end_s - begin_s))
    assert energy.watts == pytest.approx(10)
    assert energy.readings > 0
    assert 0 < energy.uncertainty_j < energy.energy_j
    assert meter.since_start is not None
    assert meter.since_start.energy_j > energy.energy_j


def test_a_moment_between_readings_gets_its_part() -> None:
    with Meter(Listed([(0, 0), (1, 4), (3, 5), (4, 15)])) as meter:
        energy = meter.energy(0.5, 3.0)
        assert energy == (3.0, 4.0, 2.5, 2)  # half of the first four joules; the edge may be off by all four
        assert meter.energy(1, 4) == (11.0, 0.0, 3.0, 3)
        assert meter.energy(3, 3) is None
        assert meter.energy(-1, 3) is None
        assert meter.energy(1, 4.5, patience_s=0.02) is None
        assert meter.since_start == (15.0, 0.0, 4.0, 4)


def test_a_sensor_that_fails_is_named() -> None:
    with Meter(Lamp(answers=3)) as meter:
        begin_s = time.perf_counter()
        with pytest.raises(PowerError, match="lamp: unplugged"):
            meter.energy(begin_s, begin_s + 1)
    with pytest.raises(PowerError, match="unplugged"), Meter(Lamp(answers=0)):
        pass
