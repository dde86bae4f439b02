"""Joules of a frame: of turns, of runs that last, and by the platform's watts where no sensor is."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.support.log_lines import log_lines
from tvm_pipeline import Plan, Stage
from tvm_pipeline.core.frame_energy import FrameEnergy
from tvm_pipeline.core.plan import Prediction
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import IdlePower
from tvm_pipeline.core.statistics import RunStatistics, StageStatistics
from tvm_pipeline.cost.busy_energy import at_pace, energy_by_watts
from tvm_pipeline.cost.device_costs import known_idle_w
from tvm_pipeline.cost.simulate import SATURATED, fixed_rate, simulate
from tvm_pipeline.errors import PowerError
from tvm_pipeline.planning import plan as planned
from tvm_pipeline.power import Meter, Reading, Sensor
from tvm_pipeline.runtime.comparison import compare, runner
from tvm_pipeline.runtime.metering import RunEnergy, metered
from tvm_pipeline.testing import FakeModel, example_graph, example_problem

STAGES = (Stage(("d0", "d1"), ("double",)), Stage(("d0",), ("increment",)))
PLAN = Plan("net", "by hand", "throughput", STAGES, Prediction(energy_j=0.5))


def with_watts(problem: Problem, idle_w: float | None, **active_w: float) -> Problem:
    devices = tuple(replace(device, active_w=active_w.get(device.name)) for device in problem.platform.devices)
    return replace(problem, platform=replace(problem.platform, devices=devices, idle_w=idle_w))


def ran(*stages: tuple[int, str, int, float], fps: float | None = 20.0) -> RunStatistics:
    found = tuple(
        StageStatistics(stage, name, frames, busy_s, 0.001, 0.0, 0.0) for stage, name, frames, busy_s in stages
    )
    return RunStatistics(100, fps, None, None, None, None, found)


def test_by_watts_each_device_counts_while_it_is_busy() -> None:
    statistics = ran((0, "d0", 75, 0.009), (0, "d1", 25, 0.019), (1, "d0", 100, 0.004))
    problem = with_watts(example_problem(), 4.0, d0=10.0, d1=20.0)
    active_j = pytest.approx(10 * 0.010 * 0.75 + 20 * 0.020 * 0.25 + 10 * 0.005)
    assert energy_by_watts(problem, PLAN, statistics) == FrameEnergy(pytest.approx(0.225 + 4 / 20), active_j)
    unknown = energy_by_watts(with_watts(problem, None, d0=10.0, d1=20.0), PLAN, statistics)
    assert unknown == FrameEnergy(active_j, active_j)
    measured = replace(problem, profile=replace(problem.profile, idle=IdlePower("lamp", "the board", 6.0)))
    found = energy_by_watts(measured, PLAN, statistics)
    assert found is not None
    assert found.energy_j == pytest.approx(0.225 + 6 / 20)  # what was measured wins
    assert not found.is_measured


@pytest.mark.parametrize("pace_fps", [None, 10.0])
def test_by_watts_a_simulated_run_draws_what_the_judge_says(pace_fps: float | None) -> None:
    """The simulator knows frames and seconds, and nothing of energy."""
    problem = with_watts(example_problem(), 4.0, d0=10.0, d1=20.0)
    arrivals = SATURATED if pace_fps is None else fixed_rate(pace_fps)
    for candidate in planned(problem).candidates:
        run = simulate(problem, candidate.stages, 300, arrivals)
        found = energy_by_watts(problem, candidate, run.statistics)
        predicted = candidate.predicted if pace_fps is None else at_pace(problem, candidate.predicted, pace_fps)
        assert found is not None
        assert found.energy_j == pytest.approx(predicted.energy_j, rel=0.01)


def test_idle_power_of_something_else_is_not_subtracted() -> None:
    problem = with_watts(example_problem(), 4.0)
    assert known_idle_w(problem, "the board") == 4.0
    problem = replace(problem, profile=replace(problem.profile, idle=IdlePower("VDD_IN", "the board", 6.0)))
    assert (known_idle_w(problem), known_idle_w(problem, "the board"), known_idle_w(problem, "GPU 0")) == (
        6.0,
        6.0,
        None,
    )


def test_by_watts_nothing_is_guessed() -> None:
    statistics = ran((0, "d0", 75, 0.009), (0, "d1", 25, 0.019), (1, "d0", 100, 0.004))
    assert energy_by_watts(with_watts(example_problem(), 4.0, d0=10.0), PLAN, statistics) is None
    problem = with_watts(example_problem(), 4.0, d0=10.0, d1=20.0)
    assert energy_by_watts(problem, PLAN, replace(statistics, throughput_fps=None)) is None
    assert energy_by_watts(problem, PLAN, ran((0, "d0", 100, 0.009))) is None  # the stages of another plan


class Work(Sensor):
    """Counts the joules that operators say they draw, beside an idle machine of 5 W."""

    name, covers, period_s = "work", "the test", 0.01

    def __init__(self) -> None:
        self.drawn_j, self.broken = 0.0, False

    def read(self) -> Sequence[Reading]:
        if self.broken:
            raise PowerError("work: unplugged")
        now_s = time.perf_counter()
        return [Reading(now_s, 5.0 * now_s + self.drawn_j)]


def drawing(sensor: Work) -> FakeModel:
    """Return the example's model; each operator takes 2 ms and draws 0.1 J."""

    def hook(_: int) -> None:
        time.sleep(0.002)
        sensor.drawn_j += 0.1

    functions = {"double": lambda x: [2 * x], "increment": lambda x: [x + 1]}
    return FakeModel(example_graph(), functions, hooks={(name, "d0"): hook for name in functions})


