"""Graphs with ordered operators: every search against every plan there is, and bounds of plans that share replicas."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.test_dynamic_programming import check, of_chain
from tests.support.brute_force import every_plan, every_sharing, figure, least
from tests.support.examples import examples, seeds
from tests.support.graphs import TIMED, Traits, constrained, problems, random_problem, randoms
from tvm_pipeline import planning
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Objective, Problem
from tvm_pipeline.cost.device_costs import counts_period
from tvm_pipeline.errors import NoPlanError
from tvm_pipeline.planning.local.bounds import lower_bound
from tvm_pipeline.planning.search.cost_tables import stage_seconds
from tvm_pipeline.planning.search.cuts import ideals as downsets
from tvm_pipeline.planning.search.dynamic_programming import chain, hybrid, ideals
from tvm_pipeline.planning.search.pipelines import Pruning, least_bottleneck
from tvm_pipeline.planning.search.space import Space, replica_units
from tvm_pipeline.planning.search.work_bound import spread

ORDERED = Traits(ordered=True, locks=True)
EVERYTHING = Traits(ordered=True, locks=True, modelled=True, buses=True, copies=True, uncertain=True)


def mixed(seed: int) -> tuple[Problem, Traits]:
    """Return a random problem of any kind, with limits half of the time."""
    rng = random.Random(seed)
    traits = rng.choice((ORDERED, EVERYTHING))
    objective: Objective = rng.choice(TIMED)
    return constrained(rng, random_problem(rng, objective, operators=(1, 5), traits=traits)), traits


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("scheduler", [chain, ideals, hybrid])
def test_searches_find_the_best_of_all_plans(scheduler: Callable[[Problem], Plan]) -> None:
    for seed in seeds(400):
        problem, traits = mixed(seed)
        check(problem, scheduler, proves=not counts_period(problem) or not (scheduler is hybrid or traits.buses))


@examples(40)
@given(problems("throughput", operators=(1, 5), devices=(2, 4), traits=Traits(ordered=True)))
def test_hybrids_without_links_are_proven(problem: Problem) -> None:
    """Unequal transfers to replicas are all that keeps the search from a proof."""
    free = replace(problem.platform, links=())
    check(replace(problem, platform=free, profile=replace(problem.profile, links=())), hybrid)


@pytest.mark.parametrize("idea", ["bound", "windows", "equal_devices"])
def test_pruning_loses_no_plan_of_replicas(idea: str) -> None:
    for seed in seeds(25):
        rng = random.Random(seed)
        traits = Traits(overlapping=False, ordered=True, busy=False)
        problem = random_problem(rng, operators=(2, 5), devices=(2, 3), traits=traits, choose_stages=False)
        cuts, devices = downsets(problem.graph), problem.platform.devices
        assert cuts is not None
        space = Space(cuts, devices, replica_units(devices), frozenset(range(len(devices))))
        seconds = stage_seconds(problem, cuts, devices)
        found = [least_bottleneck(space, seconds, np.inf, None, p) for p in (Pruning(), Pruning(**{idea: False}))]
        values = [search.found.value if search.found else np.inf for search in found]
        assert values[0] == pytest.approx(values[1])


def check_best(problem: Problem) -> None:
    """Check that `best` is no worse than every plan of its schedulers, and that its bound holds for every plan."""
    paced = counts_period(problem)
    optimum = least(problem, every_plan(problem, problem.stages, replicas=paced))
    of_all = least(problem, (stages for stages in every_sharing(problem) if problem.stages in (None, len(stages))))
    try:
        plan = planning.plan(problem).plan
    except NoPlanError:
        return
    assert problem.stages in (None, len(plan.stages))
    value = figure(problem, plan.predicted)
    assert of_all is not None
    assert value >= of_all - 1e-9 * abs(of_all)
    if plan.bound is not None:
        bound = -plan.bound[0] if problem.objective == "throughput" else plan.bound[0]
        assert optimum is None or bound <= optimum + 1e-9 * abs(optimum)
        assert bound <= of_all + 1e-9 * abs(of_all)
    if plan.status == "optimal":
        assert value == pytest.approx(of_all, rel=1e-9)
    if not problem.profile.links and not problem.platform.links and optimum is not None:
        assert value <= optimum + 1e-9 * abs(optimum)


@examples(40, deadline=None)
@given(st.data())
def test_the_bound_of_best_holds_for_replicas_that_serve_other_stages(data: st.DataObject) -> None:
    traits = data.draw(
        st.sampled_from([Traits(ordered=True), Traits(ordered=True, locks=True, memory=False, idle=True)])
    )
    objective = data.draw(st.sampled_from(TIMED))
    problem = data.draw(problems(objective, operators=(1, 4), devices=(2, 3), traits=traits))
    ordered = any(operator.ordered for operator in problem.graph.operators)
    if objective != "throughput" and data.draw(st.booleans()):
        problem = replace(problem, min_throughput_fps=float(data.draw(st.integers(5, 80))))
    if data.draw(st.booleans()):
        problem = replace(
            problem, platform=replace(problem.platform, links=()), profile=replace(problem.profile, links=())
        )
    if ordered:
        check_best(problem)


@given(randoms(), st.sampled_from(TIMED))
@examples(40, deadline=None)
def test_no_plan_is_better_than_the_bound_of_all(rng: random.Random, objective: Objective) -> None:
    problem = random_problem(rng, objective, operators=(1, 4), devices=(1, 3), traits=EVERYTHING)
    best = least(problem, every_sharing(problem))
    if best is not None:
        bound = lower_bound(problem, again=True)[0] * (-1 if objective == "throughput" else 1)
        assert bound <= best + 1e-9 * abs(best)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=8))
def test_the_spread_of_work_is_nearly_the_best_bound(drawn: list[tuple[int, int]]) -> None:
    """For two devices the best weights are found by trying all: at one of the ratios of an operator's seconds."""
    seconds = np.array(drawn, float).T
    ratios = [b / (a + b) for a, b in drawn if a + b] or [0.5]
    best = max(float(np.minimum(w * seconds[0], (1 - w) * seconds[1]).sum()) for w in (0.0, *ratios, 1.0))
    assert 0.97 * best - 1e-12 <= spread(seconds)[0] <= best * (1 + 1e-9)


