"""Seconds of kernels by the clock of a CUDA device: events between them, and one wait at the end.

By the host's clock each kernel is launched and waited for, and this round trip counts to the kernel. It may take longer
than a small kernel does. Between events, a kernel takes the time by which it makes the pass longer: its own where the
device still has work when the launch comes, and that of the launch where the device waits for the host. A stage has
both kinds too, so a stage of many small kernels gets the time of its launches. Launches from here take somewhat longer
than those of a stage, which runs no Python between kernels.

Only the proportions matter: the profile scales operators to whole passes (`profiling/estimates.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise

from tvm_pipeline.errors import RunError
from tvm_pipeline_tvm.devices.cuda_toolkit import loaded_runtime
from tvm_pipeline_tvm.devices.targets import index_of, kind_of

# Makes calls that give work to the device, and returns the seconds of each.
DeviceClock = Callable[[Sequence[Callable[[], object]]], list[float]]


def device_clock(target: str) -> DeviceClock | None:
    """Return what times calls on a device; None where that is no CUDA device, or the host's clock is all there is.

    The calls are made in their order, and must not wait for the device. Their work has to be on the default stream,
    where TVM's is.

    Raises (when it times):
        RunError: the device failed.
    """
    runtime = loaded_runtime() if kind_of(target) == "cuda" else None
    if runtime is None:
        return None
    index = index_of(target)

    def check(status: int) -> None:
        if status:
            runtime.cudaGetErrorString.restype = ctypes.c_char_p
            raise RunError(
                f"CUDA device {index} failed while its kernels were timed: "
                f"{runtime.cudaGetErrorString(status).decode()}; leave it out of the platform, or start again"
            )

    def seconds(calls: Sequence[Callable[[], object]]) -> list[float]:
        check(runtime.cudaSetDevice(index))  # this thread's, in which events are made
        events = [ctypes.c_void_p() for _ in range(len(calls) + 1)]
        with ExitStack() as stack:
            for event in events:
                check(runtime.cudaEventCreate(ctypes.byref(event)))
                stack.callback(runtime.cudaEventDestroy, event)
            record = runtime.cudaEventRecord
            statuses = [record(events[0], None)]
            for call, event in zip(calls, events[1:], strict=True):
                call()
                statuses.append(record(event, None))
            statuses.append(runtime.cudaEventSynchronize(events[-1]))
            for status in statuses:
                check(status)
            return [elapsed_s(begin, end) for begin, end in pairwise(events)]

    def elapsed_s(begin: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        milliseconds = ctypes.c_float()
        check(runtime.cudaEventElapsedTime(ctypes.byref(milliseconds), begin, end))
        return milliseconds.value / 1e3

    return seconds
