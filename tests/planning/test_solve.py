"""What the user calls: the best of all schedulers, its reasons, and its refusals."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.brute_force import every_plan, figure, least, serving_once
from tests.support.examples import examples, seeds
from tests.support.graphs import TIMED, Traits, lexicographic_problems, problems, random_problem
from tvm_pipeline import planning
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Decision, Plan, Stage, describe
from tvm_pipeline.core.platform import Device, Link, Platform
from tvm_pipeline.core.problem import Objective, Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.cost.device_costs import counts_period
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, NoPlanError, OptionError, ProfileError, SearchTimeError
from tvm_pipeline.planning.registry import OWN
from tvm_pipeline.planning.search import space
from tvm_pipeline.testing import example_problem

EVERYTHING = Traits(modelled=True, buses=True, copies=True)


def every(problem: Problem) -> Iterator[tuple[Stage, ...]]:
    """All that `best` chooses from: pipelines of one device a stage or several, and devices that come again.

    For latency, and for energy without an idle power, a device may come again in any number of stages, for throughput
    in three or four, for energy with an idle power in three; one with a memory limit or a parameter cache never does.
    """
    limited = serving_once(problem)
    paced = counts_period(problem)
    if paced:
        yield from every_plan(problem, problem.stages, replicas=True)
    if problem.min_throughput_fps is not None or problem.max_latency_s is not None:
        return
    for stages in every_plan(problem, problem.stages, again=True):
        used = [stage.devices[0] for stage in stages]
        most = len(used) if not paced else 3 if problem.objective == "energy" else 4
        if len(stages) <= most and not any(used.count(name) > 1 for name in limited):
            yield stages


def check(problem: Problem, *, proves: bool = False) -> None:
    optimum = least(problem, every(problem))
    try:
        decision = planning.plan(problem)
    except NoPlanError:
        assert optimum is None or not proves
        return
    assert_sound(problem, decision)
    assert optimum is not None
    plan, value = decision.plan, figure(problem, decision.plan.predicted)
    assert plan.status == "optimal" or not proves
    if plan.status == "optimal":
        assert value == pytest.approx(optimum, rel=1e-9)
        assert plan.bound == plan.value
    elif plan.bound is not None:
        bound = -plan.bound[0] if problem.objective == "throughput" else plan.bound[0]
        assert bound - 1e-9 * abs(bound) <= optimum <= value + 1e-9 * abs(value)


def assert_sound(problem: Problem, decision: Decision) -> None:
    """Candidates differ, stand in order, are legal, and say what `evaluate` says."""
    assert decision.plan == decision.candidates[0]
    assert len({plan.stages for plan in decision.candidates}) == len(decision.candidates)
    figures = [figure(problem, plan.predicted) for plan in decision.candidates]
    # Of equal figures the simpler plan comes first, and sums in another order are equal.
    figures = [float(f"{value:.12g}") if isinstance(value, float) else value for value in figures]
    assert figures == sorted(figures)
    for plan in decision.candidates:
        assert plan.predicted == evaluate(problem, plan.stages).predicted
        assert problem.stages in (None, len(plan.stages))
        assert describe(plan) in decision.why or len(decision.candidates) == 1
        assert Plan.parse(str(plan)) == plan


def random_of_a_kind(seed: int) -> tuple[Problem, bool]:
    """A problem, and whether its optimum is always proven: not with buses, nor with unequal links to replicas."""
    rng = random.Random(seed)
    traits = replace(rng.choice((Traits(), Traits(modelled=True), EVERYTHING)), idle=seed % 3 > 0)
    objective: Objective = rng.choice(TIMED)
    problem = random_problem(rng, objective, operators=(1, 4), traits=traits)
    problem = replace(problem, children_together=rng.random() < 0.2)
    if rng.random() < 0.4:
        if objective == "throughput":
            return replace(problem, max_latency_s=rng.randint(5, 120) / 1000), False
        return replace(problem, min_throughput_fps=float(rng.randint(5, 80))), False
    return problem, not counts_period(problem)


def test_it_is_the_best_of_all_plans_of_every_kind() -> None:
    for seed in seeds(250):
        problem, proves = random_of_a_kind(seed)
        check(problem, proves=proves)


@pytest.mark.parametrize("seed", [1755, 1927, 2288, 2355, 2736])
def test_what_a_bus_or_a_mean_over_replicas_hides_is_not_claimed(seed: int) -> None:
    """The plan of least cost misses the pace over its bus, or replicas with unequal links share frames otherwise."""
    rng = random.Random(seed)
    traits = Traits(modelled=True, buses=True, unsupported=False, memory=False)
    objective: Objective = rng.choice(("latency", "energy"))
    problem = random_problem(rng, objective, operators=(2, 4), devices=(2, 3), traits=traits, choose_stages=False)
    check(replace(problem, min_throughput_fps=float(rng.randint(20, 100))))


@examples(25)
@given(problems("throughput", operators=(1, 5)))
def test_throughput_is_the_best_of_pipelines_replicas_and_both(problem: Problem) -> None:
    check(problem)


@pytest.mark.thorough
def test_where_devices_have_too_many_states_other_searches_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of 16 unequal devices: here the limit is lower."""
    monkeypatch.setattr(space, "MOST_CELLS", 8)
    for seed in range(6):
        objective: Objective = "latency" if seed % 2 else "throughput"
        problem = random_problem(random.Random(seed), objective, operators=(2, 5), devices=(2, 3), choose_stages=False)
        check(replace(problem, time_limit_s=0.1))


