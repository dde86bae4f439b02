"""Which changes of plan are proposed when devices become slower and faster: on a machine with its own clock."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.machine import Loads, Machine, plan_of, problem_of
from tests.support.examples import examples
from tvm_pipeline import Plan, Problem
from tvm_pipeline.core.plan import Measured, Prediction, Stage
from tvm_pipeline.core.profile import DeviceProfile
from tvm_pipeline.core.statistics import RunStatistics, StageRecord
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import NoPlanError, PlanError
from tvm_pipeline.runtime import Adaptation
from tvm_pipeline.runtime.replanning import NEARLY, LimitWatch, gain, nearest_plan, quick_plan
from tvm_pipeline.runtime.strategy import TICK_S, CoreLoad, RecentFrames

EQUAL = {"d0": [4e-3] * 8, "d1": [4e-3] * 8}
# Best cut in the middle: 62.5 frames a second, replicas make 50.
APART = {"d0": [4e-3] * 4 + [6e-3] * 4, "d1": [6e-3] * 4 + [4e-3] * 4}
UNEQUAL = {"big": [1e-3] * 8, "little": [2e-3] * 8}
WATTS = {"big": 4.0, "little": 1.0}
NO_RUN = RunStatistics(9, 1.0, 0.0, 0.0, 0.0, 0.0, ())


@pytest.fixture
def stat(tmp_path: Path) -> Path:
    return tmp_path / "stat"


def between(begin_s: float, end_s: float, **loads: float) -> Loads:
    return lambda now_s: loads if begin_s <= now_s < end_s else {}


def every_plan(problem: Problem) -> list[tuple[Stage, ...]]:
    """One device, all, and every cut of the chain in both orders of two devices."""
    names = tuple(problem.graph.operator_names)
    devices = [device.name for device in problem.platform.devices]
    plans = [(Stage((name,), names),) for name in devices]
    plans += [(Stage(chosen, names),) for n in range(2, len(devices) + 1) for chosen in combinations(devices, n)]
    for first in devices:
        for second in devices:
            if first != second:
                cuts = range(1, len(names))
                plans += [(Stage((first,), names[:cut]), Stage((second,), names[cut:])) for cut in cuts]
    return plans


def possible(problem: Problem) -> list[tuple[float, float, float]]:
    """Joules, frames a second and latency of every plan that keeps the limits."""
    found = []
    for stages in every_plan(problem):
        try:
            predicted = evaluate(problem, stages).predicted
        except PlanError:
            continue
        found.append((predicted.energy_j or 0.0, predicted.throughput_fps or 0.0, predicted.latency_s or 0.0))
    return found


def test_nothing_changes_on_an_idle_machine(stat: Path):
    problem = problem_of(EQUAL)
    machine = Machine(problem, quick_plan(problem), Adaptation(), stat, noise=0.1)
    machine.run(40)
    assert not machine.switches


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_one_change_for_a_load_and_one_when_it_is_gone(stat: Path, share: float):
    problem = problem_of(APART)
    first = quick_plan(problem)
    machine = Machine(problem, first, Adaptation(), stat, loads=between(5, 20, d1=share))
    machine.run(5)
    assert not machine.switches
    machine.run(1)
    assert len(machine.switches) == 1
    machine.run(15)
    assert len(machine.switches) <= 2
    machine.run(10)
    assert len(machine.switches) <= 2
    assert 1 / machine.pace_s() >= 0.9 * first.predicted.throughput_fps


def test_a_load_that_comes_and_goes_changes_the_plan_no_more_often_than_itself(stat: Path):
    problem = problem_of(APART)
    for period_s in (0.3, 1.5, 4.0):
        machine = Machine(
            problem,
            quick_plan(problem),
            Adaptation(),
            stat,
            loads=lambda now, p=period_s: {"d1": 0.6} if now % (2 * p) < p else {},
        )
        machine.run(20)
        assert len(machine.switches) <= 20 / period_s + 1


def test_a_hiccup_is_no_reason(stat: Path):
    problem = problem_of(APART)
    machine = Machine(
        problem,
        quick_plan(problem),
        Adaptation(),
        stat,
        loads=lambda now: {"d1": 0.9} if now % 3 < 0.2 else {},
    )
    machine.run(30)
    assert not machine.switches


@pytest.mark.parametrize(("spread", "switches"), [(0.0, True), (0.05, True), (0.6, False)])
def test_a_gain_below_the_noise_of_the_measurement_is_no_reason(stat: Path, spread: float, switches: bool):
    """The second stage is measured to be slower by half, by frames that differ so much from each other."""
    problem = problem_of(EQUAL)
    strategy = Adaptation()
    strategy._cores = CoreLoad(stat)
    strategy.begin(problem, plan_of(problem, ("d0", 4), ("d1", 4)))
    records = [StageRecord(0, "d0"), StageRecord(1, "d1")]
    proposals = []
    for frame in range(100):
        records[0].add(0.008, 0.0, 0.016, frame, 0.024 * frame)
        records[1].add(0.0, 0.0, 0.024 * (1 + (frame % 3 - 1) * spread), frame, 0.024 * frame)
        if frame % 4 == 3:
            proposals.append(strategy.look(records, problem))
    assert strategy.noise == pytest.approx(spread, abs=0.02)
    assert any(proposals) == switches


def test_a_source_that_gives_few_frames_is_no_reason(stat: Path):
    """Clocks and caches that sleep between frames make the devices slower, and an idle one looks faster."""
    problem = problem_of(APART)
    machine = Machine(problem, quick_plan(problem), Adaptation(), stat, source_fps=10, asleep=1.5)
    machine.run(30)
    assert not machine.switches


def test_of_plans_that_promise_and_do_not_keep_none_take_turns(stat: Path):
    """For latency a sleepy device looks worse than an idle one, until that is used."""
    problem = problem_of(EQUAL, objective="latency")
    machine = Machine(problem, plan_of(problem, ("d0", 8)), Adaptation(), stat, source_fps=10, asleep=1.5)
    machine.run(100)
    assert 1 < len(machine.switches) <= 8
    times = [0.0, *(now_s for now_s, *_ in machine.switches)]
    waits = [after - before for before, after in pairwise(times)]
    assert waits[2:] == sorted(waits[2:])


def test_a_model_of_two_seconds_a_frame_adapts_after_as_many_frames_as_it_takes(stat: Path):
    problem = problem_of({name: [0.25] * 8 for name in EQUAL})
    onset_s = 60
    machine = Machine(
        problem, plan_of(problem, ("d0", 4), ("d1", 4)), Adaptation(), stat, loads=between(onset_s, 999, d1=0.6)
    )
    machine.run(onset_s + 20)
    (switch_s, *_), *more = machine.switches
    assert not more
    slow_frame_s = 4 * 0.25 / (1 - 0.6)
    assert switch_s <= onset_s + 3 * slow_frame_s + 4 * TICK_S


@pytest.mark.parametrize(("noise", "counts"), [(0.01, range(1)), (0.5, range(1, 26))])
def test_plans_are_made_only_where_something_moved_and_one_may_be_better(
    stat: Path, monkeypatch: pytest.MonkeyPatch, noise: float, counts: range
):
    """A search takes time of the cores that the stages need."""
    problem = problem_of(EQUAL)
    asked = []
    monkeypatch.setattr(
        "tvm_pipeline.runtime.adaptation.nearest_plan", lambda now: asked.append(now) or nearest_plan(now)
    )
    machine = Machine(problem, plan_of(problem, ("d0", 4), ("d1", 4)), Adaptation(), stat, noise=noise)
    machine.run(20)
    assert len(asked) in counts


@examples(100)
@given(st.data())
def test_no_plan_gains_more_than_is_known_without_a_search(data: st.DataObject):
    """Of every plan of a chain on two devices, each slower or faster than profiled, and measured before the run."""
    problem = problem_of(APART)
    plans = [Plan("net", "", "throughput", stages, Prediction(10.0)) for stages in every_plan(problem)]
    running = data.draw(st.sampled_from(plans))
    strategy = Adaptation()
    best = max(plans, key=lambda plan: evaluate(problem, plan.stages).predicted.throughput_fps)
    measured = []
    for plan in data.draw(st.sampled_from([(), (running, best)])):
        rate_fps = data.draw(st.floats(5, 15))
        measured.append(Measured(plan, rate_fps, 0.0, 0.1, NO_RUN))
    strategy.expect(measured)
    strategy.begin(problem, running)
    strategy.factors = {name: data.draw(st.floats(0.3, 3)) for name in APART}
    strategy.seen = [RecentFrames(0.01, 0.0, 1.0, 0.0)] * 2
    now = strategy.scaled(problem)
    most = strategy._most_gain(problem, now, running)
    assert all(strategy.corrected(gain(now, plan, running), plan, running) <= most + 1e-9 for plan in plans)


def test_what_was_reset_is_still_seen(stat: Path):
    problem = problem_of(APART)
    machine = Machine(problem, plan_of(problem, ("d0", 4), ("d1", 4)), Adaptation(), stat, loads=between(5, 99, d1=0.6))
    machine.run(4.5)
    for record in machine.records:  # as `reset_statistics` does
        record.frames = 0
        record.samples.clear()
    machine.run(2)
    assert len(machine.switches) == 1


@pytest.mark.thorough
def test_a_device_the_kernel_knows_nothing_of_is_tried_again(stat: Path):
    problem = problem_of({"d0": [1e-3] * 8, "gpu": [0.2e-3] * 8}, objective="latency")
    devices = tuple(replace(device, cores=()) for device in problem.platform.devices)
    problem = replace(problem, platform=replace(problem.platform, devices=devices))
    machine = Machine(problem, plan_of(problem, ("gpu", 8)), Adaptation(), stat, loads=between(5, 30, gpu=0.95))
    machine.run(20)
    assert "gpu" not in machine.plan.devices
    machine.run(200)
    assert "gpu" in machine.plan.devices
    assert len(machine.switches) <= 8


# Limits


def test_a_rate_is_kept_by_the_cheapest_plan_under_load_and_after(stat: Path):
    problem = problem_of(UNEQUAL, WATTS, objective="energy", min_throughput_fps=50.0)
    first = quick_plan(problem)
    assert first.value == pytest.approx((min(joules for joules, *_ in possible(problem)),), rel=NEARLY)
    machine = Machine(problem, first, Adaptation(), stat, loads=between(5, 20, little=0.5))
    machine.run(4)
    assert not machine.switches
    machine.run(11)
    assert 1 / machine.pace_s() >= 50
    slowed = problem_of({**UNEQUAL, "little": [4e-3] * 8}, WATTS, objective="energy", min_throughput_fps=50.0)
    cheapest = min(joules for joules, *_ in possible(slowed))
    assert machine.plan.predicted.energy_j == pytest.approx(cheapest, rel=0.1 + NEARLY)
    assert "frames a second, 50 are asked for" in machine.switches[0][2]
    machine.run(15)
    assert machine.plan.stages == first.stages
    assert len(machine.switches) == 2


def test_where_no_plan_keeps_the_rate_the_fastest_runs(stat: Path):
    problem = problem_of(UNEQUAL, WATTS, objective="energy", min_throughput_fps=150.0)
    first = quick_plan(problem)
    machine = Machine(problem, first, Adaptation(), stat, loads=between(5, 20, little=0.5, big=0.5))
    machine.run(15)
    slowed = problem_of({"big": [2e-3] * 8, "little": [4e-3] * 8})
    assert 1 / machine.pace_s() >= (1 - NEARLY) * max(fps for _, fps, _ in possible(slowed))
    machine.run(15)
    assert machine.plan.stages == first.stages
    assert len(machine.switches) <= 2


def test_where_no_plan_keeps_the_latency_the_one_of_least_latency_runs(stat: Path):
    problem = problem_of(UNEQUAL, max_latency_s=10.5e-3)
    first = quick_plan(problem)
    machine = Machine(problem, first, Adaptation(), stat, loads=between(5, 20, big=0.3, little=0.3))
    machine.run(15)
    slowed = problem_of({"big": [1e-3 / 0.7] * 8, "little": [2e-3 / 0.7] * 8})
    least = min(latency for *_, latency in possible(slowed))
    assert machine.plan.predicted.latency_s == pytest.approx(least, rel=0.1)
    machine.run(15)
    assert machine.plan.predicted.latency_s <= 10.5e-3
    assert machine.plan.predicted.throughput_fps >= first.predicted.throughput_fps / 1.2


def test_a_camera_that_gives_what_is_asked_misses_nothing(stat: Path):
    problem = problem_of(UNEQUAL, WATTS, objective="energy", min_throughput_fps=50.0)
    machine = Machine(problem, quick_plan(problem), Adaptation(), stat, source_fps=10, asleep=1.5)
    machine.run(30)
    assert not machine.switches


@examples(25, deadline=None)
@given(
    figures=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6),
    target=st.one_of(st.tuples(st.just("min_throughput_fps"), st.floats(20, 1500)), st.tuples(
        st.just("max_latency_s"), st.floats(1e-3, 40e-3))),
)  # fmt: skip
def test_the_nearest_plan_keeps_what_can_be_kept(figures: list[tuple[int, int]], target: tuple[str, float]) -> None:
    name, limit = target
    objective = "energy" if name == "min_throughput_fps" else "throughput"
    seconds = {"a": [x * 1e-3 for x, _ in figures], "b": [y * 1e-3 for _, y in figures]}
    free = problem_of(seconds, {"a": 3.0, "b": 1.0}, objective=objective)
    problem = replace(free, **{name: limit})
    plan, keeping, every = nearest_plan(problem), possible(problem), possible(free)
    joules, fps, latency = plan.predicted.energy_j, plan.predicted.throughput_fps, plan.predicted.latency_s
    if keeping and objective == "energy":
        assert fps >= limit * (1 - 1e-6)
        assert joules <= min(row[0] for row in keeping) * (1 + NEARLY + 1e-6)
    elif keeping:
        assert latency <= limit * (1 + 1e-6)
        assert fps >= max(row[1] for row in keeping) / (1 + NEARLY + 1e-6)
    elif objective == "energy":
        assert fps >= max(row[1] for row in every) / (1 + NEARLY + 1e-6)
    else:
        assert latency <= min(row[2] for row in every) * (1 + NEARLY + 1e-6)


def test_without_limits_there_is_no_nearest_plan():
    problem = problem_of({"d0": [1e-3] * 2})
    unable = DeviceProfile.in_order(problem.graph, (1e-3, None))
    with pytest.raises(NoPlanError, match="no plan is left"):
        nearest_plan(replace(problem, profile=replace(problem.profile, devices={"d0": unable})))


def test_a_limit_is_told_once_when_it_is_missed_and_once_when_it_is_kept_again():
    problem = problem_of(EQUAL, WATTS, objective="latency", min_throughput_fps=50.0)
    slow, fast = plan_of(problem, ("d0", 8)), plan_of(problem, ("d0", 4), ("d1", 4))
    nearly = replace(problem, min_throughput_fps=fast.predicted.throughput_fps * 1.03)
    watch = LimitWatch()

    def told(problem: Problem, plan: Plan, starved: bool = False) -> list[str]:
        return [news for _ in range(30) if (news := watch.look(problem, plan, starved))]

    assert told(problem, fast) == []
    assert told(problem, slow, starved=True) == []
    assert told(problem, slow) == ["missed: 31.25 frames a second, 50 are asked for (-38%)"]
    assert told(problem, slow) == []
    assert told(nearly, fast) == []  # less than it may err
    assert told(problem, fast) == ["kept again: 62.5 frames a second, 50 are asked for (+25%)"]
    assert told(nearly, fast) == []
    assert told(replace(problem, min_throughput_fps=None, objective="throughput", max_latency_s=16e-3), slow) == [
        "missed: 32 ms a frame, 16 are allowed (room -50%)"
    ]


def test_the_kernel_is_read_over_half_a_second(tmp_path: Path):
    cores = CoreLoad(tmp_path / "stat")
    assert cores.busy() == {}
    seen = []
    for tick in range(12):
        busy = 10 * max(0, tick - 5)
        (tmp_path / "stat").write_text(f"cpu  1 1\ncpu0 {busy} 0 0 {10 * tick - busy} 0 0 0 0 0 0\nintr 5\n\n")
        seen.append(cores.busy().get(0, 0.0))
    assert seen == pytest.approx([0, 0, 0, 0, 0, 0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_a_gain_is_corrected_by_what_was_measured_before_the_run():
    """By prediction `fast` is a quarter better; side by side it was slower, so that no re-plan promises a gain."""

    def measured(device: str, predicted_fps: float, measured_fps: float) -> Measured:
        stages = (Stage((device,), ("a",)),)
        plan = Plan("net", "single", "throughput", stages, Prediction(predicted_fps, 0.01))
        return Measured(plan, measured_fps, 0.01, 0.01, RunStatistics(9, measured_fps, 0.0, 0.0, 0.0, 0.0, ()))

    slow, fast = measured("d0", 80.0, 72.0), measured("d1", 100.0, 60.0)
    unknown = replace(slow.plan, stages=(Stage(("d2",), ("a",)),))
    strategy = Adaptation()
    assert strategy.corrected(0.25, fast.plan, slow.plan) == 0.25
    strategy.expect([slow, fast])
    assert strategy.corrected(0.25, fast.plan, slow.plan) == pytest.approx(60 / 72 - 1)
    assert strategy.corrected(0.25, unknown, slow.plan) == pytest.approx(1.25 * 0.75 / 0.9 - 1)  # off by the median
    assert strategy.corrected(math.inf, fast.plan, slow.plan) == math.inf
