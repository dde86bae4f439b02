"""Plans whose stages are measured: a device without hardware that is not as its profile says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fake_backend import FakeModel, busy, chain_model, fake_platform, numbers
from tvm_pipeline import Pipeline, Problem, evaluate
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.profile import DeviceProfile, Profile, SegmentProfile, unmeasured
from tvm_pipeline.errors import InfeasibleError, OptionError
from tvm_pipeline.planning import plan as decide
from tvm_pipeline.profiling import stage_timer

SLOW_S = 0.004


def measured_plan(model: FakeModel, problem: Problem) -> tuple[Plan, tuple[SegmentProfile, ...]]:
    decision = decide(problem, "measured", measure=stage_timer(model))
    return decision.plan, decision.segments


def problem_of(model: FakeModel, platform: Platform, seconds: float = 1e-3) -> Problem:
    devices = {
        device.name: DeviceProfile.in_order(model.graph, (seconds,) * len(model.graph)) for device in platform.devices
    }
    return Problem(model.graph, platform, Profile(model.graph.name, model.graph.fingerprint, devices), stages=2)


@pytest.mark.thorough
def test_the_device_has_the_last_word():
    # By the profile four and four are best; in truth the first two take nearly all the time.
    model = chain_model(8, hooks={(name, "d0"): busy(SLOW_S) for name in ("op0", "op1")})
    problem = problem_of(model, fake_platform("d0", "d1"))
    plan, segments = measured_plan(model, problem)
    assert [stage.operators[0] for stage in plan.stages] == ["op0", "op1"]  # as no other cut parts the two
    assert plan.scheduler == "measured"
    assert plan.status == "feasible"
    assert plan.gap is not None
    told = replace(problem, profile=replace(problem.profile, segments=segments))
    assert evaluate(told, plan.stages).predicted == plan.predicted
    assert [(s.device, s.operators) for s in segments] == [(s.devices[0], s.operators) for s in plan.stages]
    # What a stage was measured to take is what the plan promises.
    assert plan.predicted.throughput_fps == pytest.approx(1 / max(s.seconds for s in segments))
    with Pipeline(model, plan, problem.platform) as pipeline:
        assert [int(result.outputs["y"][0]) for result in pipeline.map(numbers(5))] == [8, 9, 10, 11, 12]


def test_devices_of_one_kind_are_chosen_and_told_apart():
    model = chain_model(4)
    kinds = [Device("cpu", "fake", active_w=3.0), *fake_platform("tpu0", "tpu1").devices]
    plan, _ = measured_plan(model, problem_of(model, Platform("mixed", tuple(kinds))))
    assert plan.devices == ("tpu0", "tpu1")


def test_a_model_may_speak_where_nothing_was_measured():
    model = chain_model(6)
    device = Device("tpu0", "fake", model=DeviceModel(operator_s=1e-3))
    platform = Platform("modelled", (device, replace(device, name="tpu1")))
    plan, segments = measured_plan(model, Problem(model.graph, platform, unmeasured(model.graph)))
    assert len(plan.stages) == len(segments) == 2


def test_what_cannot_be_planned_so():
    model = chain_model(4)
    problem = problem_of(model, fake_platform("d0", "d1"))
    with pytest.raises(InfeasibleError, match=r"3 stages need as many equal devices, .* has 2"):
        measured_plan(model, replace(problem, stages=3))
    with pytest.raises(OptionError, match="measured does not plan for objective latency, only for throughput"):
        measured_plan(model, replace(problem, objective="latency"))


def test_a_measured_stage_overrides_its_operators():
    model = chain_model(4)
    problem = problem_of(model, fake_platform("d0", "d1"))
    stages = measured_plan(model, problem)[0].stages
    plain = evaluate(problem, stages).predicted
    told = SegmentProfile("d0", tuple(reversed(stages[0].operators)), 1000.0)
    slowed = evaluate(replace(problem, profile=replace(problem.profile, segments=(told,))), stages).predicted
    assert slowed.throughput_fps == pytest.approx(1e-3)
    assert plain.throughput_fps is not None
    assert plain.throughput_fps > 1.0
    # The stages are measured, so that the first may be any operators; these are of both stages.
    other = SegmentProfile("d0", (stages[0].operators[-1], stages[1].operators[0]), 1.0)
    assert evaluate(replace(problem, profile=replace(problem.profile, segments=(other,))), stages).predicted == plain
