"""CP-SAT against every plan there is, on small random graphs, and by hand where a rule is at stake."""

from __future__ import annotations

import random
import signal
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.brute_force import every_plan, figure, least, serving_once, verdict
from tests.support.examples import examples
from tests.support.graphs import BY_EDGES, LEXICOGRAPHIC, TIMED, Traits, lexicographic_problems, problems
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.core.platform import Device, Link, Platform, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile, unmeasured
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, NoPlanError, OptionError, ProfileError, SearchTimeError
from tvm_pipeline.planning.planner import plan
from tvm_pipeline.planning.sat import least_seconds
from tvm_pipeline.planning.sat.cp_sat import cp_sat
from tvm_pipeline.planning.sat.staging import Staging

EVERYTHING = Traits(modelled=True, buses=True, copies=True)
IDLE = replace(EVERYTHING, locks=True, idle=True, unstated=True)


def in_space(problem: Problem) -> list[tuple[Stage, ...]]:
    """Return every plan of the space that `cp_sat` names."""
    again = problem.objective in ("latency", "energy")
    once = serving_once(problem)
    widest = max(len(group) for group in disjoint_sets(problem.platform.devices))
    return [
        stages
        for stages in every_plan(problem, problem.stages, again=again)
        if (problem.stages or len(stages) <= 2 * widest)
        and all(sum(stage.devices == (name,) for stage in stages) <= 1 for name in once)
    ]


def plan_or_none(problem: Problem, hint: tuple[Stage, ...] | None = None) -> Plan | None:
    try:
        plan = cp_sat(problem, hint)
    except NoPlanError:
        return None
    assert plan.predicted == evaluate(problem, plan.stages).predicted  # raises where the plan is not legal
    assert problem.stages in (None, len(plan.stages))
    return plan


def assert_best(problem: Problem, plans: list[tuple[Stage, ...]]) -> None:
    plan, best = plan_or_none(problem), least(problem, iter(plans))
    if best is None:
        assert plan is None
        return
    assert plan is not None
    assert figure(problem, plan.predicted) == pytest.approx(best, rel=1e-7)
    assert (plan.status, plan.bound, plan.scheduler) == ("optimal", plan.value, "cp-sat")


@given(data=st.data(), together=st.booleans())
@examples(150)
def test_bytes_are_the_least_of_all_plans(data: st.DataObject, together: bool) -> None:
    problem = data.draw(lexicographic_problems(operators=(2, 7), children_together=together))
    assert_best(problem, in_space(problem))


@given(data=st.data(), together=st.booleans())
@examples(150)
def test_bytes_with_communication_by_edges_are_the_least_of_all_plans(data: st.DataObject, together: bool) -> None:
    problem = data.draw(lexicographic_problems(BY_EDGES, operators=(2, 7), children_together=together))
    assert_best(problem, in_space(problem))


@given(data=st.data(), together=st.booleans())
def test_best_is_by_edges_where_they_are_counted(data: st.DataObject, together: bool) -> None:
    """`best` begins at the plan that is best by tensors, which is another one in some of these."""
    problem = data.draw(lexicographic_problems(BY_EDGES, operators=(2, 6), children_together=together))
    expected = least(problem, iter(in_space(problem)))
    if expected is None:
        with pytest.raises(NoPlanError):
            plan(problem)
        return
    best = plan(problem).plan
    assert (best.value, best.status, best.bound) == (expected, "optimal", expected)


def test_the_two_counts_of_communication_choose_different_cuts() -> None:
    """a's 5 bytes have one reader, b's 4 have two: edges bring 5 bytes to b, and 8 to c and d. Memory is the same."""
    sizes = {"a": 5, "b": 4, "c": 9, "d": 9, "e": 1}
    reads = {"a": (), "b": ("a",), "c": ("b",), "d": ("b",), "e": ("c", "d")}
    operators = tuple(
        Operator(name, "k", reads[name], (Tensor(name, (size,), "int8"),), int(name in "ae"))
        for name, size in sizes.items()
    )
    graph = OperatorGraph("two readers", (), operators, ("e",))
    for objective, first, value in [
        ("memory,communication", ("a", "b"), (1, 4)),
        ("memory,edge_communication", ("a",), (1, 5)),
        ("dram,memory,edge_communication", ("a",), (0, 1, 5)),
    ]:
        for scheduler in ("best", "cp-sat"):
            found = plan(equal_devices(graph, 2, objective, stages=2), scheduler).plan
            assert (found.stages[0].operators, found.value, found.status) == (first, value, "optimal")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("objective", TIMED)
@given(data=st.data(), traits=st.sampled_from([Traits(), EVERYTHING, IDLE]), together=st.booleans())
@examples(200)
def test_seconds_and_joules_are_the_best_of_all_plans(
    objective: Any, data: st.DataObject, traits: Traits, together: bool
) -> None:
    problem = data.draw(problems(objective, operators=(1, 5), traits=traits, children_together=together))
    assert_best(problem, in_space(problem))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("objective", TIMED)
