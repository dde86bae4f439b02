"""A plan exchanged while it runs: no frame lost, repeated or out of order, whatever is exchanged and whatever fails."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.support.fake_backend import FakeModel, chain_model, fake_platform, number, numbers, raise_at
from tvm_pipeline import Plan, Problem
from tvm_pipeline.core.plan import Prediction, Stage, calls_inside, describe
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.errors import PipelineClosedError, StageError
from tvm_pipeline.runtime import Adaptation, LivePipeline, live_pipeline
from tvm_pipeline.runtime.frame_stream import Tagged
from tvm_pipeline.runtime.replanning import nearest_plan
from tvm_pipeline.runtime.strategy import TICK_S, Strategy

OPERATORS = 6


def problem_of(model: FakeModel, platform: Platform) -> Problem:
    devices = {
        device.name: DeviceProfile.in_order(model.graph, (1e-4,) * len(model.graph)) for device in platform.devices
    }
    return Problem(model.graph, platform, Profile(model.graph.name, model.graph.fingerprint, devices))


def random_plan(problem: Problem, random: np.random.Generator) -> Plan:
    """One to three stages, some of them replicated, over whichever devices."""
    names = [device.name for device in problem.platform.devices]
    random.shuffle(names)
    count = int(random.integers(1, min(3, len(names)) + 1))
    cuts = [0, *sorted(random.choice(np.arange(1, OPERATORS), count - 1, replace=False).tolist()), OPERATORS]
    operators = problem.graph.operator_names
    stages = []
    for index in range(count):
        left = len(names) - (count - 1 - index)
        taken = int(random.integers(1, left + 1)) if random.random() < 0.4 else 1
        devices, names = tuple(names[:taken]), names[taken:]
        stages.append(Stage(devices, tuple(operators[cuts[index] : cuts[index + 1]])))
    return judged(problem, Plan(problem.graph.name, "random", "throughput", tuple(stages), Prediction()))


def live(model: FakeModel, *names: str, **options) -> LivePipeline:
    problem = problem_of(model, fake_platform(*names))
    return LivePipeline(model, problem, random_plan(problem, np.random.default_rng(0)), **options)


def check(results, count: int) -> None:
    """Every frame once, in order, with what the whole model makes of it."""
    seen = [(result.frame, int(result.outputs["y"][0])) for result in results]
    assert seen == [(frame, frame + OPERATORS) for frame in range(count)]


@pytest.mark.parametrize("switch_count", [200, pytest.param(400, marks=pytest.mark.thorough)])
def test_many_switches_at_random_moments(switch_count):
    model, random = chain_model(OPERATORS), np.random.default_rng(1)
    frames, switches = 20 * switch_count, 0
    with live(model, "d0", "d1", "d2") as pipeline:
        over = threading.Event()

        def exchange() -> None:
            nonlocal switches
            while not over.is_set() and switches < switch_count:
                switches += pipeline.switch(random_plan(pipeline.problem, random), "for the test")
                time.sleep(random.random() * 1e-3)

        exchanger = threading.Thread(target=exchange)
        exchanger.start()
        check(pipeline.map(numbers(frames)), frames)
        over.set()
        exchanger.join()
        assert pipeline.version == switches >= switch_count / 20
        assert [event.version for event in pipeline.events if event.kind == "switch"][-1] == switches


@pytest.mark.parametrize("seed", range(20))
def test_devices_that_fail_cost_no_frame(seed):
    random = np.random.default_rng(seed)
    hooks = {
        (f"op{random.integers(OPERATORS)}", name): raise_at(int(random.integers(0, 60)), OSError("unplugged"))
        for name in ("d0", "d1", "d2")
    }
    model = chain_model(OPERATORS, hooks=hooks)
    with live(model, "d0", "d1", "d2", "d3") as pipeline:
        check(pipeline.map(numbers(300)), 300)
        out = {event.reason.split()[3] for event in pipeline.events if event.kind == "failure"}
        assert out <= {"d0", "d1", "d2"}
        assert all(not out.intersection(stage.devices) for stage in pipeline.plan.stages)


def test_who_submits_and_takes_in_one_thread_outlives_a_failure_too():
    model = chain_model(
        OPERATORS, hooks={("op2", "d0"): raise_at(5, OSError("gone")), ("op2", "d1"): raise_at(9, OSError("gone"))}
    )
    with live(model, "d0", "d1", "d2") as pipeline:
        results = []
        for value in range(40):
            pipeline.submit(number(value))
            if value >= 1:
                results.append(pipeline.result())
        results.append(pipeline.result())
        check(results, 40)


@pytest.mark.parametrize("seed", range(5))
def test_tags_stay_with_their_frames_over_switches_and_failures(seed):
    """A tag comes back with the result of its own frame, also if that ran again on another device."""
    random = np.random.default_rng(seed)
    hooks = {("op2", "d0"): raise_at(3, OSError("gone")), ("op4", "d1"): raise_at(20, OSError("gone"))}
    model = chain_model(OPERATORS, hooks=hooks)
    problem = problem_of(model, fake_platform("d0", "d1", "d2", "d3"))
    with LivePipeline(model, problem, whole(problem, "d0")) as pipeline:
        results = []
        for result in pipeline.map(Tagged(number(value), ("frame", value)) for value in range(300)):
            results.append(result)
            if len(results) % 20 == 0:
                pipeline.switch(random_plan(pipeline.problem, random), "for the test")
        check(results, 300)
        assert [result.tag for result in results] == [("frame", value) for value in range(300)]
        assert {event.kind for event in pipeline.events} >= {"switch", "failure"}


def test_a_switch_says_its_plan_as_reports_do():
    with live(chain_model(OPERATORS), "d0", "d1", "d2") as pipeline:
        names = pipeline.problem.graph.operator_names
        stages = Stage(("d0", "d1"), tuple(names[:3])), Stage(("d2",), tuple(names[3:]))
        plan = judged(pipeline.problem, Plan("chain", "by hand", "throughput", stages, Prediction()))
        assert pipeline.switch(plan, "for the test")
        assert pipeline.events[-1].plan == "d0 + d1 | d2"
        assert f"({pipeline.events[-1].plan})" in describe(plan)
        check(pipeline.map(numbers(5)), 5)


def test_a_plan_that_was_measured_meanwhile_takes_its_problem_with_it():
    """Also where it has devices that the pipeline did not have."""
    model, told = chain_model(OPERATORS), []
    few, all_of_them = (problem_of(model, fake_platform(*names)) for names in (("d0",), ("d0", "d1", "d2")))
    with LivePipeline(model, few, whole(few, "d0"), on_event=told.append) as pipeline:
        frames = iter(numbers(300))

        def fed():
            for index, frame in enumerate(frames):
                if index == 150:
                    pipeline.begin_again(all_of_them, whole(all_of_them, "d1", "d2"), Adaptation(), "it was measured")
                yield frame

        check(pipeline.map(fed()), 300)
        assert [(event.kind, event.reason, event.frame) for event in told[1:2]] == [
            ("measured", "it was measured", 150)
        ]
        assert pipeline.given == all_of_them
        assert pipeline.statistics().frames == 300
        assert pipeline.factors.keys() <= {"d0", "d1", "d2"}


def test_a_measured_plan_that_cannot_be_started_leaves_the_first_one():
    model = chain_model(OPERATORS, bind_errors={"d1": OSError("no such core")})
    problem = problem_of(model, fake_platform("d0", "d1"))
    with LivePipeline(model, problem, whole(problem, "d0")) as pipeline:
        pipeline.begin_again(problem, whole(problem, "d1"), Adaptation(), "it was measured")
        assert [event.kind for event in pipeline.events] == ["start", "refusal"]
        check(pipeline.map(numbers(20)), 20)
        assert pipeline.plan.devices == ("d0",)


def test_without_a_device_left_the_failure_is_told_after_the_results_before():
    model = chain_model(OPERATORS, hooks={("op3", "d0"): raise_at(4, OSError("burnt"))})
    with live(model, "d0") as pipeline:
        pipeline.switch(whole(pipeline.problem, "d0"), "so that the failing plan is not the first")
        results = pipeline.map(numbers(20))
        check(itertools.islice(results, 4), 4)
        with pytest.raises(StageError, match="d0 failed at frame 4: OSError: burnt"):
            next(results)


def whole(problem: Problem, *devices: str) -> Plan:
    """All operators on each of the devices."""
    names = tuple(problem.graph.operator_names)
    return judged(problem, Plan(problem.graph.name, "by hand", "throughput", (Stage(devices, names),), Prediction()))


def failures(pipeline: LivePipeline) -> list[str]:
    return [event.reason for event in list(pipeline.events) if event.kind == "failure"]


@pytest.mark.parametrize("devices", [("d0",), ("d0", "d1"), ("d1", "d0")])
def test_a_stage_that_hangs_is_left_behind(devices):
    release = threading.Event()
    model = chain_model(OPERATORS, hooks={("op1", "d0"): lambda call: call == 0 and release.wait()})
    problem = problem_of(model, fake_platform("d0", "d1", "d2"))
    try:
        with LivePipeline(model, problem, whole(problem, *devices), watchdog_s=0.2) as pipeline:
            frames = itertools.takewhile(lambda _: not failures(pipeline), numbers(1_000_000))  # until it took one
            results = list(pipeline.map(frames))
            check(results, len(results))
            assert "on d0 failed at frame" in failures(pipeline)[0]
            assert "did not end within 0.2 s" in failures(pipeline)[0]
    finally:
        release.set()


def test_a_device_may_serve_again_after_its_cool_down():
    model = chain_model(OPERATORS, hooks={("op0", "d0"): raise_at(3, OSError("loose plug"))})
    problem = problem_of(model, fake_platform("d0", "d1"))
    with LivePipeline(model, problem, whole(problem, "d0", "d1"), cool_down_s=0.1) as pipeline:
        deadline, done = time.monotonic() + 20, 0
        kinds: set[str] = set()
        while time.monotonic() < deadline and not ("return" in kinds and len(pipeline.plan.devices) == 2):
            pipeline.submit(number(done))
            assert int(pipeline.result().outputs["y"][0]) == done + OPERATORS
            done += 1
            kinds = {event.kind for event in pipeline.events}
        assert {"failure", "return"} <= kinds
        assert set(pipeline.plan.devices) == {"d0", "d1"}


@pytest.mark.parametrize("devices", [("d1",), ("d0", "d1")])  # d0 works for the old plan
def test_a_plan_that_cannot_be_started_changes_nothing(devices):
    model = chain_model(OPERATORS, bind_errors={"d1": OSError("no such core")})
    problem = problem_of(model, fake_platform("d0", "d1"))
    with LivePipeline(model, problem, whole(problem, "d0")) as pipeline:
        assert not pipeline.switch(whole(problem, *devices), "to try it")
        assert pipeline.version == 0
        assert pipeline.events[-1].kind == "refusal"
        check(pipeline.map(numbers(5)), 5)


@pytest.mark.parametrize(
    ("devices", "adaptation", "floor_fps", "plans"),
    [(2, Adaptation(), None, 1), (2, Adaptation(), 30.0, 2), (1, Adaptation(), None, 0), (2, None, None, 0)],
    ids=["adapts", "keeps a limit", "one device", "off"],
)
def test_what_plans_is_loaded_before_the_first_frame(devices, adaptation, floor_fps, plans, monkeypatch):
    """The first plan of a process takes most of a second, for which no frame waits; so may one without the limits."""
    made = []
    monkeypatch.setattr(live_pipeline, "nearest_plan", lambda problem: made.append(problem) or nearest_plan(problem))
    model, platform = chain_model(OPERATORS), fake_platform(*("d0", "d1")[:devices])
    problem = replace(problem_of(model, platform), objective="latency", min_throughput_fps=floor_fps)
    with LivePipeline(model, problem, whole(problem, "d0"), adaptation=adaptation) as pipeline:
        assert made == [pipeline.given, replace(problem, objective="throughput", min_throughput_fps=None)][:plans]


class Looks(Strategy):
    """Counts its looks, and says when so many of them are over."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.count, self.over, self._most = 0, threading.Event(), most

    def look(self, records, problem):
        self.count += 1
        if self.count == self._most:
            self.over.set()


