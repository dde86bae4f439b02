"""Samples a sensor in a thread of its own, and tells the joules between two moments.

Read before: sensor.py, what a sensor tells.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import deque
from types import TracebackType
from typing import NamedTuple

from tvm_pipeline.errors import PowerError
from tvm_pipeline.power.sensor import Reading, Sensor

KEPT = 100_000  # readings: more than a quarter of an hour at 100 a second
LONGEST_PERIOD_S = 1.0  # between two reads of a sensor that has new values more seldom
SHORTEST_PERIOD_S = 0.01  # to read a sensor more often would draw power of its own


class Energy(NamedTuple):
    """The joules between two moments.

    Attributes:
        energy_j: drawn between them.
        uncertainty_j: how far, at most, the edges may be off, where the moments lie between two readings.
        seconds: between the moments.
        readings: number of readings that lie between the moments.
    """

    energy_j: float
    uncertainty_j: float
    seconds: float
    readings: int

    @property
    def watts(self) -> float:
        """The mean power."""
        return self.energy_j / self.seconds


class Meter:
    """Samples a sensor for a `with` block, once in each of its periods, yet at most 100 times a second.

    Args:
        sensor: what is sampled; it is closed at the end.
        least_s: seconds between two reads, at least.

    Attributes:
        sensor: what is sampled.
        period_s: seconds between two values of the sensor that are read.
        failure: why sampling ended before the block, None while it goes on.
    """

    def __init__(self, sensor: Sensor, least_s: float = SHORTEST_PERIOD_S) -> None:
        self.sensor = sensor
        self.period_s = max(sensor.period_s, least_s)
        self.failure: PowerError | None = None
        self._readings: deque[Reading] = deque(maxlen=KEPT)
        self._first: Reading | None = None
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name=f"meter {sensor.name}", daemon=True)

    def __enter__(self) -> Meter:
        """Begin to sample; raise PowerError where the sensor cannot be read."""
        self._readings.extend(self.sensor.read())
        self._first = self._readings[0] if self._readings else None
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.sensor.close()

    def _sample(self) -> None:
        while not self._ended.wait(min(self.period_s, LONGEST_PERIOD_S)):
            try:
                found = self.sensor.read()
            except PowerError as error:
                self.failure = error
                found = ()
            with self._changed:
                self._readings.extend(found)
                self._first = self._first or next(iter(found), None)
                self._changed.notify_all()
            if self.failure:
                return

    @property
    def began_s(self) -> float | None:
        """The moment of the first reading; None before there is one."""
        return self._first.time_s if self._first else None

    @property
    def since_start(self) -> Energy | None:
        """What was drawn from the first reading to the last one, however long ago; None before there are two."""
        with self._changed:
            first, last = self._first, self._readings[-1] if self._readings else None
        if first is None or last is None or last.time_s <= first.time_s:
            return None
        return Energy(last.energy_j - first.energy_j, 0.0, last.time_s - first.time_s, len(self._readings))

    def energy(self, begin_s: float, end_s: float, patience_s: float = 5.0) -> Energy | None:
        """Return the joules between two moments of `time.perf_counter`; None where the readings do not span them.

        A moment between two readings gets its part of the joules between these, in proportion of time. What is off by
        that is at most what was drawn between the two.

        Args:
            patience_s: the longest wait for a reading after the end.

        Raises:
            PowerError: the sensor could not be read any more.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure or (self._readings and self._readings[-1].time_s >= end_s), patience_s
            )
            readings = _since(self._readings, begin_s)
        if self.failure:
            raise self.failure
        if not readings or readings[0].time_s > begin_s or readings[-1].time_s < end_s or end_s <= begin_s:
            return None
        times = [reading.time_s for reading in readings]
        begin_j, before_j = _at(readings, times, begin_s)
        end_j, after_j = _at(readings, times, end_s)
        inside = bisect_right(times, end_s) - bisect_left(times, begin_s)
        return Energy(end_j - begin_j, before_j + after_j, end_s - begin_s, inside)


def _since(readings: deque[Reading], begin_s: float) -> list[Reading]:
    """Return the last reading that is not after a moment, and all later ones; there may be weeks of others."""
    found: list[Reading] = []
    for reading in reversed(readings):
        found.append(reading)
        if reading.time_s <= begin_s:
            break
    return found[::-1]


def _at(readings: list[Reading], times: list[float], time_s: float) -> tuple[float, float]:
    """Return the joules at a moment, and those between the readings around it, where it lies between two."""
    index = bisect_left(times, time_s)
    after = readings[index]
    if after.time_s == time_s:
        return after.energy_j, 0.0
    before = readings[index - 1]
    step_j = after.energy_j - before.energy_j
    return before.energy_j + step_j * (time_s - before.time_s) / (after.time_s - before.time_s), step_j
