"""The plans that compete in `best`, and the bound that holds for all of them.

Where the downsets of a graph can be listed, dynamic programming over them is exact. Where they are too many, or the
devices are, `large_graphs.py` searches, and `local/bounds.py` bounds all plans that there are. Next: `planner.py`,
which chooses between the candidates.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from tvm_pipeline.core.plan import Plan, Stage, cost_key
from tvm_pipeline.core.platform import disjoint_sets
from tvm_pipeline.core.problem import Problem, counts_edges
from tvm_pipeline.cost.device_costs import cost_of, counts_period
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, NoPlanError, OptionError, PlanError
from tvm_pipeline.planning.baselines.whole_model import each_engine, replicas_by_engine, singles
from tvm_pipeline.planning.large_graphs import (
    CP_SAT_S,
    LazyBound,
    Maker,
    by_edges,
    made,
    plan_large_graph,
    reaches,
    size_of,
    with_time_left,
)
from tvm_pipeline.planning.local.bounds import better_bound, lower_bound
from tvm_pipeline.planning.sat.cp_sat import cp_sat
from tvm_pipeline.planning.search.cuts import Cuts, prefixes
from tvm_pipeline.planning.search.cuts import ideals as listed_ideals
from tvm_pipeline.planning.search.dynamic_programming import chain, least_period, plan_over, two_stage
from tvm_pipeline.planning.search.revisits import revisits
from tvm_pipeline.planning.search.space import replica_units, single_units
from tvm_pipeline.planning.search.work_bound import shares_replicas

# `best` searches for replicated stages over all downsets up to this number, else over the graph's own order.
MOST_HYBRID_CUTS = 10_000
# The bound of all plans takes this time at most, and this part of what a time limit leaves.
BOUND_S, BOUND_SHARE = 10.0, 0.25
# `size_of` of the largest problems for which all simple plans are compared, which takes some seconds.
MOST_SIMPLE = 250_000


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of the searches.

    Attributes:
        plans: distinct plans, best first, by the relaxation that was searched.
        bound: no plan of any of the schedulers is better than this; None where a scheduler by name proved nothing.
        error: the reason where there are no plans.
    """

    plans: list[Plan]
    bound: tuple[float, ...] | None
    error: NoPlanError | None = None


def find_candidates(problem: Problem, deadline: float | None) -> SearchResult:
    """Return the distinct plans of all schedulers that compete, and the bound that holds for all plans of these."""
    # The downsets are listed once for all schedulers that cut the graph anywhere.
    cuts = listed_ideals(problem.graph)
    bound_of_every_plan = LazyBound(problem, partial(bound_within, problem, deadline))
    plans, errors = made(_makers(problem, deadline, cuts, bound_of_every_plan))
    if problem.stages is not None:
        plans = [plan for plan in plans if len(plan.stages) == problem.stages]
    # Two algorithms that agree are one candidate, named after the simpler one.
    distinct = list({plan.stages: plan for plan in reversed(plans)}.values())
    bound = _common_bound(problem, plans, errors, deadline, bound_of_every_plan)
    if plans and (bound is None or not any(reaches(plan, bound) for plan in plans)):
        bound = better_bound(problem, bound, bound_of_every_plan())
    # Of the errors, that of the search for pipelines tells most: it is the widest search that always runs.
    return SearchResult(distinct, bound, errors.get("pipeline"))


def bound_within(problem: Problem, deadline: float | None = None) -> tuple[float, ...]:
    """Return `lower_bound` of all plans that `best` considers, in a part of the time that is left."""
    now = time.monotonic()
    left_s = BOUND_S if deadline is None else min(BOUND_S, BOUND_SHARE * max(0.0, deadline - now))
    return lower_bound(problem, now + left_s, again=_serves_again(problem))


def _makers(problem: Problem, deadline: float | None, cuts: Cuts | None, bound: LazyBound) -> dict[str, Maker]:
    """Return the schedulers that compete for the objective of the problem, by name, the simplest first."""

    def left() -> Problem:
        return with_time_left(problem, deadline)

    def cut(_: list[Plan]) -> list[Plan]:
        if cuts is not None:
            with suppress(OptionError):  # many unequal devices have more states than can be held
                return [_pipeline(left(), cuts)]
        return [plan_large_graph(left(), bound, again=_serves_again(problem))]

    def cut_in_two(_: list[Plan]) -> list[Plan]:
        with suppress(OptionError):  # many unequal devices, as in `cut`
            return [two_stage(left())]
        return []

    pipeline: dict[str, Maker] = {"pipeline": cut}
    if counts_edges(problem.objective):
        return pipeline
    if problem.is_lexicographic:
        return {"chain": lambda _: [chain(left())], **pipeline} if cuts is not None else pipeline
    if cuts is None and size_of(problem) > MOST_SIMPLE:
        return {"whole": lambda _: _whole_models(problem), **pipeline}
    makers: dict[str, Maker] = {
        "single": lambda _: _distinct(singles(problem)),
        "replicas": lambda _: replicas_by_engine(problem),
        "two-stage": cut_in_two,
        **pipeline,
    }
    # Replicated stages and devices that serve twice raise the throughput, and never shorten the latency of a frame.
    if counts_period(problem) and (cuts is not None or _spares_devices(problem)):
        makers["hybrid"] = lambda known: [_with_replicas(left(), cuts, known)]
    if _revisits(problem):
        makers["revisits"] = lambda _: [revisits(left())]
    return makers


def _whole_models(problem: Problem) -> list[Plan]:
    """Return plans of the whole model: on the device that computes it fastest, and replicated on all devices.

    Each engine has its own, where there are several.
    """
    own = [plan for alone in each_engine(problem) for plan in _whole_models(alone)]
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
    return list({plan.stages: plan for plan in (*own, *found)}.values())


def _spares_devices(problem: Problem) -> bool:
    """Return whether there are more devices than stages, so that stages may have replicas."""
    return shares_replicas(problem) or max(map(len, disjoint_sets(problem.platform.devices))) > (problem.stages or 1)


def _serves_again(problem: Problem) -> bool:
    """Return whether a device may serve several stages of a plan that `best` considers."""
    return shares_replicas(problem) or _revisits(problem)


def _revisits(problem: Problem) -> bool:
    """Return whether plans compete in which a device serves several stages, although the period counts."""
    unlimited = problem.max_latency_s is None and problem.min_throughput_fps is None
    return problem.objective != "latency" and counts_period(problem) and unlimited and _has_few_sequences(problem)


def _common_bound(
    problem: Problem, plans: list[Plan], errors: Mapping[str, NoPlanError], deadline: float | None, of_all: LazyBound
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
        bounds.append(of_all())
    return max(bounds) if problem.objective == "throughput" else min(bounds)


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
    guess = by_edges(problem, lambda other: _pipeline(other, cuts))
    most_s = CP_SAT_S if problem.time_limit_s is None else problem.time_limit_s - (time.monotonic() - started)
    return cp_sat(replace(problem, time_limit_s=max(0.0, most_s)), guess.stages)