@given(data=st.data(), chance=st.randoms(use_true_random=False))
@examples(120)
def test_limits_are_met_exactly(objective: Any, data: st.DataObject, chance: random.Random) -> None:
    """The limit is the very figure of one of the plans, which is to stay allowed."""
    problem = data.draw(problems(objective, operators=(1, 5), traits=replace(IDLE, modelled=chance.random() < 0.5)))
    plans = in_space(problem)
    figures = [found for stages in plans if (found := verdict(problem, stages))]
    if not figures:
        return
    one = chance.choice(figures)
    if objective == "throughput":
        problem = replace(problem, max_latency_s=one.latency_s)
    else:
        problem = replace(problem, min_throughput_fps=one.throughput_fps)
    assert_best(problem, plans)


def line(sizes: list[int], platform: Platform, seconds: list[list[float]], **options: Any) -> Problem:
    """Return operators in a row that hand on `sizes` bytes; `seconds` of each device, if they are measured."""
    tensors = [Tensor(f"t{i}", (size,), "int8") for i, size in enumerate(sizes)]
    operators = tuple(
        Operator(f"op{i}", "kind", (before.name,), (after,), 1, 1)
        for i, (before, after) in enumerate(pairwise(tensors))
    )
    graph = OperatorGraph("line", (tensors[0],), operators, (tensors[-1].name,))
    devices = {
        d.name: DeviceProfile.in_order(graph, tuple(row)) for d, row in zip(platform.devices, seconds, strict=False)
    }
    return Problem(graph, platform, Profile("line", graph.fingerprint, devices), **options)


def test_a_bus_that_all_links_share_sets_the_pace() -> None:
    """Four operators of 10 ms, links of 8 ms. Four stages take 18 ms, and three links on one bus 24; three take 20."""
    devices = tuple(Device(f"d{i}") for i in range(4))
    links = tuple(Link(a.name, b.name, 0.008, bus="usb") for a in devices for b in devices if a != b)
    apart = tuple(replace(link, bus="") for link in links)
    plans = [cp_sat(line([1] * 5, Platform("box", devices, each), [[0.01] * 4] * 4)) for each in (apart, links)]
    assert [len(plan.stages) for plan in plans] == [4, 3]
    assert [plan.value for plan in plans] == [(pytest.approx(1 / 0.018),), (pytest.approx(1 / 0.02),)]


def test_a_cache_that_is_too_small_is_worth_a_second_stage() -> None:
    model = DeviceModel(call_s=0.001, cached_bytes=2, refill_bytes_per_s=100.0)
    devices = tuple(Device(f"tpu{i}", model=model) for i in range(2))
    plan = cp_sat(line([1] * 5, Platform("box", devices), [], objective="latency"))
    assert [stage.operators for stage in plan.stages] == [("op0", "op1"), ("op2", "op3")]
    assert plan.value == (pytest.approx(0.002),)


def test_devices_that_share_cores_do_not_work_together() -> None:
    """Each operator is fastest on another one of two devices that share core 0."""
    platform = Platform("box", (Device("d0", cores=(0,)), Device("cpu", cores=(0, 1)), Device("d1", cores=(1,))))
    problem = line([1, 1, 1], platform, [[0.1, 0.9], [0.9, 0.1], [0.4, 0.4]])
    found = cp_sat(problem)
    assert {stage.devices[0] for stage in found.stages} == {"d0", "d1"}
    assert found.predicted.throughput_fps == pytest.approx(1 / 0.4)


def equal_devices(graph: OperatorGraph, count: int, objective: Any, **options: Any) -> Problem:
    devices = tuple(Device(f"d{i}", cache_bytes=options.pop("cache", 10)) for i in range(count))
    return Problem(graph, Platform("box", devices), unmeasured(graph), objective, **options)


def fork(readers: int) -> OperatorGraph:
    """Return one operator, and so many that read it."""
    stem = Operator("stem", "kind", (), (Tensor("s", (4,), "int8"),), 4)
    tips = [Operator(f"tip{i}", "kind", ("s",), (Tensor(f"t{i}", (1,), "int8"),), 4) for i in range(readers)]
    return OperatorGraph("fork", (), (stem, *tips), tuple(f"t{i}" for i in range(readers)))


def test_without_a_number_of_stages_bytes_take_as_many_as_can_be() -> None:
    assert len(cp_sat(equal_devices(fork(3), 3, "memory,communication")).stages) == 3
    assert len(cp_sat(equal_devices(fork(1), 3, "memory,communication")).stages) == 2
    together = cp_sat(equal_devices(fork(3), 3, "memory,communication", children_together=True))
    assert [stage.operators for stage in together.stages] == [("stem",), ("tip0", "tip1", "tip2")]


def test_children_that_must_stay_together_leave_no_plan_of_three_stages() -> None:
    problem = equal_devices(fork(3), 3, "memory,communication", children_together=True, stages=3)
    with pytest.raises(InfeasibleError, match="no plan of 3 stages"):
        cp_sat(problem)


