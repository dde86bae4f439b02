"""The exact planner against every plan there is: throughput, latency and energy, with and without limits."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.brute_force import every_chain, every_plan, figure, least, serving_once
from tests.support.examples import examples, seeds
from tests.support.graphs import TIMED, Traits, constrained, problems, random_chain, random_problem, randoms
from tvm_pipeline import planning
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.core.platform import Device, Link, Platform
from tvm_pipeline.core.problem import Objective, Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile, unmeasured
from tvm_pipeline.cost.device_costs import counts_period
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import NoPlanError, OptionError, PlanError, SearchTimeError
from tvm_pipeline.planning.sat.cp_sat import cp_sat
from tvm_pipeline.planning.search.dynamic_programming import chain, hybrid, ideals

Scheduler = Callable[[Problem], Plan]
EVERYTHING = Traits(modelled=True, buses=True, copies=True)
WITHOUT_BUSES = Traits(modelled=True)


def space(problem: Problem, scheduler: Scheduler) -> Iterator[tuple[Stage, ...]]:
    """Return all plans that `scheduler` chooses from."""
    again = not counts_period(problem)
    limited = serving_once(problem)
    if scheduler is chain:
        plans = every_chain(problem, problem.stages, again=again)
    else:
        plans = every_plan(problem, problem.stages, again=again, replicas=scheduler is hybrid)
    for stages in plans:
        used = [name for stage in stages for name in stage.devices]
        if not any(used.count(name) > 1 for name in limited):
            yield stages


def planned(scheduler: Scheduler, problem: Problem) -> Plan | None:
    try:
        plan = scheduler(problem)
    except NoPlanError:
        return None
    assert plan.predicted == evaluate(problem, plan.stages).predicted  # raises where the plan is not legal
    assert problem.stages in (None, len(plan.stages))
    assert plan.scheduler == scheduler.__name__
    assert plan.bound is not None
    return plan


def check(problem: Problem, scheduler: Scheduler, *, proves: bool = True) -> None:
    """Check that the plan is the best of its space, or that its bound encloses the best."""
    optimum = least(problem, space(problem, scheduler))
    plan = planned(scheduler, problem)
    if plan is None:
        # Only what a search cannot add up (buses, unequal transfers to replicas) may hide a plan under a limit.
        assert optimum is None or not proves
        return
    assert optimum is not None
    value = figure(problem, plan.predicted)
    assert plan.bound is not None
    bound = -plan.bound[0] if problem.objective == "throughput" else plan.bound[0]
    if proves:
        assert plan.status == "optimal"
    if plan.status == "optimal":
        assert value == pytest.approx(optimum, rel=1e-9)
        assert plan.bound == plan.value
    else:
        assert bound - 1e-9 * abs(bound) <= optimum <= value + 1e-9 * abs(value)


@pytest.mark.parametrize("scheduler", [chain, ideals, hybrid])
@examples(25)
@given(data=st.data())
def test_throughput(scheduler: Scheduler, data: st.DataObject) -> None:
    traits = data.draw(st.sampled_from([Traits(), WITHOUT_BUSES, EVERYTHING]))
    most = 6 if scheduler is chain else 5
    problem = data.draw(problems("throughput", operators=(1, most), devices=(1, 4), traits=traits))
    check(problem, scheduler, proves=scheduler is not hybrid and not traits.buses)


@pytest.mark.parametrize("objective", ["latency", "energy"])
@pytest.mark.parametrize("scheduler", [chain, ideals, hybrid])
@examples(25)
@given(data=st.data())
def test_least_sums(scheduler: Scheduler, objective: Objective, data: st.DataObject) -> None:
    """Devices without a memory limit or a parameter cache may come again."""
    traits = data.draw(st.sampled_from([Traits(), EVERYTHING, Traits(idle=True)]))
    most = 6 if scheduler is chain else 4
    problem = data.draw(problems(objective, operators=(1, most), devices=(1, 3), traits=traits))
    check(problem, scheduler, proves=scheduler is not hybrid or not counts_period(problem))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("objective", ["latency", "energy"])
@pytest.mark.parametrize("scheduler", [chain, ideals, hybrid])
@examples(25)
@given(data=st.data())
def test_least_sums_under_a_throughput(scheduler: Scheduler, objective: Objective, data: st.DataObject) -> None:
    traits = data.draw(st.sampled_from([Traits(), WITHOUT_BUSES, EVERYTHING]))
    problem = data.draw(problems(objective, operators=(1, 5), devices=(1, 3), traits=traits))
    limited = replace(problem, min_throughput_fps=float(data.draw(st.integers(5, 80))))
    check(limited, scheduler, proves=scheduler is not hybrid and not traits.buses)


@pytest.mark.parametrize("scheduler", [chain, ideals, hybrid])
@examples(25)
@given(data=st.data())
def test_throughput_under_a_latency(scheduler: Scheduler, data: st.DataObject) -> None:
    traits = data.draw(st.sampled_from([Traits(), WITHOUT_BUSES, EVERYTHING]))
    problem = data.draw(problems("throughput", operators=(1, 5), devices=(1, 3), traits=traits))
    limited = replace(problem, max_latency_s=data.draw(st.integers(5, 120)) / 1000)
    check(limited, scheduler, proves=scheduler is not hybrid and not traits.buses)


@pytest.mark.parametrize("scheduler", [chain, ideals, hybrid])
@examples(25)
@given(data=st.data())
def test_children_together(scheduler: Scheduler, data: st.DataObject) -> None:
    objective = data.draw(st.sampled_from(TIMED))
    most = 5 if objective == "throughput" else 4
    drawn = problems(objective, operators=(1, most), traits=WITHOUT_BUSES, children_together=True)
    check(data.draw(drawn), scheduler, proves=scheduler is not hybrid)


@pytest.mark.parametrize("scheduler", [chain, ideals])
@pytest.mark.parametrize("objective", ["latency", "energy"])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_device_serves_as_many_stages_as_it_may(scheduler: Scheduler, objective: Objective, most: int) -> None:
    """Two devices alternate as the faster one along seven operators, so without a limit one of them serves four times.

    Plans are counted here, and judged without the limit.
    """
    graph = random_chain(random.Random(0), 7)
    seconds = {"dla": [1, 9] * 3 + [1], "gpu": [9, 1] * 3 + [9]}
    devices = {
        name: DeviceProfile.in_order(graph, [float(s) for s in row], joules=[float(s) for s in row])
        for name, row in seconds.items()
    }
    free = Problem(
        graph,
        Platform("board", (Device("dla"), Device("gpu"))),
        Profile("chain", graph.fingerprint, devices),
        objective,
    )
    allowed = [
        stages
        for stages in every_chain(free, None, again=True)
        if sum(stage.devices == ("dla",) for stage in stages) <= most
    ]
    limited = replace(free, platform=Platform("board", (Device("dla", most_stages=most), Device("gpu"))))
    plan = scheduler(limited)
    assert figure(free, plan.predicted) == least(free, iter(allowed)) > least(free, every_chain(free, None, again=True))
    assert plan.status == "optimal"
    with pytest.raises(PlanError, match=f"device dla would serve 4 stages, and its most_stages is {most}"):
        evaluate(limited, scheduler(free).stages)


def mixed(seed: int, scheduler: Scheduler) -> tuple[Problem, bool]:
    """Return a random problem of any kind, and whether a search proves its plan."""
    rng = random.Random(seed)
    traits = rng.choice((Traits(), WITHOUT_BUSES, EVERYTHING))
    traits = replace(traits, idle=seed % 4 > 0, unstated=seed % 4 > 2)
    objective: Objective = rng.choice(TIMED)
    problem = constrained(rng, random_problem(rng, objective, operators=(1, 5), traits=traits))
    return problem, not counts_period(problem) or not (scheduler is hybrid or traits.buses)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("scheduler", [chain, ideals, hybrid])
def test_problems_of_every_kind(scheduler: Scheduler) -> None:
    """Hypothesis likes its problems small; these are larger on average."""
    for seed in seeds(400):
        problem, proves = mixed(seed, scheduler)
        check(problem, scheduler, proves=proves)


@pytest.mark.parametrize("scheduler", [chain, ideals, hybrid])
def test_time_that_is_over_proves_nothing(scheduler: Scheduler) -> None:
    """Only `b` runs the first operator and only `a` the others: no plan is at hand without a search, yet one exists."""
    tensors = [Tensor(f"t{i}", (1,)) for i in range(7)]
    operators = tuple(Operator(f"op{i}", "kind", (f"t{i}",), (tensors[i + 1],)) for i in range(6))
    graph = OperatorGraph("net", (tensors[0],), operators, ("t6",))
    devices = {
        "a": DeviceProfile.in_order(graph, (None, *(0.1,) * 5)),
        "b": DeviceProfile.in_order(graph, (0.1, *(None,) * 5)),
    }
    platform = Platform("box", (Device("a"), Device("b")))
    problem = Problem(graph, platform, Profile("net", graph.fingerprint, devices))
    assert [stage.devices for stage in scheduler(problem).stages] == [("b",), ("a",)]
    with pytest.raises(SearchTimeError, match="`time_limit_s`"):
        scheduler(replace(problem, time_limit_s=0.0))


@pytest.mark.parametrize("scheduler", [chain, ideals, hybrid])
@examples(25)
@given(data=st.data())
def test_without_time_there_is_a_plan_with_a_bound(scheduler: Scheduler, data: st.DataObject) -> None:
    """The plan may be one of no search at all, and so better than the scheduler's own space."""
    objective = data.draw(st.sampled_from(TIMED))
    traits = replace(EVERYTHING, idle=True)
    problem = data.draw(problems(objective, operators=(1, 4), traits=traits))
    optimum = least(problem, space(problem, scheduler))
    plan = planned(scheduler, replace(problem, time_limit_s=0.0))
    if plan is None:
        return
    assert optimum is not None
    assert plan.bound is not None
    bound = -plan.bound[0] if objective == "throughput" else plan.bound[0]
    assert bound - 1e-9 * abs(bound) <= optimum
    if plan.status == "optimal":
        assert figure(problem, plan.predicted) <= optimum + 1e-9 * abs(optimum)


