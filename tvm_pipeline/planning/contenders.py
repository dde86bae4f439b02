"""The plans that compete in `best`, and the bound that holds for all of them.

Where the downsets of a graph can be listed, dynamic programming over them is exact. Where they are too many, local
search finds a plan and CP-SAT goes on from it, and `local/bounds.py` bounds all plans that there are. Next:
`planner.py`, which chooses between the candidates.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from tvm_pipeline.core.plan import Plan, Stage, cost_key
from tvm_pipeline.core.platform import disjoint_sets
from tvm_pipeline.core.problem import Problem, by_tensors, counts_edges
from tvm_pipeline.cost.device_costs import cost_of, counts_period
from tvm_pipeline.cost.evaluate import evaluate, judged
from tvm_pipeline.errors import InfeasibleError, NoPlanError, OptionError, PlanError
from tvm_pipeline.planning.baselines.two_stage import two_stage
from tvm_pipeline.planning.baselines.whole_model import replicas_of_any_count, singles
from tvm_pipeline.planning.local.bounds import better_bound, lower_bound
from tvm_pipeline.planning.local.local_search import local_search
from tvm_pipeline.planning.sat.cp_sat import cp_sat
from tvm_pipeline.planning.search.cuts import Cuts, prefixes
from tvm_pipeline.planning.search.cuts import ideals as listed_ideals
from tvm_pipeline.planning.search.dynamic_programming import chain, least_period, plan_over
from tvm_pipeline.planning.search.revisits import revisits
from tvm_pipeline.planning.search.space import replica_units, single_units
from tvm_pipeline.planning.search.work_bound import bound_of_all, shares_replicas

# `best` gives CP-SAT this time where the downsets are too many to list and the problem has no time limit.
CP_SAT_S = 60.0
# `best` searches for replicated stages over all downsets up to this number, else over the graph's own order.
MOST_HYBRID_CUTS = 10_000
# The bound of all plans takes this time at most, and this part of what a time limit leaves.
BOUND_S, BOUND_SHARE = 10.0, 0.25
# Of the time that is left local search takes this part, and CP-SAT the rest.
LOCAL_SHARE = 0.4
# The largest models of CP-SAT: operators times stages times devices.
MOST_LITERALS = 300_000
# `_size` of the largest problems for which all simple plans are compared, and of those whose order is cut by dynamic
# programming; together they take some seconds.
MOST_SIMPLE = 250_000
MOST_CHAIN = 4_000_000

# A maker gets the plans of the makers before it, and returns plans of its own.
Maker = Callable[[list[Plan]], list[Plan]]


@dataclass(frozen=True, slots=True)
class Found:
    """The result of the searches.

    Attributes:
        plans: distinct plans, best first, by the relaxation that was searched.
        bound: no plan of any of the schedulers is better than this; None where a scheduler by name proved nothing.
        error: the reason where there are no plans.
    """

    plans: list[Plan]
    bound: tuple[float, ...] | None
    error: NoPlanError | None = None


def contenders(problem: Problem, deadline: float | None) -> Found:
    """Return the distinct plans of all schedulers that compete, and the bound that holds for all plans of these."""
    # The downsets are listed once for all schedulers that cut the graph anywhere.
    cuts = listed_ideals(problem.graph)
    bound_of_every_plan = cache(lambda: bound_within(problem, deadline))
    plans, errors = made(_makers(problem, deadline, cuts, bound_of_every_plan))
    if problem.stages is not None:
        plans = [plan for plan in plans if len(plan.stages) == problem.stages]
    # Two algorithms that agree are one candidate, named after the simpler one.
    distinct = list({plan.stages: plan for plan in reversed(plans)}.values())
    bound = _common_bound(problem, plans, errors, deadline)
    if plans and (bound is None or not any(_reaches(plan, bound) for plan in plans)):
        bound = better_bound(problem, bound, bound_of_every_plan())
    # Of the errors, that of the search for pipelines tells most: it is the widest search that always runs.
    return Found(distinct, bound, errors.get("pipeline"))


def bound_within(problem: Problem, deadline: float | None = None) -> tuple[float, ...]:
    """Return `lower_bound` of all plans that `best` considers, in a part of the time that is left."""
    now = time.monotonic()
    left_s = BOUND_S if deadline is None else min(BOUND_S, BOUND_SHARE * max(0.0, deadline - now))
    return lower_bound(problem, now + left_s, again=shares_replicas(problem) or _revisits(problem))


def _makers(
    problem: Problem, deadline: float | None, cuts: Cuts | None, bound: Callable[[], tuple[float, ...]]
) -> dict[str, Maker]:
    """Return the schedulers that compete for the objective of the problem, by name, the simplest first."""

    def left() -> Problem:
        return with_time_left(problem, deadline)

    pipeline: dict[str, Maker] = {
        "pipeline": lambda _: [_pipeline(left(), cuts) if cuts is not None else _anywhere(left(), bound)]
    }
    if counts_edges(problem.objective):
        return pipeline
    if problem.is_lexicographic:
        return {"chain": lambda _: [chain(left())], **pipeline} if cuts is not None else pipeline
    if cuts is None and _size(problem) > MOST_SIMPLE:
        return {"whole": lambda _: _whole_models(problem), **pipeline}
    makers: dict[str, Maker] = {
        "single": lambda _: _distinct(singles(problem)),
        "replicas": lambda _: [replicas_of_any_count(problem)],
        "two-stage": lambda _: [two_stage(problem)],
        **pipeline,
    }
    # Replicated stages and devices that serve twice raise the throughput, and never shorten the latency of a frame.
    if counts_period(problem) and (cuts is not None or _spares_devices(problem)):
        makers["hybrid"] = lambda known: [_with_replicas(left(), cuts, known)]
    if _revisits(problem):
        makers["revisits"] = lambda _: [revisits(left())]
    return makers


def _whole_models(problem: Problem) -> list[Plan]:
    """Return two plans of the whole model: on the device that computes it fastest, and replicated on all devices."""
    graph, names = problem.graph, tuple(operator.name for operator in problem.graph.operators)
    macs = np.array([operator.macs for operator in graph.operators], np.float64)
    seconds = {}
    for device in problem.platform.devices:
        costs = cost_of(problem, device)
        of_device = float((costs.every_added_s(graph.operators) + costs.every_work_s(macs)).sum())
        if not math.isnan(of_device):  # else it cannot run some operator
            seconds[device.name] = of_device + costs.spill_s(sum(operator.param_bytes for operator in graph.operators))
    widest = max(disjoint_sets(problem.platform.devices), key=len)
    able = tuple(device.name for device in widest if device.name in seconds)
    found = []
    for devices in ((min(seconds, key=seconds.__getitem__),) if seconds else (), able):
        with suppress(PlanError):
            predicted = evaluate(problem, (Stage(devices, names),)).predicted
            name = "single" if len(devices) == 1 else "replicas"
            found.append(Plan(graph.name, name, problem.objective, (Stage(devices, names),), predicted))
    return found


def _spares_devices(problem: Problem) -> bool:
    """Return whether there are more devices than stages, so that stages may have replicas."""
    return shares_replicas(problem) or max(map(len, disjoint_sets(problem.platform.devices))) > (problem.stages or 1)


def _revisits(problem: Problem) -> bool:
    """Return whether plans compete in which a device serves several stages, although the period counts."""
    unlimited = problem.max_latency_s is None and problem.min_throughput_fps is None
    return problem.objective != "latency" and counts_period(problem) and unlimited and _has_few_sequences(problem)


def _reaches(plan: Plan, bound: tuple[float, ...]) -> bool:
    return plan.value is not None and all(
        math.isclose(value, limit, rel_tol=1e-9) for value, limit in zip(plan.value, bound, strict=True)
    )


def made(makers: Mapping[str, Maker]) -> tuple[list[Plan], dict[str, NoPlanError]]:
    """Return the plans of all makers, and the errors of those that make none."""
    plans: list[Plan] = []
    errors: dict[str, NoPlanError] = {}
    for name, make in makers.items():
        try:
            plans += make(plans)
        except NoPlanError as error:
            errors[name] = error
    return plans, errors


def _common_bound(
    problem: Problem, plans: list[Plan], errors: Mapping[str, NoPlanError], deadline: float | None
) -> tuple[float, ...] | None:
    """Return the bound that holds for the plans of every scheduler; None where a search proved nothing."""
    # A search that ended before it had a plan, or whose plan misses a limit, has no bound either. The search of
    # two-stage need not prove anything, because plans of two stages are pipelines, too.
    unproven = any(not isinstance(error, InfeasibleError) for name, error in errors.items() if name != "two-stage")
    bounds = [plan.bound for plan in plans if plan.bound is not None]
    if not bounds or len(bounds) < len(plans) or unproven or (errors and deadline is not None):
        return None
    # Beside ordered operators, replicas may serve other stages, which the searches leave out.
    if shares_replicas(problem):
        bounds.append((bound_of_all(problem),))
    return max(bounds) if problem.objective == "throughput" else min(bounds)


def with_time_left(problem: Problem, deadline: float | None) -> Problem:
    """Return the problem with the time that is left until the deadline."""
    return problem if deadline is None else replace(problem, time_limit_s=max(0.0, deadline - time.monotonic()))


def _distinct(plans: list[Plan]) -> list[Plan]:
    """Return one plan for each prediction, since plans for equal devices have equal predictions."""
    return list({plan.predicted: plan for plan in reversed(plans)}.values())


def _with_replicas(problem: Problem, cuts: Cuts | None, known: list[Plan]) -> Plan:
    """Return the best plan with replicated stages, or the best known plan where replicas are no better.

    Where there are too many downsets, only the graph's own order is searched. The bound is then that of a relaxation
    over all downsets.
    """
    of_count = [plan for plan in known if problem.stages in (None, len(plan.stages))]
    best = min(of_count, key=cost_key, default=None)
    searched = cuts if cuts is not None and len(cuts) <= MOST_HYBRID_CUTS else prefixes(problem.graph)
    try:
        plan = plan_over(problem, searched, replica_units, "hybrid", best)
    except OptionError as error:
        if best is None:
            raise NoPlanError(str(error)) from error
        return replace(best, status="feasible", bound=None)  # too many sets of replicas
    if searched is cuts:
        return plan
    if cuts is None or problem.objective != "throughput":
        return replace(plan, status="feasible", bound=None)
    bound = 1 / max(least_period(problem, cuts, replica_units), 1e-12)
    return replace(plan, status="feasible", bound=(bound,))


def _has_few_sequences(problem: Problem) -> bool:
    """Return whether it takes about a second at most to try all sequences of devices."""
    count = max(map(len, disjoint_sets(problem.platform.devices)))
    return count <= 3 and len(problem.graph) * count**3 <= 8000


def _pipeline(problem: Problem, cuts: Cuts) -> Plan:
    """Return the best pipeline over all cuts of the graph, by the method that fits the objective."""
    if not counts_edges(problem.objective):
        return plan_over(problem, cuts, single_units, "ideals")
    started = time.monotonic()
    guess = _by_edges(problem, lambda other: _pipeline(other, cuts))
    most_s = CP_SAT_S if problem.time_limit_s is None else problem.time_limit_s - (time.monotonic() - started)
    return cp_sat(replace(problem, time_limit_s=max(0.0, most_s)), guess.stages)


def _anywhere(problem: Problem, bound: Callable[[], tuple[float, ...]]) -> Plan:
    """Return a good pipeline of a graph whose downsets are too many to list.

    It is that of local search, which begins with the best pipeline along the graph's order. CP-SAT goes on from there,
    unless the bound of all plans is reached, or its model would be too large.
    """
    deadline = None if problem.time_limit_s is None else time.monotonic() + problem.time_limit_s
    plans, errors = made(
        {"chain": lambda _: [_along_the_order(with_time_left(problem, deadline))]}
        if _size(problem) <= MOST_CHAIN
        else {}
    )
    most = bound()
    if not any(_reaches(plan, most) for plan in plans):
        share = LOCAL_SHARE if _fits_cp_sat(problem) else 1.0
        begun = with_time_left(problem, deadline)
        limited = begun if begun.time_limit_s is None else replace(begun, time_limit_s=begun.time_limit_s * share)
        hint = min(plans, key=cost_key).stages if plans else None
        if _size(problem) > MOST_CHAIN and problem.stages is None:
            # Of a large graph even one number of stages takes all the time: as many as there are devices.
            widest = max(map(len, disjoint_sets(problem.platform.devices)))
            limited = replace(limited, stages=min(widest, len(problem.graph)))
        found, missed = made({"local-search": lambda _: [local_search(limited, hint)]})
        plans, errors = plans + found, errors | missed
    # Of equal plans the first one counts, which is that of the simpler scheduler.
    best = replace(min(plans, key=cost_key), status="feasible", bound=None) if plans else None
    if (best is not None and _reaches(best, most)) or not _fits_cp_sat(problem):
        if best is None:
            raise next(iter(errors.values()))
        return best
    left_s = CP_SAT_S if deadline is None else max(0.0, deadline - time.monotonic())
    proven = cp_sat(replace(problem, time_limit_s=left_s), best.stages if best else None)
    if best is None or proven.stages != best.stages or proven.status == "optimal":
        return proven
    return replace(best, bound=proven.bound)


def _along_the_order(problem: Problem) -> Plan:
    """Return `chain_of`; raise NoPlanError where that search has too many states, for which others are a remedy."""
    try:
        return chain_of(problem)
    except OptionError as error:
        raise NoPlanError(str(error)) from error


def _size(problem: Problem) -> int:
    """Return the operators times the square of the devices, as which the time of simple searches grows."""
    return len(problem.graph) * len(problem.platform.devices) ** 2


def _fits_cp_sat(problem: Problem) -> bool:
    """Return whether the model of CP-SAT can be built in a few seconds."""
    devices = max(map(len, disjoint_sets(problem.platform.devices)))
    stages = problem.stages or 2 * devices
    each = 1 if problem.is_lexicographic else len(problem.platform.devices)
    return len(problem.graph) * stages * each <= MOST_LITERALS


def chain_of(problem: Problem) -> Plan:
    """Return the best pipeline along the graph's order, or a good one where communication is counted by edges."""
    return _by_edges(problem, chain) if counts_edges(problem.objective) else chain(problem)


def _by_edges(problem: Problem, plan_by_tensors: Callable[[Problem], Plan]) -> Plan:
    """Return the plan that is best with communication counted by tensors; nothing is proven of it by edges."""
    plan = plan_by_tensors(replace(problem, objective=by_tensors(problem.objective)))
    return replace(judged(problem, plan), objective=problem.objective, status="feasible", bound=None)
