"""Whatever goes wrong is said once, with where; what was done before comes out; no thread is left.

That no thread is left is checked after every test here, by `conftest.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.fake_backend import (
    Hook,
    busy,
    chain_model,
    chain_pipeline,
    fake_platform,
    make_plan,
    number,
    numbers,
    raise_at,
    values,
)
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.errors import ModelError, PipelineClosedError, PipelineTimeoutError, StageError
from tvm_pipeline.runtime import Pipeline, Result


class Gate:
    """A hook that stands still until it is opened, and says when something has come to it."""

    def __init__(self) -> None:
        self.reached, self.opened, self.calls = threading.Event(), threading.Event(), 0

    def __call__(self, _: int) -> None:
        self.calls += 1
        self.reached.set()
        assert self.opened.wait(20)


def taken_until(error: type[BaseException], results: Iterator[Result]) -> tuple[list[int], BaseException]:
    """The values before the iterator raised, and what it raised."""
    taken: list[Result] = []
    with pytest.raises(error) as caught:
        taken.extend(results)  # keeps what came before
    return values(taken), caught.value


OTHERS: set[threading.Thread] = set()  # threads that tests before left


@pytest.fixture(autouse=True)
def _own_threads() -> None:
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def pipeline_threads() -> list[str]:
    """Return the names of the threads of a test's pipelines."""
    new = set(threading.enumerate()) - OTHERS
    return [thread.name for thread in new if thread.name.startswith(("stage", "feeder"))]


def chain_with(hooks: dict[tuple[str, str], Hook], operators: int = 3, **options: int) -> Pipeline:
    return chain_pipeline(chain_model(operators, hooks=hooks), **options)


# A stage fails


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("frame", [0, 1, 17])
@pytest.mark.parametrize("error", [ValueError("no such kernel"), KeyboardInterrupt(), SystemExit(1)])
def test_a_failing_stage_is_named_after_the_results_before_it(stage: int, frame: int, error: BaseException) -> None:
    with chain_with({(f"op{stage}", f"d{stage}"): raise_at(frame, error)}) as pipeline:
        taken, raised = taken_until(StageError, pipeline.map(map(number, itertools.count())))
        assert taken == list(range(3, 3 + frame))
        assert (raised.stage, raised.device, raised.frame) == (stage, f"d{stage}", frame)
        assert raised.__cause__ is error
        assert str(raised).startswith(f"stage {stage} on d{stage} failed at frame {frame}: {type(error).__name__}")
        for use in (lambda: pipeline.submit(number(0)), pipeline.result, lambda: next(pipeline.map([]))):
            with pytest.raises(StageError, match=f"at frame {frame}"):
                use()


def test_a_failing_replica_does_not_cost_the_frames_before() -> None:
    def fail_at_20(x: Array) -> list[Array]:
        if x[0] == 20:
            raise ZeroDivisionError
        return [x + 1]

    model = chain_model(2)
    model.functions["op0"] = fail_at_20
    plan = make_plan(model.graph, (["d0", "d1", "d2"], ["op0"]), (["d3", "d4"], ["op1"]))
    for _ in range(30):
        with Pipeline(model, plan, fake_platform("d0", "d1", "d2", "d3", "d4")) as pipeline:
            taken, raised = taken_until(StageError, pipeline.map(numbers(100)))
        assert taken == list(range(2, 22))
        assert (raised.stage, raised.frame) == (0, 20)
        assert raised.device in ("d0", "d1", "d2")