@examples(25)
@given(randoms(), st.sampled_from(TIMED))
def test_equal_devices_change_places_without_a_trace(rng: random.Random, objective: Objective) -> None:
    """Only the first free one of equal devices is tried, so their order in the platform must not matter."""
    traits = Traits(overlapping=False, modelled=True)
    problem = random_problem(rng, objective, operators=(2, 5), devices=(2, 2), traits=traits)
    first, other = problem.platform.devices
    twin = replace(first, name="twin", cores=tuple(core + 100 for core in first.cores))
    # The twin has the links of the first device; between the two there are none.
    links = [*problem.platform.links, *problem.profile.links]
    links = list({(link.source, link.destination): link for link in reversed(links)}.values())
    links += [replace(link, source="twin") for link in links if link.source == first.name]
    links += [replace(link, destination="twin") for link in links if link.destination == first.name]
    measured = dict(problem.profile.devices)
    if first.name in measured:
        measured["twin"] = measured[first.name]
    profile = replace(problem.profile, devices=measured, links=())
    found = set()
    for devices in permutations((first, other, twin)):
        platform = Platform("box", devices, tuple(links))
        shuffled = replace(problem, platform=platform, profile=profile)
        plan = planned(ideals, shuffled)
        found.add(None if plan is None else round(figure(shuffled, plan.predicted), 9))
    assert len(found) == 1
    if found != {None}:
        optimum = least(shuffled, space(shuffled, ideals))
        assert found == {round(optimum, 9)}


