"""Every frame comes out once, in order and with the values of the unsplit model, however the model is split."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.fake_backend import (
    LAYOUTS,
    FakeModel,
    FakeRunner,
    Mix,
    busy,
    chain_model,
    chain_pipeline,
    fake_platform,
    make_plan,
    number,
    numbers,
    random_model,
    values,
)
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Plan, Prediction, calls_inside
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.errors import ModelError, OptionError, PipelineTimeoutError, PlanError
from tvm_pipeline.runtime import Pipeline, Result
from tvm_pipeline.runtime.worker import StageGate

DEVICES = tuple(f"d{index}" for index in range(9))
# Each third device copies one frame while it computes another.
PLATFORM = replace(
    fake_platform(*DEVICES),
    devices=tuple(replace(d, concurrent_copies=i % 3 == 1) for i, d in enumerate(fake_platform(*DEVICES).devices)),
)


def random_frames(random: np.random.Generator, model: FakeModel, count: int) -> list[dict[str, Array]]:
    return [
        {t.name: random.integers(-99, 99, t.shape).astype(t.dtype) for t in model.graph.inputs} for _ in range(count)
    ]


def random_plan(random: np.random.Generator, graph: OperatorGraph, stages: int) -> Plan:
    """Some topological order, cut anywhere; stages on one device, perhaps one seen before, or on replicas."""
    waiting, known, order = list(graph.operators), {t.name for t in graph.inputs}, []
    while waiting:
        ready = [operator for operator in waiting if known.issuperset(operator.inputs)]
        chosen = ready[random.integers(len(ready))]
        waiting.remove(chosen)
        known.update(tensor.name for tensor in chosen.outputs)
        order.append(chosen.name)
    cuts = sorted(random.choice(np.arange(1, len(order)), stages - 1, replace=False)) if stages > 1 else []
    fresh, single, made = iter(DEVICES), [], []
    for begin, end in itertools.pairwise([0, *cuts, len(order)]):
        replicas = int(random.choice([1, 1, 2, 3]))
        if replicas == 1 and single and random.random() < 0.3:
            devices = [single[random.integers(len(single))]]
        else:
            devices = list(itertools.islice(fresh, replicas))
            single += devices if replicas == 1 else []
        made.append((devices, order[begin:end]))
    return make_plan(graph, *made)


def random_layouts(random: np.random.Generator, graph: OperatorGraph) -> dict[str, dict[str, str]]:
    return {device: {name: str(random.choice(list(LAYOUTS))) for name in graph.tensors} for device in DEVICES}


def assert_same(results: list[Result], model: FakeModel, frames: list[dict[str, Array]]) -> None:
    assert [result.frame for result in results] == list(range(len(frames)))
    for result, frame in zip(results, frames, strict=True):
        expected = model.unsplit(frame)
        assert result.outputs.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(result.outputs[name], array)
            assert result.outputs[name].dtype == array.dtype
        assert result.latency_s > 0


@examples(100)
@given(
    seed=st.integers(0, 2**32),
    operators=st.integers(1, 10),
    stages=st.integers(1, 3),
    in_flight=st.one_of(st.none(), st.integers(1, 12)),
    frames=st.integers(0, 20),
)
def test_any_split_of_any_model_computes_what_the_model_does(
    seed: int, operators: int, stages: int, in_flight: int | None, frames: int
) -> None:
    random = np.random.default_rng(seed)
    model = random_model(random, operators)
    model.layouts = random_layouts(random, model.graph)
    plan = random_plan(random, model.graph, min(stages, operators))
    given_frames = random_frames(random, model, frames)
    with Pipeline(model, plan, PLATFORM, in_flight=in_flight) as pipeline:
        assert_same(list(pipeline.map(given_frames)), model, given_frames)


@examples(40)
@given(seed=st.integers(0, 2**32), in_flight=st.integers(1, 5), moves=st.lists(st.booleans(), max_size=40))
def test_submit_and_result_in_any_order_hold_just_in_flight_frames(
    seed: int, in_flight: int, moves: list[bool]
) -> None:
    random = np.random.default_rng(seed)
    model = random_model(random, 4)
    frames, results = random_frames(random, model, len(moves)), []
    submitted = 0
    with Pipeline(model, random_plan(random, model.graph, 2), PLATFORM, in_flight=in_flight) as pipeline:
        for submits in moves:
            inside = submitted - len(results)
            if submits and inside == in_flight:
                with pytest.raises(PipelineTimeoutError, match=f"{in_flight} frames are inside"):
                    pipeline.submit(frames[submitted], timeout_s=0)
            elif submits:
                assert pipeline.submit(frames[submitted], timeout_s=0) == submitted
                submitted += 1
            elif inside:
                results.append(pipeline.result(timeout_s=20))
            else:
                with pytest.raises(PipelineTimeoutError, match="0 frames are inside"):
                    pipeline.result(timeout_s=0)
        pipeline.drain()
        results += pipeline.results(timeout_s=20)
    assert_same(results, model, frames[:submitted])


def test_a_tensor_may_skip_stages_and_several_may_cross_a_cut() -> None:
    a, b, c, d = (Tensor(name, (4, 4), "int64") for name in "abcd")
    operators = [
        Operator("first", "mix", ("x",), (a, b)),
        Operator("second", "mix", ("a", "x"), (c,)),
        Operator("third", "mix", ("c", "b", "x"), (d,)),
    ]
    graph = OperatorGraph("skips", (Tensor("x", (4, 4), "int64"),), tuple(operators), ("d", "a"))
    functions = {o.name: Mix(tuple(range(2, 2 + len(o.inputs))), o.outputs) for o in operators}
    layouts = {"d0": {"a": "AB2a", "x": "AB2a2b"}, "d1": {"a": "AB2a2b"}, "d2": {"b": "AB2a", "x": "AB2a"}}
    model = FakeModel(graph, functions, layouts=layouts)
    frames = random_frames(np.random.default_rng(0), model, 5)
    plan = make_plan(graph, (["d0"], ["first"]), (["d1"], ["second"]), (["d2"], ["third"]))
    with Pipeline(model, plan, PLATFORM) as pipeline:
        assert_same(list(pipeline.map(frames)), model, frames)


def test_replicas_overtake_each_other_and_frames_still_come_in_order() -> None:
    others, overtaken = threading.Semaphore(0), []

    def hold_frame_0(x: Array) -> list[Array]:
        if x[0] == 0:
            overtaken.extend(others.acquire(timeout=10) for _ in range(3))
        else:
            others.release()
        return [x + 1]

    model = chain_model(2)
    model.functions["op0"] = hold_frame_0
    plan = make_plan(model.graph, (["d0", "d1"], ["op0"]), (["d2"], ["op1"]))
    with Pipeline(model, plan, PLATFORM, in_flight=4) as pipeline:
        assert values(list(pipeline.map(numbers(9)))) == list(range(2, 11))
    assert overtaken == [True] * 3


def test_the_last_replica_to_end_passes_the_end_on() -> None:
    """An end that overtakes the frame of another replica would leave the stages behind it waiting for that frame."""
    source, target = SimpleQueue(), SimpleQueue()
    gate = StageGate(source, target, 2)
    gate.close()
    assert target.empty()
    assert source.get_nowait() is None  # for the other replica
    gate.close()
    assert target.get_nowait() is None
    assert source.empty()


def test_many_frames_through_slow_and_quick_stages() -> None:
    model = chain_model(3, hooks={("op1", "d1"): busy(2e-4), ("op1", "d2"): busy(5e-5)})
    plan = make_plan(model.graph, (["d0"], ["op0"]), (["d1", "d2", "d3"], ["op1"]), (["d4"], ["op2"]))
    with Pipeline(model, plan, PLATFORM) as pipeline:
        assert values(list(pipeline.map(numbers(1000)))) == list(range(3, 1003))


@pytest.mark.parametrize("frames", [[], iter(()), (number(0) for _ in ())])
def test_no_frames_give_no_results(frames: object) -> None:
    with chain_pipeline(chain_model()) as pipeline:
        assert list(pipeline.map(frames)) == []


def test_inputs_may_be_one_array_or_arrays_by_name_and_be_used_again() -> None:
    buffer = np.zeros(1, np.int64)

    def frames() -> Iterator[dict[str, Array] | Array]:
        for index in range(50):
            buffer[0] = index
            yield buffer if index % 2 else {"x": buffer}

    with chain_pipeline(chain_model()) as pipeline:
        assert values(list(pipeline.map(frames()))) == list(range(2, 52))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"z": number(1)}, "the model has the inputs x; it was given z"),
        ({"x": number(1), "z": number(1)}, "it was given x, z"),
        ({}, "the model has the inputs x"),
        ("x", "input x was given a str; a frame is an array, or arrays by input name"),
        (np.zeros(2, np.int64), r"input x is int64 of shape \[1\]; it was given int64 of shape \[2\]"),
        (np.zeros((), np.int64), r"given int64 of shape \[\]"),
        (np.zeros(1, np.float32), "given float32"),
        (np.zeros(1, np.uint64), "given uint64"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_and_the_pipeline_goes_on(inputs: object, message: str) -> None:
    with chain_pipeline(chain_model(), in_flight=1) as pipeline:
        for _ in range(3):  # a frame that is refused takes no room
            with pytest.raises(ModelError, match=message):
                pipeline.submit(inputs)
        assert pipeline.submit(np.array([4], np.uint8)) == 0
        assert values([pipeline.result()]) == [6]


def test_a_wider_float_is_rounded_to_the_models() -> None:
    tensor = Tensor("y", (2,), "float32")
    graph = OperatorGraph(
        "copy", (Tensor("x", (2,), "float32"),), (Operator("copy", "copy", ("x",), (tensor,)),), ("y",)
    )
    model = FakeModel(graph, {"copy": lambda x: [x]})
    with Pipeline(model, make_plan(graph, (["d0"], ["copy"])), PLATFORM) as pipeline:
        pipeline.submit(np.array([0.1, 1e9]))
        np.testing.assert_array_equal(pipeline.result().outputs["y"], np.array([0.1, 1e9], np.float32))


def test_never_more_than_in_flight_frames_are_inside() -> None:
    taken = 0

    def frames() -> Iterator[Array]:
        for index in range(60):
            # The one being made is not inside, and one more may lie between `result` and the count.
            assert index - taken <= 3 + 1
            yield number(index)

    with chain_pipeline(chain_model(3), in_flight=3) as pipeline:
        for result in pipeline.map(frames()):
            assert result.frame == taken
            taken += 1
    assert taken == 60


def test_submit_waits_for_room_and_goes_on_when_a_result_is_taken() -> None:
    with chain_pipeline(chain_model(), in_flight=2) as pipeline, ThreadPoolExecutor(1) as other:
        pipeline.submit(number(0))
        pipeline.submit(number(1))
        with pytest.raises(PipelineTimeoutError, match="no room"):
            pipeline.submit(number(2), timeout_s=0.01)
        waiting = other.submit(pipeline.submit, number(2))
        assert values([pipeline.result()]) == [2]
        assert waiting.result(10) == 2
        assert [pipeline.result(10).frame for _ in range(2)] == [1, 2]


def test_one_thread_submits_while_another_takes_results() -> None:
    with chain_pipeline(chain_model()) as pipeline, ThreadPoolExecutor(1) as other:
        results = other.submit(lambda: list(pipeline.results()))
        indexes = [pipeline.submit(frame) for frame in numbers(500)]
        pipeline.drain()
        assert values(results.result(20)) == list(range(2, 502))
    assert indexes == list(range(500))


def test_several_threads_submit_and_each_learns_its_frames() -> None:
    def submit_all(base: int) -> dict[int, int]:
        return {pipeline.submit(number(value)): value for value in range(base, base + 300)}

    with chain_pipeline(chain_model()) as pipeline, ThreadPoolExecutor(4) as others:
        submitters = [others.submit(submit_all, base) for base in (0, 1000, 2000)]
        seen = values([pipeline.result(20) for _ in range(900)])
        value_of = {frame: value for submitter in submitters for frame, value in submitter.result(20).items()}
    assert seen == [value_of[frame] + 2 for frame in range(900)]


def test_pipelines_do_not_meet() -> None:
    with chain_pipeline(chain_model(2)) as two, chain_pipeline(chain_model(5)) as five:
        for index, (a, b) in enumerate(zip(two.map(numbers(100)), five.map(numbers(100)), strict=True)):
            assert (a.outputs["y"], b.outputs["y"]) == (index + 2, index + 5)


def test_one_pipeline_feeds_another() -> None:
    with chain_pipeline(chain_model(2)) as first, chain_pipeline(chain_model(3)) as second:
        results = second.map(result.outputs["y"] for result in first.map(numbers(100)))
        assert values(list(results)) == list(range(5, 105))


def test_plans_that_do_not_fit_are_refused() -> None:
    model = chain_model()
    with pytest.raises(PlanError, match="wrong order"):
        Pipeline(model, make_plan(model.graph, (["d0"], ["op1"]), (["d1"], ["op0"])), PLATFORM)
    with pytest.raises(PlanError, match="op1 is in no stage"):
        Pipeline(model, make_plan(model.graph, (["d0"], ["op0"])), PLATFORM)


def test_a_stage_that_cannot_be_closed_is_logged_and_holds_nobody_up(monkeypatch, caplog) -> None:
    model = chain_model(2)

    def broken(self: FakeRunner) -> None:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(FakeRunner, "close", broken)
    with Pipeline(
        model, make_plan(model.graph, (["d0"], ["op0"]), (["d1"], ["op1"])), fake_platform("d0", "d1")
    ) as pipeline:
        assert len(list(pipeline.map(numbers(3)))) == 3
    assert "could not be closed" in caplog.text


@pytest.mark.parametrize("in_flight", [0, -1])
def test_a_pipeline_without_room_is_refused(in_flight: int) -> None:
    with pytest.raises(OptionError, match="at least one frame"):
        chain_pipeline(chain_model(), in_flight=in_flight)


def test_fast_replicas_need_not_wait_for_a_slow_one():
    """While the slow replica is at its frame, the fast one finishes as many as are predicted, and they find room."""
    release, done = threading.Event(), threading.Semaphore(0)
    model = chain_model(1, hooks={("op0", "slow"): lambda _: release.wait(), ("op0", "fast"): lambda _: done.release()})
    seconds = {
        "slow": DeviceProfile.in_order(model.graph, (10e-3,)),
        "fast": DeviceProfile.in_order(model.graph, (1e-3,)),
    }
    profile = Profile(model.graph.name, model.graph.fingerprint, seconds)
    problem = Problem(model.graph, fake_platform("slow", "fast"), profile)
    plan = judged(problem, make_plan(model.graph, (["slow", "fast"], ["op0"])))
    with Pipeline(model, plan, problem.platform) as pipeline:
        for value in range(11):  # one for the slow, ten for the fast
            pipeline.submit(number(value), timeout_s=10)
        for _ in range(10):
            assert done.acquire(timeout=10)
        release.set()
        assert values([pipeline.result() for _ in range(11)]) == [value + 1 for value in range(11)]


@pytest.mark.parametrize(
    ("prediction", "frames"),
    [
        (Prediction(), 4),
        (Prediction(1.0, 1.0), 4),
        (Prediction(110.0, 0.1), 13),
        (Prediction(1e9, 1.0), 34),  # no more than 16 for each worker
        (Prediction(math.nan, 1.0), 34),
    ],
)
def test_how_many_frames_are_inside_by_default(prediction: Prediction, frames: int):
    model = chain_model(2)
    plan = make_plan(model.graph, (["d0"], ["op0"]), (["d1"], ["op1"]))
    assert calls_inside(plan.stages, prediction) == frames
