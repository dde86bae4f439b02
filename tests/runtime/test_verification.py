"""Which candidates run before one is chosen, and which of them is chosen, by runs that say what they measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_backend import chain_model
from tvm_pipeline.core.plan import Decision, Plan, Prediction, Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.core.statistics import RunStatistics, StageRecord
from tvm_pipeline.cost.simulate import simulate
from tvm_pipeline.errors import OptionError, RunError
from tvm_pipeline.planning import plan as planned
from tvm_pipeline.runtime import verification
from tvm_pipeline.runtime.comparison import Run, Turn, own_times_s, runner
from tvm_pipeline.runtime.verification import LEAST_ROUNDS, SLOT_ROUNDS, verified, with_fewest_inside
from tvm_pipeline.testing import busy

GRAPH = chain_model(2).graph
WHOLE = tuple(GRAPH.operator_names)
PLATFORM = Platform("box", (Device("d0", "fake", (0,)), Device("d1", "fake", (1,)), Device("cpu", "fake", (0, 1))))
STAGES = {
    "two": (Stage(("d0",), WHOLE[:1]), Stage(("d1",), WHOLE[1:])),
    "swapped": (Stage(("d1",), WHOLE[:1]), Stage(("d0",), WHOLE[1:])),
    "replicas": (Stage(("d0", "d1"), WHOLE),),
    "single": (Stage(("d0",), WHOLE),),
    "pool": (Stage(("cpu",), WHOLE),),
}
FOREVER = 1000.0  # every race below ends by its results, long before


def problem_of(**options) -> Problem:
    options = {"platform": PLATFORM, "graph": GRAPH, **options}
    graph, platform = options.pop("graph"), options.pop("platform")
    devices = {device.name: DeviceProfile.in_order(graph, [0.01] * len(graph.operators)) for device in platform.devices}
    return Problem(graph, platform, Profile(graph.name, graph.fingerprint, devices), **options)


def decision_of(objective: str = "throughput", uncertainty: float | None = None, **predicted: float) -> Decision:
    """A decision by predictions: the names of the plans with their frames a second, best first."""
    plans = tuple(
        Plan(GRAPH.name, name, objective, STAGES[name], Prediction(fps, 1 / fps, uncertainty=uncertainty))
        for name, fps in predicted.items()
    )
    return Decision(plans[0], plans, f"{plans[0].scheduler} is predicted to be best")


class Runs:
    """Gives each plan the figures of the test, and counts its turns.

    Args:
        fps: of each plan, or what it raises; latencies are their reciprocals.
        machine: the speed of the machine in each round.
    """

    def __init__(
        self, machine: Callable[[int], float] = lambda _: 1.0, latency_s: Mapping[str, float] | None = None, **fps
    ) -> None:
        self.fps, self.machine, self.latency_s = fps, machine, latency_s or {}
        self.turns = dict.fromkeys(fps, 0)

    def __call__(self, plan: Plan, seconds: float) -> Turn:
        name = plan.scheduler
        speed = self.machine(self.turns[name])
        self.turns[name] += 1
        if isinstance(self.fps[name], Exception):
            raise self.fps[name]
        fps = self.fps[name] * speed
        return Turn(RunStatistics(24, fps, None, None, None, None, ()), self.latency_s.get(name, 1 / fps))


def choice(decision: Decision) -> tuple[str, str]:
    assert decision.plan == decision.candidates[0]
    return decision.plan.scheduler, decision.decided_by


def test_of_plans_with_overlapping_intervals_the_measured_best_is_chosen() -> None:
    predicted = decision_of(two=100, replicas=95, single=60)
    runs = Runs(two=80, replicas=97, single=61)
    decision = verified(problem_of(), predicted, runs, FOREVER)
    assert choice(decision) == ("replicas", "measurement")
    assert [(m.plan.scheduler, m.throughput_fps, m.spread) for m in decision.measured] == [
        ("replicas", 97, 0),
        ("two", 80, 0),
        ("single", 61, 0),
    ]
    assert decision.plan.predicted.throughput_fps == 95  # beside the measured figure
    assert {plan.scheduler for plan in decision.candidates} == {"two", "replicas", "single"}
    assert decision.why == (
        "replicas (d0 + d1) measured 97 fps against 80 fps of two (d0 | d1), 61 fps of single (d0), in turns; "
        "by prediction two is predicted to be best"
    )
    assert runs.turns == dict.fromkeys(runs.turns, LEAST_ROUNDS)  # that was clear at once


@pytest.mark.parametrize("making_s", [0.0, 2.0])
def test_engines_that_make_their_stages_for_long_are_measured_all_the_same(
    monkeypatch: pytest.MonkeyPatch, making_s: float
) -> None:
    """Two seconds for each turn of three plans are more than the ten in all that the turns may take."""
    now_s = [0.0]
    monkeypatch.setattr(verification.time, "perf_counter", lambda: now_s[0])
    runs = Runs(two=50, replicas=97, single=61)

    def run(plan: Plan, seconds: float) -> Turn:
        now_s[0] += making_s + seconds
        return runs(plan, seconds)

    platform = replace(PLATFORM, devices=(replace(PLATFORM.devices[0], backend="engine"), *PLATFORM.devices[1:]))
    problem = problem_of(platform=platform)
    decision = verified(problem, decision_of(two=100, replicas=95, single=60), run, 10.0)
    assert choice(decision) == ("replicas", "measurement")


@pytest.mark.parametrize(
    ("uncertainty", "ran"),
    [
        (None, {"two", "swapped", "single"}),  # 10 % where nothing is stated
        (0.01, {"two", "single"}),
        (0.2, {"two", "swapped", "single", "pool"}),
    ],
)
def test_what_may_be_best_is_run_and_the_obvious_plans(uncertainty: float | None, ran: set[str]) -> None:
    predicted = decision_of(uncertainty=uncertainty, two=100, swapped=90, single=70, pool=69)
    runs = Runs(two=100, swapped=90, single=70, pool=69)
    assert choice(verified(problem_of(), predicted, runs, FOREVER)) == ("two", "measurement")
    assert {name for name, turns in runs.turns.items() if turns} == ran


def test_a_slow_phase_of_the_machine_does_not_choose() -> None:
    """Rounds differ by more than the plans do, but within each round one plan is faster."""
    predicted = decision_of(two=100, replicas=99)
    runs = Runs(two=96, replicas=99, machine=lambda turn: 0.5 + 0.13 * (7 * turn % 5))
    decision = verified(problem_of(), predicted, runs, FOREVER)
    assert choice(decision) == ("replicas", "measurement")
    assert runs.turns["two"] > LEAST_ROUNDS  # which was not clear at once


def test_a_plan_that_is_clearly_worse_leaves_its_time_to_the_others() -> None:
    predicted = decision_of(two=100, replicas=99, single=98)
    noise = (1.0, 1.1, 0.9, 1.05, 0.95)
    runs = Runs(two=96, replicas=97, single=50, machine=lambda turn: noise[turn % 5])
    decision = verified(problem_of(), predicted, runs, FOREVER)
    assert choice(decision) == ("replicas", "measurement")
    assert runs.turns["single"] == LEAST_ROUNDS < runs.turns["two"]
    assert {measured.plan.scheduler for measured in decision.measured} == {"two", "replicas", "single"}


def test_plans_of_the_same_speed_are_not_measured_on_and_on() -> None:
    """The one with the lower latency is chosen, as soon as the other cannot be much faster."""
    predicted = decision_of(two=100, replicas=99)
    runs = Runs(two=96, replicas=97, latency_s={"two": 0.02, "replicas": 0.04}, machine=lambda turn: 1 + turn % 3)
    decision = verified(problem_of(), predicted, runs, FOREVER)
    assert choice(decision) == ("two", "measurement")
    assert runs.turns == dict.fromkeys(runs.turns, LEAST_ROUNDS + 1)


def test_a_plan_that_does_not_run_is_left_out() -> None:
    predicted = decision_of(two=100, replicas=95, single=60)
    runs = Runs(two=RunError("stage 1 on d1 is gone"), replicas=50, single=51)
    decision = verified(problem_of(), predicted, runs, FOREVER)
    assert choice(decision) == ("single", "measurement")
    assert [measured.plan.scheduler for measured in decision.measured] == ["single", "replicas"]
    assert decision.why.endswith("; two (d0 | d1) does not run: stage 1 on d1 is gone")


def test_the_only_plan_that_runs_is_chosen() -> None:
    runs = Runs(two=RunError("gone"), replicas=RunError("gone"), single=51)
    decision = verified(problem_of(), decision_of(two=100, replicas=95, single=60), runs, FOREVER)
    assert choice(decision) == ("single", "measurement")
    assert "single (d0) measured 51 fps, in turns" in decision.why


def test_where_no_candidate_runs_those_that_were_not_tried_are_next() -> None:
    runs = Runs(two=RunError("gone"), single=RunError("gone"), pool=1)
    decision = verified(problem_of(), decision_of(two=100, single=70, pool=60), runs, FOREVER)
    assert choice(decision) == ("pool", "prediction")
    assert "two (d0 | d1) does not run: gone; single (d0) does not run: gone" in decision.why


def test_other_errors_are_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        verified(problem_of(), decision_of(two=100, single=99), Runs(two=ZeroDivisionError(), single=1), FOREVER)


def test_for_latency_the_frame_that_is_alone_counts() -> None:
    predicted = decision_of("latency", two=100, replicas=95)
    runs = Runs(two=80, replicas=60, latency_s={"two": 0.012, "replicas": 0.011})
    decision = verified(problem_of(objective="latency"), predicted, runs, FOREVER)
    assert choice(decision) == ("replicas", "measurement")
    assert decision.why.startswith("replicas (d0 + d1) measured 11 ms against 12 ms of two (d0 | d1)")


@pytest.mark.parametrize(("floor_fps", "chosen"), [(70.0, "two"), (50.0, "replicas"), (90.0, "two")])
def test_a_rate_must_be_kept_as_measured(floor_fps: float, chosen: str) -> None:
    """Where no plan keeps it, the one that comes nearest is taken."""
    predicted = decision_of("latency", two=100, replicas=95)
    runs = Runs(two=80, replicas=60, latency_s={"two": 0.012, "replicas": 0.011})
    problem = problem_of(objective="latency", min_throughput_fps=floor_fps)
    decision = verified(problem, predicted, runs, FOREVER)
    assert choice(decision) == (chosen, "measurement")
    missed = {70.0: "replicas (d0 + d1) missed", 90.0: "no candidate keeps"}
    said = f"; {missed.get(floor_fps)} `min_throughput_fps` as measured"
    assert decision.why.endswith(said) == (floor_fps in missed)


def test_a_latency_must_be_kept_as_measured() -> None:
    predicted = decision_of(two=100, replicas=95)
    runs = Runs(two=80, replicas=90, latency_s={"two": 0.012, "replicas": 0.021})
    decision = verified(problem_of(max_latency_s=0.02), predicted, runs, FOREVER)
    assert choice(decision) == ("two", "measurement")
    assert "replicas (d0 + d1) missed `max_latency_s` as measured" in decision.why


def test_of_equally_fast_plans_the_one_with_the_lower_latency_is_chosen() -> None:
    predicted = decision_of(two=100, replicas=95)
    runs = Runs(two=90.0, replicas=89.5, latency_s={"two": 0.08, "replicas": 0.03})
    assert choice(verified(problem_of(), predicted, runs, FOREVER)) == ("replicas", "measurement")
    runs = Runs(two=90.0, replicas=88.0, latency_s={"two": 0.08, "replicas": 0.03})  # more than 2 % slower
    assert choice(verified(problem_of(), predicted, runs, FOREVER)) == ("two", "measurement")


@pytest.mark.parametrize(
    ("needed", "has_host", "found"),
    [(1, True, 1), (1, False, 2), (3, False, 3), (4, False, None), (9, False, None)],
)
def test_the_pipeline_holds_the_fewest_frames_that_keep_the_rate(
    needed: int, has_host: bool, found: int | None
) -> None:
    def run(plan: Plan, seconds: float) -> Turn:
        fps = 100.0 * min(1.0, plan.frames_inside / needed)
        return Turn(RunStatistics(24, fps, None, None, None, None, ()), 1 / fps)

    problem = with_host_work() if has_host else problem_of()
    measured = verified(problem_of(), decision_of(two=100, replicas=95), Runs(two=90, replicas=60), FOREVER)
    decision = with_fewest_inside(problem, measured, run, FOREVER)
    assert decision.plan.in_flight == found  # of at most four: two workers
    assert (f"with {found} frames inside keeps 100.0% of the rate with 4, at " in decision.why) == (found is not None)
    assert decision.plan == decision.candidates[0]
    assert Plan.parse(str(decision.plan)) == decision.plan
    assert with_fewest_inside(problem, measured, run, 0).plan.in_flight is None
    assert with_fewest_inside(problem, decision_of(two=100, replicas=95), run).plan.in_flight is None  # not measured


@pytest.mark.parametrize(("slow_turn", "rounds"), [(None, LEAST_ROUNDS), (1, SLOT_ROUNDS)])
def test_no_round_follows_where_each_of_enough_says_the_same(slow_turn: int | None, rounds: int) -> None:
    turns: list[int] = []

    def run(plan: Plan, seconds: float) -> Turn:
        turns.append(plan.calls_inside)
        slow = plan.calls_inside == 2 and turns.count(2) - 1 == slow_turn
        return Turn(RunStatistics(24, 95.0 if slow else 100.0, None, None, None, None, ()), plan.calls_inside / 100)

    measured = verified(problem_of(), decision_of(two=100, replicas=95), Runs(two=90, replicas=60), FOREVER)
    assert with_fewest_inside(problem_of(), measured, run, FOREVER).plan.in_flight == 2
    assert turns.count(4) == rounds


def test_an_equally_fast_plan_of_fewer_workers_holds_the_fewest_frames() -> None:
    """Replicas need four frames for a rate that one device reaches with two."""

    def run(plan: Plan, seconds: float) -> Turn:
        fps = 100.0 * min(1.0, plan.frames_inside / (4 if plan.scheduler == "replicas" else 2))
        return Turn(RunStatistics(24, fps, None, None, None, None, ()), plan.frames_inside / fps)

    predicted = decision_of(replicas=100, single=99)
    latencies_s = {"replicas": 0.01, "single": 0.04}
    measured = verified(problem_of(), predicted, Runs(replicas=90, single=89.5, latency_s=latencies_s), FOREVER)
    assert choice(measured) == ("replicas", "measurement")
    plans = (measured.plan, replace(measured.candidates[1], predicted=Prediction(99, 2 / 99)))  # it holds three
    ran = tuple(replace(found, plan=plan) for found, plan in zip(measured.measured, plans, strict=True))
    decision = with_fewest_inside(problem_of(), replace(measured, candidates=plans, measured=ran), run, FOREVER)
    assert (*choice(decision), decision.plan.in_flight) == ("single", "measurement", 2)
    assert decision.measured[0].plan.stages == decision.plan.stages
    assert decision.why.startswith(
        "single (d0) with 2 frames inside keeps 100.0% of the rate of replicas (d0 + d1) with 4, at 20 ms under load "
        "in place of 40 ms; replicas (d0 + d1) measured 90 fps"
    )


def missing(device: Device) -> Device:
    return replace(device, stand_in="a CPU")


@pytest.mark.parametrize(
    ("problem", "predicted", "said"),
    [
        (problem_of(), decision_of(two=100), ""),  # there is nothing to choose
        (problem_of(objective="energy"), decision_of("energy", two=100, single=99), "no sensor measures energy"),
        (problem_of(objective="memory,communication"), decision_of("memory,communication", two=100, single=99), ""),
        (
            problem_of(platform=replace(PLATFORM, devices=tuple(map(missing, PLATFORM.devices[:2])))),
            decision_of(two=100, single=99),
            "a stand-in says nothing of the speed of d0, d1",
        ),
    ],
)
def test_what_cannot_be_measured_is_predicted(problem: Problem, predicted: Decision, said: str) -> None:
    if problem.objective == "energy":
        powered = tuple(replace(device, active_w=1.0) for device in PLATFORM.devices)
        problem = replace(problem, platform=replace(PLATFORM, devices=powered))
    decision = verified(problem, predicted, Runs())
    assert decision == replace(predicted, why=decision.why)
    assert decision.why == predicted.why or said in decision.why


@pytest.mark.parametrize("run", [None, Runs()])
def test_without_time_or_model_the_prediction_decides(run: Run | None) -> None:
    predicted = decision_of(two=100, replicas=99)
    assert verified(problem_of(), predicted, run, 10.0 if run is None else 0.0) == predicted


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_no_time_can_be_negative_or_endless(seconds: float) -> None:
    with pytest.raises(OptionError, match="`verify_s`"):
        verified(problem_of(), decision_of(two=100), None, seconds)


@pytest.mark.parametrize("fps", [0.5, 100])
def test_time_for_too_few_turns_is_not_spent(fps: float) -> None:
    runs = Runs(two=fps, replicas=fps)
    decision = verified(problem_of(), decision_of(two=fps, replicas=fps), runs, 1.5)
    assert choice(decision) == ("two", "prediction")
    assert decision.why.endswith("; 1.5 s are too short to measure 3 turns of two candidates")
    assert runs.turns == {"two": 0, "replicas": 0}


@pytest.mark.parametrize(("rate_fps", "ran"), [(None, ["two", "replicas", "single"]), (10, ["two", "replicas"])])
def test_a_turn_at_a_rate_counts_as_time(rate_fps: float | None, ran: list[str]) -> None:
    """Twelve frames at 10 a second take 1.2 s of each turn: 10 s are enough for two plans."""
    runs = Runs(two=100, replicas=95, single=90)
    predicted = decision_of(two=100, replicas=99, single=98)
    assert choice(verified(problem_of(), predicted, runs, 10.0, rate_fps=rate_fps)) == ("two", "measurement")
    assert [name for name, turns in runs.turns.items() if turns] == ran


@pytest.mark.thorough
def test_turns_that_take_longer_than_predicted_end_the_race() -> None:
    """By the prediction three rounds take 2.1 s; one takes 1.6 s."""
    runs = Runs(two=100, replicas=99)

    def slow(plan: Plan, seconds: float) -> Turn:
        busy(0.8)(0)
        return runs(plan, seconds)

    decision = verified(problem_of(), decision_of(two=100, replicas=99), slow, 2.2)
    assert choice(decision) == ("two", "prediction")
    assert "too short" in decision.why
    assert sum(runs.turns.values()) == 2


@given(st.lists(st.tuples(st.floats(0.5, 2), st.floats(0.5, 2)), min_size=5, max_size=5), st.floats(0, 0.5))
def test_no_plan_that_ran_is_better_than_the_chosen_one(figures: list[tuple[float, float]], uncertainty: float) -> None:
    """Whatever was predicted and is true; and the plan with the best prediction is one of those that ran."""
    by_prediction = sorted(zip(STAGES, figures, strict=True), key=lambda pair: -pair[1][0])
    predicted = decision_of(uncertainty=uncertainty, **{name: 100 * fps for name, (fps, _) in by_prediction})
    runs = Runs(**{name: 100 * fps for name, (_, fps) in by_prediction})
    decision = verified(problem_of(), predicted, runs, FOREVER)
    ran = {name for name, turns in runs.turns.items() if turns}
    assert predicted.plan.scheduler in ran
    assert runs.fps[decision.plan.scheduler] >= 0.98 * max(runs.fps[name] for name in ran)


# Host work


def with_host_work() -> Problem:
    encode, *others = GRAPH.operators
    return problem_of(graph=replace(GRAPH, operators=(replace(encode, ordered=True), *others)))


def test_threads_that_share_cores_with_host_work_are_chosen_by_measurement_alone() -> None:
    predicted = decision_of(pool=100, two=99)
    for run, seconds in ((None, 10.0), (Runs(pool=100, two=99), 0.0), (Runs(pool=100, two=99), 0.5)):
        decision = verified(with_host_work(), predicted, run, seconds)
        assert choice(decision) == ("two", "prediction")
        assert decision.why.startswith("pool (cpu) is not chosen unmeasured")
    stalling, fine = Runs(pool=60, two=99), Runs(pool=120, two=99)
    assert choice(verified(with_host_work(), predicted, stalling, FOREVER)) == ("two", "measurement")
    assert choice(verified(with_host_work(), predicted, fine, FOREVER)) == ("pool", "measurement")


def test_the_only_plan_and_a_model_without_host_work_keep_their_threads() -> None:
    alone = decision_of(pool=100)
    assert verified(with_host_work(), alone, None) == alone
    free = decision_of(pool=100, two=99)
    assert verified(problem_of(), free, None) == free


# Plans that really run


def test_pipelines_that_run_correct_a_profile_that_is_wrong() -> None:
    """By the profile both devices take 1 ms for an operator; one takes 30 ms, so that no replica of it pays."""
    hooks = {(name, device): busy(ms / 1e3) for name in WHOLE for device, ms in (("d0", 1), ("d1", 30))}
    model = chain_model(2, hooks=hooks)
    platform = replace(PLATFORM, devices=PLATFORM.devices[:2])
    devices = {device.name: DeviceProfile.in_order(GRAPH, [1e-3, 1e-3]) for device in platform.devices}
    problem = Problem(GRAPH, platform, Profile(GRAPH.name, GRAPH.fingerprint, devices))
    predicted = planned(problem)
    assert len(predicted.plan.devices) == 2
    decision = verified(problem, predicted, runner(model, platform), 6.0)
    assert (decision.plan.devices, decision.decided_by) == (("d0",), "measurement")
    best, *others = decision.measured
    assert all(best.throughput_fps > other.throughput_fps for other in others)
    assert best.statistics.frames >= 24 * LEAST_ROUNDS
    assert best.latency_s > 2e-3
    assert not model.open_stages


def test_the_best_of_each_engine_runs_however_slow_its_own_times_make_it() -> None:
    """Figures of two engines come from counters of their own; the replicas of each and its best device are obvious."""
    engines = {"d0": "fake", "d1": "fake", "e0": "other", "e1": "other"}
    devices = tuple(Device(name, backend, (int(name[1]),)) for name, backend in engines.items())
    stages = {"single-d": ("d0",), "single-e": ("e0",), "slower-e": ("e1",)}
    stages |= {"replicas-e": ("e0", "e1"), "mixed": ("d0", "e1")}
    rates = {"single-d": 100.0, "mixed": 60.0, "replicas-e": 50.0, "single-e": 30.0, "slower-e": 20.0}
    plans = tuple(
        Plan(GRAPH.name, name, "throughput", (Stage(stages[name], WHOLE),), Prediction(fps, 1 / fps, uncertainty=0.01))
        for name, fps in rates.items()
    )
    decision = Decision(plans[0], plans, "single-d is predicted to be best")
    runs = Runs(**{name.replace("-", "_"): fps for name, fps in rates.items()})
    seen: list[str] = []

    def run(plan: Plan, seconds: float) -> Turn:
        seen.append(plan.scheduler)
        return runs(replace(plan, scheduler=plan.scheduler.replace("-", "_")), seconds)

    verified(problem_of(platform=Platform("box", devices)), decision, run, FOREVER)
    assert {"single-d", "single-e", "replicas-e"} <= set(seen)
    assert "slower-e" not in seen


def test_stages_of_one_device_are_replayed_at_the_rate_at_which_they_ran():
    """Two threads on the cores of d0 took 8 of 10 ms each by the clock: 5 ms of it without waiting for one another."""
    graph = chain_model(3).graph
    names = tuple(graph.operator_names)
    stages = Stage(("d0",), names[:1]), Stage(("d1",), names[1:2]), Stage(("d0",), names[2:])
    records = [StageRecord(index, stage.devices[0]) for index, stage in enumerate(stages)]
    for frame in range(50):
        for record, worked_s in zip(records, (0.008, 0.004, 0.008), strict=True):
            record.add(0.010 - worked_s, 0.0, worked_s, frame, 0.010 * frame)
    times_s = own_times_s(records, skip=10)
    assert times_s == ((0.005,) * 40, (0.004,) * 40, (0.005,) * 40)
    replayed = simulate(problem_of(graph=graph), stages, 200, in_flight=6, times_s=times_s)
    assert replayed.statistics.throughput_fps == pytest.approx(100.0, rel=0.01)
