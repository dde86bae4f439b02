"""Planning while a pipeline runs: a plan within milliseconds, also if no plan keeps the limits.

A running pipeline cannot refuse to run because its machine is loaded. So a limit (`min_throughput_fps`,
`max_latency_s`) that no plan keeps any more becomes the objective: the most frames a second, or the least latency.

Read next: `strategy.py` and `adaptation.py`, which ask for such plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import replace
from fractions import Fraction

from tvm_pipeline.core.plan import Plan, Prediction, cost_key, margin
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.batches import of_calls, of_frames
from tvm_pipeline.cost.device_costs import require_energy
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.errors import NoPlanError, PlanError
from tvm_pipeline.planning.baselines.whole_model import replicas, singles
from tvm_pipeline.planning.search.dynamic_programming import chain

# The accuracy of a prediction: a plan that misses a limit by less may keep it.
NEARLY = 0.05
# A limit counts as missed after so many looks in a row; a plan that keeps it would run by then.
MISSING_LOOKS = 10


def with_runtime_objective(problem: Problem) -> Problem:
    """Return the problem to plan for while it runs: an objective of bytes, which do not change, becomes throughput.

    Raises ProfileError if nothing says how fast a device is.
    """
    return replace(problem, objective="throughput") if problem.is_lexicographic else problem


def quick_plan(problem: Problem) -> Plan:
    """Return the best of `quick_plans`.

    Of plans that are nearly as good it is the one with fewest stages: replicas divide the frames by whatever load there
    is, while a cut is right for one load only.

    Raises what `quick_plans` raises.
    """
    plans = quick_plans(problem)
    best = min(plans, key=cost_key)
    near = [plan for plan in plans if (margin(best, plan) or 0.0) <= NEARLY]
    chosen = min(near, key=lambda plan: (len(plan.stages), cost_key(plan), len(plan.devices)))
    return replace(chosen, power_mode=problem.profile.power_mode)


def quick_plans(problem: Problem) -> list[Plan]:
    """Return the model on each device, the model on every device, and the best pipeline cut in the graph's order.

    They take milliseconds.

    Raises:
        InfeasibleError: none of these is possible.
        ProfileError: the objective is energy, and nothing says what a device draws.
    """
    if (batch := problem.graph.batch) > 1:
        return [of_frames(plan, batch) for plan in quick_plans(of_calls(problem))]
    if problem.objective == "energy":
        require_energy(problem)
    plans: list[Plan] = []
    reasons: list[str] = []
    makers: tuple[Callable[[], list[Plan]], ...] = (
        lambda: singles(problem),
        lambda: [replicas(problem)],
        lambda: [chain(problem)],
    )
    if len(problem.platform.devices) == 1 and problem.stages in (None, 1):
        makers = makers[:1]  # the others would find the same, and load what compiles their loops
    for make in makers:
        try:
            plans += make()
        except NoPlanError as error:
            reasons.append(str(error))
    fitting = [plan for plan in plans if problem.stages in (None, len(plan.stages))]
    if not fitting:
        raise NoPlanError(f"no plan is left: {'; '.join(dict.fromkeys(reasons))}")
    return fitting


def nearest_plan(problem: Problem) -> Plan:
    """Return the `quick_plan` if one keeps the limits, else the plan that comes nearest: the fastest, or least latent.

    Raises what `quick_plan` raises, InfeasibleError only if there is no plan even without the limits.
    """
    try:
        return quick_plan(problem)
    except NoPlanError:
        free = without_limits(problem)
        if free == problem:
            raise
    found = quick_plan(free)
    return judged_now(problem, replace(found, status="feasible", bound=None))


def without_limits(problem: Problem) -> Problem:
    """Return what to plan for where no plan keeps the limits: the most frames a second, or the least latency."""
    if (free := unlimited(problem)) == problem:
        return problem
    return replace(free, objective="latency" if problem.min_throughput_fps is None else "throughput")


def with_frames_as(given: Plan, plan: Plan) -> Plan:
    """Return the plan with its default number of frames inside, reduced as much as that of `given`.

    If `given` holds 2 frames, and 4 by default, a plan whose default is 8 gets 4. A measurement before the run found
    how few frames keep the rate of `given`.
    """
    if given.in_flight is None or plan.in_flight is not None:
        return plan
    share = Fraction(given.in_flight, replace(given, in_flight=None).calls_inside)
    return replace(plan, in_flight=math.ceil(share * plan.calls_inside))


def unlimited(problem: Problem) -> Problem:
    """Return the problem without limits of throughput and latency."""
    return replace(problem, min_throughput_fps=None, max_latency_s=None)


def judged_now(problem: Problem, plan: Plan) -> Plan:
    """Return the plan judged by the problem's objective, limits apart; raise PlanError if it cannot run."""
    return judged(unlimited(problem), replace(plan, objective=problem.objective))


