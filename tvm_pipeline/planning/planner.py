"""The one entry of planning: from a Problem to a Decision.

The default, `best`, is never worse than a simple plan. It makes all candidates (one device, replicas, pipelines, and
pipelines with replicated stages) and returns the best by the objective, with all others and its margin over them.

`plan` takes these steps, each of which is a function:

1. `_check`       refuse a problem that the scheduler does not declare
2. `_searched`    search a relaxation of the problem: without activations, and without stages measured as a whole
3. `_kept`        judge the plans of the search by the whole problem, with orders whose activations fit
4. `_recut`       search with activations, where the best plan of the relaxation does not fit
5. `_decided`     choose a plan, with its bound
6. `chosen_by_simulation`  where devices share a bus

Next: `registry.py`, the schedulers; `bus_simulation.py`, the last step.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import suppress
from dataclasses import replace

from tvm_pipeline.core.plan import Decision, Plan, cost_key, describe, margin
from tvm_pipeline.core.problem import OBJECTIVES, Problem, counts_edges
from tvm_pipeline.cost.batches import of_calls, of_frames
from tvm_pipeline.cost.device_costs import idle_w, require_caches, require_energy
from tvm_pipeline.cost.evaluate import idle_share, judged
from tvm_pipeline.errors import (
    InfeasibleError,
    LimitMissedError,
    NoPlanError,
    OptionError,
    PlanError,
    PlatformError,
    ProfileError,
)
from tvm_pipeline.planning.baselines.whole_model import replicas_of_any_count, singles
from tvm_pipeline.planning.bus_simulation import chosen_by_simulation, shares_a_bus
from tvm_pipeline.planning.candidates import SearchResult, bound_within, find_candidates
from tvm_pipeline.planning.large_graphs import Maker, chain_of, made, reaches, with_time_left
from tvm_pipeline.planning.measured import SegmentTimer, measured_plan
from tvm_pipeline.planning.registry import BEST, LIMITS, SCHEDULERS, Scheduler, check_scheduler
from tvm_pipeline.planning.stage_orders import fitting_plan

_log = logging.getLogger(__name__)

MOST_DEVICES = 64

# The schedulers to use where communication is counted by edges.
BY_EDGES = "cp-sat or best"


def plan(problem: Problem, scheduler: str = BEST, *, measure: SegmentTimer | None = None) -> Decision:
    """Return the best plan of `problem` by the scheduler of that name, or of all schedulers (`best`), with the reason.

    Args:
        measure: a function that times a stage on a device, for schedulers that measure; see `profiling.stage_timer`.

    Raises:
        OptionError: no scheduler has that name, or it does not take the problem's objective, limits or stages.
        InfeasibleError: it is proven that no plan exists; the message names the operators and limits in conflict.
        NoPlanError: no plan was found, but one may exist.
        ProfileError: the speed of a device is not known, or, for objective energy, its power.

    Examples:
        >>> from tvm_pipeline.testing import example_problem
        >>> decision = plan(example_problem())
        >>> [(stage.devices, stage.operators) for stage in decision.plan.stages]
        [(('d0',), ('double',)), (('d1',), ('increment',))]
        >>> plan(example_problem(), "single").plan.devices  # by another scheduler
        ('d0',)
    """
    if (batch := problem.graph.batch) > 1:
        try:
            found = plan(of_calls(problem), scheduler, measure=measure)
        except NoPlanError as error:
            raise type(error)(f"{error}; the figures are of calls, which compute {batch} frames each") from error
        candidates = tuple(of_frames(candidate, batch) for candidate in found.candidates)
        return replace(found, plan=of_frames(found.plan, batch), candidates=candidates)
    _check(problem, scheduler)
    if scheduler != BEST and (cut := SCHEDULERS[scheduler].cut):
        decision = measured_plan(problem, scheduler, SCHEDULERS[scheduler].run, cut, measure)
        return _settled(problem, _bounded(problem, decision))
    try:
        decision = proposed(problem, scheduler)
    except InfeasibleError as error:
        raise InfeasibleError(f"{error}{_what_is_possible(problem)}") from error
    if scheduler == BEST and problem.time_limit_s is None and shares_a_bus(problem):
        _log.info("simulating the best plans, with turns on the bus")
        decision = chosen_by_simulation(problem, decision, proposed)
    return _settled(problem, decision)


def _bounded(problem: Problem, decision: Decision) -> Decision:
    """Return the decision of the scheduler `measured`, whose plan has a bound of all plans by the measured stages."""
    problem = replace(problem, profile=replace(problem.profile, segments=decision.segments))
    plan = with_bound(decision.plan, bound_within(problem))
    return replace(decision, plan=plan, candidates=(plan,))


def _settled(problem: Problem, decision: Decision) -> Decision:
    """Return the decision whose plans name the power mode of the profile, and hold no more frames than a limit allows.

    A full pipeline keeps `max_latency_s` by Little's law if it holds at most that many seconds times its rate.
    """
    mode, most_s = problem.profile.power_mode, problem.max_latency_s
    if not mode and most_s is None:
        return decision

    def settled(plan: Plan) -> Plan:
        if most_s is None or not plan.predicted.throughput_fps:
            return replace(plan, power_mode=mode)
        allowed = max(1, math.floor(most_s * plan.predicted.throughput_fps * (1 + 1e-9)))
        return replace(plan, power_mode=mode, in_flight=min(plan.calls_inside, allowed))

    return replace(decision, plan=settled(decision.plan), candidates=tuple(map(settled, decision.candidates)))


def proposed(problem: Problem, scheduler: str = BEST) -> Decision:
    """Return the decision by predictions alone, which is `plan` without simulations and measurements."""
    deadline = None if problem.time_limit_s is None else time.monotonic() + problem.time_limit_s
    found = _searched(problem, scheduler, deadline)
    kept, refused = _kept(problem, found.plans)
    if scheduler == BEST and problem.counts_activations and found.plans[0] in refused:
        kept += _recut(problem, deadline)
    if not kept:
        raise _refusal(problem, scheduler, refused)
    return _decided(problem, scheduler, found, kept, refused, deadline)


def _check(problem: Problem, scheduler: str) -> None:
    """Raise where the problem is too large, the scheduler does not take it, or the objective needs missing figures."""
    devices = problem.platform.devices
    if len(devices) > MOST_DEVICES:
        raise PlatformError(
            f"platform {problem.platform.name} has {len(devices)} devices; plans are made for up to {MOST_DEVICES}: "
            "leave some out of the platform file"
        )
    if scheduler != BEST:
        check_scheduler(scheduler)
        _check_declared(problem, scheduler, SCHEDULERS[scheduler])
    if problem.objective == "energy":
        require_energy(problem)
    if "dram" in problem.objective:
        require_caches(problem)


def _check_declared(problem: Problem, scheduler: str, declared: Scheduler) -> None:
    """Raise OptionError where a scheduler does not declare the problem's objective, limits or stages."""
    if problem.objective not in declared.objectives:
        raise OptionError(
            f"scheduler {scheduler} does not plan for objective {problem.objective}, only for "
            f"{', '.join(o for o in OBJECTIVES if o in declared.objectives)}; use "
            f"{BY_EDGES if counts_edges(problem.objective) else declared.instead}",
            option="objective",
            value=problem.objective,
        )
    for limit in LIMITS:
        value = getattr(problem, limit)
        if value and limit in declared.refuses:
            raise OptionError(
                f"scheduler {scheduler} does not plan under `{limit}`; use {declared.instead}",
                option=limit,
                value=value,
            )
    if problem.stages is not None and declared.stages and problem.stages not in declared.stages:
        has = " or ".join(map(str, declared.stages))
        raise OptionError(
            f"`stages` {problem.stages}: the plans of scheduler {scheduler} have {has}; leave `stages` out, or use "
            f"{declared.instead}",
            option="stages",
            value=problem.stages,
        )


