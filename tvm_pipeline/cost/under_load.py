"""The latency of frames under load, and the plan that keeps a deadline: by simulating measured times of stages.

    plan = with_latencies(problem, plan, decision.times_s(plan), rate_fps=30.0)
    print(plan.predicted.latency_p99_s)
    decision = in_time(problem, decision, FrameDeadline(0.050, miss_share=0.001, rate_fps=30.0))

A stage takes the seconds that its frames were measured to take where its plan ran for a decision; else its seconds vary
by the spread of the profile. Frames come at a rate, and their latency counts from when they come. Without a rate the
source is never waited for, and the latency counts from a frame's slot, or from when the first stage reads it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tvm_pipeline.core.plan import Decision, Plan, describe
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.simulate import MOST_JITTER, SATURATED, cameras, check_rate, fixed_rate, simulate
from tvm_pipeline.errors import LimitMissedError, OptionError

FRAMES = 1000  # that are simulated, to tell the latencies of a plan
DRAWS = 5  # of the moments at which cameras begin
QUARTILES = 1.349  # standard deviations between the quartiles of a normal distribution
LEAST_MISS = 0.001  # a plan is measured for some hundred frames, which show nothing rarer
SEEN_LATE = 10  # frames that are late, at the miss rate, in a simulation that tells whether a plan keeps it
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # of a rate, which are tried where the whole is too much

Times = Sequence[Sequence[float]]  # as `Measured.times_s`; empty where a plan did not run


def under_load(problem: Problem, decision: Decision, rate_fps: float | None = None) -> Decision:
    """Return the decision whose chosen and measured plans state quantiles of their latency, see `with_latencies`."""
    ran = {decision.plan.stages, *(found.plan.stages for found in decision.measured)}
    candidates = tuple(
        as_measured(problem, plan, decision, rate_fps) if plan.stages in ran else plan for plan in decision.candidates
    )
    chosen = candidates[decision.candidates.index(decision.plan)]
    return replace(decision, plan=chosen, candidates=candidates)


def as_measured(problem: Problem, plan: Plan, decision: Decision, rate_fps: float | None = None) -> Plan:
    """Return the plan with the latencies that follow from what was measured for a decision, see `with_latencies`."""
    return with_latencies(problem, plan, decision.times_s(plan), rate_fps, decision.full_p50_s(plan))


def with_latencies(
    problem: Problem, plan: Plan, times_s: Times, rate_fps: float | None = None, full_p50_s: float | None = None
) -> Plan:
    """Return the plan with p50, p90 and p99 of its latency under load; as it is where nothing tells how that varies.

    Args:
        rate_fps: frames a second that come; None for as many as the plan takes, which more keep as full.
        full_p50_s: the median of a full pipeline as measured, to which the three are scaled. Where two stages take
            nearly the same time, small differences decide where frames wait, and no simulation tells these.
    """
    if plan.predicted.throughput_fps is None or not (times_s or rate_fps or spread(problem, plan)):
        return plan
    if rate_fps and rate_fps >= plan.predicted.throughput_fps:
        rate_fps = None
    found = simulated_latencies(problem, plan, times_s, SATURATED if rate_fps is None else fixed_rate(rate_fps))
    quantiles = np.quantile(found, [0.5, 0.9, 0.99])
    if full_p50_s and rate_fps is None:
        quantiles *= full_p50_s / quantiles[0]
    p50, p90, p99 = map(float, quantiles)
    predicted = replace(plan.predicted, latency_p50_s=p50, latency_p90_s=p90, latency_p99_s=p99)
    return replace(plan, predicted=predicted)


def simulated_latencies(
    problem: Problem, plan: Plan, times_s: Times, arrivals: Iterable[float], frames: int = FRAMES
) -> list[float]:
    """Return the seconds of each of so many frames, without those that fill the pipeline; see `simulate`."""
    filling = plan.frames_inside
    run = simulate(
        replace(problem, min_throughput_fps=None, max_latency_s=None),  # a measured plan may keep what none should
        plan.stages,
        frames + filling,
        arrivals,
        in_flight=plan.calls_inside,
        jitter=spread(problem, plan),
        times_s=times_s,
    )
    return [p.done_s - (p.entered_s if arrivals is SATURATED else p.arrived_s) for p in run.passages[filling:]]


def spread(problem: Problem, plan: Plan) -> float:
    """Return the standard deviation over mean of a stage's seconds, by the operators of the device that varies most."""
    profiles = (problem.profile.devices.get(name) for name in plan.devices)
    most = max((profile.mean_spread for profile in profiles if profile), default=0.0)
    return min(most / QUARTILES, MOST_JITTER)


