"""Schedulers: each a function Problem -> Plan, selectable by name. None imports TVM.

`solve` is what the rest of the package calls. The default, `best`, is the rule of the house: never lose to the
obvious. It makes every candidate (one device, replicas, pipelines, stages of which some are replicated) and returns
the best by the objective, with all the others and by how much it beats them. The baselines of the papers have names,
too, to be compared with.

Which exact method plans the pipelines is decided by counting: `ideals` where they can be listed, else `cp-sat` with
the best cut of the graph's own order as its first guess. They count parameters where a device's memory is limited;
`activations.py` says what becomes of plans whose tensors do not fit besides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from tvm_pipeline.core.plan import Plan, Problem, lead, merit
from tvm_pipeline.core.platform import disjoint_sets
from tvm_pipeline.cost.device_costs import require_caches, require_energy
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.errors import InfeasibleError, LimitMissedError, OptionError, PlanError
from tvm_pipeline.planning.baselines.coral import coral_parameters, coral_profiling, coral_profiling_original
from tvm_pipeline.planning.baselines.even_parameters import even_parameters
from tvm_pipeline.planning.baselines.greedy import greedy
from tvm_pipeline.planning.baselines.two_stage import two_stage
from tvm_pipeline.planning.baselines.whole_model import replicas, single, singles
from tvm_pipeline.planning.sat.cp_sat import cp_sat
from tvm_pipeline.planning.search.cuts import Cuts, prefixes
from tvm_pipeline.planning.search.cuts import ideals as listed_ideals
from tvm_pipeline.planning.search.dynamic_programming import chain, hybrid, ideals, least_period, plan_over
from tvm_pipeline.planning.search.revisits import revisits
from tvm_pipeline.planning.search.space import replica_units, single_units

Scheduler = Callable[[Problem], Plan]

SCHEDULERS: dict[str, Scheduler] = {
    "single": single,
    "replicas": replicas,
    "two-stage": two_stage,
    "chain": chain,
    "ideals": ideals,
    "cp-sat": cp_sat,
    "hybrid": hybrid,
    "revisits": revisits,
    "even-parameters": even_parameters,
    "greedy": greedy,
    "coral-parameters": coral_parameters,
    "coral-profiling": coral_profiling,
    "coral-profiling-original": coral_profiling_original,
}

# What these know of memory are parameters; the others judge whatever they try.
COUNT_PARAMETERS = ("two-stage", "ideals", "cp-sat", "hybrid", "revisits")

# Where the ideals are too many and no limit is given, `best` searches for so long, and states the gap.
CP_SAT_S = 60.0
# `best` looks for replicated stages at all ideals up to so many, else at the cuts of the graph's own order.
MOST_HYBRID_CUTS = 10_000


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen plan, every candidate (the chosen one among them, best first), and why it won."""

    plan: Plan
    candidates: tuple[Plan, ...]
    why: str


def solve(problem: Problem, scheduler: str = "best") -> Decision:
    """Plans `problem` with the scheduler of that name, or with all of them (`best`).

    Raises:
        OptionError: no scheduler has that name, or it does not make plans of `problem.stages` stages.
        InfeasibleError: no plan exists; the message gives each scheduler's reason.
    """
    if problem.objective == "energy":
        require_energy(problem)
    if "dram" in problem.objective:
        require_caches(problem)
    if problem.profile.segments:
        return _with_measured_stages(problem, scheduler)
    if problem.counts_activations and scheduler == "best":
        return _with_activations(problem)
    if scheduler != "best":
        if scheduler not in SCHEDULERS:
            raise OptionError(f"no scheduler is called {scheduler}; there are best, {', '.join(SCHEDULERS)}")
        plan = _by_name(problem, scheduler)
        if problem.stages not in (None, len(plan.stages)):
            raise OptionError(
                f"--stages {problem.stages}: the plans of scheduler {scheduler} have {len(plan.stages)}; "
                "leave --stages out, or choose chain or best"
            )
        return Decision(plan, (plan,), f"it was asked for with --scheduler {scheduler}")
    considered = _considered(problem)
    candidates = considered.plans
    if not candidates:
        raise InfeasibleError(f"no plan is possible: {considered.reason}")
    candidates.sort(key=_preference)
    candidates[0] = _proven(candidates[0], considered.bound)
    return Decision(candidates[0], tuple(candidates), _why(candidates))