@pytest.mark.parametrize("objective", ["latency", "energy"])
@examples(25)
@given(data=st.data())
def test_a_single_frame_is_the_best_of_all_pipelines(objective: Objective, data: st.DataObject) -> None:
    check(data.draw(problems(objective, operators=(1, 4))), proves=True)


@examples(25)
@given(lexicographic_problems(operators=(2, 6)), st.booleans())
def test_bytes_are_the_best_of_all_stagings(problem: Problem, together: bool) -> None:
    problem = replace(problem, children_together=together)
    optimum = least(problem, every_plan(problem, problem.stages))
    if optimum is None:
        with pytest.raises(InfeasibleError, match=r"no plan is possible: .* stages are not possible"):
            planning.plan(problem)
        return
    decision = planning.plan(problem)
    assert_sound(problem, decision)
    assert (decision.plan.status, decision.plan.value) == ("optimal", optimum)


@examples(25)
@given(problems("throughput", operators=(1, 5), traits=EVERYTHING))
def test_without_time_there_is_still_a_plan(problem: Problem) -> None:
    try:
        decision = planning.plan(replace(problem, time_limit_s=0.0))
    except NoPlanError:
        return
    assert_sound(problem, decision)
    optimum, plan = least(problem, every(problem)), decision.plan
    if plan.status == "optimal":
        assert figure(problem, plan.predicted) == pytest.approx(optimum, rel=1e-9)
    elif plan.bound is not None:
        assert -plan.bound[0] * (1 + 1e-9) <= optimum


REFUSED = {("revisits", "latency")}


@pytest.mark.parametrize("scheduler", [name for name in OWN if not OWN[name].cut])
def test_a_scheduler_by_name_is_legal_and_never_better_than_the_best(scheduler: str) -> None:
    made = 0
    for seed in range(10):
        rng = random.Random(seed)
        problem = random_problem(rng, rng.choice(TIMED), operators=(2, 4), traits=Traits(modelled=True))
        problem = replace(problem, time_limit_s=0.1)  # local search stops early
        try:
            decision, best_plan = planning.plan(problem, scheduler), planning.plan(problem).plan
        except (NoPlanError, SearchTimeError):  # a busy machine may find none in that time
            continue
        except OptionError:
            # Where a number of stages is asked for, or an objective, that it does not make.
            if problem.stages is None and (scheduler, problem.objective) not in REFUSED:
                raise
            continue
        made += 1
        assert decision.plan.scheduler == scheduler
        assert decision.candidates == (decision.plan,)
        assert scheduler in decision.why
        assert problem.stages in (None, len(decision.plan.stages))
        assert decision.plan.predicted == evaluate(problem, decision.plan.stages).predicted
        best = figure(problem, best_plan.predicted)
        assert figure(problem, decision.plan.predicted) >= best - 1e-9 * abs(best)
    assert made > 0


def net(objective: str = "throughput", stages: int | None = None, **power: float) -> Problem:
    operators = tuple(Operator(f"op{i}", "k", (f"t{i}",), (Tensor(f"t{i + 1}", (1,)),)) for i in range(3))
    graph = OperatorGraph("net", (Tensor("t0", (1,)),), operators, ("t3",))
    seconds = {
        "cpu": DeviceProfile.in_order(graph, (0.01, 0.01, 0.04)),
        "gpu": DeviceProfile.in_order(graph, (0.04, 0.01, 0.01)),
    }
    devices = tuple(Device(name, active_w=power.get(name)) for name in seconds)
    profile = Profile("net", graph.fingerprint, seconds)
    return Problem(graph, Platform("box", devices), profile, objective, stages)  # type: ignore[arg-type]


def test_the_why_compares_with_every_other_plan() -> None:
    """cpu | gpu: 20 and 10 ms; either alone: 60 ms; both as replicas: 30 ms a frame."""
    decision = planning.plan(net())
    assert describe(decision.plan) == "two-stage (cpu | gpu)"
    assert decision.plan.value == pytest.approx((50.0,))
    assert decision.why == (
        "two-stage (cpu | gpu) has the best throughput: +50.0% against replicas (cpu + gpu), "
        "+150.0% against revisits (cpu | gpu | cpu), +200.0% against single (cpu), +200.0% against single (gpu)"
    )


