"""What a live pipeline is asked for may change while it runs, and what it cannot keep is said."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.runtime.machine import plan_of
from tests.support.fake_backend import chain_model, fake_platform, number, raise_at, values
from tvm_pipeline import Problem
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.errors import NoPlanError, OptionError, ProfileError
from tvm_pipeline.runtime import Adaptation, LivePipeline

OPERATORS = 4
# Big: 16 mJ a frame, 250 frames a second; little: 8 mJ, 125.
SECONDS, WATTS = {"big": 1e-3, "little": 2e-3}, {"big": 4.0, "little": 1.0}


def problem_of(model, **options) -> Problem:
    platform = fake_platform(*SECONDS)
    devices = tuple(replace(device, active_w=WATTS[device.name]) for device in platform.devices)
    measured = {name: DeviceProfile.in_order(model.graph, (seconds,) * OPERATORS) for name, seconds in SECONDS.items()}
    profile = Profile(model.graph.name, model.graph.fingerprint, measured)
    return Problem(model.graph, Platform("machine", devices), profile, **options)


def told(pipeline: LivePipeline, *kinds: str) -> list[tuple[str, str]]:
    return [(event.kind, event.reason) for event in list(pipeline.events) if event.kind in kinds]


def devices_of(pipeline: LivePipeline) -> tuple[tuple[str, ...], ...]:
    return tuple(stage.devices for stage in pipeline.plan.stages)


@pytest.mark.parametrize("strategy", [lambda: None, Adaptation])
def test_the_objective_changes_while_frames_run(strategy):
    model = chain_model(OPERATORS)
    problem = problem_of(model)
    results, frames = [], iter(range(1000))

    def some(pipeline: LivePipeline) -> None:
        for _ in range(5):  # so few that the strategies do not see that these devices are faster than their profile
            pipeline.submit(number(next(frames)))
            results.append(pipeline.result())

    with LivePipeline(model, problem, plan_of(problem, ("big+little", 4)), adaptation=strategy()) as pipeline:
        some(pipeline)
        pipeline.set_objective(replace(problem, objective="energy"))
        assert devices_of(pipeline) == (("little",),)
        some(pipeline)
        pipeline.set_objective(replace(problem, objective="energy", min_throughput_fps=200.0))
        assert devices_of(pipeline) == (("big",), ("little",))  # 12 mJ
        some(pipeline)
        pipeline.set_objective(replace(problem, max_latency_s=4.5e-3))
        assert pipeline.plan.predicted.latency_s <= 4.5e-3
        some(pipeline)
        version = pipeline.version
        pipeline.set_objective(replace(problem, objective="latency"))  # the plan is the best for it, too
        assert (pipeline.version, pipeline.plan.objective) == (version, "latency")
        some(pipeline)
        pipeline.set_objective(problem)
        assert devices_of(pipeline) == (("big", "little"),)
        some(pipeline)
        assert values(results) == [value + OPERATORS for value in range(len(results))]
        assert told(pipeline, "objective") == [
            ("objective", "energy"),
            ("objective", "energy, at least 200 frames a second"),
            ("objective", "throughput, at most 0.0045 s a frame"),
            ("objective", "latency"),
            ("objective", "throughput"),
        ]
        assert told(pipeline, "switch")[0] == ("switch", "it is best for energy")


def test_what_is_impossible_changes_nothing():
    model = chain_model(OPERATORS)
    problem = problem_of(model)
    with LivePipeline(model, problem, plan_of(problem, ("big+little", 4)), adaptation=Adaptation()) as pipeline:
        with pytest.raises(NoPlanError, match="asks for 400"):
            pipeline.set_objective(replace(problem, objective="energy", min_throughput_fps=400.0))
        with pytest.raises(NoPlanError, match=r"allows 0\.001"):
            pipeline.set_objective(replace(problem, max_latency_s=1e-3))
        powerless = tuple(replace(device, active_w=None) for device in problem.platform.devices)
        other = replace(problem, platform=replace(problem.platform, devices=powerless), objective="energy")
        with pytest.raises(OptionError, match="keeps chain on machine"):
            pipeline.set_objective(other)
        assert pipeline.given == problem
        assert told(pipeline, "objective", "switch") == []
        pipeline.submit(number(1))
        assert pipeline.result().frame == 0


def test_energy_that_nothing_is_known_of_is_refused():
    model = chain_model(OPERATORS)
    problem = problem_of(model)
    powerless = tuple(replace(device, active_w=None) for device in problem.platform.devices)
    problem = replace(problem, platform=replace(problem.platform, devices=powerless))
    with LivePipeline(model, problem, plan_of(problem, ("big", 4))) as pipeline:
        with pytest.raises(ProfileError, match="active_w"):
            pipeline.set_objective(replace(problem, objective="energy"))
        assert pipeline.given == problem


def test_bytes_do_not_change_while_it_runs_so_throughput_counts():
    model = chain_model(OPERATORS)
    problem = problem_of(model)
    bytes_of = replace(problem, objective="memory,communication")
    with LivePipeline(model, bytes_of, plan_of(problem, ("big", 2), ("little", 2))) as pipeline:
        assert pipeline.given.objective == "throughput"
        pipeline.set_objective(replace(problem, objective="energy"))
        pipeline.set_objective(bytes_of)
        assert pipeline.given.objective == "throughput"


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", [lambda: None, Adaptation])
def test_a_limit_that_a_failure_breaks_is_told_and_told_again_when_it_is_kept(strategy, monkeypatch):
    """Little alone makes 125 frames a second; the cool-down is long enough for that to be told."""
    monkeypatch.setattr("tvm_pipeline.runtime.replanning.MISSING_LOOKS", 2)
    model = chain_model(OPERATORS, hooks={("op0", "big"): raise_at(3, OSError("unplugged"))})
    problem = problem_of(model, objective="energy", min_throughput_fps=200.0)
    first = plan_of(problem, ("big", 2), ("little", 2))
    with LivePipeline(model, problem, first, adaptation=strategy(), cool_down_s=2.0) as pipeline:
        results = []
        for value in range(8):
            pipeline.submit(number(value))
            results.append(pipeline.result())
        assert values(results) == [value + OPERATORS for value in range(8)]
        assert devices_of(pipeline) == (("little",),)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and len(told(pipeline, "limit")) < 2:
            time.sleep(0.05)
        assert told(pipeline, "limit") == [
            ("limit", "missed: 125 frames a second, 200 are asked for (-38%)"),
            ("limit", "kept again: 250 frames a second, 200 are asked for (+25%)"),
        ]
        assert pipeline.plan.stages == first.stages


def test_what_was_given_for_another_objective_is_judged_by_the_one_that_is_asked():
    model = chain_model(OPERATORS)
    problem = problem_of(model)
    by_throughput = plan_of(problem, ("big+little", 4))
    energy = replace(problem, objective="energy")
    with LivePipeline(model, energy, by_throughput, adaptation=Adaptation()) as pipeline:
        deadline = time.monotonic() + 20
        value = 0
        while time.monotonic() < deadline and pipeline.version == 0:
            pipeline.submit(number(value))
            pipeline.result()
            value += 1
        assert devices_of(pipeline) in ((("little",),), (("big",),))
        assert "energy, with" in told(pipeline, "switch")[0][1]