def test_of_two_failures_the_earlier_frame_is_told() -> None:
    """Frame 5 fails at the first stage while frame 3 is still at the last one, and then fails too."""
    gate = Gate()

    def first(call: int) -> None:
        if call == 5:
            assert gate.reached.wait(20)
            raise ValueError("the later frame")

    def last(call: int) -> None:
        if call == 3:
            gate(call)
            raise ValueError("the earlier frame")

    hooks = {("op0", "d0"): first, ("op2", "d2"): last}
    with chain_with(hooks, in_flight=6) as pipeline, ThreadPoolExecutor(1) as other:
        for frame in numbers(6):
            pipeline.submit(frame)
        with pytest.raises(StageError, match="at frame 5: ValueError: the later frame"):
            other.submit(pipeline.submit, number(6)).result(20)
        gate.opened.set()
        taken, raised = taken_until(StageError, pipeline.results(20))
    assert taken == [3, 4, 5]
    assert str(raised) == "stage 2 on d2 failed at frame 3: ValueError: the earlier frame"


def test_a_failure_reaches_who_waits_to_submit() -> None:
    gate = Gate()

    def fail(call: int) -> None:
        gate(call)
        raise ValueError("broken")

    with chain_with({("op1", "d1"): fail}, in_flight=2) as pipeline, ThreadPoolExecutor(1) as other:
        pipeline.submit(number(0))
        pipeline.submit(number(1))
        waiting = other.submit(pipeline.submit, number(2))
        gate.opened.set()
        with pytest.raises(StageError, match="stage 1 on d1 failed at frame 0: ValueError: broken"):
            waiting.result(20)


@pytest.mark.parametrize("devices", [("d0",), ("d1",), ("d2",), ("d0", "d1", "d2", "d3")])
def test_a_device_that_cannot_be_bound_fails_start(devices: tuple[str, ...]) -> None:
    errors = {device: OSError(f"no core for {device}") for device in devices}
    model = chain_model(3, bind_errors=errors)
    plan = make_plan(model.graph, (["d0"], ["op0"]), (["d1", "d2"], ["op1"]), (["d3"], ["op2"]))
    pipeline = Pipeline(model, plan, fake_platform("d0", "d1", "d2", "d3"))
    with pytest.raises(StageError, match="no core for") as caught:
        pipeline.start()
    assert caught.value.device in devices
    assert caught.value.__cause__ is errors[caught.value.device]
    assert pipeline_threads() == []
    for use in (lambda: pipeline.submit(number(0)), pipeline.result):
        with pytest.raises(StageError, match="no core for"):
            use()
    with pytest.raises(PipelineClosedError, match="started before"):
        pipeline.start()


# The source fails, or its reader leaves


def test_what_the_source_raises_comes_after_the_results_before() -> None:
    broken = OSError("the camera went away")

    def frames() -> Iterator[Array]:
        yield from numbers(20)
        raise broken

    with chain_with({}) as pipeline:
        taken, raised = taken_until(OSError, pipeline.map(frames()))
    assert taken == list(range(3, 23))
    assert raised is broken


def test_a_frame_that_does_not_fit_ends_map_after_the_results_before() -> None:
    with chain_with({}) as pipeline:
        taken, _ = taken_until(ModelError, pipeline.map([*numbers(20), np.zeros(2), *numbers(20)]))
    assert taken == list(range(3, 23))


def test_what_a_pipeline_raises_passes_through_the_one_it_feeds() -> None:
    hooks = {("op1", "d1"): raise_at(7, ValueError("broken"))}
    with chain_with(hooks, 2) as first, chain_with({}) as second:
        taken, raised = taken_until(StageError, second.map(r.outputs["y"] for r in first.map(numbers(50))))
    assert taken == list(range(5, 12))
    assert raised.frame == 7


@pytest.mark.parametrize("frames", [3, 50, None])
@pytest.mark.parametrize("taken", [1, 3])
def test_a_reader_may_leave_early(frames: int | None, taken: int) -> None:
    source = map(number, itertools.count()) if frames is None else numbers(frames)
    with chain_with({}) as pipeline:
        results = pipeline.map(source)
        assert values([next(results) for _ in range(taken)]) == list(range(3, 3 + taken))
        results.close()
        assert pipeline_threads() == []
        with pytest.raises(PipelineClosedError, match="stopped"):
            pipeline.submit(number(0))


