"""The figures that a run measures. Their names are those of a plan's prediction, so that the two can be compared.

Only the steady state counts: the first frames, which fill the pipeline, and the frames that are still inside when the
last one was submitted are left out. Samples are kept in windows of bounded length, so a run may last for weeks.

A `Sample` is one frame in one stage as a worker records it; a `Bar` is the same frame on a time axis, for charts and
traces. Both are used for real runs and for simulated ones. Read next: `runtime/worker.py`, which records the samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from math import comb
from typing import NamedTuple, TypeVar

import numpy as np

WINDOW = 4096  # samples kept

SampleT = TypeVar("SampleT")


class Sample(NamedTuple):
    """One frame in one stage on one device, as its worker records it.

    Attributes:
        wait_s: seconds that the worker waited for the frame.
        transfer_s: seconds of receiving the frame's tensors and of sending its results.
        compute_s: seconds of computing.
        frame: index of the frame.
        done_s: clock time at which the worker was done with it.
    """

    wait_s: float
    transfer_s: float
    compute_s: float
    frame: int
    done_s: float


NO_SAMPLE = Sample(0.0, 0.0, 0.0, -1, 0.0)


@dataclass(frozen=True, slots=True)
class Bar:
    """One frame in one stage on one device, on a time axis: the device receives its tensors, then computes."""

    stage: int
    device: str
    frame: int
    start_s: float
    transfer_s: float
    compute_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.transfer_s + self.compute_s


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """One stage on one device: the median seconds of each part of a frame, and the share of time it was idle."""

    stage: int
    device: str
    frames: int
    compute_s: float
    transfer_s: float
    wait_s: float
    bubble_share: float


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """Throughput and end-to-end latency in steady state; a figure is None if too few frames came out."""

    frames: int
    throughput_fps: float | None
    latency_p50_s: float | None
    latency_p90_s: float | None
    latency_p99_s: float | None
    latency_max_s: float | None
    stages: tuple[StageStatistics, ...]


@dataclass(slots=True)
class StageRecord:
    """The record of one worker: how many frames it has done, and a sample of each of the latest."""

    stage: int
    device: str
    frames: int = 0
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, wait_s: float, transfer_s: float, compute_s: float, frame: int, done_s: float) -> None:
        self.frames += 1
        # One append: other threads read whole samples.
        self.samples.append(Sample(wait_s, transfer_s, compute_s, frame, done_s))

    def times_s(self, skip: int) -> tuple[float, ...]:
        """Return the seconds of each frame without waits, in order, without the first `skip` frames."""
        samples = _filled(self.samples, self.frames, skip, least=1)
        return tuple(round(sample.transfer_s + sample.compute_s, 7) for sample in samples)

    def summary(self, skip: int) -> StageStatistics:
        """Return the statistics without the first `skip` frames."""
        samples = _filled(self.samples, self.frames, skip, least=1) or [NO_SAMPLE]
        figures = np.fromiter(chain.from_iterable(samples), float)  # thrice as fast as np.array of tuples
        wait, transfer, compute, _, _ = figures.reshape(-1, 5).T
        whole = float(wait.sum() + transfer.sum() + compute.sum())
        return StageStatistics(
            self.stage,
            self.device,
            self.frames,
            float(np.median(compute)),
            float(np.median(transfer)),
            float(np.median(wait)),
            float(wait.sum()) / whole if whole else 0.0,
        )


@dataclass(slots=True)
class RunRecord:
    """The record of a pipeline: when each frame entered and when it was done."""

    frames: int = 0
    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, entered_s: float, done_s: float) -> None:
        self.frames += 1
        self.samples.append((entered_s, done_s))

    def summary(self, skip: int, last_entry_s: float, stages: tuple[StageStatistics, ...]) -> RunStatistics:
        """Return the statistics without the first `skip` frames and those that came out after the last one entered."""
        samples = _filled(self.samples, self.frames, skip, least=2)
        if not samples:
            return RunStatistics(self.frames, None, None, None, None, None, stages)
        times = np.fromiter(chain.from_iterable(samples), float).reshape(-1, 2)
        before_drain = times[times[:, 1] <= last_entry_s]
        entered, done = (before_drain if len(before_drain) >= 2 else times).T
        span = float(done.max() - done.min())
        # Frames of one call come out together: those of the first call began the span.
        fps = float((done > done.min()).sum()) / span if span > 0 else None
        p50, p90, p99, longest = (float(q) for q in np.quantile(done - entered, [0.5, 0.9, 0.99, 1.0]))
        return RunStatistics(self.frames, fps, p50, p90, p99, longest, stages)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median: two of the values, whatever their distribution.

    Of fewer than six values these are the least and the greatest, which is less certain: 75 % for three values.

    >>> median_interval([3.0, 1.0, 2.0])
    (1.0, 3.0)
    >>> median_interval(range(100))
    (39, 60)
    """
    ordered, beyond = sorted(values), left_out(len(values))
    return ordered[beyond], ordered[-1 - beyond]


@cache
def left_out(count: int) -> int:
    """Return how many values the interval of the median leaves out at either end: a quantile of coin tosses."""
    tail, beyond = 1, 0
    while 40 * (tail := tail + comb(count, beyond + 1)) <= 2**count:  # integers, because 2**count may be too large
        beyond += 1
    return beyond


def _filled(samples: deque[SampleT], frames: int, skip: int, least: int) -> list[SampleT]:
    """Return the samples without those of the first `skip` frames, but at least `least` of them."""
    kept = list(samples)
    forgotten = frames - len(kept)  # the window loses the oldest samples
    return kept[max(0, min(skip - forgotten, len(kept) - least)) :]
