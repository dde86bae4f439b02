"""State that goes from frame to frame: each frame meets what the one before left, whatever is exchanged and fails.

The plain loop over the unsplit model is the reference, bit for bit.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.support.crashes import install
from tests.support.fake_backend import FakeModel, Mix, busy, fake_platform, raise_at
from tvm_pipeline import Plan, Problem
from tvm_pipeline.backends.carried import CarriedModel, with_carry
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Prediction, Stage
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.errors import PlanError
from tvm_pipeline.planning import plan as plan_best
from tvm_pipeline.runtime import LivePipeline, Pipeline
from tvm_pipeline.runtime.isolation import isolated

CARRY = (("h", "h_next"), ("k", "k_next"))
DEVICES = ("d0", "d1", "d2", "d3")


def recurrent(**options) -> FakeModel:
    """Two layers with a state each, and what stands in front, between and behind; every frame hangs on all before."""
    tensors = {name: Tensor(name, (4, 6), "int64") for name in ("x", "a", "b", "h", "k", "h_next", "k_next", "c", "y")}
    reads = {
        "a": ("x",),
        "b": ("a",),
        "h_next": ("b", "h"),
        "c": ("h_next",),
        "k_next": ("c", "k"),
        "y": ("k_next", "a"),
    }
    made = tuple(Operator(f"to_{name}", "mix", read, (tensors[name],)) for name, read in reads.items())
    functions = {o.name: Mix(tuple(range(3, 3 + len(o.inputs))), o.outputs) for o in made}
    inputs = tuple(tensors[name] for name in ("x", "h", "k"))
    return FakeModel(OperatorGraph("recurrent", inputs, made, ("y", "h_next", "k_next")), functions, **options)


def frames_of(count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(7).integers(-9, 9, (count, 4, 6)))


def plain_loop(model: FakeModel, frames: list[np.ndarray]) -> list[dict[str, np.ndarray]]:
    states = {name: np.zeros((4, 6), "int64") for name, _ in CARRY}
    found = []
    for frame in frames:
        found.append(model.unsplit({"x": frame, **states}))
        states = {name: found[-1][output] for name, output in CARRY}
    return found


def problem_of(compiled: CarriedModel, *devices: str) -> Problem:
    devices = devices or DEVICES
    measured = DeviceProfile.in_order(compiled.graph, (1e-4,) * len(compiled.graph))
    profile = Profile(compiled.graph.name, compiled.graph.fingerprint, dict.fromkeys(devices, measured))
    return Problem(compiled.graph, fake_platform(*devices), profile)


def plan_of(problem: Problem, *stages: tuple[str, int]) -> Plan:
    """Stages as (devices joined by +, count of operators)."""
    names, made = problem.graph.operator_names, []
    for devices, count in stages:
        made.append(Stage(tuple(devices.split("+")), tuple(names[:count])))
        names = names[count:]
    return judged(problem, Plan(problem.graph.name, "by hand", "throughput", tuple(made), Prediction()))


def random_plan(problem: Problem, random: np.random.Generator) -> Plan:
    """Stages over whichever devices, some replicated where they hold no loop."""
    while True:
        devices = [str(name) for name in random.permutation(DEVICES)]
        cuts = sorted(random.choice(range(1, len(problem.graph)), int(random.integers(0, 3)), replace=False))
        counts = np.diff([0, *cuts, len(problem.graph)]).tolist()
        stages = [(devices.pop(), count) for count in counts]
        chosen = int(random.integers(len(stages)))
        stages[chosen] = ("+".join([stages[chosen][0], *devices]), stages[chosen][1])
        try:
            return plan_of(problem, *stages)
        except PlanError:
            continue  # it replicates a loop


def check(results, expected: list[dict[str, np.ndarray]]) -> None:
    found = list(results)
    assert [result.frame for result in found] == list(range(len(expected)))
    for result, outputs in zip(found, expected, strict=True):
        assert result.outputs.keys() == outputs.keys()
        for name, array in outputs.items():
            np.testing.assert_array_equal(result.outputs[name], array, err_msg=f"{name} of frame {result.frame}")


def test_a_pipeline_over_loops_is_the_plain_loop():
    model, frames = recurrent(), frames_of(50)
    compiled = CarriedModel(model, CARRY)
    problem = problem_of(compiled)
    plan = plan_of(problem, ("d0+d1", 2), ("d2", 2), ("d3", 2))
    with Pipeline(compiled, plan, problem.platform, in_flight=9) as pipeline:
        check(pipeline.map(frames), plain_loop(model, frames))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", range(6))
def test_changes_of_plan_and_failures_leave_every_bit_of_the_state(seed):
    random = np.random.default_rng(seed)
    operators = recurrent().graph.operator_names
    hooks = {
        (operators[random.integers(len(operators))], name): raise_at(int(random.integers(40)), OSError("unplugged"))
        for name in DEVICES
        for _ in range(2)
    }
    model, frames = recurrent(hooks=hooks), frames_of(200)
    compiled = CarriedModel(model, CARRY)
    problem = problem_of(compiled)
    with LivePipeline(compiled, problem, random_plan(problem, random), cool_down_s=0.0) as pipeline:
        over = threading.Event()

        def exchange() -> None:
            while not over.wait(random.random() * 2e-3):
                pipeline.switch(random_plan(problem, random), "for the test")

        exchanger = threading.Thread(target=exchange)
        exchanger.start()
        try:
            check(pipeline.map(frames), plain_loop(model, frames))
        finally:
            over.set()
            exchanger.join()
        assert {event.kind for event in pipeline.events} >= {"switch", "failure"}


def test_a_plan_that_fails_while_the_next_one_waits_for_its_state():
    """The new plan's loop waits for frames that ran out of the old one: what these leave comes from a third plan."""
    slow, gone = busy(0.02), raise_at(3, OSError("unplugged"))
    model = recurrent(hooks={("to_a", "d0"): slow, ("to_y", "d1"): gone})
    frames = frames_of(40)
    compiled = CarriedModel(model, CARRY)
    problem = problem_of(compiled)
    first = plan_of(problem, ("d0", 5), ("d1", 1))
    with LivePipeline(compiled, problem, first, in_flight=6) as pipeline:
        for frame in frames[:6]:
            pipeline.submit(frame)
        assert pipeline.switch(plan_of(problem, ("d2", 3), ("d3", 3)), "for the test")
        feeder = threading.Thread(target=lambda: [pipeline.submit(frame) for frame in frames[6:]])
        feeder.start()
        check((pipeline.result(20) for _ in frames), plain_loop(model, frames))
        feeder.join()
        assert [event.kind for event in pipeline.events][:3] == ["start", "switch", "failure"]


