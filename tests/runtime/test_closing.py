"""Stages are closed by what opened them: at the end of a run, whichever way it ends."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from tests.runtime.test_live_pipeline import problem_of, whole
from tests.support.fake_backend import chain_model, chain_pipeline, fake_platform, make_plan, number, numbers, raise_at
from tvm_pipeline.errors import PlanError, StageError
from tvm_pipeline.profiling import profile_model
from tvm_pipeline.runtime import LivePipeline, Pipeline
from tvm_pipeline.testing import FakeBackend


def test_stopped_or_never_started() -> None:
    model = chain_model(3)
    with chain_pipeline(model) as pipeline:
        assert len(model.open_stages) == 3
        assert len(list(pipeline.map(numbers(5)))) == 5
    assert not model.open_stages
    pipeline = chain_pipeline(model)
    assert len(model.open_stages) == 3
    pipeline.stop()
    assert not model.open_stages


def test_drained_to_the_end() -> None:
    model = chain_model(2)
    pipeline = chain_pipeline(model)
    pipeline.start()
    pipeline.submit(number(1))
    pipeline.drain()
    assert pipeline.result().outputs["y"] == 3
    for worker in pipeline._workers:
        worker.done.wait(10)
    assert not model.open_stages
    pipeline.stop()


def test_a_pipeline_that_cannot_be_made_leaves_no_stage_open() -> None:
    model = chain_model(3)
    plan = make_plan(model.graph, (["d0"], ["op0"]), (["d1"], ["op1"]), (["d2"], ["op2"]))
    platform = fake_platform("d0", "d1", "d2")
    made = model.stage

    def refuse_the_last(operators, device):
        if device.name == "d2":
            raise PlanError("no")
        return made(operators, device)

    model.stage = refuse_the_last  # type: ignore[method-assign]
    with pytest.raises(PlanError, match="no"):
        Pipeline(model, plan, platform)
    assert not model.open_stages


def test_one_that_fails() -> None:
    model = chain_model(2, hooks={("op1", "d1"): raise_at(2, ValueError("broken"))})
    with pytest.raises(StageError), chain_pipeline(model) as pipeline:
        list(pipeline.map(numbers(9)))
    assert not model.open_stages


def test_one_that_hangs_is_closed_while_it_does() -> None:
    let_go = threading.Event()
    model = chain_model(1, hooks={("op0", "d0"): lambda _: let_go.wait() and None})
    pipeline = chain_pipeline(model)
    with pipeline:
        pipeline.submit(number(0))
        while not pipeline._workers[0].busy_s():
            pass
        assert len(model.open_stages) == 1
        pipeline.overdue(0.0)
        assert not model.open_stages
        let_go.set()


def test_exchanged_plans() -> None:
    model, platform = chain_model(2), fake_platform("d0", "d1")
    problem = problem_of(model, platform)
    with LivePipeline(model, problem, whole(problem, "d0")) as pipeline:
        for turn in range(6):
            pipeline.submit(number(turn))
            pipeline.result()
            assert pipeline.switch(whole(problem, f"d{1 - turn % 2}"), "test")
        pipeline.submit(number(6))
        pipeline.result()
        assert len(model.open_stages) == 1
    assert not model.open_stages


def test_profiling() -> None:
    model, platform = chain_model(2), fake_platform("d0", "d1")
    profile_model(FakeBackend(platform.devices, [model]), model, platform, 8)
    assert not model.open_stages
    model.close()


def test_a_pipeline_does_not_wait_for_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        pipeline = chain_pipeline(chain_model(2))
        with pipeline:
            list(pipeline.map(numbers(5)))
        seen = weakref.ref(pipeline)
        del pipeline
        assert seen() is None
    finally:
        gc.enable()