@dataclass(frozen=True, slots=True)
class _Considered:
    """The distinct plans of all schedulers, why there are none, and what no plan of any of them passes."""

    plans: list[Plan]
    reason: str
    bound: tuple[float, ...] | None


def _with_measured_stages(problem: Problem, scheduler: str) -> Decision:
    """Plans without what was measured of whole stages, which only the judge knows, and judges with it.

    A bound of the operators' times is then none of the stages'.
    """
    found = solve(replace(problem, profile=replace(problem.profile, segments=())), scheduler)
    plans, reasons = [], []
    for plan in found.candidates:
        try:
            plans.append(replace(judged(problem, plan), status="feasible", bound=None))
        except PlanError as error:
            reasons.append(str(error))
    if not plans:
        raise InfeasibleError(f"no plan keeps the limits once its stages were measured: {reasons[0]}")
    plans.sort(key=merit)
    return Decision(plans[0], tuple(plans), found.why if len(plans) == 1 else _why(plans))


def _by_name(problem: Problem, scheduler: str) -> Plan:
    if not problem.counts_activations or scheduler not in COUNT_PARAMETERS:
        return SCHEDULERS[scheduler](problem)
    plan = SCHEDULERS[scheduler](replace(problem, activations=False))
    try:
        return judged(problem, plan)
    except PlanError as error:
        raise LimitMissedError(
            f"scheduler {scheduler} counts parameters alone, and its plan does not fit: {error}; or use --scheduler "
            "best or chain, which cut anew"
        ) from error


def _with_activations(problem: Problem) -> Decision:
    """Plans by parameters alone, a relaxation, and judges with activations; where its best does not fit, cuts anew."""
    deadline = None if problem.time_limit_s is None else time.monotonic() + problem.time_limit_s
    relaxed = solve(replace(problem, activations=False))
    plans: list[Plan] = []
    refused = reason = ""
    for plan in relaxed.candidates:
        try:
            plans.append(judged(problem, plan))
        except PlanError as error:
            refused = refused or f"{describe(plan)} does not fit with its activations: {error}"
    fits = relaxed.plan in plans
    if not fits:
        if deadline is not None:
            problem = replace(problem, time_limit_s=max(0.0, deadline - time.monotonic()))
        try:
            plans.append(chain(problem))
        except InfeasibleError as error:
            reason = str(error)
        # The relaxation leaves out what equals another plan in all but its memory.
        others: tuple[Callable[[], list[Plan]], ...] = (lambda: singles(problem), lambda: [replicas(problem)])
        for make in others:
            with suppress(InfeasibleError):
                plans += make()
    fitting = {plan.stages: plan for plan in reversed(plans) if problem.stages in (None, len(plan.stages))}
    if not fitting:
        raise InfeasibleError(f"no plan was found that fits: {reason}")
    plans = sorted(fitting.values(), key=_preference)
    plans[0] = _proven(plans[0], relaxed.plan.bound)
    why = _why(plans)
    return Decision(plans[0], tuple(plans), why if fits else f"{why}; {refused}")


def _preference(plan: Plan) -> tuple[tuple[float, ...], int, int]:
    """On equal figures the simpler plan wins."""
    return merit(plan), len(plan.stages), len(plan.devices)


