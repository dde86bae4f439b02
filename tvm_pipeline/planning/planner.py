"""The one entry of planning: from a Problem to a Decision.

The default, `best`, never loses to the obvious. It makes every candidate (one device, replicas, pipelines, stages of
which some are replicated) and returns the best by the objective, with all the others and by how much it beats them.

`plan` takes these steps, each a function below:

1. `_checked`     refuse what the scheduler does not declare
2. `_searched`    let it search a relaxation: parameters alone, operators alone
3. `_kept`        judge what it found by all that was measured, with orders whose activations fit
4. `_recut`       cut anew where the best that was found does not fit
5. `_decided`     choose, and say what is proven
6. `rehearsed`    on a shared bus, choose by simulation

Next: `registry.py`, the schedulers; `rehearsal.py`, the last step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm_pipeline.core.plan import Decision, Plan, cost_key, describe, margin
from tvm_pipeline.core.platform import disjoint_sets
from tvm_pipeline.core.problem import OBJECTIVES, Problem
from tvm_pipeline.cost.device_costs import require_caches, require_energy
from tvm_pipeline.errors import InfeasibleError, LimitMissedError, NoPlanError, OptionError, PlanError
from tvm_pipeline.planning import rehearsal
from tvm_pipeline.planning.baselines.two_stage import two_stage
from tvm_pipeline.planning.baselines.whole_model import replicas, singles
from tvm_pipeline.planning.measured import MEASURED, SegmentTimer, measured_plan
from tvm_pipeline.planning.registry import LIMITS, SCHEDULERS
from tvm_pipeline.planning.sat.cp_sat import cp_sat
from tvm_pipeline.planning.search.cuts import Cuts, prefixes
from tvm_pipeline.planning.search.cuts import ideals as listed_ideals
from tvm_pipeline.planning.search.dynamic_programming import chain, least_period, plan_over
from tvm_pipeline.planning.search.revisits import revisits
from tvm_pipeline.planning.search.space import replica_units, single_units
from tvm_pipeline.planning.stage_orders import fitting_plan

BEST = "best"

# Where the downsets are too many and no time limit is given, `best` searches for so long, and states the gap.
CP_SAT_S = 60.0
# `best` looks for replicated stages at all downsets up to so many, else at the cuts of the graph's own order.
MOST_HYBRID_CUTS = 10_000


def plan(
    problem: Problem,
    scheduler: str = BEST,
    *,
    measure: SegmentTimer | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Decision:
    """Return the best plan of `problem` by the scheduler of that name, or of all of them (`best`), and why it is.

    Args:
        measure: what times a stage on a device, for the scheduler `measured`; `profiling.stage_timer` makes one.
        progress: told in a few words what is being done, where that takes long.

    Raises:
        OptionError: no scheduler has that name, or it does not take the problem's objective, limits or stages.
        InfeasibleError: it is proven that no plan exists; the message says what is in conflict.
        NoPlanError: no plan was found, and one may exist.
        ProfileError: nothing says how fast a device is, or what it draws where that is the objective.
    """
    _checked(problem, scheduler)
    if scheduler == MEASURED:
        return measured_plan(problem, measure, progress)
    decision = proposed(problem, scheduler)
    if scheduler == BEST and problem.time_limit_s is None and rehearsal.shares_a_bus(problem):
        progress("simulating the best plans, with turns on the bus")
        return rehearsal.rehearsed(problem, decision, proposed)
    return decision


def proposed(problem: Problem, scheduler: str = BEST) -> Decision:
    """Return the decision by predictions alone: `plan` without the rehearsal and without measuring."""
    deadline = None if problem.time_limit_s is None else time.monotonic() + problem.time_limit_s
    found = _searched(problem, scheduler)
    kept, refused = _kept(problem, found.plans)
    if scheduler == BEST and problem.counts_activations and found.plans[0] in refused:
        kept += _recut(problem, deadline)
    if not kept:
        raise _refusal(problem, scheduler, refused)
    return _decided(problem, scheduler, found, kept, refused)


def _checked(problem: Problem, scheduler: str) -> None:
    """Raise where the scheduler does not take the problem, by its declaration."""
    if scheduler not in (BEST, MEASURED):
        _check_declared(problem, scheduler)
    if problem.objective == "energy":
        require_energy(problem)
    if "dram" in problem.objective:
        require_caches(problem)


def _check_declared(problem: Problem, scheduler: str) -> None:
    declared = SCHEDULERS.get(scheduler)
    if declared is None:
        names = ", ".join((BEST, *SCHEDULERS, MEASURED))
        raise OptionError(f"no scheduler is called {scheduler}; there are {names}", option="scheduler", value=scheduler)
    if problem.objective not in declared.objectives:
        raise OptionError(
            f"scheduler {scheduler} does not plan for objective {problem.objective}, only for "
            f"{', '.join(o for o in OBJECTIVES if o in declared.objectives)}; use {declared.instead}",
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


@dataclass(frozen=True, slots=True)
class _Found:
    """What the searches found.

    Attributes:
        plans: distinct plans, best first, by the relaxation that was searched.
        bound: what no plan of any of the schedulers passes; None where that is not known.
        error: why there are no plans.
    """

    plans: list[Plan]
    bound: tuple[float, ...] | None
    error: NoPlanError | None = None


def _searched(problem: Problem, scheduler: str) -> _Found:
    """Search without activations and without the stages that were measured whole, which no search counts.

    The bound of this relaxation is one of the problem, unless whole stages were measured.
    """
    operators_alone = replace(problem, profile=replace(problem.profile, segments=()))
    relaxed = replace(operators_alone, activations=False)
    if scheduler == BEST:
        found = _considered(relaxed)
        if not found.plans:
            raise found.error or InfeasibleError(f"no plan of {problem.graph.name} is possible")
        found.plans.sort(key=_preference)
        return found
    declared = SCHEDULERS[scheduler]
    plan = declared.run(operators_alone if "activations" in declared.counts else relaxed)
    return _Found([plan], plan.bound)


def _kept(problem: Problem, plans: list[Plan]) -> tuple[list[Plan], dict[Plan, PlanError]]:
    """Return the plans that the judge takes, in orders that fit, and for each of the others the reason."""
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
    """Return plans that fit with their activations, where the best by parameters alone does not.

    Raises:
        InfeasibleError: an operator fits on no device.
    """
    if deadline is not None:
        problem = replace(problem, time_limit_s=max(0.0, deadline - time.monotonic()))
    # The relaxation leaves out what equals another plan in all but its memory.
    makers: tuple[Callable[[], list[Plan]], ...] = (
        lambda: [chain(problem)],
        lambda: singles(problem),
        lambda: [replicas(problem)],
    )
    plans: list[Plan] = []
    errors: list[NoPlanError] = []
    for make in makers:
        try:
            plans += make()
        except NoPlanError as error:
            errors.append(error)
    plans = [plan for plan in plans if problem.stages in (None, len(plan.stages))]
    if not plans and errors:
        raise errors[0]
    return plans


def _refusal(problem: Problem, scheduler: str, refused: dict[Plan, PlanError]) -> LimitMissedError:
    if not problem.counts_activations:
        return LimitMissedError(f"no plan keeps the limits once its stages were measured: {_first(refused)}")
    return LimitMissedError(
        f"scheduler {scheduler} counts parameters alone, and its plan does not fit: {_first(refused)}; or use "
        "scheduler best or chain, which cut anew"
    )


def _first(refused: dict[Plan, PlanError]) -> str:
    return str(next(iter(refused.values())))


def _decided(
    problem: Problem, scheduler: str, found: _Found, kept: list[Plan], refused: dict[Plan, PlanError]
) -> Decision:
    """Return the best of the plans, with what is proven of it."""
    plans = sorted({plan.stages: plan for plan in reversed(kept)}.values(), key=_preference)
    if problem.profile.segments:
        # A bound of the operators' times is none of whole stages.
        plans = [replace(plan, status="feasible", bound=None) for plan in plans]
    elif scheduler == BEST or refused:
        plans[0] = _with_bound(plans[0], found.bound)
    if scheduler != BEST:
        why = f"it was asked for with `scheduler` {scheduler}"
    else:
        why = _why(plans)
        worst = found.plans[0]
        if worst in refused:
            why += f"; {describe(worst)} does not fit with its activations: {refused[worst]}"
    return Decision(plans[0], tuple(plans), why)


def _preference(plan: Plan) -> tuple[tuple[float, ...], int, int]:
    """Order plans by their figures; of equal ones the simpler comes first."""
    return cost_key(plan), len(plan.stages), len(plan.devices)


def _with_bound(best: Plan, bound: tuple[float, ...] | None) -> Plan:
    """Return the best plan with the bound of all schedulers together."""
    if bound is None or best.value is None:
        return replace(best, status="feasible", bound=None)
    if all(math.isclose(value, limit, rel_tol=1e-9) for value, limit in zip(best.value, bound, strict=True)):
        return replace(best, status="optimal", bound=best.value)
    return replace(best, status="feasible", bound=bound)


def _considered(problem: Problem) -> _Found:
    """Return the distinct plans of all schedulers that compete, and the bound that all their searches prove."""
    deadline = None if problem.time_limit_s is None else time.monotonic() + problem.time_limit_s

    def left() -> Problem:
        return problem if deadline is None else replace(problem, time_limit_s=max(0.0, deadline - time.monotonic()))

    # Listed once for all that cut the graph anywhere.
    cuts = listed_ideals(problem.graph)
    plans: list[Plan] = []
    makers: dict[str, Callable[[], list[Plan]]] = {
        "single": lambda: _unlike(singles(problem)),
        "replicas": lambda: [replicas(problem)],
        "two-stage": lambda: [two_stage(problem)],
        "pipeline": lambda: [_pipeline(left(), cuts)],
    }
    # Replicas and devices that come again make frames come faster, never sooner.
    if problem.objective == "throughput" or problem.min_throughput_fps is not None:
        makers["hybrid"] = lambda: [_with_replicas(left(), cuts, plans)]
    if problem.objective == "throughput" and _few(problem):
        makers["revisits"] = lambda: [revisits(left())]
    if problem.is_lexicographic:
        makers = {"chain": lambda: [chain(left())], "pipeline": makers["pipeline"]}
    errors: dict[str, NoPlanError] = {}
    for name, make in makers.items():
        try:
            plans.extend(make())
        except NoPlanError as error:
            errors[name] = error
    # The search for pipelines explains itself best, and it is the widest that always runs.
    reason = errors.get("pipeline")
    if problem.stages is not None:
        plans = [plan for plan in plans if len(plan.stages) == problem.stages]
    bounds = [plan.bound for plan in plans]
    # Two algorithms that agree are one candidate, named after the simpler one.
    distinct = list({plan.stages: plan for plan in reversed(plans)}.values())
    # A search that ended before it had a plan, or had one that misses a limit, has no bound either.
    # Plans of two stages are pipelines, too, so that their search need not prove anything.
    unproven = any(not isinstance(error, InfeasibleError) for name, error in errors.items() if name != "two-stage")
    known = [bound for bound in bounds if bound is not None]
    if not known or len(known) < len(bounds) or unproven or (errors and deadline is not None):
        return _Found(distinct, None, reason)
    best = max(known) if problem.objective == "throughput" else min(known)
    return _Found(distinct, best, reason)


def _unlike(plans: list[Plan]) -> list[Plan]:
    """One of those that are predicted the same: equal devices make equal plans."""
    return list({plan.predicted: plan for plan in reversed(plans)}.values())


def _with_replicas(problem: Problem, cuts: Cuts | None, known: list[Plan]) -> Plan:
    """The best plan with replicated stages, or the best that is known where replicas do not better it.

    Of many ideals only the graph's own order is searched; what is proven of all of them is then the relaxation's bound.
    """
    fitting = [plan for plan in known if problem.stages in (None, len(plan.stages))]
    best = min(fitting, key=cost_key, default=None)
    whole = cuts is not None and len(cuts) <= MOST_HYBRID_CUTS
    try:
        plan = plan_over(
            problem, cuts if cuts is not None and whole else prefixes(problem.graph), replica_units, "hybrid", best
        )
    except OptionError as error:
        if best is None:
            raise NoPlanError(str(error)) from error
        return replace(best, status="feasible", bound=None)  # too many sets of replicas: nothing is proven
    if whole:
        return plan
    if cuts is None or problem.objective != "throughput":
        return replace(plan, status="feasible", bound=None)
    bound = 1 / max(least_period(problem, cuts, replica_units), 1e-12)
    return replace(plan, status="feasible", bound=(bound,))


def _few(problem: Problem) -> bool:
    """Whether trying all sequences of devices takes about a second at most."""
    count = max(map(len, disjoint_sets(problem.platform.devices)))
    return count <= 3 and len(problem.graph) * count**3 <= 8000 and problem.max_latency_s is None


def _pipeline(problem: Problem, cuts: Cuts | None) -> Plan:
    """The best pipeline over all ways to cut the graph, by the exact method that fits its size."""
    if cuts is not None:
        return plan_over(problem, cuts, single_units, "ideals")
    started = time.monotonic()
    guess = chain(problem)
    most_s = CP_SAT_S if problem.time_limit_s is None else problem.time_limit_s - (time.monotonic() - started)
    return cp_sat(replace(problem, time_limit_s=max(0.0, most_s)), guess.stages)


def _why(candidates: list[Plan]) -> str:
    best, *others = candidates
    if not others:
        return "it is the only plan possible"
    parts = [f"{margin(best, other) or 0.0:+.1%} against {describe(other)}" for other in others]
    return f"{describe(best)} has the best {best.objective}: {', '.join(parts)}"