def _searched(problem: Problem, scheduler: str, deadline: float | None) -> SearchResult:
    """Search without activations and without the stages that were measured as a whole, which searches do not count.

    The bound of this relaxation is one of the problem, unless stages were measured as a whole.
    """
    operators_alone = replace(problem, profile=replace(problem.profile, segments=()))
    relaxed = replace(operators_alone, activations=False)
    if scheduler == BEST:
        found = find_candidates(relaxed, deadline)
        if not found.plans:
            raise found.error or InfeasibleError(f"no plan of {problem.graph.name} is possible")
        found.plans.sort(key=_preference)
        return found
    declared = SCHEDULERS[scheduler]
    asked = operators_alone if "activations" in declared.counts else relaxed
    try:
        plan = judged(asked, replace(declared.run(asked), scheduler=scheduler))
    except NoPlanError:
        raise
    except PlanError as error:
        raise LimitMissedError(
            f"the plan of scheduler {scheduler} is refused: {error}; use {declared.instead}"
        ) from error
    return SearchResult([plan], plan.bound)


def _what_is_possible(problem: Problem) -> str:
    """Return the best that a plan can do where no plan keeps a limit of speed; empty where there is no such limit."""
    told = []
    with suppress(PlanError, OptionError, ProfileError):
        if problem.min_throughput_fps is not None:
            free = replace(problem, objective="throughput", min_throughput_fps=None)
            told.append(f"the fastest plan makes {proposed(free).plan.predicted.throughput_fps:.4g} frames a second")
        if problem.max_latency_s is not None:
            free = replace(problem, objective="latency", max_latency_s=None)
            told.append(f"the shortest latency of a plan is {proposed(free).plan.predicted.latency_s:.3g} s")
    return "".join(f"; {one}" for one in told)


