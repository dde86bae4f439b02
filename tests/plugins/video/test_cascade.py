"""Two models in a row: frames in order, each with its own crops, whatever fails; planned as one problem."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.runtime.test_live_pipeline import problem_of
from tests.support.fake_backend import busy, chain_model, fake_platform, make_plan, number, numbers, raise_at
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import OptionError, StageError
from tvm_pipeline.runtime import Pipeline, Result
from tvm_pipeline_video.cascade import Cascade, CascadeResult, measured_crops, plan_cascade

FRAMES = 150


def opened(operators: int, hooks=None, **options) -> Pipeline:
    model = chain_model(operators, hooks=hooks)
    names = model.graph.operator_names
    pipeline = Pipeline(
        model, make_plan(model.graph, (["d0"], names[:1]), (["d1"], names[1:])), fake_platform("d0", "d1"), **options
    )
    pipeline.start()
    return pipeline


def cut(result: Result) -> list[np.ndarray]:
    """Frame n has n % 4 crops: 100 n, 100 n + 1, ... of what the first model makes of it."""
    value = int(result.outputs["y"][0])
    return [number(100 * value + index) for index in range(result.frame % 4)]


def seen(frame: CascadeResult) -> tuple[int, int, list[int]]:
    return frame.first.frame, int(frame.first.outputs["y"][0]), [int(crop.outputs["y"][0]) for crop in frame.crops]


def expected(frame: int) -> tuple[int, int, list[int]]:
    return frame, frame + 2, [100 * (frame + 2) + index + 3 for index in range(frame % 4)]


@pytest.mark.parametrize(("first", "second"), [({}, {}), ({"in_flight": 1}, {"in_flight": 1}), ({"in_flight": 20}, {})])
def test_frames_come_in_order_each_with_its_own_crops(first, second):
    found = list(Cascade(opened(2, **first), opened(3, **second), cut).map(numbers(FRAMES)))
    assert list(map(seen, found)) == [expected(frame) for frame in range(FRAMES)]


def test_the_first_model_goes_on_while_the_second_one_is_at_crops():
    reached, passed = threading.Event(), threading.Event()

    def second(_: int) -> None:  # the crop of frame 1 ends only when the first model has come to frame 5
        assert passed.wait(20)

    def first(call: int) -> None:
        reached.set()
        if call == 5:
            passed.set()

    cascade = Cascade(opened(2, {("op0", "d0"): first}), opened(3, {("op0", "d0"): second}), cut)
    assert len(list(cascade.map(numbers(8)))) == 8


@pytest.mark.parametrize("where", ["first", "second", "cut", "frames"])
def test_what_fails_is_told_after_the_frames_before(where):
    gone = {("op1", "d1"): raise_at(9, OSError("unplugged"))}

    def cutting(result: Result) -> list[np.ndarray]:
        if where == "cut" and result.frame == 9:
            raise ValueError("no such crop")
        return cut(result)

    def frames():
        yield from numbers(9 if where == "frames" else FRAMES)
        if where == "frames":
            raise ValueError("no such frame")

    cascade = Cascade(
        opened(2, gone if where == "first" else None), opened(3, gone if where == "second" else None), cutting
    )
    found = []
    with pytest.raises(StageError if where in ("first", "second") else ValueError) as raised:
        found.extend(cascade.map(frames()))
    # The crop of number 9 is the first one of frame 7; those before have 0 + 1 + 2 + 3 + 0 + 1 + 2.
    before = 7 if where == "second" else 9
    assert list(map(seen, found)) == [expected(frame) for frame in range(before)]
    assert {"first": "unplugged", "second": "unplugged", "cut": "no such crop", "frames": "no such frame"}[
        where
    ] in str(raised.value)


def test_who_leaves_early_ends_both_pipelines():
    first, second = opened(2), opened(3, {("op0", "d0"): busy(0.001)})
    results = Cascade(first, second, cut).map(numbers(100_000))
    assert seen(next(results)) == expected(0)
    results.close()
    assert (first.state, second.state) == ("stopped", "stopped")


def test_both_models_are_planned_as_one_problem_at_the_measured_rate():
    crops = measured_crops(opened(2), numbers(8), cut)
    assert crops == 12 / 8
    platform = fake_platform("d0", "d1")
    problems = problem_of(chain_model(6), platform), problem_of(chain_model(4), platform)
    found = plan_cascade(problems, crops)
    assert found.rates_fps == (1.0, crops)
    # 6 operators of 0.1 ms a frame and 1.5 times 4: each device has half of the 1.2 ms.
    assert found.utilisation == pytest.approx({"d0": 6e-4, "d1": 6e-4})
    assert [plan.graph for plan in found.plans] == ["chain", "chain"]
    for problem, plan in zip(problems, found.plans, strict=True):
        assert evaluate(problem, plan.stages).predicted.throughput_fps


def test_a_stretch_without_crops_counts_as_one_and_one_without_frames_is_refused():
    assert measured_crops(opened(2), numbers(10), lambda _: []) == 0.1
    with pytest.raises(OptionError, match="it gave none; give it another `source`"):
        measured_crops(opened(2), [], cut)
