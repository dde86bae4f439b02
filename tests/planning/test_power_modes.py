"""Plans over power modes: the best of what each mode could give, with a bound that is true."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.brute_force import every_plan, figure, least
from tests.support.examples import examples
from tests.support.graphs import TIMED, Traits, random_chain, random_platform, random_profile, randoms
from tvm_pipeline.core.in_mode import for_mode, in_mode
from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.core.platform import Device, Link, Platform
from tvm_pipeline.core.power_mode import PowerMode
from tvm_pipeline.core.problem import Objective, Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile, SegmentProfile
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, NoPlanError, OptionError, PlanError, PlatformError, ProfileError
from tvm_pipeline.planning import plan, plan_modes
from tvm_pipeline.runtime.replanning import quick_plan
from tvm_pipeline.testing import example_graph

# In `high` the board has both clusters and draws much; in `low` the big one is off, and little takes twice as long.
HIGH = PowerMode("high", nvpmodel=0, idle_w=3.0, active_w={"big": 8.0, "little": 2.0})
LOW = PowerMode("low", nvpmodel=1, offline_cores=(2, 3), idle_w=0.5, active_w={"little": 0.5})
BOARD = Platform(
    "board",
    (Device("big", cores=(2, 3), active_w=99.0), Device("little", cores=(0, 1))),
    (Link("big", "little", 0.001), Link("little", "big", 0.001)),
    power_modes=(HIGH, LOW),
)


def profile(mode: str, **seconds: list[float | None]) -> Profile:
    graph = example_graph()
    devices = {name: DeviceProfile.in_order(graph, listed) for name, listed in seconds.items()}
    return Profile(graph.name, graph.fingerprint, devices, power_mode=mode)


def of_board(objective: Objective, **limits: float) -> list[Problem]:
    profiles = profile("high", big=[0.01, 0.01], little=[0.03, 0.03]), profile("low", little=[0.06, 0.06])
    return [Problem(example_graph(), in_mode(BOARD, p.power_mode), p, objective, **limits) for p in profiles]


@pytest.mark.parametrize(
    ("objective", "limits", "mode"),
    [
        ("throughput", {}, "high"),
        ("latency", {}, "high"),
        ("energy", {}, "low"),
        ("energy", {"min_throughput_fps": 8.0}, "low"),
        ("energy", {"min_throughput_fps": 9.0}, "high"),  # `low` makes 8.3 at most
        ("latency", {"min_throughput_fps": 30.0}, "high"),
    ],
)
def test_the_objective_chooses_the_mode(objective: Objective, limits: dict, mode: str) -> None:
    problems = of_board(objective, **limits)
    decision = plan_modes(problems)
    assert decision.plan.power_mode == mode
    assert decision.plan.status == "optimal"
    problem = problems[mode == "low"]
    assert decision.plan.predicted == evaluate(problem, decision.plan.stages).predicted
    assert Plan.parse(str(decision.plan)) == decision.plan
    assert f"\npower_mode {mode}\n" in str(decision.plan)


def test_the_reason_says_what_the_other_modes_would_give() -> None:
    decision = plan_modes(of_board("throughput"))
    assert {candidate.power_mode for candidate in decision.candidates} == {"high", "low"}
    assert decision.candidates[0] == decision.plan
    assert decision.why.startswith("power mode high has the best throughput: +700.0% against single (little) in low; ")
    assert "; in high, replicas (big + little) has the best throughput: " in decision.why
    slow = plan_modes(of_board("energy", min_throughput_fps=9.0))
    assert "power mode high has the best energy; power mode low has no plan: " in slow.why
    assert slow.plan.status == "optimal"  # that `low` has none is proven, so it has no better one


@examples(25)
@given(rng=randoms(), objective=st.sampled_from(TIMED))
def test_it_is_the_best_of_all_modes(rng: random.Random, objective: Objective) -> None:
    """Against every plan of each mode; modes differ in their figures, power and devices, and some have no plan."""
    traits = Traits(overlapping=False, memory=False, joules=False)
    graph = random_chain(rng, rng.randint(1, 4))
    machine = random_platform(rng, graph, 2, traits)
    watts = [{device.name: float(rng.randint(1, 5)) for device in machine.devices} for _ in range(2)]
    modes = PowerMode("a", 0, active_w=watts[0]), PowerMode("b", 1, active_w=watts[1], offline_cores=(2, 3))
    machine = replace(machine, power_modes=modes)
    problems = []
    for mode in modes:
        here = in_mode(machine, mode.name)
        measured = replace(random_profile(rng, graph, here, traits), power_mode=mode.name)
        problems.append(Problem(graph, here, measured, objective))

    def every(problem: Problem) -> Iterator[tuple[Stage, ...]]:
        if objective == "throughput":
            yield from every_plan(problem, replicas=True)
        yield from (p for p in every_plan(problem, again=True) if objective != "throughput" or len(p) <= 4)

    optima = [optimum for problem in problems if (optimum := least(problem, every(problem))) is not None]
    try:
        decision = plan_modes(problems)
    except NoPlanError:
        assert not optima
        return
    value = figure(problems[0], decision.plan.predicted)
    assert value == pytest.approx(min(optima), rel=1e-9)
    figures = [figure(problems[0], p.predicted) for p in decision.candidates]
    assert figures == sorted(figures)
    assert decision.plan.bound is not None
    bound = -decision.plan.bound[0] if objective == "throughput" else decision.plan.bound[0]
    assert bound <= min(optima) * (1 - 1e-9 if min(optima) < 0 else 1 + 1e-9)


def test_a_mode_whose_stages_were_measured_as_a_whole_has_a_bound_too() -> None:
    """Such a stage took longer than its operators add up to; the bound of its mode holds, and that of all with it."""
    high, low = of_board("throughput")
    whole = SegmentProfile("little", ("double", "increment"), 0.1)
    slower = replace(low, profile=replace(low.profile, segments=(whole,)))
    decision = plan_modes([high, slower])
    assert (decision.plan.power_mode, decision.plan.status) == ("high", "optimal")
    assert decision.plan.bound == decision.plan.value


def test_no_mode_has_a_plan() -> None:
    with pytest.raises(InfeasibleError, match=r"power mode high: .*; power mode low: "):
        plan_modes(of_board("energy", min_throughput_fps=900.0))


def test_problems_that_do_not_go_together() -> None:
    high, low = of_board("throughput")
    with pytest.raises(OptionError, match="two are of power mode high"):
        plan_modes([high, high])
    with pytest.raises(OptionError, match="one names no power mode"):
        plan_modes([high, replace(low, profile=replace(low.profile, power_mode=""))])
    with pytest.raises(OptionError, match="differ in more than"):
        plan_modes([high, replace(low, objective="latency")])
    with pytest.raises(OptionError, match="at least one"):
        plan_modes([])
    high, low = of_board("energy")
    unknown = replace(low, platform=replace(low.platform, idle_w=None))
    with pytest.raises(ProfileError, match="the idle power of power mode low is not known, that of others is"):
        plan_modes([high, unknown])


def test_the_machine_in_a_mode() -> None:
    """A device whose cores are off is left out with its links, and power is that of the mode alone."""
    low = in_mode(BOARD, "low")
    assert low == Platform("board", (Device("little", cores=(0, 1), active_w=0.5),), (), 0.5, (LOW,))
    assert in_mode(low, "low") == low
    assert in_mode(BOARD, "") is BOARD
    assert in_mode(BOARD, "high").device("big").active_w == 8.0
    silent = replace(BOARD, idle_w=5.0, power_modes=(PowerMode("silent", 2),))
    assert (in_mode(silent, "silent").idle_w, in_mode(silent, "silent").device("big").active_w) == (None, None)
    with pytest.raises(PlatformError, match=r"platform board has no power mode 5W \(it has high, low\)"):
        in_mode(BOARD, "5W")
    off = replace(BOARD, power_modes=(PowerMode("off", 2, offline_cores=(0, 1, 2, 3)),))
    with pytest.raises(PlatformError, match="no device has a core that works in power mode off"):
        in_mode(off, "off")


def test_plans_made_while_it_runs_stay_in_the_mode() -> None:
    (_, low) = of_board("latency")
    assert quick_plan(low).power_mode == "low"
    assert plan(low, "single").plan.power_mode == "low"
    by_hand = replace(plan(low).plan, power_mode="")
    assert for_mode(by_hand, "low").power_mode == "low"
    with pytest.raises(PlanError, match="the plan is for power mode low, the profile is of none"):
        for_mode(plan(low).plan, "")
