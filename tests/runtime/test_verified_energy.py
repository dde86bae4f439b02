"""Of candidates for least energy the measured best is chosen, where a sensor is."""

from __future__ import annotations

import time

import pytest

from tests.runtime.test_verification import FOREVER, GRAPH, STAGES, choice, problem_of
from tvm_pipeline.core.plan import Decision, Plan, Prediction
from tvm_pipeline.core.statistics import RunStatistics
from tvm_pipeline.errors import PowerError
from tvm_pipeline.power import Meter, PowerSensor
from tvm_pipeline.runtime.comparison import Turn
from tvm_pipeline.runtime.verification import PERIODS, verified

FRAMES = 10


class Lamp(PowerSensor):
    """A sensor of the watts that the plan which runs draws; its runs make 10 frames in 50 ms."""

    name, covers, period_s = "lamp", "the board", 0.004

    def __init__(self, answers: int = 10**9, **watts: float) -> None:
        super().__init__()
        self.now_w, self.of_plan, self.answers = 0.0, watts, answers
        self.turns: list[tuple[str, float]] = []

    def watts(self) -> float:
        self.answers -= 1
        if self.answers < 0:
            raise PowerError("lamp: unplugged")
        return self.now_w

    def run(self, plan: Plan, seconds: float) -> Turn:
        self.turns.append((plan.scheduler, seconds))
        self.now_w = self.of_plan[plan.scheduler]
        time.sleep(0.02)
        begin_s = time.perf_counter()
        time.sleep(0.05)
        end_s = time.perf_counter()
        time.sleep(0.02)
        statistics = RunStatistics(FRAMES, FRAMES / 0.05, None, None, None, None, ())
        return Turn(statistics, 0.01, (begin_s, end_s), FRAMES)


def predicted(**energy_j: float) -> Decision:
    plans = tuple(
        Plan(GRAPH.name, name, "energy", STAGES[name], Prediction(200.0, 0.01, joules))
        for name, joules in energy_j.items()
    )
    return Decision(plans[0], plans, f"{plans[0].scheduler} is predicted to be best")


def test_the_plan_of_least_measured_joules_is_chosen() -> None:
    lamp = Lamp(two=30.0, replicas=10.0, single=90.0)
    with Meter(lamp) as meter:
        decision = verified(
            problem_of(objective="energy"),
            predicted(two=1.0, replicas=1.05, single=2.0),
            lamp.run,
            FOREVER,
            meter=meter,
        )
    assert choice(decision) == ("replicas", "measurement")
    best, *others = decision.measured
    assert best.energy is not None
    assert best.energy.sensor == "lamp"
    assert [found.plan.scheduler for found in others] == ["two", "single"]
    assert all(found.energy and found.energy.energy_j > best.energy.energy_j for found in others)
    assert decision.why.startswith("replicas (d0 + d1) measured ")
    assert "J a frame by lamp against" in decision.why
    assert all(seconds >= PERIODS * meter.period_s for _, seconds in lamp.turns)


def test_a_plan_that_is_predicted_to_draw_far_more_does_not_run() -> None:
    lamp = Lamp(two=10.0, swapped=30.0, single=20.0)
    with Meter(lamp) as meter:
        verified(
            problem_of(objective="energy"), predicted(two=1.0, swapped=1.5, single=2.0), lamp.run, FOREVER, meter=meter
        )
    assert {name for name, _ in lamp.turns} == {"two", "single"}


@pytest.mark.parametrize("answers", [2, 10])
def test_where_the_sensor_fails_the_prediction_decides(answers: int) -> None:
    lamp = Lamp(answers, two=30.0, replicas=10.0)
    with Meter(lamp) as meter:
        decision = verified(
            problem_of(objective="energy"), predicted(two=1.0, replicas=1.05), lamp.run, FOREVER, meter=meter
        )
    assert choice(decision) == ("two", "prediction")
    assert decision.why.endswith("no measurement decided, because lamp: unplugged")
