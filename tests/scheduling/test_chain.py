"""The chain planner against every chain there is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.brute_force import every_chain, figure, least
from tests.support.graphs import Traits, problems
from tvm_pipeline.errors import InfeasibleError
from tvm_pipeline.evaluate import evaluate
from tvm_pipeline.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.plan import Plan, Problem
from tvm_pipeline.platform import Device, Link, Platform
from tvm_pipeline.profile import DeviceProfile, Profile
from tvm_pipeline.scheduling.chain import chain, chain_of


def plan_or_none(problem: Problem) -> Plan | None:
    try:
        plan = chain(problem)
    except InfeasibleError:
        return None
    assert plan.predicted == evaluate(problem, plan.stages).predicted  # raises where the plan is not legal
    assert problem.stages in (None, len(plan.stages))
    return plan


def assert_best(problem: Problem, best: float | None) -> None:
    plan = plan_or_none(problem)
    if best is None:
        assert plan is None
        return
    assert plan is not None
    assert figure(problem, plan.predicted) == pytest.approx(best, rel=1e-9)
    assert (plan.status, plan.bound, plan.scheduler) == ("optimal", plan.value, "chain")


@given(problems("throughput", operators=(1, 6), devices=(1, 4)))
def test_throughput_is_the_best_of_all_chains(problem: Problem) -> None:
    assert_best(problem, least(problem, every_chain(problem, problem.stages, again=False)))


@given(problems("throughput", operators=(2, 6), devices=(2, 3), choose_stages=False))
def test_each_number_of_stages_gets_its_best(problem: Problem) -> None:
    best = {
        count: least(problem, every_chain(problem, count, again=False))
        for count in range(1, min(len(problem.graph), len(problem.platform.devices)) + 1)
    }
    try:
        found = {len(plan.stages): figure(problem, plan.predicted) for plan in chain_of(problem)}
    except InfeasibleError:
        found = {}
    assert found == pytest.approx({count: value for count, value in best.items() if value is not None})


@pytest.mark.parametrize("objective", ["latency", "energy"])
@given(data=st.data())
def test_least_sum_is_the_best_of_all_chains(objective: str, data: st.DataObject) -> None:
    """Devices may come again, though not in consecutive stages: that would be one stage."""
    problem = data.draw(problems(objective, operators=(1, 5), traits=Traits(memory=False)))  # type: ignore[arg-type]
    assert_best(problem, least(problem, every_chain(problem, problem.stages, again=True)))


@pytest.mark.parametrize("objective", ["latency", "energy"])
@given(data=st.data())
def test_with_memory_limits_a_least_sum_is_legal_or_refused(objective: str, data: st.DataObject) -> None:
    """Memory is shared by all stages of a device, which a shortest path cannot see: a legal plan or a reason.

    It may be worse than the best, and there may be a plan where it finds none; it never claims better than is so.
    """
    problem = data.draw(problems(objective, operators=(1, 5)))  # type: ignore[arg-type]
    plan = plan_or_none(problem)
    if plan is not None:
        best = least(problem, every_chain(problem, problem.stages, again=True))
        assert best is not None
        assert figure(problem, plan.predicted) >= best - 1e-12


@given(problems("throughput"))
def test_the_same_problem_gives_the_same_plan(problem: Problem) -> None:
    first, second = plan_or_none(problem), plan_or_none(problem)
    assert first == second


def problem_of(seconds: dict[str, tuple[float | None, ...]], **figures: object) -> Problem:
    """A chain of operators with 10 bytes of parameters each, on a device for each row of seconds."""
    count = len(next(iter(seconds.values())))
    operators = tuple(Operator(f"op{i}", "k", (f"t{i}",), (Tensor(f"t{i + 1}", (100,)),), 10) for i in range(count))
    graph = OperatorGraph("net", (Tensor("t0", (100,)),), operators, (f"t{count}",))
    profile = Profile("net", graph.fingerprint, {name: DeviceProfile(row) for name, row in seconds.items()})
    return Problem(graph, Platform("box", tuple(map(Device, seconds))), profile, **figures)  # type: ignore[arg-type]


def test_a_device_that_is_fast_at_the_ends_comes_twice_for_latency() -> None:
    problem = problem_of({"cpu": (0.1, 0.9, 0.1), "npu": (0.9, 0.1, 0.9)}, objective="latency")
    plan = chain(problem)
    assert [(stage.devices, stage.operators) for stage in plan.stages] == [
        (("cpu",), ("op0",)),
        (("npu",), ("op1",)),
        (("cpu",), ("op2",)),
    ]
    assert plan.value == pytest.approx(0.3)


def test_a_dear_link_keeps_the_model_in_one_place() -> None:
    problem = problem_of({"cpu": (0.1, 0.2), "npu": (0.2, 0.1)})
    assert len(chain(problem).stages) == 2
    dear = Platform("box", problem.platform.devices, (Link("cpu", "npu", 1.0), Link("npu", "cpu", 1.0)))
    assert len(chain(replace(problem, platform=dear)).stages) == 1


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (
            problem_of({"a": (0.1, 0.1, 0.1), "b": (0.1, 0.1, 0.1)}, stages=3),
            "3 stages need as many devices that share no cores; platform box has 2",
        ),
        (
            problem_of({"a": (0.1, 0.1, 0.1)}, stages=2, objective="latency"),
            "2 stages need two devices that share no cores; platform box has 1",
        ),
        (problem_of({"a": (0.1, None), "b": (0.1, None)}), "no device can run operator op1"),
        (problem_of({"a": (0.1, None, 0.1, None), "b": (None, 0.1, None, 0.1)}), "no chain of stages fits"),
    ],
)
def test_no_comes_with_its_reason(problem: Problem, message: str) -> None:
    with pytest.raises(InfeasibleError, match=message):
        chain(problem)


def test_an_operator_that_no_device_can_hold_is_named() -> None:
    problem = problem_of({"a": (0.1, 0.1), "b": (0.1, 0.1)})
    small = Platform("box", tuple(Device(name, memory_bytes=9) for name in "ab"))
    with pytest.raises(InfeasibleError, match="operator op0 holds 10 bytes of parameters, no device has more than 9"):
        chain(replace(problem, platform=small))
    tight = Platform("box", tuple(Device(name, memory_bytes=10) for name in "ab"))
    assert len(chain(replace(problem, platform=tight)).stages) == 2