def _proven(best: Plan, bound: tuple[float, ...] | None) -> Plan:
    """The best plan, as one of the space of all schedulers together."""
    if bound is None or best.value is None:
        return replace(best, status="feasible", bound=None)
    if all(math.isclose(value, limit, rel_tol=1e-9) for value, limit in zip(best.value, bound, strict=True)):
        return replace(best, status="optimal", bound=best.value)
    return replace(best, status="feasible", bound=bound)


def _considered(problem: Problem) -> _Considered:
    deadline = None if problem.time_limit_s is None else time.monotonic() + problem.time_limit_s

    def left() -> Problem:
        return problem if deadline is None else replace(problem, time_limit_s=max(0.0, deadline - time.monotonic()))

    # Listed once for all that cut the graph anywhere.
    cuts = listed_ideals(problem.graph)
    plans: list[Plan] = []
    makers: list[Callable[[], list[Plan]]] = [
        lambda: _unlike(singles(problem)),
        lambda: [replicas(problem)],
        lambda: [two_stage(problem)],
        lambda: [_pipeline(left(), cuts)],
    ]
    # Replicas and devices that come again make frames come faster, never sooner.
    if problem.objective == "throughput" or problem.min_throughput_fps is not None:
        makers.append(lambda: [_with_replicas(left(), cuts, plans)])
    if problem.objective == "throughput" and _few(problem):
        makers.append(lambda: [revisits(left())])
    if problem.is_lexicographic:
        makers = [lambda: [chain(left())], lambda: [_pipeline(left(), cuts)]]
    reasons: dict[int, str] = {}
    missed = False
    for index, make in enumerate(makers):
        try:
            plans.extend(make())
        except InfeasibleError as error:
            reasons[index] = str(error)
            missed = missed or isinstance(error, LimitMissedError)
    # The search for pipelines explains itself best, and it is the widest that always runs.
    reason = reasons.get(min(3, len(makers) - 1), "none has so many stages")
    if problem.stages is not None:
        plans = [plan for plan in plans if len(plan.stages) == problem.stages]
    bounds = [plan.bound for plan in plans]
    # Two algorithms that agree are one candidate, named after the simpler one.
    distinct = list({plan.stages: plan for plan in reversed(plans)}.values())
    # A search that was ended before it had a plan, or had one that misses a limit, has no bound either.
    known = [bound for bound in bounds if bound is not None]
    if not known or len(known) < len(bounds) or missed or (reasons and deadline is not None):
        return _Considered(distinct, reason, None)
    best = max(known) if problem.objective == "throughput" else min(known)
    return _Considered(distinct, reason, best)


def _unlike(plans: list[Plan]) -> list[Plan]:
    """One of those that are predicted the same: equal devices make equal plans."""
    return list({plan.predicted: plan for plan in reversed(plans)}.values())


def _with_replicas(problem: Problem, cuts: Cuts | None, known: list[Plan]) -> Plan:
    """The best plan with replicated stages, or the best that is known where replicas do not better it.

    Of many ideals only the graph's own order is searched; what is proven of all of them is then the relaxation's bound.
    """
    fitting = [plan for plan in known if problem.stages in (None, len(plan.stages))]
    best = min(fitting, key=merit, default=None)
    whole = cuts is not None and len(cuts) <= MOST_HYBRID_CUTS
    try:
        plan = plan_over(
            problem, cuts if cuts is not None and whole else prefixes(problem.graph), replica_units, "hybrid", best
        )
    except OptionError as error:
        if best is None:
            raise InfeasibleError(str(error)) from error
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
    parts = [f"{lead(best, other) or 0.0:+.1%} against {describe(other)}" for other in others]
    return f"{describe(best)} has the best {best.objective}: {', '.join(parts)}"


def describe(plan: Plan) -> str:
    """A plan in a few words: `cpu0 | cpu1` is a pipeline, `cpu0 + cpu1` are replicas."""
    return f"{plan.scheduler} ({' | '.join(' + '.join(stage.devices) for stage in plan.stages)})"
