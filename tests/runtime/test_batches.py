"""Calls of several frames: every frame comes out once, in order and as alone, whatever calls it shares with others."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.test_failures import taken_until
from tests.runtime.test_host_work import OPERATORS, WHOLE, Numbers, plan_of, problem_of, run, with_core
from tests.runtime.test_pipeline import PLATFORM, assert_same, random_frames, random_layouts, random_plan
from tests.support.examples import examples
from tests.support.fake_backend import (
    chain_model,
    fake_platform,
    make_plan,
    number,
    numbers,
    raise_at,
    random_model,
    values,
    with_calls_of,
)
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.errors import StageError
from tvm_pipeline.runtime import LivePipeline, Pipeline


@examples(60)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(2, 5),
    operators=st.integers(1, 8),
    stages=st.integers(1, 3),
    in_flight=st.one_of(st.none(), st.integers(1, 6)),
    frames=st.integers(0, 20),
)
def test_frames_of_any_calls_are_those_of_the_model(
    seed: int, batch: int, operators: int, stages: int, in_flight: int | None, frames: int
) -> None:
    random = np.random.default_rng(seed)
    alone = random_model(random, operators)
    alone.layouts = random_layouts(random, alone.graph)
    model = with_calls_of(batch, alone)
    given_frames = random_frames(random, alone, frames)
    plan = random_plan(random, model.graph, min(stages, operators))
    with Pipeline(model, plan, PLATFORM, in_flight=in_flight) as pipeline:
        assert_same(list(pipeline.map(given_frames)), alone, given_frames)
        assert pipeline.submitted == pipeline.delivered == frames


@examples(40)
@given(batch=st.integers(2, 4), in_flight=st.integers(1, 3), moves=st.lists(st.booleans(), max_size=40))
def test_submit_and_result_in_any_order(batch: int, in_flight: int, moves: list[bool]) -> None:
    """A frame that nobody follows comes out all the same: no call waits for others to fill it."""
    model = with_calls_of(batch, chain_model(2))
    plan = make_plan(model.graph, (["d0"], ["op0"]), (["d1"], ["op1"]))
    submitted, results = 0, []
    with Pipeline(model, plan, fake_platform("d0", "d1"), in_flight=in_flight) as pipeline:
        for submits in moves:
            if submits and submitted - len(results) < in_flight:
                assert pipeline.submit(number(submitted)) == submitted
                submitted += 1
            elif submitted > len(results):
                results.append(pipeline.result(20))
        while len(results) < submitted:
            results.append(pipeline.result(20))
    assert values(results) == [2 + n for n in range(submitted)]


def test_frames_that_wait_share_a_call() -> None:
    """While the first stage is at a frame, those behind it fill one call after another."""
    began, gate, calls = threading.Event(), threading.Event(), []

    def wait(call: int) -> None:
        calls.append(call)
        began.set()
        assert gate.wait(20)

    model = with_calls_of(4, chain_model(1, hooks={("op0", "d0"): wait}))
    with Pipeline(model, make_plan(model.graph, (["d0"], ["op0"])), fake_platform("d0"), in_flight=3) as pipeline:
        pipeline.submit(number(0))
        assert began.wait(20)
        for index in range(1, 8):
            pipeline.submit(number(index))
        gate.set()
        results = [pipeline.result(20) for _ in range(8)]
        assert pipeline.stage_statistics()[0].frames == len(calls) == 3  # 1, 4 and 3 frames
        assert pipeline.statistics().frames == 8
    assert values(results) == list(range(1, 9))


def test_frames_inside_come_out_when_it_is_drained() -> None:
    model = with_calls_of(8, chain_model(2))
    plan = make_plan(model.graph, (["d0"], ["op0"]), (["d1"], ["op1"]))
    with Pipeline(model, plan, fake_platform("d0", "d1")) as pipeline:
        for frame in numbers(3):
            pipeline.submit(frame, tag=int(frame[0]))
        pipeline.drain()
        results = list(pipeline.results(20))
    assert values(results) == [2, 3, 4]
    assert [result.tag for result in results] == [0, 1, 2]


def test_a_failing_call_is_named_by_its_first_frame_after_the_results_before_it() -> None:
    hooks = {("op0", "d0"): raise_at(2, ValueError("no such kernel"))}
    model = with_calls_of(4, chain_model(1, hooks=hooks))
    with Pipeline(model, make_plan(model.graph, (["d0"], ["op0"])), fake_platform("d0")) as pipeline:
        taken, raised = taken_until(StageError, pipeline.map(map(number, itertools.count())))
    assert raised.frame == len(taken)
    assert taken == [n + 1 for n in range(len(taken))]


@pytest.mark.parametrize("failing", ["op0", "op1"])
def test_a_device_that_fails_costs_no_frame(failing: str) -> None:
    fails, failed = raise_at(3, OSError("gone")), threading.Event()

    def failing_hook(call: int) -> None:
        if call >= 3:
            failed.set()
        fails(call)

    def patient_hook(call: int) -> None:  # without waiting, d1 might compute all frames on a busy machine
        if call >= 3:
            failed.wait(10)

    hooks = {(failing, "d0"): failing_hook, (failing, "d1"): patient_hook}
    model = with_calls_of(3, chain_model(2, hooks=hooks))
    platform = fake_platform("d0", "d1", "d2")
    devices = {name: DeviceProfile.in_order(model.graph, (1e-4, 1e-4)) for name in ("d0", "d1", "d2")}
    problem = Problem(model.graph, platform, Profile("chain", model.graph.fingerprint, devices))
    plan = make_plan(model.graph, (["d0", "d1"], ["op0", "op1"]))
    with LivePipeline(model, problem, plan) as pipeline:
        assert values(list(pipeline.map(numbers(100)))) == [n + 2 for n in range(100)]
        kinds = [event.kind for event in pipeline.events]
    assert "failure" in kinds
    assert pipeline.plan.batch == 3


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 9, 50])
def test_a_source_may_end_within_a_call(count: int) -> None:
    """The frames before its end come out, in order and once each."""
    app = Numbers(chain_model(OPERATORS), count)
    app.model = with_calls_of(4, app.model)
    problem = problem_of(app, platform := with_core("d0", "d1"))
    first, last = "host/read host/prepare op0", "op1 op2 op3 host/write"
    for plan in (plan_of(problem, ("d0", WHOLE)), plan_of(problem, ("d0", first), ("d1", last))):
        app.read.clear()
        app.written.clear()
        with Pipeline(app.model, plan, platform, host=app.host) as pipeline:
            assert run(pipeline) == [n + OPERATORS for n in range(count)]
        assert app.written == [(n, n + OPERATORS) for n in range(count)]
