"""What a run measured. The names are those of a plan's prediction, so that the two stand side by side.

Only the steady state counts: the first frames, which fill the pipeline, and those that are still inside when
the last was submitted are left out. Samples are kept in windows of bounded length, so a run may take weeks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import numpy as np

WINDOW = 4096  # samples kept

Sample = TypeVar("Sample")


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """One stage on one device, a frame: median seconds of each part, and the share of time it stood idle."""

    stage: int
    device: str
    frames: int
    compute_s: float
    transfer_s: float
    wait_s: float
    bubble_share: float


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """Throughput and end-to-end latency in steady state; None where too few frames came out to say."""

    frames: int
    throughput_fps: float | None
    latency_p50_s: float | None
    latency_p90_s: float | None
    latency_p99_s: float | None
    latency_max_s: float | None
    stages: tuple[StageStatistics, ...]


@dataclass(slots=True)
class StageRecord:
    """What one worker writes down, frame by frame.

    Attributes:
        samples: seconds of waiting, of receiving and sending, and of computing; then which frame, and when it was done.
    """

    stage: int
    device: str
    frames: int = 0
    samples: deque[tuple[float, float, float, int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, wait_s: float, transfer_s: float, compute_s: float, frame: int, done_s: float) -> None:
        self.frames += 1
        # One append: other threads read whole samples.
        self.samples.append((wait_s, transfer_s, compute_s, frame, done_s))

    def summary(self, skip: int) -> StageStatistics:
        samples = _filled(self.samples, self.frames, skip, least=1) or [(0.0, 0.0, 0.0, -1, 0.0)]
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
    """What the pipeline writes down: when each frame went in and came out."""

    frames: int = 0
    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, entered_s: float, done_s: float) -> None:
        self.frames += 1
        self.samples.append((entered_s, done_s))

    def summary(self, skip: int, last_entry_s: float, stages: tuple[StageStatistics, ...]) -> RunStatistics:
        """The steady state: without the first `skip` frames and what came out after the last one went in."""
        samples = _filled(self.samples, self.frames, skip, least=2)
        if not samples:
            return RunStatistics(self.frames, None, None, None, None, None, stages)
        times = np.fromiter(chain.from_iterable(samples), float).reshape(-1, 2)
        before_drain = times[times[:, 1] <= last_entry_s]
        entered, done = (before_drain if len(before_drain) >= 2 else times).T
        span = float(done.max() - done.min())
        fps = (len(done) - 1) / span if span > 0 else None
        p50, p90, p99, longest = (float(q) for q in np.quantile(done - entered, [0.5, 0.9, 0.99, 1.0]))
        return RunStatistics(self.frames, fps, p50, p90, p99, longest, stages)


def _filled(samples: deque[Sample], frames: int, skip: int, least: int) -> list[Sample]:
    """The samples without those of the first `skip` frames, as far as `least` remain."""
    kept = list(samples)
    forgotten = frames - len(kept)  # those that the window lost were the first
    return kept[max(0, min(skip - forgotten, len(kept) - least)) :]
