"""The base of every strategy of adaptation: it measures how slow each device is now, relative to its profile.

The slow-down of a device that runs a stage is the stage's measured time over its predicted time. A device that runs no
stage is not measured, but the kernel tells how busy its cores are. If it has no cores, its last known slow-down is
slowly forgotten. Figures are medians over the last half second, or over the last three frames if these took longer, so
a disturbance of less than half of that changes nothing.

Read next: `adaptation.py`, a strategy and the table of all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tvm_pipeline.core.plan import Measured, Plan, Stage
from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.statistics import StageRecord, median_interval
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.cost.scaling import slowed
from tvm_pipeline.runtime.replanning import unlimited

TICK_S = 0.1  # between two looks at the devices
WINDOW_S = 0.5
# The first frames of a plan are left out: their caches are cold.
COLD_FRAMES = 4
LEAST_SAMPLES = 3
# A median over more samples is no more accurate.
MOST_SAMPLES = 100
# The share that is kept at each look of the slow-down of an idle device without cores: half of it is lost in 30 s.
KEPT = 0.5 ** (TICK_S / 30)
# A pipeline with fewer frames inside on average is waiting for its source.
STARVED = 0.8


@dataclass(frozen=True, slots=True)
class RecentFrames:
    """The latest frames of one worker.

    Attributes:
        compute_s: median.
        transfer_s: median.
        busy: the share of time in which it worked.
        uncertainty: relative half-width of the 95 % confidence interval of the median seconds of a frame.
    """

    compute_s: float
    transfer_s: float
    busy: float
    uncertainty: float

    @property
    def seconds(self) -> float:
        return self.compute_s + self.transfer_s


class Strategy(ABC):
    """Watches the stages of the plan that runs, and may propose another.

    Attributes:
        factors: how many times slower each device is than its profile.
        seen: the latest figures of each worker of the running plan, in its order; None for one that is too new.
    """

    def __init__(self) -> None:
        self.factors: dict[str, float] = {}
        self.seen: list[RecentFrames | None] = []
        self._expected_s: list[tuple[str, float]] = []
        self._off: dict[tuple[Stage, ...], float] = {}
        self._cores = CoreLoad()

    def expect(self, measured: Sequence[Measured]) -> None:
        """Take note of plans that ran side by side before the run: how far each one's prediction is off."""
        self._off = {
            found.plan.stages: found.throughput_fps / found.plan.predicted.throughput_fps
            for found in measured
            if found.plan.predicted.throughput_fps
        }

    def corrected(self, gain: float, plan: Plan | None, running: Plan) -> float:
        """Return the predicted gain of a plan over the running one, corrected by what was measured of the two.

        The prediction of a plan that was not measured is taken to be off as those of the others are in the median.
        Without a plan, the result is the greatest that any plan with this predicted gain can have.
        """
        if not self._off or not math.isfinite(gain):
            return gain
        usual = median(self._off.values())
        off = self._off.get(plan.stages, usual) if plan else max(self._off.values())
        return (1 + gain) * off / max(self._off.get(running.stages, usual), 1e-12) - 1

    def begin(self, problem: Problem, plan: Plan) -> None:
        """Take note of the plan that runs from now on; `problem` has the devices as they were profiled."""
        costs = evaluate(unlimited(problem), plan.stages).costs
        self._expected_s = [(cost.device, cost.compute_s) for cost in costs]
        self.seen = [None] * len(costs)

    @abstractmethod
    def look(self, records: Sequence[StageRecord], problem: Problem) -> tuple[Plan, str] | None:
        """Return another plan to run and the reason, or None to keep the plan.

        It is called every `TICK_S`, less often where it takes long.

        Args:
            records: of the running plan's stages, in its order.
            problem: with the devices that may serve, as they were profiled.
        """

    @property
    def starved(self) -> bool:
        """Return whether the source gives fewer frames than the pipeline can take.

        Busy shares add up to the mean number of frames inside (Little's law); below one the pipeline is empty at times.
        Its stages are then slow because clocks fall and caches cool between frames, and no faster plan would help.
        """
        return sum(1.0 if worker is None else worker.busy for worker in self.seen) < STARVED

    @property
    def noise(self) -> float:
        """Return how far, relatively, the measured seconds of a stage may be from the true ones: those least certain.

        A gain of less may be none.
        """
        return max((worker.uncertainty for worker in self.seen if worker is not None), default=0.0)

    def scaled(self, problem: Problem) -> Problem:
        """Return the problem with each device as slow as it was measured."""
        return slowed(problem, self.factors)

    def observe(self, records: Sequence[StageRecord], devices: Sequence[Device]) -> None:
        """Update `factors` and `seen` by the latest frames; `look` begins with it."""
        self.seen = [_seen(record) for record in records]
        took_s: dict[str, float] = defaultdict(float)
        should_s: dict[str, float] = defaultdict(float)
        for worker, (name, expected_s) in zip(self.seen, self._expected_s, strict=True):
            if worker is not None:
                took_s[name] += worker.compute_s
                should_s[name] += expected_s
        for name, seconds in took_s.items():
            self.factors[name] = max(seconds, 1e-12) / max(should_s[name], 1e-12)
        working = {name for name, _ in self._expected_s}
        used = {core for device in devices if device.name in working for core in device.cores}
        busy = self._cores.busy()
        for device in devices:
            if device.name in working:
                continue
            # The cores of our own stages are busy by these stages, which are measured themselves.
            alike = [self.factors.get(d.name, 1.0) for d in devices if d.name in working and d.overlaps(device)]
            # A stage that shares a core with another process gets the time that this leaves, and at least half.
            foreign = [1 / (1 - min(busy[c], 0.5)) for c in device.cores if c in busy and c not in used]
            if alike or foreign:
                self.factors[device.name] = max(1.0, *alike, *foreign)
            elif device.name in self.factors:
                self.factors[device.name] = 1 + (self.factors[device.name] - 1) * KEPT


