"""The strategy `replan`, which decides whether another plan is worth a change, and the table of all strategies.

At each look it plans for the devices as slow as they are now. The best plan runs next if it is better than the running
one at several looks in a row: by more than the hysteresis, and by more than the noise of the measured seconds. A switch
may bring less than promised, because its devices are slower than they seemed while they were idle. Then the patience
doubles, so that two plans do not take turns for ever.

Read next: `strategy.py`, which measures how slow the devices are; `replanning.py`, which finds the best plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.statistics import StageRecord
from tvm_pipeline.errors import NoPlanError, PlanError
from tvm_pipeline.plugins import PluginTable
from tvm_pipeline.runtime.replanning import (
    gain,
    judged_now,
    nearest_plan,
    quick_plans,
    shown_slack,
    slack,
    unlimited,
)
from tvm_pipeline.runtime.strategy import Strategy

# No new plan is made for a slow-down that changed by less, or by less than `noise`.
CHANGE = 0.05
# After so many looks at a plan the effect of its switch is known.
SETTLED_LOOKS = 5
# Doublings of the patience: with 3 looks every 0.1 s, 5 minutes.
MOST_DOUBLINGS = 10


class Adaptation(Strategy):
    """Re-plans by how slow the devices are.

    Args:
        hysteresis: a plan must be better by more than this share to be proposed, and by more than `noise`.
        patience: at how many looks in a row it must be better.
    """

    def __init__(self, hysteresis: float = 0.1, patience: int = 3) -> None:
        super().__init__()
        self._hysteresis, self._patience = hysteresis, patience
        self._plan: Plan | None = None
        self._judged_for: tuple[dict[str, float], tuple[str, ...], bool] | None = None
        self._proposal: Plan | None = None
        self._gain = 0.0
        self._better = 0
        self._promise: tuple[dict[str, float], float] | None = None  # the factors and the gain of the last switch
        self._fastest: tuple[tuple[str, ...], float] | None = None  # devices, and frames a second of their fastest plan
        self._settled = 0
        self._doublings = 0

    def begin(self, problem: Problem, plan: Plan) -> None:
        super().begin(problem, plan)
        self._plan, self._judged_for, self._better, self._settled, self._fastest = plan, None, 0, 0, None

    def look(self, records: Sequence[StageRecord], problem: Problem) -> tuple[Plan, str] | None:
        self.observe(records, problem.platform.devices)
        running = self._plan
        if running is None:
            return None
        if self._moved(problem):
            now = self.scaled(problem)
            self._proposal = nearest_plan(now) if self._most_gain(problem, now, running) > self._hysteresis else None
            if self._proposal:
                self._gain = self.corrected(gain(now, self._proposal, running, self.starved), self._proposal, running)
        known = None not in self.seen
        wished = known and self._proposal is not None and self._gain > max(self._hysteresis, self.noise)
        self._settled += known
        if self._promise and (self._settled >= SETTLED_LOOKS or (wished and not self._better)):
            kept = _kept(running, self.factors, *self._promise)
            self._doublings, self._promise = 0 if kept else min(self._doublings + 1, MOST_DOUBLINGS), None
        self._better = self._better + 1 if wished else 0
        if self._proposal is None or not wished or self._better < self._patience * 2**self._doublings:
            return None
        self._promise = dict(self.factors), self._gain
        reason = self._reason(self.scaled(problem), running)
        return replace(self._proposal, scheduler="replan", status="feasible", bound=None), reason

    def _most_gain(self, problem: Problem, now: Problem, running: Plan) -> float:
        """Return an upper bound of the gain that any plan brings over the running one, found without a search.

        Slower devices make no plan faster than the fastest plan is by the profile. If devices are faster than their
        profile, that plan's rate is divided by the least slow-down, which is below 1. The bound is infinite for other
        objectives, and where there are limits.
        """
        if problem.objective != "throughput" or unlimited(problem) != problem:
            return math.inf
        names = tuple(device.name for device in problem.platform.devices)
        try:
            before_fps = judged_now(now, running).predicted.throughput_fps or 0.0
            if self.starved:
                return 0.0
            if self._fastest is None or self._fastest[0] != names:
                rates = [plan.predicted.throughput_fps or math.inf for plan in quick_plans(problem)]
                self._fastest = names, max(rates)
        except (NoPlanError, PlanError):
            return math.inf
        least = min(1.0, *(self.factors.get(name, 1.0) for name in names))
        return self.corrected(self._fastest[1] / (least * max(before_fps, 1e-12)) - 1, None, running)

    def _moved(self, problem: Problem) -> bool:
        """Return whether the devices or their slow-downs changed since the plans were last judged; remember them."""
        names = tuple(device.name for device in problem.platform.devices)
        if self._judged_for is not None:
            factors, devices, starved = self._judged_for
            least = max(CHANGE, self.noise)
            still = all(abs(f / factors.get(name, 1.0) - 1) <= least for name, f in self.factors.items())
            if still and devices == names and starved == self.starved:
                return False
        self._judged_for = dict(self.factors), names, self.starved
        return True

    def _reason(self, now: Problem, running: Plan) -> str:
        slowed = ", ".join(f"{name} x{factor:.2f}" for name, factor in sorted(self.factors.items()))
        if math.isfinite(self._gain):
            return f"{self._gain:+.0%} {now.objective}, with {slowed}"
        try:
            spare = slack(now, judged_now(now, running).predicted)
        except PlanError as error:
            return f"the running plan is not possible any more ({error}), with {slowed}"
        return f"the running plan makes {shown_slack(now, spare)}, with {slowed}"


def _kept(plan: Plan, factors: dict[str, float], then: dict[str, float], promised: float) -> bool:
    """Return whether the devices are nearly as fast as assumed, so that at least half of the promised gain is left."""
    slower = max(factors.get(name, 1.0) / then.get(name, 1.0) for name in plan.devices) - 1
    return slower <= min(promised, 1.0) / 2


OFF = "off"
STRATEGIES = PluginTable[type[Strategy]](
    "tvm_pipeline.strategies",
    "strategy",
    {"replan": Adaptation},
    lambda loaded: isinstance(loaded, type) and issubclass(loaded, Strategy),
    "docs/schedulers.md",
)


def check_strategy(name: str) -> None:
    """Raise OptionError, with the names of all that are installed, if a run cannot adapt by this name."""
    STRATEGIES.check(name, "adapt", OFF)


def strategy_of(name: str) -> Strategy | None:
    """Return a new strategy of this name; None for `off`, which keeps the plan."""
    return None if name == OFF else STRATEGIES[name]()