def of_chain(seconds: dict[str, tuple[float | None, ...]], **figures: object) -> Problem:
    """Return a chain of operators with 10 bytes of parameters each, on a device for each row of seconds."""
    count = len(next(iter(seconds.values())))
    operators = tuple(Operator(f"op{i}", "k", (f"t{i}",), (Tensor(f"t{i + 1}", (100,)),), 10) for i in range(count))
    graph = OperatorGraph("net", (Tensor("t0", (100,)),), operators, (f"t{count}",))
    profile = Profile(
        "net", graph.fingerprint, {name: DeviceProfile.in_order(graph, row) for name, row in seconds.items()}
    )
    return Problem(graph, Platform("box", tuple(map(Device, seconds))), profile, **figures)  # type: ignore[arg-type]


def test_a_device_that_is_fast_at_the_ends_comes_twice_for_latency() -> None:
    plan = chain(of_chain({"cpu": (0.1, 0.9, 0.1), "npu": (0.9, 0.1, 0.9)}, objective="latency"))
    assert plan.stages == (Stage(("cpu",), ("op0",)), Stage(("npu",), ("op1",)), Stage(("cpu",), ("op2",)))
    assert plan.value == pytest.approx((0.3,))


def test_the_cache_of_a_model_does_not_count_where_the_device_was_measured() -> None:
    problem = of_chain({"cpu": (0.1, 0.9, 0.1), "npu": (0.9, 0.1, 0.9)}, objective="latency")
    modelled = tuple(replace(d, model=DeviceModel(cached_bytes=1)) for d in problem.platform.devices)
    for scheduler in (chain, ideals, cp_sat):
        plan = scheduler(replace(problem, platform=Platform("box", modelled)))
        assert [stage.devices for stage in plan.stages] == [("cpu",), ("npu",), ("cpu",)]


