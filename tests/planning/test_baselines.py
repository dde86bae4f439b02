"""The baselines: what they say they do, and never better than every pipeline there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.brute_force import every_chain, figure, least
from tests.support.graphs import LEXICOGRAPHIC, TIMED, Traits, graphs, lexicographic_problems, problems
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile, unmeasured
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, LimitMissedError, NoPlanError, ProfileError
from tvm_pipeline.planning.baselines.segments import even_cuts, even_parameters, greedy

Scheduler = Callable[[Problem], Plan]
BASELINES: dict[str, Scheduler] = {"even-parameters": even_parameters, "greedy": greedy}


def assert_sound(problem: Problem, name: str, make: Scheduler) -> None:
    """The plan is legal and judged, one stage a device in the platform's order, no better than the best pipeline."""
    best = least(problem, every_chain(problem, problem.stages, again=False))
    try:
        plan = make(problem)
    except NoPlanError as error:
        reason = str(error)
        assert name in reason
        assert len(reason) > len(name) + 10
        return
    assert best is not None
    assert plan.predicted == evaluate(problem, plan.stages).predicted
    # A sum in another order may differ in its last digit.
    assert figure(problem, plan.predicted) >= best or figure(problem, plan.predicted) == pytest.approx(best, rel=1e-12)
    assert (plan.scheduler, plan.status, plan.bound) == (name, "feasible", None)
    assert problem.stages in (None, len(plan.stages))
    assert [o for stage in plan.stages for o in stage.operators] == [o.name for o in problem.graph.operators]
    order = [device.name for device in problem.platform.devices]
    places = [order.index(device) for stage in plan.stages for device in stage.devices]
    assert len(places) == len(plan.stages)
    assert places == sorted(set(places))
    assert Plan.parse(str(plan)) == plan


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("objective", TIMED)
@pytest.mark.parametrize("name", BASELINES)
@given(data=st.data())
def test_a_baseline_makes_a_legal_plan_or_says_why_not(name: str, objective: str, data: st.DataObject) -> None:
    traits = Traits(modelled=True)
    assert_sound(data.draw(problems(objective, operators=(1, 5), devices=(1, 4), traits=traits)), name, BASELINES[name])  # type: ignore[arg-type]


@given(problem=lexicographic_problems(LEXICOGRAPHIC, operators=(2, 6)))
def test_a_baseline_of_bytes_needs_no_seconds(problem: Problem) -> None:
    assert_sound(problem, "even-parameters", even_parameters)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", BASELINES)
@given(data=st.data())
def test_without_a_number_of_stages_it_is_the_best_of_all_numbers(name: str, data: st.DataObject) -> None:
    problem = data.draw(problems(operators=(1, 6), devices=(1, 4), choose_stages=False))
    figures = []
    for stages in range(1, len(problem.graph) + 1):
        try:
            staged = replace(problem, stages=stages)
            figures.append(figure(staged, BASELINES[name](staged).predicted))
        except NoPlanError:
            continue
    if not figures:
        with pytest.raises(LimitMissedError, match=f"{name} makes no plan: "):
            BASELINES[name](problem)
        return
    assert figure(problem, BASELINES[name](problem).predicted) == min(figures)


@given(graph=graphs(1, 12), data=st.data())
def test_even_cuts_stand_where_the_share_is_first_reached(graph: OperatorGraph, data: st.DataObject) -> None:
    segments = data.draw(st.integers(1, len(graph)))
    sizes = [operator.param_bytes for operator in graph.operators]
    cuts = even_cuts(graph, segments)
    assert len(cuts) == segments - 1
    assert sorted({0, *cuts, len(graph)}) == [0, *cuts, len(graph)]  # none empty
    shares = [Fraction(sum(sizes) * b, segments) for b in range(1, segments)]
    reached = [next(i for i in range(len(sizes) + 1) if sum(sizes[:i]) >= share) for share in shares]
    if len({0, *reached, len(sizes)}) == segments + 1:
        assert list(cuts) == reached


def chain(param_bytes: tuple[int, ...], seconds: dict[str, tuple[float | None, ...]], **options: int) -> Problem:
    operators = tuple(
        Operator(f"op{i}", "k", (f"t{i}",), (Tensor(f"t{i + 1}", (1,)),), size) for i, size in enumerate(param_bytes)
    )
    graph = OperatorGraph("net", (Tensor("t0", (1,)),), operators, (f"t{len(param_bytes)}",))
    profile = Profile(
        "net", graph.fingerprint, {name: DeviceProfile.in_order(graph, row) for name, row in seconds.items()}
    )
    return Problem(graph, Platform("box", tuple(map(Device, seconds))), profile, **options)  # type: ignore[arg-type]