def test_a_turn_has_the_joules_of_the_frames_that_came_out_meanwhile() -> None:
    sensor, problem = Work(), example_problem()
    problem = replace(problem, profile=replace(problem.profile, idle=IdlePower("work", "the test", 5.0)))
    plan = Plan("net", "by hand", "energy", (Stage(("d0",), ("double", "increment")),), Prediction(100.0))
    with Meter(sensor) as meter:
        run = metered(runner(drawing(sensor), problem.platform), problem, meter)
        [found] = compare(drawing(sensor), problem.platform, [plan], seconds=0.3, rounds=1, run=run)
    assert found.energy is not None
    assert found.energy.by == "work (the test)"
    # Frames at an edge may be counted half: of some 60 frames that is a few per cent.
    assert found.energy.active_j == pytest.approx(0.2, rel=0.15)
    idle_j = 5.0 / found.throughput_fps
    assert found.energy.energy_j - (found.energy.active_j or 0) == pytest.approx(idle_j, rel=0.3)


def test_a_sensor_that_fails_is_said_once_and_the_turn_has_no_joules() -> None:
    sensor, problem, said = Work(), example_problem(), log_lines("WARNING")
    plan = Plan("net", "by hand", "throughput", (Stage(("d0",), ("double", "increment")),), Prediction(100.0))
    with Meter(sensor) as meter:
        sensor.broken = True
        run = metered(runner(drawing(sensor), problem.platform), problem, meter)
        turns = [run(plan, 0.02) for _ in range(2)]
    assert [turn.energy for turn in turns] == [None, None]
    assert said == ["work: unplugged; the joules of its frames are not measured"]


class Scripted(Sensor):
    """Gives the readings that the test has put there."""

    name, covers, period_s = "script", "the board", 0.01

    def __init__(self) -> None:
        self.rows: list[Reading] = [Reading(0.0, 0.0)]
        self.taken = threading.Semaphore(0)

    def read(self) -> Sequence[Reading]:
        rows, self.rows = self.rows, []
        self.taken.release()
        return rows

    def tell(self, *rows: tuple[float, float]) -> None:
        """Have the meter read these, and wait until it has."""
        self.rows = [Reading(*row) for row in rows]
        while self.rows:
            self.taken.acquire()
        self.taken.acquire()


def test_a_run_adds_up_pieces_between_frames() -> None:
    sensor, progress = Scripted(), [(0, 0.0)]
    with Meter(sensor) as meter:
        energy = RunEnergy(meter, lambda: progress[-1], idle_w=2.0)
        energy.update()
        for frames, time_s in ((1, 1.0), (11, 3.0)):
            progress.append((frames, time_s))
            energy.update()
        assert energy.frame is None  # the sensor has not come so far
        sensor.tell((1.0, 100.0), (4.0, 130.0))  # 10 W; what was drawn before the first frame does not count
        progress.append((21, 5.0))
        energy.update()
        assert energy.energy_j == pytest.approx(20.0)
        assert energy.frame is not None
        assert (energy.frame.energy_j, energy.frame.active_j) == (pytest.approx(2.0), pytest.approx(1.6))
        assert (energy.frame.sensor, energy.frame.covers) == ("script", "the board")
        sensor.tell((6.0, 170.0))  # 20 W from the 4th second
        energy.finish()
        # Ten frames in 20 J, then ten in 10 + 20 J.
        assert energy.frame.energy_j == pytest.approx(2.5)
        assert energy.energy_j == pytest.approx(50.0)


def test_a_run_leaves_out_what_the_sensor_was_silent_of() -> None:
    sensor, progress = Scripted(), [(1, 1.0)]
    with Meter(sensor) as meter:
        energy = RunEnergy(meter, lambda: progress[-1], idle_w=None)
        for frames, time_s in ((1, 1.0), (11, 3.0), (1000, 100.0), (1010, 101.0)):
            progress.append((frames, time_s))
            energy.update()
        sensor.tell((90.0, 0.0), (102.0, 120.0))
        energy.update()
    assert energy.frame is not None
    assert (energy.frame.energy_j, energy.frame.active_j) == (pytest.approx(1.0), None)


def test_a_run_that_begins_again_leaves_out_what_was_drawn_meanwhile() -> None:
    sensor, progress = Scripted(), [(1, 1.0)]
    with Meter(sensor) as meter:
        energy = RunEnergy(meter, lambda: progress[-1], idle_w=None)
        for frames, time_s in ((1, 1.0), (11, 3.0)):
            progress.append((frames, time_s))
            energy.update()
        sensor.tell((1.0, 0.0), (4.0, 30.0))  # 10 W
        energy.update()
        energy.begin_again()
        energy.update()  # no frame came out since
        for frames, time_s in ((12, 51.0), (22, 53.0)):
            progress.append((frames, time_s))
            energy.update()
        sensor.tell((50.0, 5000.0), (54.0, 5040.0))
        energy.update()
    assert energy.energy_j == pytest.approx(40.0)
    assert energy.frame is not None
    assert energy.frame.energy_j == pytest.approx(2.0)


def test_a_run_whose_sensor_fails_keeps_what_was_measured() -> None:
    sensor, progress, said = Work(), [(1, time.perf_counter())], log_lines("WARNING")
    with Meter(sensor) as meter:
        energy = RunEnergy(meter, lambda: progress[-1], None)
        energy.update()  # that frame came before the sensor
        progress.append((2, time.perf_counter()))
        energy.update()
        time.sleep(0.05)
        progress.append((11, time.perf_counter()))
        energy.finish()
        before = energy.frame
        sensor.broken = True
        progress.append((21, time.perf_counter() + 1))
        energy.finish()
        energy.update()
    assert before is not None
    assert energy.frame == before
    assert said == ["work: unplugged; joules are not measured from here on"]
