"""What the user calls: the best of all schedulers, its reasons, and its refusals."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.brute_force import every_chain, every_replication, figure, least
from tests.support.graphs import Traits, problems
from tvm_pipeline.errors import InfeasibleError, OptionError, ProfileError
from tvm_pipeline.evaluate import evaluate
from tvm_pipeline.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.plan import OBJECTIVES, Plan, Problem
from tvm_pipeline.platform import Device, Link, Platform
from tvm_pipeline.profile import DeviceProfile, Profile
from tvm_pipeline.scheduling import SCHEDULERS, Decision, describe, solve


def best_of_all(problem: Problem, again: bool) -> float | None:
    found = [least(problem, every_chain(problem, problem.stages, again=again))]
    if problem.stages in (None, 1):
        found.append(least(problem, every_replication(problem)))
    return min((value for value in found if value is not None), default=None)


def assert_best(problem: Problem, best: float | None) -> None:
    if best is None:
        with pytest.raises(InfeasibleError, match=r"no plan is possible: \S"):
            solve(problem)
        return
    decision = solve(problem)
    assert figure(problem, decision.plan.predicted) == pytest.approx(best, rel=1e-9)
    assert_sound(problem, decision)


def assert_sound(problem: Problem, decision: Decision) -> None:
    """Candidates differ, stand in order, are legal, and say what `evaluate` says."""
    assert decision.plan == decision.candidates[0]
    assert len({plan.stages for plan in decision.candidates}) == len(decision.candidates)
    figures = [figure(problem, plan.predicted) for plan in decision.candidates]
    assert figures == sorted(figures)
    for plan in decision.candidates:
        assert plan.predicted == evaluate(problem, plan.stages).predicted
        assert problem.stages in (None, len(plan.stages))
        assert describe(plan) in decision.why or len(decision.candidates) == 1
        assert Plan.parse(str(plan)) == plan


@given(problems("throughput", operators=(1, 5)))
def test_throughput_is_the_best_of_all_chains_and_replicas(problem: Problem) -> None:
    assert_best(problem, best_of_all(problem, again=False))


@pytest.mark.parametrize("objective", ["latency", "energy"])
@given(data=st.data())
def test_a_single_frame_is_the_best_of_all_chains_and_replicas(objective: str, data: st.DataObject) -> None:
    problem = data.draw(problems(objective, operators=(1, 5), traits=Traits(memory=False)))  # type: ignore[arg-type]
    assert_best(problem, best_of_all(problem, again=True))


@given(problems("latency", operators=(1, 5)))
def test_with_memory_limits_the_best_is_never_worse_than_one_device(problem: Problem) -> None:
    try:
        decision = solve(problem)
    except InfeasibleError:
        return
    assert_sound(problem, decision)
    alone = least(problem, every_chain(problem, 1, again=False)) if problem.stages in (None, 1) else None
    assert alone is None or figure(problem, decision.plan.predicted) <= alone + 1e-12


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@given(data=st.data())
def test_a_scheduler_by_name_is_never_better_than_the_best(scheduler: str, data: st.DataObject) -> None:
    problem = data.draw(problems(data.draw(st.sampled_from(OBJECTIVES)), operators=(1, 4)))
    try:
        decision = solve(problem, scheduler)
    except InfeasibleError:
        return
    except OptionError:  # only where a number of stages is asked for that it does not make
        if problem.stages is None:
            raise
        return
    assert decision.plan.scheduler == scheduler
    assert decision.candidates == (decision.plan,)
    assert scheduler in decision.why
    assert problem.stages in (None, len(decision.plan.stages))
    best = figure(problem, solve(problem).plan.predicted)
    assert figure(problem, decision.plan.predicted) >= best - 1e-12


def net(objective: str = "throughput", stages: int | None = None, **power: float) -> Problem:
    operators = tuple(Operator(f"op{i}", "k", (f"t{i}",), (Tensor(f"t{i + 1}", (1,)),)) for i in range(3))
    graph = OperatorGraph("net", (Tensor("t0", (1,)),), operators, ("t3",))
    seconds = {"cpu": DeviceProfile((0.01, 0.01, 0.04)), "gpu": DeviceProfile((0.04, 0.01, 0.01))}
    devices = tuple(Device(name, active_w=power.get(name)) for name in seconds)
    profile = Profile("net", graph.fingerprint, seconds)
    return Problem(graph, Platform("box", devices), profile, objective, stages)  # type: ignore[arg-type]


def test_the_why_compares_with_every_other_plan() -> None:
    """cpu | gpu: 20 and 10 ms; either alone: 60 ms; both as replicas: 30 ms a frame."""
    decision = solve(net())
    assert describe(decision.plan) == "two-stage (cpu | gpu)"
    assert decision.plan.value == pytest.approx(50.0)
    assert decision.why == (
        "two-stage (cpu | gpu) has the best throughput: +50.0% against replicas (cpu + gpu), "
        "+200.0% against single (cpu), +200.0% against single (gpu)"
    )


def test_on_equal_figures_the_simpler_plan_wins() -> None:
    problem = net("latency")
    same = {name: DeviceProfile((0.01, 0.01, 0.01)) for name in ("cpu", "gpu")}
    decision = solve(replace(problem, profile=replace(problem.profile, devices=same)))
    assert describe(decision.plan) == "single (cpu)"


def test_one_device_is_a_good_answer_where_links_are_dear() -> None:
    problem = net("latency")
    dear = tuple(Link(a, b, 9.0) for a, b in (("cpu", "gpu"), ("gpu", "cpu")))
    decision = solve(replace(problem, platform=replace(problem.platform, links=dear)))
    assert len(decision.plan.stages) == 1


def test_the_only_plan_possible_says_so() -> None:
    problem = net()
    decision = solve(replace(problem, platform=Platform("box", problem.platform.devices[:1])))
    assert (decision.why, decision.plan.devices) == ("it is the only plan possible", ("cpu",))


def test_an_unknown_scheduler_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match=f"no scheduler is called magic; there are best, {', '.join(SCHEDULERS)}"):
        solve(net(), "magic")


def test_a_scheduler_is_not_asked_for_stages_that_it_does_not_make() -> None:
    with pytest.raises(OptionError, match="--stages 3: the plans of scheduler two-stage have 2"):
        solve(net("latency", 3), "two-stage")
    assert len(solve(net("latency", 3), "chain").plan.stages) == 3


def test_more_stages_than_devices_says_why_not() -> None:
    with pytest.raises(InfeasibleError, match="3 stages need as many devices that share no cores; platform box has 2"):
        solve(net(stages=3))


@pytest.mark.parametrize(
    ("scheduler", "joules"),
    [("best", 0.09), ("chain", 0.09), ("two-stage", 0.09), ("single", 0.12), ("replicas", 0.21)],
)
def test_energy_wants_the_power_of_every_device(scheduler: str, joules: float) -> None:
    """At 5 and 2 W: cpu 50, 50 and 200 mJ; gpu 80, 20 and 20 mJ; replicas take every other frame."""
    with pytest.raises(ProfileError, match="nothing is known of the power of device gpu; give `active_w`"):
        solve(net("energy", cpu=5.0), scheduler)
    assert solve(net("energy", cpu=5.0, gpu=2.0), scheduler).plan.value == pytest.approx(joules)


def test_an_operator_that_no_device_runs_is_named() -> None:
    problem = net()
    devices = {name: DeviceProfile((0.1, None, 0.1)) for name in ("cpu", "gpu")}
    with pytest.raises(InfeasibleError, match="no device can run operator op1"):
        solve(replace(problem, profile=replace(problem.profile, devices=devices)))


def test_neither_the_package_nor_its_schedulers_import_tvm() -> None:
    """Board users bring their own TVM, and planning needs none."""
    program = (
        "import pkgutil, sys, tvm_pipeline, tvm_pipeline.scheduling as s\n"
        "for module in pkgutil.iter_modules(s.__path__, 'tvm_pipeline.scheduling.'):\n"
        "    __import__(module.name)\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'tvm', 'onnx', 'tflite', 'torch'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
