"""Plans of graphs whose downsets are too many to list, and the bound of all plans that is tightened beside them.

Minimum cuts find plans and bounds (`local/refined_chain.py`), local search improves plans, and CP-SAT goes on from
there. Each gets a part of the time. Next: `candidates.py`, which calls `plan_large_graph` and lets its plan compete.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from tvm_pipeline.core.plan import Plan, Stage, cost_key
from tvm_pipeline.core.platform import disjoint_sets
from tvm_pipeline.core.problem import Problem, by_tensors, counts_edges
from tvm_pipeline.cost.evaluate import evaluate, judged
from tvm_pipeline.errors import NoPlanError, OptionError, PlanError
from tvm_pipeline.planning.local.bounds import better_bound
from tvm_pipeline.planning.local.local_search import local_search
from tvm_pipeline.planning.local.refined_chain import RefinedChain
from tvm_pipeline.planning.sat.cp_sat import cp_sat
from tvm_pipeline.planning.sat.staging import stage_of
from tvm_pipeline.planning.search.cuts import grouped
from tvm_pipeline.planning.search.dynamic_programming import chain

# `best` gives CP-SAT this time where the downsets are too many to list and the problem has no time limit, and half of
# this to the bound by minimum cuts before and after local search.
CP_SAT_S, REFINED_S = 60.0, 10.0
# Of the time that is left the bound by minimum cuts takes this part, before local search and after it.
REFINED_SHARE = 0.4
# Of the time that is left local search takes this part, and CP-SAT the rest.
LOCAL_SHARE = 0.4
# The largest models of CP-SAT: operators times stages times devices.
MOST_LITERALS = 300_000
# `size_of` of the largest problems whose order is cut by dynamic programming, which takes some seconds.
MOST_CHAIN = 4_000_000

# A maker gets the plans of the makers before it, and returns plans of its own.
Maker = Callable[[list[Plan]], list[Plan]]


class LazyBound:
    """The bound of all plans that `best` considers, computed when it is first asked for."""

    def __init__(self, problem: Problem, compute: Callable[[], tuple[float, ...]]) -> None:
        self.problem, self.compute = problem, compute
        self._known: tuple[float, ...] | None = None

    def __call__(self) -> tuple[float, ...]:
        if self._known is None:
            self._known = self.compute()
        return self._known

    def tighten(self, other: tuple[float, ...]) -> None:
        """Take another bound of the same plans where it says more."""
        self._known = better_bound(self.problem, self._known, other)


def plan_large_graph(problem: Problem, bound: LazyBound, *, again: bool) -> Plan:
    """Return a good pipeline of a graph whose downsets are too many to list.

    It begins with the best pipeline along the graph's order. What the bound by minimum cuts meets is better, local
    search goes on from there, and then CP-SAT, unless the bound of all plans is reached, or its model would be too
    large.

    Args:
        bound: of all plans; it is tightened.
        again: whether the bound holds for plans in which a device serves several stages.
    """
    deadline = None if problem.time_limit_s is None else time.monotonic() + problem.time_limit_s
    plans, errors = made(
        {"chain": lambda _: [_along_the_order(with_time_left(problem, deadline))]}
        if size_of(problem) <= MOST_CHAIN
        else {}
    )
    most = bound()
    refined = None
    if not again and most[0] > 0 and not any(reaches(plan, most) for plan in plans):
        refined = RefinedChain.of(problem, 1 / most[0])
    if refined is not None:
        plans += _refined(problem, refined, plans, bound, deadline)
    if not any(reaches(plan, bound()) for plan in plans):
        share = LOCAL_SHARE if _fits_cp_sat(problem) else 1.0
        begun = with_time_left(problem, deadline)
        limited = begun if begun.time_limit_s is None else replace(begun, time_limit_s=begun.time_limit_s * share)
        hint = min(plans, key=cost_key).stages if plans else None
        if size_of(problem) > MOST_CHAIN and problem.stages is None:
            # Of a large graph even one number of stages takes all the time: as many as there are devices.
            widest = max(map(len, disjoint_sets(problem.platform.devices)))
            limited = replace(limited, stages=min(widest, len(problem.graph)))
        found, missed = made({"local-search": lambda _: [local_search(limited, hint)]})
        plans, errors = plans + found, errors | missed
        if refined is not None:
            plans += _refined(problem, refined, plans, bound, deadline)
    # Of equal plans the first one counts, which is that of the simpler scheduler.
    best = replace(min(plans, key=cost_key), status="feasible", bound=None) if plans else None
    proves = _fits_cp_sat(problem)
    if best is None and not proves:
        raise next(iter(errors.values()))
    left_s = CP_SAT_S if deadline is None else max(0.0, deadline - time.monotonic())
    if best is not None and (not proves or not left_s or reaches(best, bound())):
        return best
    proven = cp_sat(replace(problem, time_limit_s=left_s), best.stages if best else None)
    if best is None or proven.stages != best.stages or proven.status == "optimal":
        return proven
    return replace(best, bound=proven.bound)


def _refined(
    problem: Problem, refined: RefinedChain, plans: list[Plan], bound: LazyBound, deadline: float | None
) -> list[Plan]:
    """Tighten the bound by minimum cuts, and return the plan of its cuts, if there is one."""
    graph = problem.graph
    devices = [device.name for device in max(disjoint_sets(problem.platform.devices), key=len)][: refined.stages]
    for plan in sorted(plans, key=cost_key)[:1]:
        if len(plan.stages) == refined.stages:
            refined.learn(np.array(stage_of(graph, plan.stages)))
    now = time.monotonic()
    refined.tighten(now + (REFINED_S if deadline is None else REFINED_SHARE * max(0.0, deadline - now)))
    bound.tighten((1 / refined.period_s,))
    if refined.stage_of is None:
        return []
    groups = grouped(graph, refined.stage_of.tolist(), len(devices))
    stages = tuple(Stage((device,), group) for device, group in zip(devices, groups, strict=True))
    try:
        return [Plan(graph.name, "cuts", problem.objective, stages, evaluate(problem, stages).predicted)]
    except PlanError:
        return []  # a stage does not fit on its device


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


def with_time_left(problem: Problem, deadline: float | None) -> Problem:
    """Return the problem with the time that is left until the deadline."""
    return problem if deadline is None else replace(problem, time_limit_s=max(0.0, deadline - time.monotonic()))


def reaches(plan: Plan, bound: tuple[float, ...]) -> bool:
    return plan.value is not None and all(
        math.isclose(value, limit, rel_tol=1e-9) for value, limit in zip(plan.value, bound, strict=True)
    )


def chain_of(problem: Problem) -> Plan:
    """Return the best pipeline along the graph's order, or a good one where communication is counted by edges."""
    return by_edges(problem, chain) if counts_edges(problem.objective) else chain(problem)


def by_edges(problem: Problem, plan_by_tensors: Callable[[Problem], Plan]) -> Plan:
    """Return the plan that is best with communication counted by tensors; nothing is proven of it by edges."""
    plan = plan_by_tensors(replace(problem, objective=by_tensors(problem.objective)))
    return replace(judged(problem, plan), objective=problem.objective, status="feasible", bound=None)


def _along_the_order(problem: Problem) -> Plan:
    """Return `chain_of`; raise NoPlanError where that search has too many states, for which others are a remedy."""
    try:
        return chain_of(problem)
    except OptionError as error:
        raise NoPlanError(str(error)) from error


def size_of(problem: Problem) -> int:
    """Return the operators times the square of the devices, as which the time of simple searches grows."""
    return len(problem.graph) * len(problem.platform.devices) ** 2


def _fits_cp_sat(problem: Problem) -> bool:
    """Return whether the model of CP-SAT can be built in a few seconds."""
    devices = max(map(len, disjoint_sets(problem.platform.devices)))
    stages = problem.stages or 2 * devices
    each = 1 if problem.is_lexicographic else len(problem.platform.devices)
    return len(problem.graph) * stages * each <= MOST_LITERALS