def sizes(plan: Plan) -> list[int]:
    return [len(stage.operators) for stage in plan.stages]


def test_even_parameters_by_hand() -> None:
    """Of 12 bytes, 4 are reached with the second operator, 8 with the fourth; of 9 bytes in one, all by that one."""
    rows = {"a": (0.1,) * 5, "b": (0.1,) * 5, "c": (0.1,) * 5}
    assert sizes(even_parameters(chain((3, 2, 2, 1, 4), rows, stages=3))) == [2, 2, 1]
    assert sizes(even_parameters(chain((0, 9, 0, 0, 0), rows, stages=3))) == [2, 1, 2]
    assert sizes(even_parameters(chain((0, 0, 0, 0, 9), rows, stages=3))) == [3, 1, 1]
    assert sizes(even_parameters(chain((0, 0, 0, 0, 0), rows, stages=3))) == [1, 1, 3]


def test_greedy_by_hand() -> None:
    """a takes 10 s for all, its share is 5: three operators make 4, the fourth would make 8. b has the rest."""
    problem = chain((0,) * 5, {"a": (1.0, 1.0, 2.0, 4.0, 2.0), "b": (1.0,) * 5}, stages=2)
    assert sizes(greedy(problem)) == [3, 2]
    # An operator beyond the share is taken alone; later stages keep one each.
    assert sizes(greedy(chain((0,) * 3, {"a": (9.0, 1.0, 1.0), "b": (1.0,) * 3}, stages=2))) == [1, 2]
    free = chain((0,) * 3, dict.fromkeys("abc", (0.0, 0.0, 0.0)), stages=3)
    assert sizes(greedy(free)) == [1, 1, 1]


def test_greedy_stops_before_what_a_device_cannot_run_or_hold() -> None:
    rows: dict[str, tuple[float | None, ...]] = {"a": (1.0, 1.0, None, 9.0), "b": (1.0,) * 4}
    assert sizes(greedy(chain((0,) * 4, rows, stages=2))) == [2, 2]
    small = chain((5, 5, 5, 5), {"a": (1.0, 0.1, 0.1, 9.0), "b": (1.0,) * 4}, stages=2)
    devices = (Device("a", memory_bytes=10), Device("b"))
    assert sizes(greedy(replace(small, platform=Platform("box", devices), activations=False))) == [2, 2]


def test_stages_stand_on_devices_that_can_work_together() -> None:
    """`all` shares cores with both halves; the largest set that does not is the halves, in the platform's order."""
    problem = chain((1, 1), {"all": (0.1, 0.1), "half0": (0.2, 0.2), "half1": (0.2, 0.2)}, stages=2)
    devices = (Device("all", cores=(0, 1)), Device("half0", cores=(0,)), Device("half1", cores=(1,)))
    problem = replace(problem, platform=Platform("box", devices))
    for make in BASELINES.values():
        assert make(problem).devices == ("half0", "half1")
    with pytest.raises(InfeasibleError, match="2 stages are asked for, and 1 devices of platform box can work"):
        greedy(replace(problem, platform=Platform("box", devices[:2])))


def test_a_plan_that_the_judge_refuses_is_infeasible_with_its_reason() -> None:
    problem = chain((4, 4), {"a": (0.1, None), "b": (0.1, None)}, stages=2)
    with pytest.raises(
        LimitMissedError, match="even-parameters makes no plan: device b cannot run operator op1 of stage 1"
    ):
        even_parameters(problem)
    tiny = Platform("box", (Device("a", memory_bytes=3), Device("b", memory_bytes=3)))
    with pytest.raises(LimitMissedError, match="device a would hold 4 bytes of parameters and has 3"):
        even_parameters(replace(problem, platform=tiny))


def test_a_baseline_of_time_says_that_it_needs_measurements() -> None:
    measured = chain((4, 4), {"a": (0.1, 0.1), "b": (0.1, 0.1)}, stages=2)
    problem = replace(measured, profile=unmeasured(measured.graph), objective="memory,communication")
    with pytest.raises(ProfileError, match="the profile of net has no device a"):
        greedy(problem)
