"""Plans on a shared bus are chosen by what they do there, and not by a bound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tvm_pipeline import Problem, planning, read_graph, read_platform
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.cost.simulate import simulate
from tvm_pipeline.planning.bus_simulation import chosen_by_simulation, shares_a_bus
from tvm_pipeline.planning.planner import proposed

PROFILES = Path(__file__).parents[2] / "profiles"


def problem_on(platform: str, stages: int | None = 4) -> Problem:
    graph = read_graph(PROFILES / "keras" / "ResNet101.json")
    return Problem(graph, read_platform(PROFILES / "platforms" / f"{platform}.toml"), unmeasured(graph), stages=stages)


@pytest.mark.thorough
def test_the_choice_is_no_slower_than_the_planner_s_own_or_a_baseline_s():
    problem = problem_on("coral-usb-4")
    decision = planning.plan(problem, "ideals")
    chosen = chosen_by_simulation(problem, decision, proposed)
    plans = [
        chosen.plan,
        decision.plan,
        *(planning.plan(problem, name).plan for name in ("even-parameters", "greedy")),
    ]
    ours, *others = [simulate(problem, plan.stages, 300).statistics.throughput_fps for plan in plans]
    assert ours >= max(others) * (1 - 1e-9)
    assert "with turns on the bus" in chosen.why
    if chosen.plan.stages != decision.plan.stages:
        assert chosen.plan.status == "feasible"
        assert chosen.plan.bound == decision.plan.bound
        assert chosen.plan == chosen.candidates[0]


def test_where_it_matters():
    usb, pcie = problem_on("coral-usb-4"), problem_on("coral-pcie-8")
    assert shares_a_bus(usb)
    assert not shares_a_bus(pcie)
    assert not shares_a_bus(replace(usb, objective="latency"))
