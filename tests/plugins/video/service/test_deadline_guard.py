"""The guard of a deadline: it plans anew when half of the misses that are allowed have come, and not before."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from tests.cost.test_deadlines import PIPELINE, SINGLE, decided
from tests.support.parts import needs

needs("av")

from tvm_pipeline.core.plan import Decision, Measured, Plan
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.statistics import RunStatistics
from tvm_pipeline.cost.scaling import slowed
from tvm_pipeline.cost.under_load import FrameDeadline
from tvm_pipeline_video.service import deadline_guard
from tvm_pipeline_video.service.deadline_guard import DeadlineGuard

# Of each 100 frames one may take longer than 45 ms, so ten of the latest 1000.
DEADLINE = FrameDeadline(0.045, 0.01, 20.0)
NOTHING = RunStatistics(0, None, None, None, None, None, ())


@dataclass
class Running:
    """A live pipeline by its figures alone."""

    given: Problem
    plan: Plan
    frames: int = 0
    factors: dict[str, float] = field(default_factory=lambda: {"a": 1.0, "b": 1.0})
    switches: list[tuple[Plan, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)

    @property
    def problem(self) -> Problem:
        return slowed(self.given, self.factors)

    def switch(self, plan: Plan, reason: str) -> bool:
        self.plan = plan
        self.switches.append((plan, reason))
        return True

    def note(self, kind: str, reason: str) -> None:
        self.notes.append((kind, reason))


@pytest.fixture
def guard(monkeypatch) -> DeadlineGuard:
    """The guard of a pipeline of 50 frames a second, which takes 40 ms; one device would take 30."""
    monkeypatch.setattr(deadline_guard, "SETTLES_S", 0.0)
    problem, decision = decided()
    rates = {PIPELINE: (50.0, ((0.02,) * 50, (0.02,) * 50)), SINGLE: (33.3, ((0.03,) * 50,))}
    measured = tuple(
        Measured(p, rates[p.stages][0], 0, 0, NOTHING, None, rates[p.stages][1]) for p in decision.candidates
    )
    return DeadlineGuard(Running(problem, decision.plan), replace(decision, measured=measured), DEADLINE)


def run(guard: DeadlineGuard, frames: int, late: int = 0) -> None:
    """Let frames come out, the first of them late."""
    for number in range(frames):
        guard.pipeline.frames += 1
        guard.count(0.05 if number < late else 0.01)


def test_half_of_the_misses_allowed_bring_the_plan_that_keeps_the_deadline_now(guard):
    guard.pipeline.factors = {"a": 1.0, "b": 1.5}  # the pipeline takes 50 ms, and the first device alone 30
    run(guard, 900, late=4)
    guard.keep()
    assert guard.pipeline.switches == []
    run(guard, 50, late=1)
    guard.keep()
    ((plan, reason),) = guard.pipeline.switches
    assert plan.stages == SINGLE
    assert reason == "5 of the last 950 frames took longer than 45 ms, and with it they would not"
    run(guard, 10, late=4)
    guard.keep()  # it counts anew
    assert len(guard.pipeline.switches) == 1
    assert guard.late == 9


def test_misses_that_the_promise_allows_change_nothing(guard):
    guard.pipeline.factors = {"a": 1.0, "b": 1.5}
    for _ in range(20):
        run(guard, 300, late=1)
        guard.keep()
        assert guard.misses() == ""
    assert (guard.late, guard.pipeline.switches) == (20, [])


def test_where_the_running_plan_is_the_best_it_stays(guard):
    run(guard, 100, late=5)
    guard.keep()
    assert (guard.pipeline.switches, guard.pipeline.notes) == ([], [])


def test_where_no_plan_keeps_it_that_is_noted(guard, monkeypatch):
    monkeypatch.setattr(deadline_guard, "SIMULATING_SHARE", 1e-6)
    guard.pipeline.factors = {"a": 2.0, "b": 2.0}
    run(guard, 100, late=5)
    guard.keep()
    ((kind, reason),) = guard.pipeline.notes
    assert kind == "limit"
    assert reason == "5 of the last 100 frames took longer than 45 ms, and no plan would keep the deadline now"
    run(guard, 100, late=5)
    guard.keep()  # what the search took is a small share of the time until the next
    assert len(guard.pipeline.notes) == 1
    assert guard.misses() == "10 of the last 200 frames took longer than 45 ms"  # those before the search count, too


def test_a_device_that_is_out_takes_its_plans_with_it(guard):
    problem = guard.pipeline.given
    platform = replace(problem.platform, devices=problem.platform.devices[:1])
    guard.pipeline.given = replace(problem, platform=platform)
    run(guard, 100, late=5)
    guard.keep()
    assert [plan.stages for plan, _ in guard.pipeline.switches] == [SINGLE]


def test_a_broken_promise_is_told_once(guard):
    run(guard, 1200, late=9)
    assert guard.misses() == ""
    run(guard, 30, late=10)
    assert guard.misses() == "10 of the last 30 frames took longer than 45 ms"
    assert guard.misses() == ""


@pytest.mark.parametrize("lacks", ["deadline", "decision", "factors"])
def test_without_a_promise_or_a_way_to_change_plans_nothing_is_done(guard, lacks):
    run(guard, 100, late=20)
    setattr(guard.pipeline if lacks == "factors" else guard, lacks, {} if lacks == "factors" else None)
    guard.keep()
    assert (guard.pipeline.switches, guard.pipeline.notes) == ([], [])


def test_decisions_are_told_by_the_times_of_slower_devices(guard):
    guard.pipeline.factors = {"a": 3.0, "b": 2.0}
    now: Decision = guard._as_slow_as_now(guard.decision)
    by_stages = {found.plan.stages: found for found in now.measured}
    assert by_stages[PIPELINE].times_s == (pytest.approx((0.06,) * 50), pytest.approx((0.04,) * 50))
    assert by_stages[PIPELINE].throughput_fps == pytest.approx(50 / 3)
