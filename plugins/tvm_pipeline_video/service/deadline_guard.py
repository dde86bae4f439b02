"""Watches a model's frames against their deadline while it runs: who is admitted, who is late, and when to plan anew.

A deadline promises that no more than a share of the frames is late. The guard looks at the latest frames: as many as
would have SEEN_LATE late ones if the promise were just kept. When half of those are late already, it looks for the plan
that keeps the deadline with the devices as slow as they are now. When all of them are, the promise is broken; a run
whose sources come and go then lets one go (running.py).

Next: `cost/under_load.py`, which predicts by simulation.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field, replace

from tvm_pipeline import Decision, Plan
from tvm_pipeline.core.plan import Measured
from tvm_pipeline.cost.under_load import (
    SEEN_LATE,
    FrameDeadline,
    Times,
    frame_deadline,
    latency_in_time_s,
    plan_in_time,
)
from tvm_pipeline.errors import PlanError
from tvm_pipeline.runtime import LivePipeline
from tvm_pipeline.runtime.replanning import judged_now

SETTLES_S = 2.0  # after a change of sources or of the plan, until late frames count
SIMULATING_SHARE = 0.02  # of a core that the search takes from the stages, at most
REST_S = 10.0  # between two searches, at least
QUICK_SHARE = 0.01  # a plan is sought for no rarer misses, which take a longer simulation beside the run


@dataclass(eq=False)
class DeadlineGuard:
    """The deadline of the frames of one model that runs.

    Attributes:
        decision: how its plan was chosen; None if it was given. Its candidates are what is changed to.
        deadline: what is promised now; None where nothing is.
        late: how many frames took longer, in the whole run.
    """

    pipeline: LivePipeline
    decision: Decision | None = None
    deadline: FrameDeadline | None = None
    late: int = 0
    _late_at: deque[int] = field(default_factory=lambda: deque(maxlen=SEEN_LATE))  # frames that had come out by then
    _from_s: float = 0.0  # the clock time from which late frames count
    _rests_until_s: float = 0.0  # and that from which a plan is sought again

    def count(self, took_s: float) -> None:
        """Take note of a frame that came out."""
        if self.deadline is None or took_s <= self.deadline.seconds:
            return
        self.late += 1
        if time.perf_counter() >= self._from_s:
            self._late_at.append(self.pipeline.frames)

    def watch(self) -> None:
        """Count late frames anew: other sources come or go, or another plan runs, which takes a moment."""
        self._late_at.clear()
        self._from_s = time.perf_counter() + SETTLES_S

    def admits(self, deadline: str, miss_share: float, rate_fps: float) -> str:
        """Return why a deadline would not be kept by the plan of now at a rate; empty where it would, which it is then.

        Only the model is predicted: the work around it is in no plan of a run that waits for sources.
        """
        asked, plan = frame_deadline(deadline, miss_share, rate_fps), self.pipeline.plan
        times_s = self.decision.times_s(plan) if self.decision else ()
        reached_s = latency_in_time_s(self.pipeline.given, plan, times_s, asked)
        if reached_s <= asked.seconds:
            self.deadline = asked
            self.watch()
            return ""
        would = f"they would take {1e3 * reached_s:.3g} ms"
        if reached_s == math.inf:
            would = f"the plan takes {plan.predicted.throughput_fps or 0.0:.3g} a second"
        return f"it is not taken, since `deadline` {asked} would be missed: {would}"

    def misses(self) -> str:
        """Return in words that the promise is broken; empty while it is kept."""
        late = self._late(SEEN_LATE)
        if late:
            self.watch()
        return late

    def keep(self) -> None:
        """Change to the plan that keeps the deadline with the devices as slow as they are now, before it is broken."""
        late, deadline = self._late(SEEN_LATE // 2), self.deadline
        if not late or deadline is None or self.decision is None or not self.pipeline.factors:
            return
        if time.perf_counter() < self._rests_until_s:
            return
        deadline = replace(deadline, miss_share=max(deadline.miss_share, QUICK_SHARE))
        began_s = time.thread_time()
        plan = plan_in_time(self.pipeline.problem, self._as_slow_as_now(self.decision), deadline)
        rest_s = max((time.thread_time() - began_s) / SIMULATING_SHARE, REST_S)
        self._rests_until_s = time.perf_counter() + rest_s
        if plan is None:
            self.pipeline.note("limit", f"{late}, and no plan would keep the deadline now")
        elif plan.stages != self.pipeline.plan.stages:
            self.watch()
            self.pipeline.switch(plan, f"{late}, and with it they would not")

    def _late(self, most: int) -> str:
        """Return in words that so many frames are late among the latest; empty where fewer are."""
        if self.deadline is None or len(self._late_at) < most:
            return ""
        among = self.pipeline.frames - self._late_at[-most] + 1
        if among > SEEN_LATE / self.deadline.miss_share:
            return ""
        return f"{most} of the last {among} frames took longer than {1e3 * self.deadline.seconds:.4g} ms"

    def _as_slow_as_now(self, decision: Decision) -> Decision:
        """Return the decision of the candidates that can run now, with the times that their stages would take."""
        problem, factors = self.pipeline.problem, self.pipeline.factors
        candidates = []
        for plan in decision.candidates:
            try:
                candidates.append(judged_now(problem, plan))
            except PlanError:
                continue  # a device of it is out

        def slowed(found: Measured) -> Measured:
            rate = found.throughput_fps / max(_most(found.plan, factors), 1e-12)
            return replace(found, throughput_fps=rate, times_s=_scaled(found.plan, found.times_s, factors))

        return replace(decision, candidates=tuple(candidates), measured=tuple(map(slowed, decision.measured)))


def _most(plan: Plan, factors: dict[str, float]) -> float:
    return max(factors.get(device, 1.0) for device in plan.devices)


def _scaled(plan: Plan, times_s: Times, factors: dict[str, float]) -> tuple[tuple[float, ...], ...]:
    """Return the seconds of each stage on each of its devices, as many times as long as its device is slower."""
    devices = [device for stage in plan.stages for device in stage.devices]
    pairs = zip(devices, times_s, strict=False)
    return tuple(tuple(factors.get(device, 1.0) * seconds for seconds in own) for device, own in pairs)