def test_a_reader_that_raises_leaves_nothing_behind() -> None:
    def read() -> None:
        with chain_with({}) as pipeline:
            for result in pipeline.map(map(number, itertools.count())):
                if result.frame == 5:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read()
    assert pipeline_threads() == []


@pytest.mark.parametrize("use", ["map", "result"])
def test_ctrl_c_while_waiting_for_a_result(use: str) -> None:
    main = threading.main_thread().ident

    def interrupt(call: int) -> None:
        if call == 3:
            signal.pthread_kill(main, signal.SIGINT)

    def read(pipeline: Pipeline) -> None:
        if use == "map":
            for _ in pipeline.map(map(number, itertools.count())):
                pass
        for frame in numbers(4):
            pipeline.submit(frame)
        while True:
            pipeline.result()

    with pytest.raises(KeyboardInterrupt), chain_with({("op1", "d1"): interrupt}) as pipeline:
        read(pipeline)


def test_a_signal_that_comes_just_before_the_wait_for_a_result_is_handled() -> None:
    """Here another thread takes the signal while the main thread waits, so that it does not interrupt the wait."""
    other = threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT))
    with chain_with({}) as pipeline:
        other.start()
        with pytest.raises(KeyboardInterrupt):
            pipeline.result()


# Time limits


def test_a_result_that_does_not_come_in_time_can_be_asked_for_again() -> None:
    gate = Gate()
    with chain_with({("op1", "d1"): gate}) as pipeline:
        pipeline.submit(number(0))
        for _ in range(2):
            with pytest.raises(PipelineTimeoutError, match="no result in the time allowed; 1 frames are inside"):
                pipeline.result(timeout_s=0.01)
        gate.opened.set()
        assert values([pipeline.result(20)]) == [3]


def test_map_gives_up_when_nothing_comes_in_time() -> None:
    with chain_with({("op1", "d1"): busy(0.3)}) as pipeline:
        results = pipeline.map(numbers(1), timeout_s=0.01)
        with pytest.raises(PipelineTimeoutError):
            next(results)
        assert pipeline_threads() == []


# Used before, twice, or after


@pytest.mark.parametrize(
    "use",
    [
        lambda pipeline: pipeline.submit(number(0)),
        lambda pipeline: pipeline.result(),
        lambda pipeline: list(pipeline.results()),
        lambda pipeline: list(pipeline.map([])),
    ],
    ids=["submit", "result", "results", "map"],
)
@pytest.mark.parametrize(
    ("prepare", "state"),
    [(lambda _: None, "new; call start"), (Pipeline.stop, "stopped"), (lambda p: (p.start(), p.stop()), "stopped")],
    ids=["before start", "stopped before start", "stopped"],
)
def test_a_pipeline_that_does_not_run(prepare: Callable[[Pipeline], None], state: str, use: Callable) -> None:
    pipeline = chain_with({})
    prepare(pipeline)
    with pytest.raises(PipelineClosedError, match=state):
        use(pipeline)


def test_starting_twice_is_refused_and_harms_nothing() -> None:
    with chain_with({}) as pipeline:
        with pytest.raises(PipelineClosedError, match="started before"):
            pipeline.start()
        assert values(list(pipeline.map(numbers(5)))) == list(range(3, 8))
    with pytest.raises(PipelineClosedError, match="started before"):
        pipeline.start()


def test_a_pipeline_that_was_stopped_does_not_start() -> None:
    pipeline = chain_with({})
    pipeline.stop()
    with pytest.raises(PipelineClosedError):
        pipeline.start()


def test_after_drain_the_frames_inside_come_out_and_no_more_go_in() -> None:
    with chain_with({}) as pipeline:
        for frame in numbers(4):
            pipeline.submit(frame)
        pipeline.drain()
        pipeline.drain()
        with pytest.raises(PipelineClosedError, match="no room for a frame: the pipeline is drained"):
            pipeline.submit(number(0))
        assert values([pipeline.result() for _ in range(4)]) == [3, 4, 5, 6]
        for _ in range(2):
            with pytest.raises(PipelineClosedError, match="no result: the pipeline is drained"):
                pipeline.result()
        assert list(pipeline.results()) == []
        with pytest.raises(PipelineClosedError, match="drained"):
            list(pipeline.map(numbers(3)))


