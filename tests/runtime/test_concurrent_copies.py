"""Two workers of a device: one copies a frame while the other computes one, and never do both compute."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import pytest

from tests.support.fake_backend import FakeRunner, chain_model, make_plan, number, numbers, values
from tvm_pipeline.backends.contract import Array, Delegating, StageRunner
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import PlanError, StageError
from tvm_pipeline.runtime import Pipeline
from tvm_pipeline.testing import FakeModel

FRAMES = 20
LIMIT_S = 20.0  # a test that waits longer has failed
GPU = Platform("box", (Device("gpu", "fake", concurrent_copies=True),))


class Steps:
    """What the stages of a device have done: the frames that were copied in, and how many compute now."""

    def __init__(self) -> None:
        self.copied = [threading.Event() for _ in range(FRAMES + 1)]
        self.copied[FRAMES].set()
        self.computing, self.most = 0, 0


class CopyingStage(StageRunner):
    """Adds 1. It computes a frame when the next one was copied, which only another stage can do meanwhile."""

    def __init__(self, inner: StageRunner, steps: Steps) -> None:
        self.inputs, self.outputs, self._steps = inner.inputs, inner.outputs, steps
        self._turn: AbstractContextManager[object] = nullcontext()

    def take_turns(self, turn: AbstractContextManager[object]) -> bool:
        self._turn = turn
        return True

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        steps, here = self._steps, inputs[0].copy()
        frame = int(here.flat[0])
        steps.copied[frame].set()
        with self._turn:
            steps.computing += 1
            steps.most = max(steps.most, steps.computing)
            assert steps.copied[frame + 1].wait(LIMIT_S), "nothing was copied meanwhile"
            steps.computing -= 1
        np.copyto(outputs[0], here + 1)


class CopyingModel(Delegating):
    def __init__(self, inner: FakeModel) -> None:
        super().__init__(inner)
        self.steps = Steps()

    def stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        return CopyingStage(super().stage(operators, device), self.steps)


def test_a_frame_is_copied_while_another_one_is_computed() -> None:
    model = CopyingModel(chain_model(1))
    with Pipeline(model, make_plan(model.graph, (["gpu"], ["op0"])), GPU) as pipeline:
        results = list(pipeline.map(numbers(FRAMES)))
        statistics = pipeline.stage_statistics()
    assert [result.frame for result in results] == list(range(FRAMES))
    assert values(results) == [frame + 1 for frame in range(FRAMES)]
    assert model.steps.most == 1
    assert [(one.stage, one.device, one.frames) for one in statistics] == [(0, "gpu", FRAMES)]


def test_a_turn_that_a_frame_waits_for_counts_as_waiting() -> None:
    """Frame 0 is computed until frame 1 waits for its turn."""
    model = chain_model(1)
    entered, left = threading.Event(), threading.Event()

    def hold(call: int) -> None:
        if not entered.is_set():
            entered.set()
            assert left.wait(LIMIT_S)

    model.hooks["op0", "gpu"] = hold
    with Pipeline(model, make_plan(model.graph, (["gpu"], ["op0"])), GPU, in_flight=2) as pipeline:
        pipeline.submit(number(0))
        assert entered.wait(LIMIT_S)
        pipeline.submit(number(1))
        second = pipeline._workers[0] if pipeline._workers[1].frame == 0 else pipeline._workers[1]
        while second._turn is None or not second._turn.asked_s:
            threading.Event().wait(1e-3)
        left.set()
        assert values([pipeline.result(LIMIT_S), pipeline.result(LIMIT_S)]) == [1, 2]
        (record,) = pipeline.records()
    waited = next(sample for sample in record.samples if sample.frame == 1)
    assert waited.wait_s >= second._turn.began_s - second._turn.asked_s > 0


class HeldStage(StageRunner):
    """A stage on the GPU that copies its first frame until it is let go."""

    def __init__(self, inner: StageRunner, model: HeldModel) -> None:
        self.inputs, self.outputs = inner.inputs, inner.outputs
        self._inner, self._model = inner, model

    def take_turns(self, turn: AbstractContextManager[object]) -> bool:
        return self._inner.take_turns(turn)

    def bind(self) -> None:
        self._inner.bind()

    def close(self) -> None:
        self._inner.close()

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        self._model.taken.append(int(inputs[0].flat[0]))
        self._model.first.set()
        assert len(self._model.taken) > 1 or self._model.go.wait(LIMIT_S)
        self._inner.run(inputs, outputs)


class HeldModel(Delegating):
    """Its stages on the GPU note which frames they take."""

    def __init__(self, inner: FakeModel) -> None:
        super().__init__(inner)
        self.taken: list[int] = []
        self.first, self.go = threading.Event(), threading.Event()

    def stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        runner = super().stage(operators, device)
        return HeldStage(runner, self) if device.concurrent_copies else runner


def test_while_a_frame_is_copied_the_others_are_free_for_another_replica() -> None:
    """The GPU copies its first frame until all others came out of the CPU, which begins after the GPU."""
    inner = chain_model(1)
    model = HeldModel(inner)
    inner.hooks["op0", "cpu"] = lambda call: model.first.wait(LIMIT_S)
    platform = Platform("box", (*GPU.devices, Device("cpu", "fake")))
    plan = make_plan(model.graph, (["gpu", "cpu"], ["op0"]))
    with Pipeline(model, plan, platform, in_flight=FRAMES) as pipeline:
        for frame in range(FRAMES):
            pipeline.submit(number(frame))
        assert model.first.wait(LIMIT_S)
        cpu = next(record for record in pipeline.records() if record.device == "cpu")
        while len(cpu.samples) < FRAMES - 1:
            threading.Event().wait(1e-3)
        assert len(model.taken) == 1
        model.go.set()
        assert values([pipeline.result(LIMIT_S) for _ in range(FRAMES)]) == [frame + 1 for frame in range(FRAMES)]


def test_a_copy_that_is_given_up_does_not_hold_up_the_other_worker() -> None:
    model = HeldModel(chain_model(1))
    with Pipeline(model, make_plan(model.graph, (["gpu"], ["op0"])), GPU) as pipeline:
        pipeline.submit(number(0))
        assert model.first.wait(LIMIT_S)
        pipeline.overdue(0.0)
        assert all(worker.done.wait(LIMIT_S) for worker in pipeline._workers)
        with pytest.raises(StageError, match=r"stage 0 on gpu failed at frame 0: .*did not end within 0 s"):
            pipeline.result(LIMIT_S)
    model.go.set()


def test_a_frame_that_fails_frees_the_device_and_those_before_it_come_out() -> None:
    model = chain_model(1)

    def fail(call: int) -> None:
        if call == 3:
            raise ValueError("broken")

    model.hooks["op0", "gpu"] = fail
    plan = make_plan(model.graph, (["gpu"], ["op0"]))
    came = []
    with Pipeline(model, plan, GPU) as pipeline:
        results = pipeline.map(numbers(FRAMES))
        with pytest.raises(StageError, match=r"stage 0 on gpu failed at frame .*broken"):
            came.extend(result.frame for result in results)
    assert came == list(range(len(came)))
    assert not model.open_stages


def test_a_stage_that_cannot_take_turns_is_an_error_that_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRunner, "take_turns", lambda runner, turn: False)
    model = chain_model(1)
    with pytest.raises(PlanError, match=r"stage 0 on device gpu cannot compute one frame and copy another.*leave that"):
        Pipeline(model, make_plan(model.graph, (["gpu"], ["op0"])), GPU)
    assert not model.open_stages


def test_an_operator_that_takes_all_frames_has_one_worker() -> None:
    model = chain_model(1)
    model.graph = replace(model.graph, operators=(replace(model.graph.operators[0], ordered=True),))
    with pytest.raises(PlanError, match=r"stage 0 holds operator op0, of which one instance.*device gpu has"):
        Pipeline(model, make_plan(model.graph, (["gpu"], ["op0"])), GPU)
