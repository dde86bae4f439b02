"""Bounds that need no search: never better than the best plan there is, and stated for every plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from tests.planning.test_solve import every
from tests.support import generators
from tests.support.brute_force import every_cut, every_sharing, least
from tests.support.examples import examples
from tests.support.graphs import (
    TIMED,
    Traits,
    lexicographic_problem,
    random_chain,
    random_dag,
    random_platform,
    random_problem,
    randoms,
    with_ordered,
)
from tests.support.memory_networks import PROFILES
from tvm_pipeline import planning
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.partition import check_partition
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import read_platform
from tvm_pipeline.core.problem import OBJECTIVES, Objective, Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile, SegmentProfile, unmeasured
from tvm_pipeline.cost.device_costs import cost_of
from tvm_pipeline.errors import NoPlanError, OptionError
from tvm_pipeline.planning import large_graphs
from tvm_pipeline.planning.local import local_search
from tvm_pipeline.planning.local.bounds import lower_bound
from tvm_pipeline.planning.local.cut_flow import Network
from tvm_pipeline.planning.local.least_crossing import least_crossing
from tvm_pipeline.planning.registry import OWN

EVERYTHING = Traits(modelled=True, buses=True, copies=True, busy=True, locks=True, joules=True, idle=True)

TAKING_ANY = tuple(name for name, scheduler in OWN.items() if not scheduler.cut)


def signed(problem: Problem, bound: tuple[float, ...]) -> object:
    """Return a bound as `figure` returns values: less is better."""
    if problem.is_lexicographic:
        return bound
    return -bound[0] if problem.objective == "throughput" else bound[0]


def assert_below(problem: Problem, bound: tuple[float, ...], plans: Iterator[tuple[Stage, ...]]) -> None:
    optimum, stated = least(problem, plans), signed(problem, bound)
    if optimum is None:
        return
    if problem.is_lexicographic:
        assert stated <= optimum
    else:
        assert stated <= optimum + 1e-9 * abs(optimum)


@examples(60)
@given(randoms())
def test_no_plan_is_better_than_its_bound(rng: random.Random) -> None:
    problem = random_problem(
        rng, rng.choice(TIMED), operators=(1, 5), traits=EVERYTHING, children_together=rng.random() < 0.2
    )
    assert_below(problem, lower_bound(problem, again=True), every(problem))


@examples(60)
@given(randoms())
def test_no_pipeline_is_better_than_the_bound_of_its_cuts(rng: random.Random) -> None:
    traits = replace(EVERYTHING, joules=False, idle=False)
    problem = random_problem(rng, operators=(2, 6), devices=(2, 3), traits=traits)
    if rng.random() < 0.7:  # equal devices, where the cuts matter most
        equal = [replace(problem.platform.devices[0], name=d.name, cores=()) for d in problem.platform.devices]
        measured = problem.profile.devices.get(equal[0].name)
        devices = {device.name: measured for device in equal} if measured else {}
        platform = replace(problem.platform, devices=tuple(equal))
        problem = replace(problem, platform=platform, profile=replace(problem.profile, devices=devices))
    once = (
        stages
        for stages in every(problem)
        if len({name for stage in stages for name in stage.devices}) == sum(len(stage.devices) for stage in stages)
    )
    assert_below(problem, lower_bound(problem), once)


@examples(25)
@given(randoms())
def test_no_plan_is_better_where_stages_were_measured_as_a_whole(rng: random.Random) -> None:
    problem = random_problem(rng, rng.choice(TIMED), operators=(1, 4), devices=(1, 2), traits=EVERYTHING)
    names = [operator.name for operator in problem.graph.operators]
    measured = []
    for device in problem.platform.devices:
        start, end = sorted(rng.sample(range(len(names) + 1), 2))
        if all(map(cost_of(problem, device).can_run, problem.graph.operators[start:end])):
            measured.append(SegmentProfile(device.name, tuple(names[start:end]), rng.randint(1, 40) / 1000))
    problem = replace(problem, profile=replace(problem.profile, segments=tuple(measured)))
    assert_below(problem, lower_bound(problem, again=True), every(problem))


@examples(15)
@given(randoms())
def test_no_plan_is_better_beside_ordered_operators(rng: random.Random) -> None:
    traits = replace(EVERYTHING, ordered=True)
    problem = random_problem(rng, rng.choice(TIMED), operators=(1, 3), devices=(1, 2), traits=traits)
    assert_below(problem, lower_bound(problem, again=True), every_sharing(problem))


@examples(40)
@given(randoms())
def test_no_plan_has_fewer_bytes(rng: random.Random) -> None:
    objective: Objective = rng.choice([objective for objective in OBJECTIVES if objective not in TIMED])
    problem = lexicographic_problem(rng, objective, operators=(2, 6))
    assert_below(problem, lower_bound(problem), every(replace(problem, objective=objective)))


@examples(40)
@given(randoms())
def test_no_cut_has_fewer_bytes_cross_than_its_window_says(rng: random.Random) -> None:
    graph = rng.choice((random_chain, random_dag))(rng, rng.randint(2, 7))
    work = np.array([rng.choice((0.0, 1.0, 2.5, 4.0)) for _ in range(len(graph))])
    crossing = least_crossing(Network(graph), work, price=rng.choice((10.0, 1e3, 1e6)))
    for first, _ in (groups for groups in every_cut(graph, 2) if len(groups) == 2):
        inside = sum(work[index] for index, operator in enumerate(graph.operators) if operator.name in first)
        rest = tuple(operator.name for operator in graph.operators if operator.name not in first)
        bytes_between = sum(tensor.bytes for tensor in check_partition(graph, [first, rest])[1])
        around = (crossing.work[:-1] <= inside) & (inside <= crossing.work[1:])
        assert crossing.least[around].min(initial=np.inf) <= bytes_between + 1e-6


CORALS = read_platform(PROFILES / "platforms" / "coral-pcie-8.toml")
# It has too many downsets to list.
TANGLED = generators.random_dag(random.Random(0), 60, reach=30)


def on_corals(graph: OperatorGraph, count: int, **options: Any) -> Problem:
    return Problem(graph, replace(CORALS, devices=CORALS.devices[:count]), unmeasured(graph), **options)


def test_the_bound_of_cuts_is_close_where_transfers_take_long() -> None:
    problem = on_corals(generators.transformer(2), 4, stages=4)
    best = planning.plan(problem, "ideals").plan
    (most_fps,), (by_load_fps,) = lower_bound(problem), lower_bound(problem, 0.0)
    assert best.status == "optimal"
    assert best.value is not None
    assert best.value[0] <= most_fps <= 1.06 * best.value[0]
    assert by_load_fps > 2 * best.value[0]


def kinds() -> dict[str, Callable[[Objective], Problem]]:
    """Return problems of every kind in which something was left without a gap: by name, a function of the objective."""
    rng = random.Random(2)
    graph = random_dag(rng, 5)
    platform = random_platform(rng, graph, 3, Traits(overlapping=False, memory=False))
    equal = replace(platform, devices=tuple(replace(d, cache_bytes=100, active_w=2.0) for d in platform.devices))
    seconds = DeviceProfile.in_order(graph, (0.01, 0.02, 0.03, 0.01, 0.02))
    measured = Profile(graph.name, graph.fingerprint, {device.name: seconds for device in equal.devices})
    ordered = with_ordered(random.Random(4), graph)
    whole = SegmentProfile(equal.devices[0].name, (graph.operators[0].name,), 0.001)
    corals = replace(CORALS, devices=tuple(replace(d, active_w=2.0) for d in CORALS.devices[:3]))

    def no_time(objective: Objective) -> Problem:
        return Problem(TANGLED, corals, unmeasured(TANGLED), objective, time_limit_s=0.0)

    return {
        "listed": lambda objective: Problem(graph, equal, measured, objective),
        "too many": lambda objective: replace(no_time(objective), time_limit_s=0.1),
        "no time": no_time,
        "two stages": lambda objective: replace(no_time(objective), stages=2),
        "whole": lambda objective: Problem(graph, equal, replace(measured, segments=(whole,)), objective),
        "ordered": lambda objective: Problem(
            ordered, equal, replace(measured, fingerprint=ordered.fingerprint), objective
        ),
    }


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("kind", "objective"),
    [*(("listed", objective) for objective in OBJECTIVES), *((kind, OBJECTIVES[0]) for kind in list(kinds())[1:])],
)
def test_every_plan_has_a_gap(kind: str, objective: Objective) -> None:
    made = 0
    for scheduler in (planning.BEST,) if kind == "too many" else (planning.BEST, *TAKING_ANY):
        try:
            problem = kinds()[kind](objective)
            problem = replace(problem, time_limit_s=problem.time_limit_s or 0.05)  # local search stops early
            decision = planning.plan(problem, scheduler)
        except (NoPlanError, OptionError):
            continue
        made += 1
        for plan in decision.candidates:
            assert plan.gap is not None, (scheduler, plan.scheduler)
            assert plan.value is not None
            assert plan.bound is not None
            if problem.objective == "throughput":
                assert plan.bound[0] >= plan.value[0] * (1 - 1e-9), (scheduler, plan.scheduler)
            else:
                assert plan.bound <= tuple(value * (1 + 1e-9) for value in plan.value), (scheduler, plan.scheduler)
    assert made


@pytest.mark.thorough
def test_local_search_and_a_bound_take_the_place_of_a_list_of_downsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local search tries a number of moves here, and nothing else takes time: a busy machine changes nothing."""
    monkeypatch.setattr(large_graphs, "REFINED_S", 0.0)
    monkeypatch.setattr(large_graphs, "MOST_LITERALS", 0)  # of CP-SAT
    monkeypatch.setattr(local_search, "MOVES", 1000)
    monkeypatch.setattr(local_search, "MOVES_OF_OPERATOR", 0)
    problem = on_corals(generators.random_dag(random.Random(0), 40, reach=20), 4, stages=4)
    by_order, plan = planning.plan(problem, "chain").plan, planning.plan(problem).plan
    assert plan.scheduler in ("cuts", "local-search")
    assert plan.value is not None
    assert by_order.value is not None
    assert plan.gap is not None
    assert plan.value[0] > 1.02 * by_order.value[0]
    assert plan.gap < 0.5
