"""What is observed beside work: from the files of a kernel, without them, and beside a program that really disturbs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.profiling.machine import Clock, Kernel
from tvm_pipeline.profiling import disturbance
from tvm_pipeline.profiling.calls import time_calls
from tvm_pipeline.profiling.disturbance import ReferenceKernel, Watch, observable

SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:
    pass
"""


@contextmanager
def spinning(core: int) -> Iterator[None]:
    """Keep another program busy on a core."""
    with subprocess.Popen([sys.executable, "-c", SPIN, str(core)], stdout=subprocess.PIPE) as program:
        assert program.stdout
        program.stdout.readline()
        try:
            yield
        finally:
            program.kill()


def compute(seconds: float) -> None:
    """Use so much time of a processor."""
    matrix, end = np.ones((64, 64)), time.thread_time() + seconds
    while time.thread_time() < end:
        matrix @ matrix


needs_schedstat = pytest.mark.skipif(
    "run queue" not in observable(()), reason="this kernel does not tell of run queues"
)


@needs_schedstat
def test_calls_beside_a_program_on_the_same_core_are_recognised() -> None:
    """Each call needs the core for longer than a kernel leaves it to one of two programs."""
    core = max(os.sched_getaffinity(0))
    with spinning(core):
        found = time_calls(lambda: os.sched_setaffinity(0, {core}), lambda: compute(0.03), 6, (core,))
    assert found.is_doubtful
    assert all(timing.window.waited_s for timing in found.timings)
    # Without what the other program took, about the time that was computed is left; with it, about twice as much.
    assert np.median([timing.seconds for timing in found.timings]) > 0.04
    assert found.median < 0.04


@needs_schedstat
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_threads_that_share_the_work_are_watched_too() -> None:
    """The other program disturbs a thread of the device that is not the bound one."""
    quiet, loaded = sorted(os.sched_getaffinity(0))[:2]
    go, ready, done, seen = (threading.Event() for _ in range(4))

    def help_out() -> None:
        os.sched_setaffinity(0, {loaded})
        ready.set()
        go.wait()
        compute(0.05)
        done.set()
        seen.wait()  # the threads of a pool live on, too

    waited: list[float | None] = []

    def bound() -> None:
        os.sched_setaffinity(0, {quiet, loaded})
        helper = threading.Thread(target=help_out)
        helper.start()
        ready.wait()
        with Watch((quiet, loaded)) as watch:
            watch.begin()
            go.set()
            done.wait()
            waited.append(watch.end().waited_s)
        seen.set()
        helper.join()

    with spinning(loaded):
        thread = threading.Thread(target=bound)
        thread.start()
        thread.join()
    [seconds] = waited
    assert seconds
    assert seconds > 0.01


def test_a_system_that_tells_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reference kernel is left."""
    monkeypatch.setattr(disturbance, "PROC", tmp_path / "nowhere")
    with Watch((0,)) as watch:
        watch.begin()
        window = watch.end()
    assert (window.waited_s, window.switches, window.stolen_s) == (None, 0, 0.0)
    assert window.reference_s > 0
    assert observable((0,)) == ("reference kernel",)


def test_what_the_kernel_tells(kernel: Kernel, clock: Clock) -> None:
    assert observable((2,)) == ("run queue", "involuntary switches", "steal time", "reference kernel")
    with Watch((2,)) as watch:
        watch.begin()
        clock.advance(1.0)
        kernel.wait(0.25)
        kernel.switch(3)
        kernel.steal(2, 0.5)
        kernel.steal(1, 0.125)
        window = watch.end()
        assert (window.elapsed_s, window.waited_s, window.switches, window.stolen_s) == (1.0, 0.25, 3, 0.5)
        assert window.taken == 0.75
        clock.advance(2.0)
        again = watch.end()
    assert (again.elapsed_s, again.waited_s, again.switches, again.stolen_s) == (2.0, 0.0, 0, 0.0)


def test_a_kernel_that_counts_nothing_tells_nothing(kernel: Kernel) -> None:
    """Some kernels show the file and leave it at zeros."""
    (disturbance.PROC / "thread-self/schedstat").write_text("0 0 0\n")
    assert "run queue" not in observable(())
    with Watch(()) as watch:
        watch.begin()
        assert watch.end().waited_s is None


def test_the_reference_kernel_takes_a_moment() -> None:
    seconds = [ReferenceKernel().seconds() for _ in range(5)]
    assert 0 < min(seconds) < 0.1