@pytest.mark.parametrize(
    ("idle_w", "joules", "stages"),
    [(0.0, 0.14, ["gpu"]), (1.0, 0.21, ["gpu"]), (2.0, 0.27, ["gpu", "cpu"]), (9.0, 0.55, ["gpu", "cpu"])],
)
def test_idle_power_buys_a_pipeline(idle_w: float, joules: float, stages: list[str]) -> None:
    """gpu alone: 70 ms at 2 W. gpu | cpu: 30 ms at 2 W and 40 ms at 3.25 W, a frame every 40 ms."""
    problem = of_chain({"gpu": (0.03, 0.04), "cpu": (0.09, 0.04)}, objective="energy")
    devices = tuple(replace(device, active_w=w) for device, w in zip(problem.platform.devices, (2, 3.25), strict=True))
    problem = replace(problem, platform=Platform("box", devices, idle_w=idle_w))
    for scheduler in (chain, ideals, cp_sat):
        plan = scheduler(problem)
        assert [stage.devices[0] for stage in plan.stages] == stages
        assert (plan.value, plan.status) == ((pytest.approx(joules),), "optimal")


def test_a_dear_link_keeps_the_model_in_one_place() -> None:
    problem = of_chain({"cpu": (0.1, 0.2), "npu": (0.2, 0.1)})
    assert len(chain(problem).stages) == 2
    dear = Platform("box", problem.platform.devices, (Link("cpu", "npu", 1.0), Link("npu", "cpu", 1.0)))
    assert len(chain(replace(problem, platform=dear)).stages) == 1


def test_a_slow_middle_is_replicated() -> None:
    """10, 40 and 10 ms on four equal devices: a | b + c | d makes 50 frames a second, all four together 66.7."""
    problem = of_chain(dict.fromkeys("abcd", (0.01, 0.04, 0.01)))
    assert hybrid(problem).value == pytest.approx((4 / 0.06,))
    three = replace(problem, stages=3)
    plan = hybrid(three)
    assert [len(stage.devices) for stage in plan.stages] == [1, 2, 1]
    assert plan.value == pytest.approx((50.0,))
    assert plan.status == "optimal"
    assert ideals(three).value == pytest.approx((25.0,))


@pytest.mark.parametrize(
    ("limit_ms", "period_ms", "devices"),
    [(70.0, 35.0, ["a", "b"]), (64.0, 45.0, ["b", "a"]), (60.0, 60.0, ["a"])],
)
def test_a_latency_chooses_among_slower_pipelines(limit_ms: float, period_ms: float, devices: list[str]) -> None:
    """a a | b is 35 and 33 ms, b | a a is 16 and 45, a alone 60; the second is neither the fastest nor the shortest."""
    problem = of_chain({"a": (0.015, 0.02, 0.025), "b": (0.016, 0.03, 0.033)}, max_latency_s=limit_ms / 1000)
    for scheduler in (chain, ideals):
        plan = scheduler(problem)
        assert [stage.devices[0] for stage in plan.stages] == devices
        assert plan.value == pytest.approx((1000 / period_ms,))
        assert plan.status == "optimal"


def test_two_stages_of_overflow_take_turns_on_a_bus() -> None:
    """Each stage spills 100 of its 200 bytes, 10 ms: apart 100 frames a second, over one bus 50."""
    model = DeviceModel(cached_bytes=100, refill_bytes_per_s=1e4)
    operators = tuple(Operator(f"op{i}", "k", (f"t{i}",), (Tensor(f"t{i + 1}", (1,)),), 100) for i in range(4))
    graph = OperatorGraph("net", (Tensor("t0", (1,)),), operators, ("t4",))
    apart = Platform("box", tuple(Device(name, model=model) for name in "ab"))
    shared = Platform("box", tuple(Device(name, model=model, bus="usb") for name in "ab"))
    problem = Problem(graph, apart, unmeasured(graph))
    assert ideals(problem).value == pytest.approx((100.0,))
    plan = ideals(replace(problem, platform=shared))
    assert plan.value == pytest.approx((50.0,))
    assert plan.status == "optimal"