@dataclass(frozen=True, slots=True)
class FrameDeadline:
    """A bound on the latency of frames that arrive at a rate: all frames but a share take at most so many seconds.

    Raises:
        OptionError: a figure is out of its range.
    """

    seconds: float
    miss_share: float
    rate_fps: float

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise OptionError(f"`deadline` {self.seconds:g}: it must be positive", option="deadline")
        if not LEAST_MISS <= self.miss_share < 0.5:
            raise OptionError(
                f"`miss` {self.miss_share:g}: it is a share of the frames from {LEAST_MISS:g}, since no measurement of "
                "a plan shows rarer ones, to below 0.5",
                option="miss",
            )
        check_rate(self.rate_fps)

    def __str__(self) -> str:
        kept = f"{1e3 * self.seconds:.4g} ms for all but {self.miss_share:.3g} of the frames"
        return f"{kept} at {self.rate_fps:.4g} a second"


def frame_deadline(text: str, miss_share: float, rate_fps: float | None) -> FrameDeadline:
    """Return the deadline of a text such as `50ms`, `0.05s` or `0.05`; raise OptionError for any other."""
    found = re.fullmatch(r"(\d{1,9}\.?\d*|\.\d+) ?(ms|s)?", text.strip())
    if not found:
        raise OptionError(f"`deadline` {text}: write it as 50ms or 0.05s", option="deadline", value=text)
    if rate_fps is None:
        raise OptionError("`deadline` needs the frames a second that come: give `rate`", option="deadline")
    return FrameDeadline(float(found[1]) * (1e-3 if found[2] == "ms" else 1.0), miss_share, rate_fps)


def latency_in_time_s(problem: Problem, plan: Plan, times_s: Times, deadline: FrameDeadline) -> float:
    """Return the seconds that all frames but the share take at the rate; infinite where the plan takes fewer."""
    if (plan.predicted.throughput_fps or 0.0) <= deadline.rate_fps:
        return math.inf
    frames = max(FRAMES, math.ceil(SEEN_LATE / deadline.miss_share))
    found = simulated_latencies(problem, plan, times_s, fixed_rate(deadline.rate_fps), frames)
    return float(np.quantile(found, 1 - deadline.miss_share))


