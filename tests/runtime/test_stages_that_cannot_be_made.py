"""A device that dies, hangs or refuses while its stage is made: the run goes on without it, or ends with its name.

What is left of processes is looked at after every test, as in `test_isolation.py`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.runtime.test_isolation import _nothing_left, chain, children, one_stage
from tests.runtime.test_live_pipeline import failures, problem_of, whole
from tests.support.crashes import AddOne, EndsLoading, HangsLoading
from tests.support.fake_backend import chain_model, chain_pipeline, fake_platform, number, numbers, values
from tests.support.waiting import until
from tvm_pipeline.errors import StageError
from tvm_pipeline.runtime import LivePipeline, Pipeline
from tvm_pipeline.runtime.isolation import isolated

__all__ = ["_nothing_left"]


def begun(before: set[int]) -> set[int]:
    """Return the children that are new and run a program of their own: one stopped earlier stops its parent, too."""
    found = set()
    for pid in children() - before:
        with suppress(OSError):  # it is gone
            if Path(f"/proc/{pid}/cmdline").read_bytes() != Path("/proc/self/cmdline").read_bytes():
                found.add(pid)
    return found


@pytest.mark.thorough
def test_one_that_hangs_while_it_loads_is_ended_and_told() -> None:
    model, platform = chain(op0=HangsLoading()), fake_platform("d0")
    plan = one_stage(model)
    with isolated(model, platform, plan.stages, making_s=0.5) as compiled:
        with pytest.raises(
            StageError, match=r"stage 0 on d0 failed before .* op0 on d0 did not make its stage within 0.5 s"
        ):
            Pipeline(compiled, plan, platform)
        assert not children()


@pytest.mark.thorough
def test_a_device_that_fails_while_a_run_begins_is_left_out(tmp_path: Path) -> None:
    """The first process that loads ends with a code; those after it do not."""
    model, platform = chain(op0=EndsLoading(tmp_path / "once")), fake_platform("d0", "d1")
    problem = problem_of(model, platform)
    with (
        isolated(model, platform, ()) as compiled,
        LivePipeline(compiled, problem, whole(problem, "d0")) as pipeline,
    ):
        assert values(list(pipeline.map(numbers(20)))) == list(range(1, 21))
        assert pipeline.plan.devices == ("d1",)
        assert "status 3" in failures(pipeline)[0]
        assert [event.kind for event in pipeline.events] == ["failure", "start"]


@pytest.mark.thorough
def test_a_replacement_that_hangs_while_it_is_made_is_left_out_too(tmp_path: Path) -> None:
    """As in a soak: one stage dies, and the process in its place is stopped at its start."""
    model, platform = chain(op0=AddOne(tmp_path, at=(30,))), fake_platform("d0", "d1", "d2")
    problem = problem_of(model, platform)
    over = threading.Event()

    def stop_the_next(before: set[int]) -> None:
        while not over.wait(0.005):
            if new := begun(before):
                os.kill(new.pop(), signal.SIGSTOP)
                return

    with (
        isolated(model, platform, (), making_s=4.0) as compiled,
        LivePipeline(compiled, problem, whole(problem, "d0"), watchdog_s=5.0) as pipeline,
    ):
        stopping = threading.Thread(target=stop_the_next, args=(children(),))
        stopping.start()
        assert values(list(pipeline.map(numbers(60)))) == list(range(1, 61))
        over.set()
        stopping.join()
        assert [("SIGSEGV" in told, "did not make its stage within 4 s" in told) for told in failures(pipeline)] == [
            (True, False),
            (False, True),
        ]


@pytest.mark.thorough
def test_a_thread_that_cannot_be_tied_to_its_device_in_time() -> None:
    let_go, model = threading.Event(), chain_model(2)
    pipeline = chain_pipeline(model)
    pipeline._workers[1]._runner.bind = let_go.wait  # type: ignore[method-assign]
    with pytest.raises(StageError, match=r"stage 1 on d1 failed before its first frame.* within 0.2 s"):
        pipeline.start(0.2)
    let_go.set()


@pytest.mark.thorough
def test_a_device_that_cannot_be_tied_when_a_run_begins_is_left_out() -> None:
    model, platform = chain_model(1), fake_platform("d0", "d1")
    problem = problem_of(model, platform)
    pipeline = LivePipeline(model, problem, whole(problem, "d0"))

    def refuse() -> None:
        raise OSError("unplugged")

    pipeline._generations.newest.pipeline._workers[0]._runner.bind = refuse  # type: ignore[method-assign]
    with pipeline:
        assert values(list(pipeline.map(numbers(5)))) == [1, 2, 3, 4, 5]
        assert (pipeline.plan.devices, "unplugged" in failures(pipeline)[0]) == (("d1",), True)


@pytest.mark.thorough
def test_stop_does_not_wait_for_a_stage_that_is_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tvm_pipeline.runtime.live_pipeline.STOP_S", 0.1)
    model, platform = chain(op0=AddOne(tmp_path, at=(3,))), fake_platform("d0", "d1")
    problem = problem_of(model, platform)
    with isolated(model, platform, ()) as compiled:
        pipeline = LivePipeline(compiled, problem, whole(problem, "d0"))
        pipeline.start()
        (first,) = children()
        ended: list[BaseException] = []

        def read() -> None:
            try:
                for each in itertools.count():
                    pipeline.submit(number(each))
                    pipeline.result()
            except BaseException as error:
                ended.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        assert until(lambda: bool(begun({first})))
        (second,) = begun({first})
        os.kill(second, signal.SIGSTOP)
        began_s = time.monotonic()
        pipeline.stop()
        waited_s = time.monotonic() - began_s
    reader.join(10)
    assert (len(ended), reader.is_alive()) == (1, False)
    assert waited_s < 20  # of the 60 that it may take to make a stage


@pytest.mark.thorough
@pytest.mark.parametrize("gone", [False, True])
def test_a_child_whose_parent_has_hung_up_prints_nothing(gone: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """It tells what it made, or that the model's folder is gone, to nobody."""
    model, platform = chain(), fake_platform("d0")
    with isolated(model, platform, ()) as compiled:
        child = compiled.stage(["op0"], platform.devices[0])._process._child  # type: ignore[attr-defined]
        if gone:
            shutil.rmtree(compiled._folder)  # type: ignore[attr-defined]
        child.hang_up()
        assert child.wait(20)
        assert child.status == 0
        Path(compiled._folder).mkdir(exist_ok=True)  # type: ignore[attr-defined]
    assert capfd.readouterr().err == ""