def test_more_stages_than_devices() -> None:
    with pytest.raises(InfeasibleError, match=r"3 stages.* 2 devices"):
        cp_sat(equal_devices(fork(3), 2, "memory,communication", stages=3))
    platform = Platform("box", (Device("d0"),))
    with pytest.raises(InfeasibleError, match="no plan of 2 stages"):
        cp_sat(line([1, 1, 1], platform, [[0.1, 0.1]], stages=2))


def test_dram_needs_the_caches_stated_and_equal() -> None:
    graph = fork(2)
    none = Platform("box", (Device("d0"), Device("d1")))
    needed = "need equal parameter caches"
    with pytest.raises(OptionError, match=rf"platform box {needed} \(d0: unknown, d1: unknown\); give each the same"):
        cp_sat(Problem(graph, none, unmeasured(graph), "memory,dram,communication"))
    unequal = Platform("box", (Device("d0", cache_bytes=1), Device("d1", cache_bytes=2)))
    with pytest.raises(OptionError, match=rf"platform box {needed} \(d0: 1, d1: 2\); give each the same `cache_bytes`"):
        cp_sat(Problem(graph, unequal, unmeasured(graph), "dram,memory,communication"))


def test_energy_of_a_device_whose_power_nobody_knows() -> None:
    with pytest.raises(ProfileError, match="active_w"):
        cp_sat(line([1, 1], Platform("box", (Device("d0"),)), [[0.1]], objective="energy"))


def test_time_that_is_over_proves_nothing() -> None:
    """No plan found in no time is no proof: neither where none exists (bytes) nor where one does (seconds)."""
    problem = equal_devices(fork(3), 3, "memory,communication", children_together=True, stages=3)
    with pytest.raises(InfeasibleError):
        cp_sat(problem)
    with pytest.raises(SearchTimeError, match="`time_limit_s`"):
        cp_sat(replace(problem, time_limit_s=0.0))
    platform = Platform("box", (Device("d0"), Device("d1")))
    problem = line([1, 1, 1, 1], platform, [[0.1, 0.1, 0.1], [0.1, 0.1, 0.1]])
    assert cp_sat(problem).status == "optimal"
    with pytest.raises(SearchTimeError, match="`time_limit_s`"):
        cp_sat(replace(problem, time_limit_s=0.0))


def test_time_over_before_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes have a plan all the same, an even split; seconds have the hint, and build one model of the two."""
    for objective in LEXICOGRAPHIC + BY_EDGES:
        plan = cp_sat(equal_devices(fork(4), 3, objective, stages=3, time_limit_s=0.0))
        assert plan.value is not None
        assert plan.bound is not None
        assert plan.bound <= plan.value
        best = cp_sat(equal_devices(fork(4), 3, objective, stages=3))
        assert plan.bound <= (best.value or ())
    platform = Platform("box", (Device("d0"), Device("d1")))
    problem = line([1, 1, 1], platform, [[0.1, 0.2], [0.2, 0.1]], time_limit_s=0.0)
    with pytest.raises(SearchTimeError, match="`time_limit_s`"):
        cp_sat(problem)
    hint = (Stage(("d1",), ("op0", "op1")),)
    built = []

    def staging(model: Any, dag: Any, stages: int) -> Staging:
        built.append(stages)
        return Staging(model, dag, stages)

    monkeypatch.setattr(least_seconds, "Staging", staging)
    plan = cp_sat(problem, hint)
    assert (plan.stages, plan.status) == (hint, "feasible")
    assert plan.bound is not None
    assert plan.bound[0] >= 1 / 0.1
    assert built == [2]


@given(data=st.data(), objective=st.sampled_from(TIMED), chance=st.randoms(use_true_random=False))
def test_a_hint_changes_nothing_but_the_way(data: st.DataObject, objective: Any, chance: random.Random) -> None:
    """Neither a good hint, nor one outside of the space (replicas, another number of stages, no plan at all)."""
    problem = data.draw(problems(objective, operators=(1, 4)))
    plans = list(every_plan(replace(problem, stages=None), again=True))
    names = tuple(operator.name for operator in problem.graph.operators)
    everywhere = Stage(tuple(device.name for device in problem.platform.devices), names)
    hint = chance.choice([chance.choice(plans), (everywhere,), (Stage(("nowhere",), names),), ()])
    with_hint, without = plan_or_none(problem, hint), plan_or_none(problem)
    assert (with_hint and with_hint.status) == (without and without.status)
    if with_hint and without:
        assert with_hint.value == pytest.approx(without.value, rel=1e-7)


def test_a_missing_ortools_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(OptionError, match="pip install ortools"):
        cp_sat(equal_devices(fork(3), 2, "memory,communication", stages=2, children_together=False))


def test_ctrl_c_after_a_search_interrupts_and_does_not_kill() -> None:
    graph = OperatorGraph("g", (), (Operator("a", "a", (), (Tensor("t", (4,)),), 1),), ("t",))
    cp_sat(Problem(graph, Platform("p", (Device("d"),)), unmeasured(graph), "memory,communication"))
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
