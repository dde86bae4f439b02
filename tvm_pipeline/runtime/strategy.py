"""What every strategy of adaptation knows: how slow each device is now, against its profile.

A running stage says how long it takes; over what the judge predicts of it, that is its device's slow-down. A device
that no stage uses says nothing, but what others do on its cores can be read from the kernel; where it has none, what
was last known of it is slowly forgotten. Both are said of the last half second, or of the last three frames where that
is longer, by medians: a hiccup that is shorter than half of it changes nothing.

Next: `adaptation.py` and `hill_climb.py`, the strategies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tvm_pipeline.core.plan import Plan, Problem
from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.statistics import StageRecord
from tvm_pipeline.cost.device_costs import slowed
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.runtime.replanning import unlimited

TICK_S = 0.1  # between two looks at the devices
WINDOW_S = 0.5
# The first frames of a plan meet cold caches.
COLD_FRAMES = 4
LEAST_SAMPLES = 3
# A median of more says nothing more.
MOST_SAMPLES = 100
# At each look, of the slow-down of an idle device that the kernel does not know: half of it is forgotten in 30 s.
KEPT = 0.5 ** (TICK_S / 30)
# A pipeline with fewer frames inside, on average, waits for its source.
STARVED = 0.8


@dataclass(frozen=True, slots=True)
class Seen:
    """One worker in its last frames: median seconds of each part, and the share of time it was busy."""

    compute_s: float
    transfer_s: float
    busy: float

    @property
    def seconds(self) -> float:
        return self.compute_s + self.transfer_s


class Strategy(ABC):
    """Watches the stages of the plan that runs, and may propose another.

    Attributes:
        factors: how many times slower each device is than its profile.
        seen: what is known of each worker of the running plan, in its order; None of one too new to say.
    """

    def __init__(self) -> None:
        self.factors: dict[str, float] = {}
        self.seen: list[Seen | None] = []
        self._expected_s: list[tuple[str, float]] = []
        self._cores = CoreLoad()

    def begin(self, problem: Problem, plan: Plan) -> None:
        """Told of the plan that runs from now on; `problem` has the devices as they were profiled."""
        costs = evaluate(unlimited(problem), plan.stages).costs
        self._expected_s = [(cost.device, cost.compute_s) for cost in costs]
        self.seen = [None] * len(costs)

    @abstractmethod
    def look(self, records: Sequence[StageRecord], problem: Problem) -> tuple[Plan, str] | None:
        """Another plan to run and why, where there is reason to change; called every `TICK_S`.

        Args:
            records: of the running plan's stages, in its order.
            problem: with the devices that may serve, as they were profiled.
        """

    @property
    def starved(self) -> bool:
        """Whether the source gives fewer frames than the pipeline takes.

        Busy shares add up to the mean number of frames inside (Little's law); below one it is empty at times.
        Its stages then run on clocks and caches that went to sleep between frames, and no faster plan would help.
        """
        return sum(1.0 if worker is None else worker.busy for worker in self.seen) < STARVED

    def scaled(self, problem: Problem) -> Problem:
        """The problem with each device as slow as it was found to be."""
        return slowed(problem, self.factors)

    def _observe(self, records: Sequence[StageRecord], devices: Sequence[Device]) -> None:
        """Updates the slow-downs by the latest frames."""
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
            # Cores of our own stages look busy whoever else is there; those stages say how slow they are.
            alike = [self.factors.get(d.name, 1.0) for d in devices if d.name in working and d.overlaps(device)]
            # Who shares a core with one other gets what that leaves, and at least half.
            foreign = [1 / (1 - min(busy[c], 0.5)) for c in device.cores if c in busy and c not in used]
            if alike or foreign:
                self.factors[device.name] = max(1.0, *alike, *foreign)
            elif device.name in self.factors:
                self.factors[device.name] = 1 + (self.factors[device.name] - 1) * KEPT


def _seen(record: StageRecord) -> Seen | None:
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
    return Seen(median(s.compute_s for s in some), median(s.transfer_s for s in some), busy)


class CoreLoad:
    """How busy each core was in the last `WINDOW_S`, 0 to 1, as Linux counts it; nothing elsewhere."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._readings: deque[dict[int, tuple[int, int]]] = deque(maxlen=1 + round(WINDOW_S / TICK_S))

    def busy(self) -> dict[int, float]:
        """Called every `TICK_S`."""
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
