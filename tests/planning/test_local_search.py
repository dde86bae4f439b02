"""Local search against every plan there is, on small random graphs; its own sums against the judge; its promises."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.brute_force import every_plan, figure, least
from tests.support.examples import examples
from tests.support.generators import random_dag
from tests.support.graphs import (
    BY_EDGES,
    LEXICOGRAPHIC,
    TIMED,
    Traits,
    constrained,
    lexicographic_problems,
    problems,
    randoms,
)
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.platform import Device, Link, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, NoPlanError
from tvm_pipeline.planning import plan
from tvm_pipeline.planning.local import annealing
from tvm_pipeline.planning.local import local_search as module
from tvm_pipeline.planning.local.local_search import local_search

EVERYTHING = Traits(modelled=True, buses=True, copies=True)
IDLE = replace(EVERYTHING, locks=True, idle=True, unstated=True)
# The best plans of it cut through branches: 1.45 times as fast as the best cut along its order.
TANGLED = random_dag(random.Random(0), 40, reach=20)


def tpus(count: int, **options: Any) -> Platform:
    """Return modelled devices with a parameter cache."""
    model = DeviceModel(1e12, 1e-4, 25e-6, 4e8, 1.3e8, 700_000, 4e8)
    return Platform("tpus", tuple(Device(f"tpu{index}", model=model, **options) for index in range(count)))


def of(graph: OperatorGraph, platform: Platform, **options: Any) -> Problem:
    return Problem(graph, platform, unmeasured(graph), **options)


def plan_or_none(problem: Problem, **options: Any) -> Plan | None:
    try:
        found = local_search(problem, **options)
    except NoPlanError:
        return None
    assert found.predicted == evaluate(problem, found.stages).predicted  # raises where the plan is not legal
    assert problem.stages in (None, len(found.stages))
    assert (found.scheduler, found.status, found.bound) == ("local-search", "feasible", None)
    return found


def assert_as_good(problem: Problem) -> None:
    """Assert that a search finds the best of all plans whose devices have one stage each."""
    best, found = least(problem, every_plan(problem, problem.stages)), plan_or_none(problem, moves=20_000)
    if best is None:
        assert found is None
        return
    assert found is not None
    assert figure(problem, found.predicted) == pytest.approx(best, rel=1e-9)


@pytest.mark.thorough
@given(data=st.data(), together=st.booleans(), by_edges=st.booleans())
@examples(8)
def test_bytes_are_the_least_of_all_plans(data: st.DataObject, together: bool, by_edges: bool) -> None:
    objectives = BY_EDGES if by_edges else LEXICOGRAPHIC
    assert_as_good(data.draw(lexicographic_problems(objectives, operators=(2, 6), children_together=together)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("objective", TIMED)
@given(data=st.data(), chance=randoms(), traits=st.sampled_from([Traits(), EVERYTHING, IDLE]))
@examples(10)
def test_seconds_and_joules_are_the_best_of_all_plans(
    objective: Any, data: st.DataObject, chance: random.Random, traits: Traits
) -> None:
    assert_as_good(constrained(chance, data.draw(problems(objective, operators=(1, 5), traits=traits))))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("objective", TIMED + LEXICOGRAPHIC[1:2] + BY_EDGES[1:2])
@given(chance=randoms(), data=st.data())
@examples(15)
def test_the_figures_of_the_moves_are_those_of_the_judge(
    objective: Any, chance: random.Random, data: st.DataObject
) -> None:
    """The sums that follow each move end as if they were computed anew, and as the judge has them."""
    traits = replace(IDLE, memory=False, unsupported=False, overlapping=False, caches=True)
    problem = data.draw(problems(objective, operators=(3, 9), devices=(2, 4), traits=traits, choose_stages=False))
    for run in module._runs(problem, None, chance.randint(0, 99), module._Budget(0.0, None, 1, 1)):
        run.anneal(0, 700, 700, 0.5)
        seen = annealing.figures(run.arrays, run.aim, run.state)
        excess, *found = seen[:4]
        lists = [sorted(run.state.free[side, : run.state.free_count[side]].tolist()) for side in range(2)]
        crossing = run.state.crossing.copy()
        stages = run.stages_of(run.state.stage, run.state.device)
        predicted = evaluate(problem, stages).predicted
        run.begin((run.state.stage.copy(), run.state.device.copy()))
        assert annealing.figures(run.arrays, run.aim, run.state)[:4] == pytest.approx(seen[:4], rel=1e-9)
        assert lists == [sorted(run.state.free[side, : run.state.free_count[side]].tolist()) for side in range(2)]
        assert np.array_equal(crossing, run.state.crossing)
        assert excess == 0
        figures = figure(problem, predicted)
        if objective == "throughput":
            assert 1 / found[0] == pytest.approx(-figures, rel=1e-9)
        else:
            assert found == pytest.approx([*figures, 0.0][:3] if isinstance(figures, tuple) else [figures, 0.0, 0.0])


@pytest.mark.thorough
def test_a_seed_and_a_number_of_moves_give_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.ReachGraph, "of", lambda _: None)  # all seeds begin with its plan
    problem = of(random_dag(random.Random(0), 80, reach=20), tpus(4), stages=4)
    first = local_search(problem, moves=1000, seed=3)
    monkeypatch.setattr(module, "CHUNK", 333)  # the time is looked at more often
    assert local_search(problem, moves=1000, seed=3) == first
    assert local_search(problem, moves=1000, seed=4) != first


@pytest.mark.thorough
def test_moves_improve_a_plan_that_no_order_of_the_graph_has() -> None:
    problem = of(TANGLED, tpus(4), stages=4)
    chain, found = plan(problem, "chain").plan, local_search(problem, moves=10_000)
    assert found.value is not None
    assert chain.value is not None
    assert found.value[0] > 1.02 * chain.value[0]


@given(problem=problems(operators=(2, 6), devices=(2, 3), traits=EVERYTHING), chance=randoms())
@examples(20)
def test_a_plan_is_never_worse_than_its_hint(problem: Problem, chance: random.Random) -> None:
    legal = [stages for stages in every_plan(problem, problem.stages) if least(problem, iter([stages])) is not None]
    if legal:
        hint = chance.choice(legal)
        found = plan_or_none(problem, hint=hint, moves=chance.choice((0, 50)))
        assert found is not None
        assert figure(problem, found.predicted) <= figure(problem, evaluate(problem, hint).predicted)


@pytest.mark.thorough
def test_without_time_the_start_or_the_hint_is_the_plan() -> None:
    problem = of(TANGLED, tpus(4), stages=4, time_limit_s=0.0)
    assert len(local_search(problem).stages) == 4
    hint = local_search(replace(problem, time_limit_s=None), moves=2000).stages
    assert local_search(problem, hint).stages == hint


@pytest.mark.thorough
def test_unequal_devices_and_links_are_used_as_they_are() -> None:
    """Of five devices the two that are fast stand where the link between them is."""
    devices = tuple(
        Device(f"d{index}", model=DeviceModel(1e11 if index in (1, 3) else 1e9, 1e-5)) for index in range(5)
    )
    links = tuple(
        Link(a.name, b.name, 0.0 if (a.name, b.name) == ("d3", "d1") else 10.0)
        for a in devices
        for b in devices
        if a != b
    )
    found = local_search(of(TANGLED, Platform("box", devices, links), stages=2), moves=20_000)
    assert found.devices == ("d3", "d1")


def test_joined_readers_do_not_change_which_operators_are_cut_anew() -> None:
    """Nodes of joined readers are numbered anew: here the first operator is the last node."""
    graph = OperatorGraph(
        "net",
        (Tensor("x", (8,), "int8"),),
        tuple(
            Operator(name, "kind", (read,), (Tensor(f"of {name}", (8,), "int8"),), param_bytes=size, macs=1000)
            for name, read, size in (("alone", "x", 4), ("first", "x", 8), ("second", "of first", 1))
        ),
        ("of alone", "of second"),
    )
    model = DeviceModel(1e9, 1e-6)
    small = Platform("box", (Device("small", memory_bytes=4, model=model), Device("large", model=model)))
    problem = of(graph, small, stages=2, objective="throughput", children_together=True, activations=False)
    links = (Link("large", "small", 10.0), Link("small", "large", 0.0))
    problem = replace(problem, platform=replace(small, links=links))
    found = local_search(problem, moves=2000)
    assert [(stage.devices, stage.operators) for stage in found.stages] == [
        (("small",), ("alone",)),
        (("large",), ("first", "second")),
    ]


@pytest.mark.thorough
def test_the_scheduler_is_found_by_name_and_counts_limits() -> None:
    problem = of(TANGLED, tpus(3), objective="throughput", time_limit_s=0.3)
    free = plan(problem, "local-search")
    assert (free.plan.scheduler, len(free.plan.stages)) == ("local-search", 3)
    assert free.plan.predicted.latency_s is not None
    least_s = plan(replace(problem, objective="latency"), "local-search").plan.predicted.latency_s
    assert least_s is not None
    assert least_s < free.plan.predicted.latency_s
    limit_s = (least_s + free.plan.predicted.latency_s) / 2
    held = plan(replace(problem, max_latency_s=limit_s), "local-search").plan.predicted
    assert held.latency_s is not None
    assert held.latency_s <= limit_s * (1 + 1e-9)


def test_more_stages_than_devices_are_impossible() -> None:
    with pytest.raises(InfeasibleError, match="7 stages are asked for, and at most 4 devices of platform tpus"):
        local_search(of(TANGLED, tpus(4), stages=7))


@pytest.mark.thorough
def test_where_no_plan_is_found_the_message_says_that_one_may_exist() -> None:
    with pytest.raises(NoPlanError, match=r"local-search found no plan of .* one may exist"):
        local_search(of(TANGLED, tpus(2, memory_bytes=1000), activations=False), moves=500)


@pytest.mark.thorough
def test_graphs_of_one_operator_and_of_hundreds() -> None:
    single = random_dag(random.Random(0), 1)
    assert len(local_search(of(single, tpus(3)), moves=10).stages) == 1
    graph = random_dag(random.Random(0), 200)
    found = local_search(of(graph, tpus(2), stages=2), moves=500)
    assert sum(len(stage.operators) for stage in found.stages) == 200