def most_cameras(problem: Problem, plan: Plan, times_s: Times, deadline: FrameDeadline) -> int:
    """Return how many cameras, of `deadline.rate_fps` each, a plan can have so that their frames keep a deadline.

    When a camera began decides whose frames it meets, for as long as it runs, so several sets of moments are drawn.
    """

    def keeps(count: int) -> bool:
        most = math.ceil(SEEN_LATE / deadline.miss_share)
        late = frames = 0
        for seed in range(DRAWS):
            arrivals = cameras(count, deadline.rate_fps, seed)
            found = simulated_latencies(problem, plan, times_s, arrivals, max(FRAMES, most) // DRAWS)
            late, frames = late + sum(seconds > deadline.seconds for seconds in found), frames + len(found)
        return late <= deadline.miss_share * frames

    capacity_fps = plan.predicted.throughput_fps or 0.0
    return bisect_left(range(1, math.ceil(capacity_fps / deadline.rate_fps)), True, key=lambda count: not keeps(count))


def in_time(problem: Problem, decision: Decision, deadline: FrameDeadline) -> Decision:
    """Return the decision for the candidate that keeps a deadline, see `plan_in_time`.

    Raises:
        LimitMissedError: none does; the message gives the best deadline at this rate, or the rate that keeps this one.
    """
    asked = _Promise(problem, decision, deadline)
    chosen = asked.best()
    if chosen is None:
        raise asked.refusal()
    spare = asked.capacity_fps(chosen) / deadline.rate_fps - 1
    why = f"{describe(chosen)} keeps {deadline}, with {spare:.0%} of capacity to spare; {decision.why}"
    others = (plan for plan in decision.candidates if plan.stages != chosen.stages)
    return replace(decision, plan=chosen, candidates=(chosen, *others), why=why)


def plan_in_time(problem: Problem, decision: Decision, deadline: FrameDeadline) -> Plan | None:
    """Return the candidate that keeps a deadline with the most capacity, or the fewest joules; None where none does.

    Joules decide where energy is the objective. Candidates that were measured come first, since the times of their
    stages are known. The plan holds no more frames than can be in time.
    """
    return _Promise(problem, decision, deadline).best()


class _Promise:
    """The candidates of a decision against a deadline."""

    def __init__(self, problem: Problem, decision: Decision, deadline: FrameDeadline) -> None:
        self._problem, self._decision, self._deadline = problem, decision, deadline
        self._rates = {found.plan.stages: found.throughput_fps for found in decision.measured}
        self._most = max(FRAMES, math.ceil(SEEN_LATE / deadline.miss_share))
        self._candidates = sorted((p for p in decision.candidates if p.predicted.throughput_fps), key=self._order)

    def capacity_fps(self, plan: Plan) -> float:
        return self._rates.get(plan.stages) or plan.predicted.throughput_fps or 0.0

    def best(self) -> Plan | None:
        """Return the first candidate that keeps the deadline, with as many frames inside as can be in time."""
        rate_fps = self._deadline.rate_fps
        return next((self._held(plan) for plan in self._candidates if self._keeps(plan, rate_fps)), None)

    def refusal(self) -> LimitMissedError:
        """Return the error where none keeps it, with what would hold."""
        deadline = self._deadline
        slower = ((share * deadline.rate_fps, plan) for share in SHARES for plan in self._candidates)
        holds = next((rate_fps for rate_fps, plan in slower if self._keeps(plan, rate_fps)), None)
        told = [f"up to {holds:.3g} frames a second it would hold" if holds else "nor does one at a tenth of this rate"]
        able = [plan for plan in self._candidates if self.capacity_fps(plan) > deadline.rate_fps]
        if able:
            found = ((self._latencies_s(plan, deadline.rate_fps, self._most), describe(plan)) for plan in able)
            best_s, best = min((float(np.quantile(reached, 1 - deadline.miss_share)), name) for reached, name in found)
            told.insert(0, f"the best deadline at this rate is {1e3 * best_s:.3g} ms, of {best}")
        else:
            most_fps = max(map(self.capacity_fps, self._candidates), default=0.0)
            told.insert(0, f"the most that a candidate can take is {most_fps:.3g}")
        return LimitMissedError(f"no candidate keeps `deadline` {deadline}: {'; '.join(told)}")

    def _order(self, plan: Plan) -> tuple[bool, float]:
        by_joules = self._problem.objective == "energy" and plan.predicted.energy_j is not None
        less_is_better = plan.predicted.energy_j or 0.0 if by_joules else -self.capacity_fps(plan)
        return plan.stages not in self._rates, less_is_better

    def _held(self, plan: Plan) -> Plan:
        allowed = max(1, math.floor(self._deadline.seconds * self.capacity_fps(plan) / plan.batch))
        return replace(plan, in_flight=allowed) if allowed < plan.calls_inside else plan

    def _latencies_s(self, plan: Plan, rate_fps: float, frames: int) -> list[float]:
        times_s = self._decision.times_s(plan)
        return simulated_latencies(self._problem, plan, times_s, fixed_rate(rate_fps), frames)

    def _keeps(self, plan: Plan, rate_fps: float) -> bool:
        """Return whether it does in some frames, and then in as many as tell a small share."""
        if self.capacity_fps(plan) <= rate_fps:
            return False
        for frames in sorted({FRAMES, self._most}):
            latencies_s = self._latencies_s(self._held(plan), rate_fps, frames)
            late = sum(seconds > self._deadline.seconds for seconds in latencies_s)
            if late / frames > max(self._deadline.miss_share, SEEN_LATE / frames):
                return False
        return True
