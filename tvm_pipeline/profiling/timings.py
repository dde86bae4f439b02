"""Timed calls, each with what was observed beside it; which of them are to be believed; and how well a median is known.

Next: `estimates.py`, which makes a device's figures of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tvm_pipeline.core.statistics import left_out
from tvm_pipeline.profiling.disturbance import Watch, Window

Samples = npt.NDArray[np.float64]

LOOKS = 0.05  # the share of the time that may go into observing


class Timing(NamedTuple):
    """The seconds of one call, and the window in which it was timed, which short calls share."""

    seconds: float
    window: Window

    @property
    def own_s(self) -> float:
        """The seconds without those that others took."""
        return self.seconds * (1 - self.window.taken)


class Rows(NamedTuple):
    """The seconds of several passes over many operators (passes x operators), which were timed in one window."""

    seconds: Samples
    window: Window


def time_in_windows(watch: Watch, call: Callable[[], object], repeats: int) -> list[Timing]:
    """Time calls, as many in each window as are needed for the observing to take LOOKS of the time."""
    timings: list[Timing] = []
    watch.begin()
    while len(timings) < repeats:
        seconds: list[float] = []
        begin = time.perf_counter()
        until_s = begin + watch.look_s / LOOKS
        while len(timings) + len(seconds) < repeats and (not seconds or begin < until_s):
            call()
            end = time.perf_counter()
            seconds.append(end - begin)
            begin = end
        window = watch.end()
        timings += [Timing(each, window) for each in seconds]
    return timings


def best_reference_s(windows: Iterable[Window]) -> float:
    """Return the seconds of the reference kernel on a core that nothing disturbs: the fewest of all windows."""
    return min((window.reference_s for window in windows), default=0.0)


def undisturbed(timings: Iterable[Timing], best_s: float) -> list[Timing]:
    """Return those that nothing disturbed."""
    return [timing for timing in timings if not timing.window.is_disturbed(best_s)]


@dataclass(frozen=True)
class TrustedTimings:
    """The timings of one thing that are believed, out of all that were taken.

    Attributes:
        timings: all that were taken.
        best_s: seconds of the reference kernel on an undisturbed core.
        least: how many undisturbed ones are enough.
    """

    timings: Sequence[Timing]
    best_s: float
    least: int

    @cached_property
    def undisturbed(self) -> int:
        """How many are undisturbed."""
        return len(undisturbed(self.timings, self.best_s))

    @property
    def is_doubtful(self) -> bool:
        """Whether the undisturbed ones are too few."""
        return self.undisturbed < self.least

    @cached_property
    def seconds(self) -> Samples:
        """The undisturbed seconds. If they are too few, the least disturbed join them, without what others took."""
        if self.is_doubtful:
            return np.array([timing.own_s for timing in self._least_disturbed])
        return np.array([timing.seconds for timing in undisturbed(self.timings, self.best_s)])

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    @property
    def uncertainty(self) -> float:
        """The relative half-width of the median's confidence interval.

        Where disturbed timings are among the believed, the share that they lost is added: they may be so far off.
        """
        doubt = (
            np.median([timing.window.lost(self.best_s) for timing in self._least_disturbed])
            if self.is_doubtful
            else 0.0
        )
        return float(relative_half_width(self.seconds) + doubt)

    @property
    def _least_disturbed(self) -> list[Timing]:
        return sorted(self.timings, key=lambda timing: timing.window.lost(self.best_s))[: self.least]


def median_interval(samples: Samples) -> tuple[Samples, Samples]:
    """Return the 95 % confidence interval of the median of each column, for any distribution; rows are samples.

    It is that of `core.statistics.median_interval`, column by column.
    """
    ordered, beyond = np.sort(samples, axis=0), left_out(len(samples))
    return ordered[beyond], ordered[-1 - beyond]


def relative_half_width(samples: Samples) -> Samples:
    """Return half the width of the median's confidence interval over the median, of each column."""
    low, high = median_interval(samples)
    return np.asarray((high - low) / 2 / np.median(samples, axis=0))