@pytest.mark.parametrize(("share", "looks"), [(1e-9, 1), (1e9, 4)], ids=["dear looks", "cheap looks"])
def test_planning_rests_for_as_long_as_its_share_of_a_core_demands(share, looks, monkeypatch):
    monkeypatch.setattr(live_pipeline, "PLANNING_SHARE", share)
    strategy = Looks(looks)
    with live(chain_model(OPERATORS), "d0", "d1", adaptation=strategy):
        assert strategy.over.wait(20)
        time.sleep(3 * TICK_S)
    assert (strategy.count == looks) == (share < 1)


@pytest.mark.parametrize("frames", [None, 2])
def test_a_plan_made_on_the_way_holds_the_given_share_of_its_frames(frames):
    """How few frames inside keep the rate was measured for the plan that was given."""
    model = chain_model(OPERATORS, hooks={("op2", "d0"): raise_at(5, OSError("unplugged"))})
    problem = problem_of(model, fake_platform("d0", "d1", "d2"))
    operators = tuple(model.graph.operator_names)
    stages = Stage(("d0",), operators[:3]), Stage(("d1",), operators[3:])
    given = judged(problem, Plan(model.graph.name, "by hand", "throughput", stages, Prediction(), in_flight=frames))
    with LivePipeline(model, problem, given) as pipeline:
        check(pipeline.map(numbers(40)), 40)
        found = pipeline.plan
        assert "d0" not in found.devices
        default = calls_inside(found.stages, found.predicted)
        assert found.frames_inside == default * (frames or 4) / 4
        assert calls_inside(given.stages, given.predicted) == 4


def test_before_the_start_no_plan_is_exchanged():
    pipeline = live(chain_model(OPERATORS), "d0", "d1")
    assert not pipeline.switch(pipeline.plan, "too early")
    with pipeline:
        check(pipeline.map(numbers(5)), 5)


def test_after_the_end_nothing_goes_in():
    with live(chain_model(OPERATORS), "d0", "d1") as pipeline:
        pipeline.submit(number(1))
        pipeline.drain()
        assert not pipeline.switch(pipeline.plan, "too late")
        with pytest.raises(PipelineClosedError):
            pipeline.submit(number(2))
        check([], 0)
        assert int(pipeline.result().outputs["y"][0]) == 1 + OPERATORS
        with pytest.raises(PipelineClosedError):
            pipeline.result()
