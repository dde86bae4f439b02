"""What a run measured. The names are those of a plan's prediction, so that the two stand side by side.

Only the steady state counts: the first frames, which fill the pipeline, and those that are still inside when
the last was submitted are left out. Samples are kept in windows of bounded length, so a run may take weeks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

WINDOW = 4096  # samples kept


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
    """What one worker writes down: seconds of waiting, receiving and sending, and computing, frame by frame."""

    stage: int
    device: str
    frames: int = 0
    wait: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    transfer: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    compute: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, wait_s: float, transfer_s: float, compute_s: float) -> None:
        self.frames += 1
        self.wait.append(wait_s)
        self.transfer.append(transfer_s)
        self.compute.append(compute_s)

    def clear(self) -> None:
        self.frames = 0
        for samples in (self.wait, self.transfer, self.compute):
            samples.clear()

    def summary(self, skip: int) -> StageStatistics:
        skip = min(skip, max(len(self.compute) - 1, 0))
        wait, transfer, compute = (
            np.array(list(islice(samples, skip, len(self.compute))) or [0.0])
            for samples in (self.wait, self.transfer, self.compute)
        )
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
    """What the pipeline writes down: when each frame came out, and how long it was inside."""

    frames: int = 0
    done: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    latency: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, entered_s: float, done_s: float) -> None:
        self.frames += 1
        self.done.append(done_s)
        self.latency.append(done_s - entered_s)

    def summary(self, skip: int, last_entry_s: float, stages: tuple[StageStatistics, ...]) -> RunStatistics:
        """The steady state: without the first `skip` frames and what came out after the last one went in."""
        done, latency = np.array(self.done), np.array(self.latency)
        steady = np.arange(len(done)) >= min(skip, max(len(done) - 2, 0))
        before_drain = steady & (done <= last_entry_s)
        if before_drain.sum() >= 2:
            steady = before_drain
        done, latency = np.sort(done[steady]), latency[steady]
        span = float(done[-1] - done[0]) if len(done) >= 2 else 0.0
        quantiles = np.quantile(latency, [0.5, 0.9, 0.99, 1.0]).tolist() if len(latency) else [None] * 4
        return RunStatistics(self.frames, (len(done) - 1) / span if span > 0 else None, *quantiles, stages)
