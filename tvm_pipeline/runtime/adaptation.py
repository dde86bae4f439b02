"""How slow each device is now, against its profile, and whether another plan is worth a change.

A running stage says how long it takes; over what the judge predicts of it, that is its device's slow-down. A device
that no stage uses says nothing, but what others do on its cores can be read from the kernel. The plan that is best for
devices so slowed runs next, if it is better by more than the hysteresis for several looks in a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from tvm_pipeline.errors import InfeasibleError, PlanError
from tvm_pipeline.evaluate import evaluate, judged
from tvm_pipeline.plan import Plan, Problem, Stage, lead, merit
from tvm_pipeline.platform import Device, DeviceModel
from tvm_pipeline.profile import DeviceProfile
from tvm_pipeline.scheduling.exact import chain
from tvm_pipeline.scheduling.whole import replicas, singles
from tvm_pipeline.statistics import StageRecord

# The first frames of a plan meet cold caches.
COLD_FRAMES = 4
LEAST_SAMPLES = 3
MOST_SAMPLES = 32
# How much of the past stays in a slow-down at each look.
MEMORY = 0.5
# A slow-down that moved by less is not planned for anew.
CHANGE = 0.03
# Predictions are not surer than this.
NEARLY = 0.05


def quick_plan(problem: Problem) -> Plan:
    """The best of one device, the model on every device, and a pipeline cut along the graph's own order: milliseconds.

    Of plans that are nearly as good the one with fewest stages: replicas take what load there is as it comes, a cut is
    right for one.

    Raises InfeasibleError where none of these is possible.
    """
    plans: list[Plan] = []
    reasons: list[str] = []
    makers: tuple[Callable[[], list[Plan]], ...] = (
        lambda: singles(problem),
        lambda: [replicas(problem)],
        lambda: [chain(problem)],
    )
    for make in makers:
        try:
            plans += make()
        except InfeasibleError as error:
            reasons.append(str(error))
    fitting = [plan for plan in plans if problem.stages in (None, len(plan.stages))]
    if not fitting:
        raise InfeasibleError(f"no plan is left: {'; '.join(dict.fromkeys(reasons))}")
    best = min(fitting, key=merit)
    near = [plan for plan in fitting if (lead(best, plan) or 0.0) <= NEARLY]
    return min(near, key=lambda plan: (len(plan.stages), merit(plan), len(plan.devices)))


class Adaptation:
    """Watches the stages of the plan that runs, and proposes another: the strategy `replan`.

    Args:
        hysteresis: a plan must be better by more than this share.
        patience: and at so many looks in a row.

    Attributes:
        factors: how many times slower each device is than its profile.
    """

    def __init__(self, hysteresis: float = 0.1, patience: int = 3) -> None:
        self.factors: dict[str, float] = {}
        self._hysteresis, self._patience = hysteresis, patience
        self._expected_s: list[tuple[str, float]] = []
        self._seen: list[int] = []
        self._plan: Plan | None = None
        self._planned_for: dict[str, float] = {}
        self._better = 0
        self._proposal: tuple[Stage, ...] | None = None
        self._cores = CoreLoad()

    def begin(self, problem: Problem, plan: Plan) -> None:
        """Told of the plan that runs from now on; `problem` has the devices as they were profiled."""
        costs = evaluate(replace(problem, min_throughput_fps=None, max_latency_s=None), plan.stages).costs
        self._expected_s = [(cost.device, cost.compute_s) for cost in costs]
        self._seen = [COLD_FRAMES] * len(costs)
        self._plan, self._proposal, self._better = plan, None, 0

    def look(self, records: Sequence[StageRecord], problem: Problem, changed: bool = False) -> tuple[Plan, str] | None:
        """A better plan and why, where there is one.

        Args:
            records: of the running plan's stages, in its order.
            problem: with the devices that may serve, as they were profiled.
            changed: plan anew even where no device became slower or faster.
        """
        self._observe(records, problem.platform.devices)
        plan = self._plan
        if plan is None:
            return None
        now = self.scaled(problem)
        moved = any(abs(f / self._planned_for.get(name, 1.0) - 1) > CHANGE for name, f in self.factors.items())
        if moved or changed or self._proposal is None:
            self._planned_for = dict(self.factors)
            self._proposal = quick_plan(now).stages
        gain = _gain(now, self._proposal, plan)
        self._better = self._better + 1 if gain > self._hysteresis else 0
        if self._better < self._patience:
            return None
        self._better = 0
        slowed = ", ".join(f"{name} x{factor:.2f}" for name, factor in sorted(self.factors.items()))
        better = replace(plan, scheduler="replan", stages=self._proposal, status="feasible", bound=None)
        return judged(now, better), f"{gain:+.0%} {plan.objective}, with {slowed}"

    def scaled(self, problem: Problem) -> Problem:
        """The problem with each device as slow as it was found to be."""
        profile, factors = problem.profile, self.factors
        measured = {name: _slower(device, factors.get(name, 1.0)) for name, device in profile.devices.items()}
        segments = tuple(replace(s, seconds=s.seconds * factors.get(s.device, 1.0)) for s in profile.segments)
        devices = tuple(
            replace(device, model=_slower_model(device.model, factors.get(device.name, 1.0)))
            for device in problem.platform.devices
        )
        return replace(
            problem,
            platform=replace(problem.platform, devices=devices),
            profile=replace(profile, devices=measured, segments=segments),
        )

    def _observe(self, records: Sequence[StageRecord], devices: Sequence[Device]) -> None:
        """Updates the slow-downs by the frames that came since the last look."""
        took_s: dict[str, float] = {}
        should_s: dict[str, float] = {}
        for place, (record, (name, expected_s)) in enumerate(zip(records, self._expected_s, strict=True)):
            new = record.frames - self._seen[place]
            if new < LEAST_SAMPLES:
                continue
            self._seen[place] = record.frames
            latest = list(record.samples)[-min(new, MOST_SAMPLES) :]
            took_s[name] = took_s.get(name, 0.0) + median(sample[2] for sample in latest)
            should_s[name] = should_s.get(name, 0.0) + expected_s
        working = {name for name, _ in self._expected_s}
        for name, seconds in took_s.items():
            self._learn(name, seconds / max(should_s[name], 1e-12))
        used = {core for device in devices if device.name in working for core in device.cores}
        busy = self._cores.busy()
        for device in devices:
            if device.name in working:
                continue
            # Cores of our own stages look busy whoever else is there; those stages say how slow they are.
            alike = [self.factors.get(d.name, 1.0) for d in devices if d.name in working and d.overlaps(device)]
            foreign = [1.0 + busy.get(core, 0.0) for core in device.cores if core not in used]
            if alike or foreign:
                self._learn(device.name, max(1.0, *alike, *foreign))

    def _learn(self, device: str, factor: float) -> None:
        known = self.factors.get(device)
        self.factors[device] = factor if known is None else MEMORY * known + (1 - MEMORY) * factor


class CoreLoad:
    """How busy each core was since the last look, 0 to 1, as Linux counts it; nothing elsewhere."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._before: dict[int, tuple[int, int]] = {}

    def busy(self) -> dict[int, float]:
        try:
            lines = self._stat.read_text().splitlines()
        except OSError:
            return {}
        shares = {}
        for line in lines:
            name, *figures = line.split()
            if not (name.startswith("cpu") and name[3:].isdigit()):
                continue
            ticks = [int(figure) for figure in figures[:8]]
            core, whole, idle = int(name[3:]), sum(ticks), ticks[3] + ticks[4]
            whole_before, idle_before = self._before.get(core, (whole, idle))
            self._before[core] = whole, idle
            passed = whole - whole_before
            if passed > 0:
                shares[core] = 1 - (idle - idle_before) / passed
        return shares


def _gain(problem: Problem, stages: tuple[Stage, ...], plan: Plan) -> float:
    """How much better the stages are than the plan; infinite where that is not possible any more."""
    if stages == plan.stages:
        return 0.0
    try:
        running = judged(problem, plan)
    except PlanError:
        return math.inf
    return lead(judged(problem, replace(plan, stages=stages)), running) or 0.0


def _slower(device: DeviceProfile, factor: float) -> DeviceProfile:
    return replace(device, seconds=tuple(None if s is None else s * factor for s in device.seconds))


def _slower_model(model: DeviceModel | None, factor: float) -> DeviceModel | None:
    if model is None:
        return None
    rate = None if model.macs_per_s is None else model.macs_per_s / factor
    return replace(model, macs_per_s=rate, call_s=model.call_s * factor, operator_s=model.operator_s * factor)