def test_the_work_of_equal_devices_is_spread_evenly() -> None:
    seconds = np.array([[0.01, 0.04, 0.01]] * 4)
    assert spread(seconds)[0] == pytest.approx(0.015)
    seconds[1:, 0] = np.inf  # only the first device runs the first operator
    assert spread(seconds)[0] == pytest.approx(0.015, rel=0.02)


def test_a_slow_ordered_middle_is_not_replicated() -> None:
    """10, 40 and 10 ms on four equal devices: replicas make 66.7, with the middle ordered it alone allows 25."""
    problem = of_chain(dict.fromkeys("abcd", (0.01, 0.04, 0.01)))
    middle = replace(problem.graph.operators[1], ordered=True)
    graph = replace(problem.graph, operators=(problem.graph.operators[0], middle, problem.graph.operators[2]))
    problem = replace(problem, graph=graph, profile=replace(problem.profile, fingerprint=graph.fingerprint))
    plan = hybrid(problem)
    assert (plan.status, plan.value) == ("optimal", pytest.approx((25.0,)))
    assert planning.plan(problem).plan.value == pytest.approx((25.0,))
    assert planning.plan(problem).plan.status == "optimal"


def test_a_platform_of_one_device_needs_no_replicas() -> None:
    problem = of_chain({"a": (0.01, 0.04, 0.01)})
    ordered = tuple(replace(operator, ordered=True) for operator in problem.graph.operators)
    graph = replace(problem.graph, operators=ordered)
    problem = replace(problem, graph=graph, profile=replace(problem.profile, fingerprint=graph.fingerprint))
    problem = replace(problem, platform=Platform("box", (Device("a"),)))
    assert (planning.plan(problem).plan.status, planning.plan(problem).plan.devices) == ("optimal", ("a",))
