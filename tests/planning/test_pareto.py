"""The Pareto front against that of every plan, in three figures and, without powers, in two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.brute_force import every_plan, verdict
from tests.support.examples import examples
from tests.support.graphs import TIMED, Traits, problems
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.core.plan import Plan, Prediction
from tvm_pipeline.core.platform import Device, Platform, read_platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile, unmeasured
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, NoPlanError
from tvm_pipeline.planning.search.dynamic_programming import ideals
from tvm_pipeline.planning.search.pareto import pareto

PROFILES = Path(__file__).parents[2] / "profiles"
Point = tuple[float, ...]


def points(predictions: list[Prediction]) -> list[Point]:
    """Return the figures, of which less is better, rounded so that the order of summation does not matter."""
    powered = all(predicted.energy_j is not None for predicted in predictions)
    return [
        (
            round(-(predicted.throughput_fps or 0.0), 6),
            round(predicted.latency_s or 0.0, 9),
            round(predicted.energy_j or 0.0, 9) if powered else 0.0,
        )
        for predicted in predictions
    ]


def front_of(all_points: set[Point]) -> list[Point]:
    return sorted(
        one
        for one in all_points
        if not any(other != one and all(x <= y for x, y in zip(other, one, strict=True)) for other in all_points)
    )


def check(problem: Problem) -> None:
    judged = [verdict(problem, stages) for stages in every_plan(problem, problem.stages)]
    allowed = [predicted for predicted in judged if predicted is not None]
    powered = all(predicted.energy_j is not None for predicted in allowed)
    expected = front_of(set(points(allowed)))
    try:
        plans = pareto(problem)
    except NoPlanError:
        assert expected == []
        return
    found = [plan.predicted if powered else replace(plan.predicted, energy_j=None) for plan in plans]
    assert sorted(points(found)) == expected
    for plan in plans:
        assert plan.predicted == evaluate(problem, plan.stages).predicted
        assert (plan.scheduler, plan.status, plan.bound) == ("pareto", "optimal", plan.value)
    speeds = [round(plan.predicted.throughput_fps or 0.0, 6) for plan in plans]
    assert speeds == sorted(speeds, reverse=True)


@examples(50)
@given(
    problem=problems("throughput", operators=(1, 5), traits=Traits(modelled=True, idle=True), choose_stages=False),
    together=st.booleans(),
)
def test_the_front_in_three_figures(problem: Problem, together: bool) -> None:
    check(replace(problem, children_together=together))


@examples(50)
@given(problems("throughput", operators=(1, 5), traits=Traits(powerless=True, joules=False)))
def test_where_a_power_is_unknown_the_front_in_two(problem: Problem) -> None:
    check(problem)


@examples(40)
@given(data=st.data())
def test_limits_hold_for_every_plan(data: st.DataObject) -> None:
    objective = data.draw(st.sampled_from(TIMED))
    problem = data.draw(problems(objective, operators=(1, 5)))
    if objective == "throughput":
        check(replace(problem, max_latency_s=data.draw(st.integers(5, 120)) / 1000))
    else:
        check(replace(problem, min_throughput_fps=float(data.draw(st.integers(5, 80)))))


def network(**power: float) -> Problem:
    """Return a network on a gpu (fast, much power), a cpu (slow, little power) and both (the most frames)."""
    operators = tuple(Operator(f"op{i}", "k", (f"t{i}",), (Tensor(f"t{i + 1}", (1,)),)) for i in range(2))
    graph = OperatorGraph("net", (Tensor("t0", (1,)),), operators, ("t2",))
    seconds = {"cpu": DeviceProfile.in_order(graph, (0.02, 0.03)), "gpu": DeviceProfile.in_order(graph, (0.01, 0.015))}
    devices = tuple(Device(name, active_w=power.get(name)) for name in seconds)
    return Problem(graph, Platform("box", devices), Profile("net", graph.fingerprint, seconds))


def test_the_front_by_hand() -> None:
    """Frames a second, ms and mJ: cpu 20, 50, 50; gpu 40, 25, 250; cpu | gpu 50, 35, 170; gpu | cpu 33.3, 40, 130."""

    def named(plans: list[Plan]) -> list[str]:
        return [" | ".join(stage.devices[0] for stage in plan.stages) for plan in plans]

    assert named(pareto(network(cpu=1.0, gpu=10.0))) == ["cpu | gpu", "gpu", "gpu | cpu", "cpu"]
    assert named(pareto(network())) == ["cpu | gpu", "gpu"]


@examples(40)
@given(
    problems("throughput", operators=(1, 5), traits=Traits(modelled=True, buses=True, copies=True), choose_stages=False)
)
def test_a_bus_is_judged_but_nothing_proven(problem: Problem) -> None:
    try:
        plans = pareto(problem)
    except NoPlanError:
        return
    found = points([evaluate(problem, plan.stages).predicted for plan in plans])
    assert front_of(set(found)) == sorted(found)
    links = (*problem.platform.links, *problem.profile.links)
    if not any(link.bus for link in links) and not any(d.bus or d.concurrent_copies for d in problem.platform.devices):
        check(problem)


def test_no_plan_at_all_says_why() -> None:
    with pytest.raises(InfeasibleError, match="2 stages need as many devices"):
        pareto(replace(network(), stages=2, platform=Platform("box", (Device("cpu"),))))
    with pytest.raises(InfeasibleError, match=r"`max_latency_s` allows 0\.001"):
        pareto(replace(network(), max_latency_s=0.001))


def test_of_a_large_graph_the_front_is_that_of_some_cuts() -> None:
    """More cuts than it takes: nothing is proven, and its fastest plan is near the best one."""
    graph = read_graph(PROFILES / "keras" / "ResNet101.json")
    platform = read_platform(PROFILES / "platforms" / "coral-pcie-8.toml")
    problem = Problem(graph, replace(platform, devices=platform.devices[:2], links=()), unmeasured(graph))
    plans = pareto(problem)
    assert {plan.status for plan in plans} == {"feasible"}
    assert {plan.bound for plan in plans} == {None}
    best = ideals(problem).value
    assert best is not None
    assert best[0] * 0.9 <= (plans[0].predicted.throughput_fps or 0.0) <= best[0] * (1 + 1e-9)
