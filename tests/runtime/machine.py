"""A machine that is not here: devices slowed by loads, on a clock of its own, for the strategies to look at.

It plays a chain or replicas at their slowest worker's pace, or that of the source, writes down what the workers would,
and what Linux would count of the cores (core n is device n's).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from tests.support.fake_backend import chain_model
from tvm_pipeline import Plan, Problem
from tvm_pipeline.core.plan import Prediction, Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.core.statistics import StageRecord
from tvm_pipeline.cost.evaluate import evaluate, judged
from tvm_pipeline.runtime.replanning import unlimited
from tvm_pipeline.runtime.strategy import TICK_S, CoreLoad, Strategy

# Device -> share of its time that others take, at a time in seconds.
Loads = Callable[[float], Mapping[str, float]]


def problem_of(seconds: Mapping[str, list[float]], watts: Mapping[str, float] | None = None, **options) -> Problem:
    """A chain of operators on devices that take so long for each."""
    graph = chain_model(len(next(iter(seconds.values())))).graph
    devices = tuple(Device(n, "fake", cores=(i,), active_w=(watts or {}).get(n)) for i, n in enumerate(seconds))
    measured = {name: DeviceProfile.in_order(graph, tuple(figures)) for name, figures in seconds.items()}
    platform = Platform("fake machine", devices)
    return Problem(graph, platform, Profile(graph.name, graph.fingerprint, measured), **options)


def plan_of(problem: Problem, *stages: tuple[str, int]) -> Plan:
    """Stages of (devices joined by +, count of operators)."""
    names, begin, made = problem.graph.operator_names, 0, []
    for devices, count in stages:
        made.append(Stage(tuple(devices.split("+")), tuple(names[begin : begin + count])))
        begin += count
    plan = Plan(problem.graph.name, "by hand", problem.objective, tuple(made), Prediction())
    return judged(unlimited(problem), plan)


class Machine:
    """Runs a plan and lets the strategy change it.

    Args:
        loads: a device shared with a load is slower by 1 / (1 - share).
        source_fps: of a source that gives no more frames than that.
        asleep: how much slower a device computes that idles for more than half of its time.
        noise: relative, of each frame.
    """

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        strategy: Strategy,
        stat: Path,
        *,
        loads: Loads = lambda _: {},
        source_fps: float = 1e9,
        asleep: float = 1.0,
        noise: float = 0.01,
    ) -> None:
        self.problem, self.strategy, self.loads = problem, strategy, loads
        self.now_s = 0.0
        self.switches: list[tuple[float, Plan, str]] = []
        self._source_s, self._asleep, self._noise = 1 / source_fps, asleep, noise
        self._stat, self._random = stat, np.random.default_rng(0)
        self._ticks = {core: 0.0 for device in problem.platform.devices for core in device.cores}
        self._busy: dict[str, float] = {}
        strategy._cores = CoreLoad(stat)
        self.run_by(plan)

    def run_by(self, plan: Plan) -> None:
        self.plan = plan
        self._costs = evaluate(unlimited(self.problem), plan.stages).costs
        self.records = [StageRecord(cost.stage, cost.device) for cost in self._costs]
        self._next_s = [self.now_s] * len(self.records)
        self.strategy.begin(self.problem, plan)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            self._work()
            self._count()
            proposal = self.strategy.look(self.records, self.problem)
            if proposal:
                self.switches.append((self.now_s, *proposal))
                self.run_by(proposal[0])

    def took_s(self) -> list[float]:
        """Seconds a frame of each worker, as slow as its device is now."""
        loads = self.loads(self.now_s)
        return [
            cost.seconds
            * (self._asleep if self._busy.get(cost.device, 1.0) < 0.5 else 1.0)
            / (1 - loads.get(cost.device, 0.0))
            for cost in self._costs
        ]

    def pace_s(self) -> float:
        """Seconds between frames."""
        rates: dict[int, float] = {}
        for cost, seconds in zip(self._costs, self.took_s(), strict=True):
            rates[cost.stage] = rates.get(cost.stage, 0.0) + 1 / seconds
        return max(1 / min(rates.values()), self._source_s)

    def _work(self) -> None:
        took, pace = self.took_s(), self.pace_s()
        workers = [sum(cost.stage == other.stage for other in self._costs) for cost in self._costs]
        for index, (record, seconds) in enumerate(zip(self.records, took, strict=True)):
            period = max(seconds, pace * workers[index])
            self._busy[record.device] = seconds / period
            while self._next_s[index] + period <= self.now_s:
                self._next_s[index] += period
                compute = seconds * (1 + self._noise * abs(self._random.standard_normal()))
                record.add(max(period - compute, 0.0), 0.0, compute, record.frames, self._next_s[index])

    def _count(self) -> None:
        """Of each core's hundredths of a second, how many were busy."""
        loads, lines = self.loads(self.now_s), []
        working = {record.device for record in self.records}
        for device in self.problem.platform.devices:
            own = self._busy[device.name] if device.name in working else 0.0
            for core in device.cores:
                self._ticks[core] += 100 * TICK_S * min(1.0, own + loads.get(device.name, 0.0))
                idle = 100 * self.now_s - self._ticks[core]
                lines.append(f"cpu{core} {round(1000 * self._ticks[core])} 0 0 {round(1000 * idle)} 0 0 0 0 0 0")
        self._stat.write_text("\n".join(lines))
