"""Processes of stages that hang where nothing seems to wait for them: at their start, at their end, and for good.

What is left of processes is looked at after every test, as in `test_isolation.py`.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.test_isolation import _nothing_left, chain, children
from tests.support.crashes import AddOne, held
from tests.support.fake_backend import fake_platform
from tests.support.waiting import until
from tvm_pipeline import processes
from tvm_pipeline.backends import stage_process
from tvm_pipeline.backends.stage_process import StageProcess, StageRequest
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import RunError, StageError
from tvm_pipeline.profiling.bound import in_bound_thread
from tvm_pipeline.runtime.isolation import isolated, making_limit_s

__all__ = ["_nothing_left"]

DEVICE = Device("d0", "fake")


@pytest.fixture
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_process, "GRACE_S", 0.3)
    monkeypatch.setattr(processes, "GONE_S", 0.3)


@pytest.mark.thorough
def test_one_that_never_reads_its_long_order_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs in the interpreter's own start; the order is longer than a pipe takes."""
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    operators = tuple(f"operator_with_a_name_{index}" for index in range(20_000))
    process = StageProcess(StageRequest(("fake",), str(tmp_path), operators, DEVICE), 0.3)
    with pytest.raises(StageError, match=r"to operator_with_a_name_19999 on d0 did not make its stage within 0.3 s"):
        _ = process.ports
    process.close()


@pytest.mark.thorough
def test_one_that_is_stopped_is_killed_when_its_stage_is_closed_and_that_is_told(
    little_grace: None, caplog: pytest.LogCaptureFixture
) -> None:
    model, platform = chain(), fake_platform("d0")
    with isolated(model, platform, ()) as compiled:
        runners = [compiled.stage(["op0"], platform.devices[0]) for _ in range(2)]
        assert all(runner.inputs for runner in runners)
        for child in children():
            os.kill(child, signal.SIGSTOP)
        runners[0].close()
        assert len(children()) == 1
        assert caplog.text.count("op0 on d0 did not end within 0.3 s after its stage was closed, and was killed") == 1
    assert caplog.text.count("and was killed") == 2  # the end of the block closed the other


@pytest.mark.thorough
def test_one_that_cannot_be_killed_holds_up_neither_its_thread_nor_the_end(
    little_grace: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, platform = chain(op0=AddOne(tmp_path, "hangs", (3,))), fake_platform("d0")
    raised: list[BaseException] = []
    with isolated(model, platform, ()) as compiled:
        runner = compiled.stage(["op0"], platform.devices[0])
        output = [port.buffer() for port in runner.outputs]

        def run() -> None:
            try:
                runner.run([np.array([3])], output)
            except RunError as error:
                raised.append(error)
                runner.close()

        thread = threading.Thread(target=in_bound_thread, args=(runner, run))
        before = children()
        thread.start()
        assert until((tmp_path / "hangs-3").exists)
        [child] = before
        with held(child):
            runner.close()
            thread.join(10)
            assert not thread.is_alive()
            assert "op0 on d0 was ended, since its stage was" in str(raised)
            assert f"({child}) cannot be killed" in caplog.text
    assert until(lambda: child not in children())


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    lowest, limits = os.dup(0), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.thorough
def test_no_descriptors_are_told_as_such(tmp_path: Path) -> None:
    model, platform = chain(), fake_platform("d0")
    with isolated(model, platform, ()) as compiled:
        with no_descriptor_left(), pytest.raises(RunError, match=r"no process can be started for op0 on d0: Too many"):
            compiled.stage(["op0"], platform.devices[0])
        runner = compiled.stage(["op0"], platform.devices[0])
        with no_descriptor_left(), pytest.raises(StageError, match=r"has no more descriptors; allow it more"):
            _ = runner.inputs


@pytest.mark.thorough
def test_a_larger_model_has_longer_to_load() -> None:
    tensors = [Tensor(name, (1,)) for name in "xy"]
    graph = OperatorGraph("net", (tensors[0],), (Operator("op", "dense", ("x",), (tensors[1],), 500_000_000),), ("y",))
    assert making_limit_s(graph) == 110
    assert making_limit_s(graph, 30) == 110
    assert making_limit_s(graph, 300) == 300
