"""Deadlines of frames: hand-worked choices between a pipeline and one device."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.support.graphs import random_chain
from tvm_pipeline.core.plan import Decision, Measured, Plan, Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.core.statistics import RunStatistics
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.cost.under_load import FrameDeadline, in_time
from tvm_pipeline.errors import LimitMissedError

PIPELINE = Stage(("a",), ("op0",)), Stage(("b",), ("op1",))  # 50 frames a second, 40 ms
SINGLE = (Stage(("a",), ("op0", "op1")),)  # 33.3 frames a second, 30 ms


def decided() -> tuple[Problem, Decision]:
    graph = random_chain(random.Random(0), 2)
    devices = {name: DeviceProfile.in_order(graph, s) for name, s in {"a": (0.02, 0.01), "b": (0.03, 0.02)}.items()}
    platform = Platform("box", tuple(map(Device, devices)))
    problem = Problem(graph, platform, Profile("chain", graph.fingerprint, devices))
    plans = tuple(
        Plan("chain", name, "throughput", stages, evaluate(problem, stages).predicted)
        for name, stages in (("chain", PIPELINE), ("single", SINGLE))
    )
    return problem, Decision(plans[0], plans, "it is fast")


@pytest.mark.parametrize(
    ("rate_fps", "deadline_s", "stages"), [(30, 0.045, PIPELINE), (30, 0.035, SINGLE), (40, 0.045, PIPELINE)]
)
def test_of_the_plans_in_time_the_one_with_most_to_spare_is_chosen(
    rate_fps: float, deadline_s: float, stages: tuple[Stage, ...]
) -> None:
    chosen = in_time(*decided(), FrameDeadline(deadline_s, 0.01, rate_fps))
    assert chosen.plan.stages == stages
    assert chosen.candidates[0] == chosen.plan
    assert chosen.plan.frames_inside <= deadline_s * chosen.plan.predicted.throughput_fps


@pytest.mark.parametrize(
    ("rate_fps", "deadline_s", "told"),
    [
        (30, 0.025, "the best deadline at this rate is 30 ms, of single (a); nor does one at a tenth"),
        (
            40,
            0.035,
            "the best deadline at this rate is 40 ms, of chain (a | b); up to 32 frames a second",
        ),
        (60, 0.045, "the most that a candidate can take is 50; up to 48 frames a second"),
    ],
)
def test_where_none_is_in_time_what_would_be_is_told(rate_fps: float, deadline_s: float, told: str) -> None:
    with pytest.raises(LimitMissedError) as refused:
        in_time(*decided(), FrameDeadline(deadline_s, 0.01, rate_fps))
    assert told in str(refused.value)


def test_the_measured_share_of_slow_frames_decides() -> None:
    """One frame of 50 takes 90 ms; frames come so rarely that none waits for another."""
    problem, decision = decided()
    statistics = RunStatistics(99, 33.3, 0.03, 0.03, 0.09, 0.09, ())
    times_s = ((0.03,) * 49 + (0.09,),)
    found = replace(decision, measured=(Measured(decision.candidates[1], 33.3, 0.0, 0.03, statistics, None, times_s),))
    assert in_time(problem, found, FrameDeadline(0.05, 0.025, 5)).plan.stages == SINGLE
    found = replace(found, candidates=found.candidates[1:])
    with pytest.raises(LimitMissedError, match="the best deadline at this rate is 90 ms"):
        in_time(problem, found, FrameDeadline(0.05, 0.015, 5))