def test_a_second_map_is_refused_rather_than_empty() -> None:
    with chain_with({}) as pipeline:
        assert len(list(pipeline.map(numbers(3)))) == 3
        with pytest.raises(PipelineClosedError, match="cannot map"):
            list(pipeline.map(numbers(3)))


def test_drain_reaches_who_waits_to_submit() -> None:
    gate = Gate()
    with chain_with({("op0", "d0"): gate}, in_flight=1) as pipeline, ThreadPoolExecutor(1) as other:
        pipeline.submit(number(0))
        waiting = other.submit(pipeline.submit, number(1))
        pipeline.drain()
        with pytest.raises(PipelineClosedError, match="drained"):
            waiting.result(20)
        gate.opened.set()
        assert values(list(pipeline.results(20))) == [3]


def test_drain_while_map_feeds_ends_it_with_the_frames_inside() -> None:
    with chain_with({}, in_flight=2) as pipeline:
        results = pipeline.map(map(number, itertools.count()))
        taken = [next(results) for _ in range(10)]
        pipeline.drain()
        taken += results
        assert 10 <= len(taken) <= 12
        assert values(taken) == list(range(3, 3 + len(taken)))


def test_every_frame_that_was_accepted_comes_out_whenever_drain_comes() -> None:
    def submit_until_drained(pipeline: Pipeline) -> int:
        count = 0
        with contextlib.suppress(PipelineClosedError):
            while True:
                pipeline.submit(number(count))
                count += 1
        return count

    with ThreadPoolExecutor(2) as others:
        for frames in range(150):
            with chain_with({}, 1, in_flight=4) as pipeline:
                submitters = [others.submit(submit_until_drained, pipeline) for _ in range(2)]
                results = [pipeline.result(20) for _ in range(frames % 7)]
                pipeline.drain()
                results += pipeline.results(20)
                assert [r.frame for r in results] == list(range(sum(s.result(20) for s in submitters)))


def test_stop_drops_what_is_inside_and_may_be_repeated() -> None:
    gate = Gate()
    with chain_with({("op1", "d1"): gate}, in_flight=5) as pipeline, ThreadPoolExecutor(2) as others:
        for frame in numbers(5):
            pipeline.submit(frame)
        assert gate.reached.wait(20)
        stops = [others.submit(pipeline.stop) for _ in range(2)]
        with pytest.raises(PipelineClosedError, match="stopped"):
            pipeline.result(20)
        gate.opened.set()
        for stop in stops:
            stop.result(20)
        pipeline.stop()
    assert gate.calls == 1  # stopped after the frame it was at


@pytest.mark.parametrize("drained", [False, True])
def test_stop_reaches_who_waits_for_a_result(drained: bool) -> None:
    gate = Gate()
    with chain_with({("op1", "d1"): gate}) as pipeline, ThreadPoolExecutor(2) as others:
        pipeline.submit(number(0))
        assert gate.reached.wait(20)
        if drained:
            pipeline.drain()
        reading = others.submit(lambda: list(pipeline.results()))
        stopping = others.submit(pipeline.stop)
        with pytest.raises(PipelineClosedError, match="stopped"):  # a frame was lost, so it may not end quietly
            reading.result(20)
        gate.opened.set()
        stopping.result(20)


def test_stop_reaches_who_waits_to_submit() -> None:
    gate = Gate()
    with chain_with({("op1", "d1"): gate}, in_flight=1) as pipeline, ThreadPoolExecutor(2) as others:
        pipeline.submit(number(0))
        waiting = others.submit(pipeline.submit, number(1))
        stopping = others.submit(pipeline.stop)
        with pytest.raises(PipelineClosedError, match="stopped"):
            waiting.result(20)
        gate.opened.set()
        stopping.result(20)