def _kept(problem: Problem, plans: list[Plan]) -> tuple[list[Plan], dict[Plan, PlanError]]:
    """Return the plans that the judge accepts, in orders that fit, and for each refused plan the error."""
    if not (problem.counts_activations or problem.profile.segments):
        return list(plans), {}
    kept, refused = [], {}
    for plan in plans:
        try:
            kept.append(fitting_plan(problem, plan))
        except PlanError as error:
            refused[plan] = error
    return kept, refused


def _recut(problem: Problem, deadline: float | None) -> list[Plan]:
    """Return plans that fit with their activations, by the schedulers whose searches count them.

    Raises:
        InfeasibleError: an operator fits on no device.
    """
    limited = with_time_left(problem, deadline)
    # The simple plans are made again, because `find_candidates` drops those that differ in their memory alone.
    makers: dict[str, Maker] = {
        "chain": lambda _: [chain_of(limited)],
        "single": lambda _: singles(limited),
        "replicas": lambda _: [replicas_of_any_count(limited)],
    }
    plans, errors = made(makers)
    plans = [plan for plan in plans if problem.stages in (None, len(plan.stages))]
    if not plans and errors:
        raise next(iter(errors.values()))
    return plans


def _refusal(problem: Problem, scheduler: str, refused: dict[Plan, PlanError]) -> LimitMissedError:
    """Return the error for a problem whose plans were all refused."""
    first = next(iter(refused.values()))
    if not problem.counts_activations:
        return LimitMissedError(f"no plan keeps the limits once its stages were measured: {first}")
    return LimitMissedError(
        f"scheduler {scheduler} counts parameters alone, and its plan does not fit: {first}; or use "
        "scheduler best or chain, which cut anew"
    )


def _decided(
    problem: Problem,
    scheduler: str,
    found: SearchResult,
    kept: list[Plan],
    refused: dict[Plan, PlanError],
    deadline: float | None,
) -> Decision:
    """Return the best of the plans, with its bound and with the reason for the choice."""
    plans = sorted({plan.stages: plan for plan in reversed(kept)}.values(), key=_preference)
    if problem.profile.segments:
        # The searches' bound counts times of operators. It is no bound of the times of whole stages; that follows.
        plans = [replace(plan, status="feasible", bound=None) for plan in plans]
    elif scheduler == BEST or refused:
        plans[0] = with_bound(plans[0], found.bound)
    if any(plan.bound is None for plan in plans):
        known = found.bound if scheduler == BEST and not problem.profile.segments else None
        bound = known if known is not None else bound_within(problem, deadline)
        plans = [with_bound(plan, bound) if plan.bound is None else plan for plan in plans]
    if scheduler != BEST:
        why = f"it was asked for with `scheduler` {scheduler}"
    else:
        why = _why(plans)
        first = found.plans[0]  # the best of the relaxation
        if first in refused:
            why += f"; {describe(first)} does not fit with its activations: {refused[first]}"
    share = idle_share(problem, plans[0].predicted) if problem.objective == "energy" else 0.0
    if share:
        why += f"; {share:.0%} of its energy is the {idle_w(problem):.3g} W of the idle machine"
    return Decision(plans[0], tuple(plans), why, asked=scheduler != BEST)


def _preference(plan: Plan) -> tuple[tuple[float, ...], int, int, tuple[float, ...]]:
    """Return the sort key of a plan: its figures, then its simplicity; figures that differ by rounding are equal."""
    figures = cost_key(plan)
    rounded = tuple(float(f"{figure:.12g}") for figure in figures)
    return rounded, len(plan.stages), len(plan.devices), figures


def with_bound(best: Plan, bound: tuple[float, ...] | None) -> Plan:
    """Return the best plan with the bound of all schedulers together."""
    if bound is None or best.value is None:
        return replace(best, status="feasible", bound=None)
    if reaches(best, bound):
        return replace(best, status="optimal", bound=best.value)
    return replace(best, status="feasible", bound=bound)


def _why(candidates: list[Plan]) -> str:
    """Return the margins of the first plan over the others, in words."""
    best, *others = candidates
    if not others:
        return "no other plan competes with it"
    parts = [f"{margin(best, other) or 0.0:+.1%} against {describe(other)}" for other in others]
    return f"{describe(best)} has the best {best.objective}: {', '.join(parts)}"