def _seen(record: StageRecord) -> RecentFrames | None:
    samples = list(record.samples)
    forgotten = record.frames - len(samples)
    warm = samples[max(0, COLD_FRAMES - forgotten) :]
    if len(warm) < LEAST_SAMPLES:
        return None
    since_s = warm[-1].done_s - WINDOW_S
    first = bisect_left(warm, since_s, key=lambda sample: sample.done_s)
    latest = warm[min(first, len(warm) - LEAST_SAMPLES) :]
    waited_s = sum(sample.wait_s for sample in latest)
    worked_s = sum(sample.transfer_s + sample.compute_s for sample in latest)
    some = latest[:: 1 + len(latest) // MOST_SAMPLES]
    busy = worked_s / max(waited_s + worked_s, 1e-12)
    low_s, high_s = median_interval([s.compute_s + s.transfer_s for s in some])
    compute_s, transfer_s = median(s.compute_s for s in some), median(s.transfer_s for s in some)
    return RecentFrames(compute_s, transfer_s, busy, (high_s - low_s) / 2 / max(compute_s + transfer_s, 1e-12))


class CoreLoad:
    """How busy each core was in the last `WINDOW_S`, 0 to 1, as Linux counts it; empty on other systems."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._readings: deque[dict[int, tuple[int, int]]] = deque(maxlen=1 + round(WINDOW_S / TICK_S))

    def busy(self) -> dict[int, float]:
        """Return the busy share of each core; call it every `TICK_S`."""
        try:
            lines = self._stat.read_text().splitlines()
        except OSError:
            return {}
        ticks: dict[int, tuple[int, int]] = {}
        for line in lines:
            name, *figures = line.split() or [""]
            if name.startswith("cpu") and name[3:].isdigit():
                counts = [int(figure) for figure in figures[:8]]
                ticks[int(name[3:])] = sum(counts), counts[3] + counts[4]
        self._readings.append(ticks)
        shares = {}
        for core, (whole, idle) in ticks.items():
            whole_before, idle_before = self._readings[0].get(core, (whole, idle))
            if whole > whole_before:
                shares[core] = 1 - (idle - idle_before) / (whole - whole_before)
        return shares