def test_on_equal_figures_the_simpler_plan_wins() -> None:
    problem = net("latency")
    same = {name: DeviceProfile.in_order(problem.graph, (0.01, 0.01, 0.01)) for name in ("cpu", "gpu")}
    decision = planning.plan(replace(problem, profile=replace(problem.profile, devices=same)))
    assert describe(decision.plan) == "single (cpu)"


def test_one_device_is_a_good_answer_where_links_are_dear() -> None:
    problem = net("latency")
    dear = tuple(Link(a, b, 9.0) for a, b in (("cpu", "gpu"), ("gpu", "cpu")))
    decision = planning.plan(replace(problem, platform=replace(problem.platform, links=dear)))
    assert len(decision.plan.stages) == 1


def test_the_only_plan_possible_says_so() -> None:
    problem = net()
    decision = planning.plan(replace(problem, platform=Platform("box", problem.platform.devices[:1])))
    assert (decision.why, decision.plan.devices) == ("no other plan competes with it", ("cpu",))


def test_an_unknown_scheduler_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match=f"there is no scheduler magic; there are best, {', '.join(OWN)}"):
        planning.plan(net(), "magic")


def test_a_decision_tells_whether_its_scheduler_was_asked_for() -> None:
    """The only plan of one device was not asked for."""
    problem = example_problem()
    alone = replace(problem, platform=replace(problem.platform, devices=problem.platform.devices[:1]))
    assert [planning.plan(alone).asked, planning.plan(alone, "single").asked] == [False, True]
    assert len(planning.plan(alone).candidates) == 1


def test_a_scheduler_is_not_asked_for_stages_that_it_does_not_make() -> None:
    with pytest.raises(OptionError, match="`stages` 3: the plans of scheduler two-stage have 2"):
        planning.plan(net("latency", 3), "two-stage")
    assert len(planning.plan(net("latency", 3), "chain").plan.stages) == 3


def test_more_stages_than_devices_takes_one_twice_or_says_why_not() -> None:
    """cpu | gpu | cpu has 10, 10 and 40 ms."""
    decision = planning.plan(net(stages=3))
    assert describe(decision.plan) == "revisits (cpu | gpu | cpu)"
    assert decision.plan.value == pytest.approx((20.0,))
    alone = Platform("box", (Device("cpu"),))
    with pytest.raises(InfeasibleError, match="3 stages need as many devices that share no cores; platform box has 1"):
        planning.plan(replace(net(stages=3), platform=alone))


@pytest.mark.parametrize(
    ("scheduler", "joules"),
    [("best", 0.09), ("chain", 0.09), ("two-stage", 0.09), ("single", 0.12), ("replicas", 0.21)],
)
def test_energy_wants_the_power_of_every_device(scheduler: str, joules: float) -> None:
    """At 5 and 2 W: cpu 50, 50 and 200 mJ; gpu 80, 20 and 20 mJ; replicas take every other frame."""
    with pytest.raises(ProfileError, match="nothing is known of the power of device gpu; give `active_w`"):
        planning.plan(net("energy", cpu=5.0), scheduler)
    assert planning.plan(net("energy", cpu=5.0, gpu=2.0), scheduler).plan.value == pytest.approx((joules,))


def test_the_why_says_what_the_idle_machine_draws() -> None:
    """cpu | gpu take 50 and 20 + 20 mJ in 10 and 20 ms; at 4 W the 20 ms between frames are 80 mJ. gpu alone: 360."""
    problem = net("energy", cpu=5.0, gpu=2.0)
    problem = replace(problem, platform=replace(problem.platform, idle_w=4.0))
    decision = planning.plan(problem)
    assert decision.plan.value == pytest.approx((0.17,))
    assert decision.why.endswith("; 47% of its energy is the 4 W of the idle machine")


def test_an_operator_that_no_device_runs_is_named() -> None:
    problem = net()
    devices = {name: DeviceProfile.in_order(problem.graph, (0.1, None, 0.1)) for name in ("cpu", "gpu")}
    with pytest.raises(InfeasibleError, match="no device can run operator op1"):
        planning.plan(replace(problem, profile=replace(problem.profile, devices=devices)))


def test_planning_imports_nothing_heavy() -> None:
    """Board users bring their own TVM; the solvers' libraries are loaded when they are first needed."""
    heavy = "{'tvm', 'onnx', 'tflite', 'torch', 'numba', 'ortools', 'networkx'}"
    program = (
        "import pkgutil, sys, tvm_pipeline, tvm_pipeline.planning as s\n"
        "for module in pkgutil.iter_modules(s.__path__, 'tvm_pipeline.planning.'):\n"
        "    __import__(module.name)\n"
        f"print(sorted({{name.partition('.')[0] for name in sys.modules}} & {heavy}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