def test_a_stage_that_hangs_is_left_behind_with_its_state():
    opened = threading.Event()
    model = recurrent(hooks={("to_k_next", "d1"): lambda call: opened.wait(20) if call == 5 else None})
    frames = frames_of(20)
    compiled = CarriedModel(model, CARRY)
    problem = problem_of(compiled)
    first = plan_of(problem, ("d0", 4), ("d1", 2))
    with LivePipeline(compiled, problem, first, watchdog_s=0.2) as pipeline:
        check(pipeline.map(frames), plain_loop(model, frames))
        assert any(event.kind == "failure" for event in pipeline.events)
        opened.set()


@pytest.mark.thorough
def test_the_state_outlives_the_process_of_its_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    model, frames = recurrent(), frames_of(60)
    carried = CarriedModel(model, CARRY)
    problem = problem_of(carried, "d0", "d1")
    first = plan_of(problem, ("d0", 6))
    others = _children()
    with (
        isolated(carried, problem.platform, first.stages) as compiled,
        LivePipeline(compiled, problem, first) as pipeline,
    ):
        results = []
        for number, result in enumerate(pipeline.map(frames)):
            results.append(result)
            if number == 10:
                os.kill(min(_children() - others), signal.SIGKILL)
        check(results, plain_loop(model, frames))
        assert any(event.kind == "failure" for event in pipeline.events)


def _children() -> set[int]:
    files = Path("/proc/self/task").glob("*/children")
    return {int(child) for file in files for child in file.read_text().split()}


def test_states_of_frames_that_came_out_are_dropped():
    compiled = CarriedModel(recurrent(), CARRY)
    problem = problem_of(compiled)
    with Pipeline(compiled, plan_of(problem, ("d0", 3), ("d1", 3)), problem.platform, in_flight=4) as pipeline:
        for _ in pipeline.map(frames_of(100)):
            pass
        assert [len(known) for known in pipeline._state._before.values()] == [1, 1]


def test_a_loop_has_no_replicas():
    compiled = CarriedModel(recurrent(), CARRY)
    problem = problem_of(compiled)
    with pytest.raises(PlanError, match="holds the ordered operator loop/h and runs on 2 devices"):
        plan_of(problem, ("d0+d1", 6))
    for plan in plan_best(problem).candidates:
        for stage in plan.stages:
            assert len(stage.devices) == 1 or not {"loop/h", "loop/k"}.intersection(stage.operators)


def test_times_of_a_loop_are_those_of_its_operators():
    model = recurrent()
    model.refused = {"d1": ["to_c"]}
    joined = CarriedModel(model, (("h", "k_next"), ("k", "h_next")))
    assert joined.graph.operator_names == ["to_a", "to_b", "loop/h", "to_y"]
    device, other = fake_platform("d0", "d1").devices
    assert joined.computes(other) == ["to_a", "to_b", "to_y"]
    assert joined.time_operators(device, 3).shape == (3, 4)
    assert np.isnan(joined.time_operators(other, 3)[:, 2]).all()
    assert with_carry(model, ()) is model