def test_cutting_anywhere_beats_the_given_order() -> None:
    """Two branches that stand interleaved in the graph's order, each fast on a device of its own."""
    names = ("a0", "b0", "a1", "b1")
    reads = {"a0": "x", "b0": "x", "a1": "ta0", "b1": "tb0"}
    operators = tuple(Operator(name, "k", (reads[name],), (Tensor(f"t{name}", (1,)),)) for name in names)
    graph = OperatorGraph("branches", (Tensor("x", (1,)),), operators, ("ta1", "tb1"))
    seconds = {"cpu": (0.01, 0.09, 0.01, 0.09), "npu": (0.09, 0.01, 0.09, 0.01)}
    profile = Profile(
        "branches", graph.fingerprint, {name: DeviceProfile.in_order(graph, row) for name, row in seconds.items()}
    )
    problem = Problem(graph, Platform("box", (Device("cpu"), Device("npu"))), profile)
    assert ideals(problem).value == pytest.approx((50.0,))
    assert chain(problem).value == pytest.approx((10.0,))


def test_memory_forces_a_cut() -> None:
    problem = of_chain({"a": (0.1, 0.1), "b": (0.1, 0.1)})
    tight = Platform("box", tuple(Device(name, memory_bytes=10) for name in "ab"))
    assert len(ideals(replace(problem, platform=tight, objective="latency", activations=False)).stages) == 2


def test_replicas_do_not_change_bytes() -> None:
    problem = replace(of_chain({"a": (0.1, 0.1)}), objective="memory,communication")
    with pytest.raises(OptionError, match="hybrid does not plan for objective memory,communication"):
        planning.plan(problem, "hybrid")


@pytest.mark.parametrize("scheduler", ["chain", "ideals", "two-stage", "hybrid"])
def test_communication_by_edges_is_no_figure_of_one_cut(scheduler: str) -> None:
    problem = replace(of_chain({"a": (0.1, 0.1), "b": (0.1, 0.1)}), objective="memory,edge_communication")
    refused = (
        f"scheduler {scheduler} does not plan for objective memory,edge_communication, only .*; use cp-sat or best"
    )
    with pytest.raises(OptionError, match=refused):
        planning.plan(problem, scheduler)
    if scheduler != "hybrid":
        run = planning.SCHEDULERS[scheduler].run
        with pytest.raises(OptionError, match="counts communication by tensors; use `scheduler` cp-sat or best"):
            run(problem)


def test_too_many_ideals_are_refused_with_what_to_use_instead() -> None:
    """2^20 subsets of twenty operators side by side."""
    operators = tuple(Operator(f"op{i}", "k", ("x",), (Tensor(f"t{i}", (1,)),)) for i in range(20))
    graph = OperatorGraph("wide", (Tensor("x", (1,)),), operators, tuple(f"t{i}" for i in range(20)))
    profile = Profile("wide", graph.fingerprint, {"a": DeviceProfile.in_order(graph, (0.1,) * 20)})
    problem = Problem(graph, Platform("box", (Device("a"),)), profile)
    with pytest.raises(OptionError, match="wide has too many downsets to list; use `scheduler` cp-sat, or chain"):
        ideals(problem)
    assert chain(problem).value == hybrid(problem).value == pytest.approx((0.5,))


@given(problems("throughput"))
@examples(20)
def test_the_same_problem_gives_the_same_plan(problem: Problem) -> None:
    assert planned(ideals, problem) == planned(ideals, problem)


@given(problems("throughput", operators=(2, 8), devices=(2, 4), traits=WITHOUT_BUSES, choose_stages=False))
@examples(30)
def test_more_freedom_is_never_worse(problem: Problem) -> None:
    plans = [planned(scheduler, problem) for scheduler in (chain, ideals, hybrid)]
    assume(plans[0] is not None)
    bounds = [plan.bound[0] for plan in plans if plan is not None and plan.bound is not None]
    assert len(bounds) == 3
    assert bounds[0] <= bounds[1] * (1 + 1e-9)
    assert bounds[1] <= bounds[2] * (1 + 1e-9)
    assert not any(math.isnan(bound) for bound in bounds)
