"""The contract of sensors: each tells how many joules have been drawn since some moment of its own.

Counters of energy (RAPL, newer NVML) tell that themselves. Sensors of power (INA3221, INA226, a USB meter) tell watts,
which `PowerSensor` sums up. A file of a meter's log has many readings at once. Next: meter.py, which reads them.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple

from tvm_pipeline.errors import PowerError

# What a sensor counts: all that the machine draws; a processor with or without its memory, disjoint from other such
# units, so that they may be summed; or a part of these.
Scope = Literal["board", "unit", "part"]


class Reading(NamedTuple):
    """What had been drawn at a moment.

    Attributes:
        time_s: the moment, of the clock `time.perf_counter`.
        energy_j: drawn since a moment of the sensor's own; never less than in a reading before.
    """

    time_s: float
    energy_j: float


class Sensor(ABC):
    """One sensor of power or energy.

    Attributes:
        name: what people call it, with where it stands; it is shown beside every figure.
        covers: what draws the joules that it counts, in words: "the board", "CPU package 0", "GPU 0".
        period_s: seconds between two values of its own; to read it more often tells nothing new.
        scope: whether that is the whole board, a unit that may be summed with others, or a part of these.
    """

    name: str
    covers: str
    period_s: float
    scope: Scope = "part"

    @abstractmethod
    def read(self) -> Sequence[Reading]:
        """Return what is new since the last call, in order of time; most sensors have one reading.

        Raises:
            PowerError: the sensor cannot be read any more; the message names it and the reason.
        """

    def close(self) -> None:  # noqa: B027 - most sensors hold nothing
        """Release what the sensor holds."""


class EnergyCounter(Sensor):
    """A counter of energy, which may begin anew at its end.

    Attributes:
        range_j: joules at which the counter begins anew at 0; infinite where it never does.

    Raises:
        PowerError: `read` found less than before in a counter that never begins anew; its driver was started again.
    """

    range_j: float

    def __init__(self) -> None:
        self._last_j: float | None = None
        self._total_j = 0.0

    @abstractmethod
    def counter_j(self) -> float:
        """Return the counter, in joules."""

    def read(self) -> Sequence[Reading]:
        """Return one reading; raise what `counter_j` raises, or PowerError where it went back."""
        now_j = self.counter_j()
        time_s = time.perf_counter()
        if self._last_j is not None:
            step_j = now_j - self._last_j
            if step_j < 0 and math.isinf(self.range_j):
                raise PowerError(f"{self.name}: its counter went back from {self._last_j} J to {now_j} J")
            self._total_j += step_j if step_j >= 0 else step_j + self.range_j
        self._last_j = now_j
        return [Reading(time_s, self._total_j)]


class PowerSensor(Sensor):
    """A sensor of power. Between two readings the power is taken to change in a straight line."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None  # moment and watts
        self._total_j = 0.0

    @abstractmethod
    def watts(self) -> float:
        """Return the power that is drawn now."""

    def read(self) -> Sequence[Reading]:
        """Return one reading; raise what `watts` raises."""
        watts = self.watts()
        return [self._summed(time.perf_counter(), watts)]

    def _summed(self, time_s: float, watts: float) -> Reading:
        if self._last is not None:
            before_s, before_w = self._last
            self._total_j += (time_s - before_s) * (before_w + watts) / 2
        self._last = time_s, watts
        return Reading(time_s, self._total_j)


class Sum(Sensor):
    """Several sensors as one, which cover different things.

    They are read one after the other, within milliseconds; the moment of a reading is the mean of theirs.

    Args:
        parts: sensors that have one reading whenever they are read.
    """

    def __init__(self, name: str, covers: str, parts: Sequence[Sensor], scope: Scope = "part") -> None:
        self.name, self.covers, self.parts, self.scope = name, covers, parts, scope
        self.period_s = max(part.period_s for part in parts)

    def read(self) -> Sequence[Reading]:
        """Return one reading; raise what a part raises."""
        readings = [part.read()[-1] for part in self.parts]
        time_s = math.fsum(reading.time_s for reading in readings) / len(readings)
        return [Reading(time_s, math.fsum(reading.energy_j for reading in readings))]

    def close(self) -> None:
        """Release what the parts hold."""
        for part in self.parts:
            part.close()


class Survey(NamedTuple):
    """The sensors of a machine, or those of one kind.

    Attributes:
        sensors: those that can be read now.
        obstacles: by name, why others cannot be read, and what would help.
        looked_for: the kinds of sensors that were looked for, in words.
    """

    sensors: list[Sensor]
    obstacles: dict[str, str]
    looked_for: tuple[str, ...] = ()
