"""Seconds by the clock of a CUDA device: events between calls, in their order."""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress
from functools import partial

import pytest

from tests.gpu.test_software_cuda import SOURCE, CudaError, Driver
from tests.support.software_cuda import SoftwareCuda
from tvm_pipeline.errors import RunError
from tvm_pipeline_tvm.devices.cuda_events import DeviceClock, device_clock
from tvm_pipeline_tvm.devices.cuda_toolkit import runtime

TARGET = "cuda -arch=sm_72"


@pytest.fixture
def clock(software_cuda: SoftwareCuda) -> DeviceClock:
    runtime()
    found = device_clock(TARGET)
    assert found
    return found


@pytest.mark.thorough
def test_an_event_lies_before_and_behind_each_call(clock: DeviceClock, software_cuda: SoftwareCuda) -> None:
    before, handles = software_cuda.recorded(), software_cuda.handles()
    seen: list[tuple[int, int]] = []
    within_s: list[float] = []

    def call(size: int) -> None:
        begin = time.monotonic()
        seen.append((size, software_cuda.recorded() - before))
        sum(range(size))
        within_s.append(time.monotonic() - begin)

    seconds = clock([partial(call, size) for size in (10, 100_000, 1000)])
    assert seen == [(10, 1), (100_000, 2), (1000, 3)]
    assert software_cuda.recorded() - before == 4
    # Both are of one clock here, and the events lie around what is done within; they are in single precision.
    assert [own >= 0.99 * within for own, within in zip(seconds, within_s, strict=True)] == [True] * 3
    assert software_cuda.handles() == handles


@pytest.mark.thorough
def test_events_are_of_the_device_that_the_target_names(
    software_cuda: SoftwareCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work may be on the second device, whatever device the thread used before."""
    monkeypatch.setenv("SOFTWARE_CUDA_DEVICES", "2")
    _, library = runtime()
    library.cudaSetDevice(0)
    clock, used = device_clock(TARGET.replace("cuda", "cuda:1")), ctypes.c_int(-1)
    assert clock
    try:
        assert len(clock([lambda: library.cudaGetDevice(ctypes.byref(used))])) == 1
    finally:
        library.cudaSetDevice(0)
    assert used.value == 1


def test_a_device_that_fails_says_so(clock: DeviceClock, software_cuda: SoftwareCuda) -> None:
    driver, handles = Driver(), software_cuda.handles()
    module, at = driver.load(SOURCE.encode()), driver.allocate(4)

    def launch() -> None:
        with suppress(CudaError):  # a real device fails later, and its launch says nothing
            driver.launch(module, "write_at", 1, (1, 1), at, ctypes.c_int(0))

    software_cuda.fail_launch()
    with pytest.raises(RunError, match=r"CUDA device 0 failed while its kernels were timed: unspecified launch"):
        clock([launch, lambda: None])
    assert software_cuda.handles() == handles
    software_cuda.reset()


def test_other_devices_have_no_such_clock(software_cuda: SoftwareCuda) -> None:
    runtime()
    assert device_clock("opencl -device=mali") is None
    assert device_clock("llvm") is None