def without(problem: Problem, devices: Set[str]) -> Problem:
    """Return the problem without some devices; raise PlatformError if none remains."""
    platform = problem.platform
    able = tuple(device for device in platform.devices if device.name not in devices)
    links = tuple(link for link in platform.links if devices.isdisjoint((link.source, link.destination)))
    return replace(problem, platform=replace(platform, devices=able, links=links))


def shown_objective(problem: Problem) -> str:
    limits = {
        "at least {:g} frames a second": problem.min_throughput_fps,
        "at most {:g} s a frame": problem.max_latency_s,
    }
    return ", ".join([problem.objective, *(text.format(limit) for text, limit in limits.items() if limit is not None)])


def slack(problem: Problem, predicted: Prediction) -> float:
    """Return by what share a prediction is better than the limit, negative if it misses it; infinite without one."""
    if problem.min_throughput_fps is not None and predicted.throughput_fps is not None:
        return predicted.throughput_fps / problem.min_throughput_fps - 1
    if problem.max_latency_s is not None and predicted.latency_s is not None:
        return problem.max_latency_s / max(predicted.latency_s, 1e-12) - 1
    return math.inf


def shown_slack(problem: Problem, spare: float) -> str:
    """Return the slack as text, in the unit of the limit."""
    if problem.min_throughput_fps is not None:
        target = problem.min_throughput_fps
        return f"{(1 + spare) * target:.4g} frames a second, {target:.4g} are asked for ({spare:+.0%})"
    limit_s = problem.max_latency_s or 0.0
    return f"{1e3 * limit_s / (1 + spare):.4g} ms a frame, {1e3 * limit_s:.4g} are allowed (room {spare:+.0%})"


def gain(problem: Problem, plan: Plan, running: Plan, starved: bool = False) -> float:
    """Return by what share `plan` is better than the running one; infinite if only `plan` keeps the limits, or can run.

    A limit that the running plan misses by less than NEARLY is no reason to change. A limit that neither plan keeps is
    what they are compared by. A pipeline that is `starved`, because its source gives no more frames, has the throughput
    that is requested of it.
    """
    if plan.stages == running.stages:
        return 0.0
    try:
        before = judged_now(problem, running)
    except PlanError:
        return math.inf
    after = judged_now(problem, plan)
    spare, spare_after = slack(problem, before.predicted), slack(problem, after.predicted)
    keeps = spare_after > -1e-8  # the rounding of sums
    if spare < -NEARLY and not (starved and problem.min_throughput_fps is not None):
        return math.inf if keeps else (1 + spare_after) / (1 + spare) - 1
    if not keeps or (starved and problem.objective == "throughput"):
        return 0.0
    return margin(after, before) or 0.0


class LimitWatch:
    """Tells when the running plan begins to miss the problem's limit, and when it keeps it again."""

    def __init__(self) -> None:
        self._missing = 0

    def look(self, problem: Problem, plan: Plan, starved: bool) -> str:
        """Return the news as text, empty if there is none; call it at every look at the devices."""
        spare = slack(problem, judged_now(problem, plan).predicted)
        if starved and problem.min_throughput_fps is not None:
            spare = max(spare, 0.0)
        told = self._missing >= MISSING_LOOKS
        if spare < -NEARLY and not told:
            self._missing += 1
            return f"missed: {shown_slack(problem, spare)}" if self._missing == MISSING_LOOKS else ""
        if spare >= 0 or not told:
            self._missing = 0
        if told and spare >= 0:
            return "kept again" if math.isinf(spare) else f"kept again: {shown_slack(problem, spare)}"
        return ""
