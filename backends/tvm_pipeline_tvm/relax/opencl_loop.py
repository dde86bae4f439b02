"""A slice on an OpenCL device: the loop of `device_loop.py` over launches of kernels, by pyopencl.

It ran on PoCL only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pyopencl as cl

from tvm_pipeline.backends.contract import Array, Seconds
from tvm_pipeline_tvm.devices.device_arrays import DeviceParams
from tvm_pipeline_tvm.devices.mirrors import Mirrors
from tvm_pipeline_tvm.devices.opencl_device import OpenCLDevice
from tvm_pipeline_tvm.devices.targets import ALIGNMENT
from tvm_pipeline_tvm.kernels import Entry
from tvm_pipeline_tvm.relax.build import Library
from tvm_pipeline_tvm.relax.device_loop import Calls, DeviceSlice
from tvm_pipeline_tvm.relax.opencl_kernels import Launches, Programs
from tvm_pipeline_tvm.slice_plan import SlicePlan


@dataclass(frozen=True, slots=True)
class OpenCLCall:
    """Launches of kernels that have their arguments.

    Attributes:
        kernels: each with the threads of all its work-groups, and of one.
        arrays: their arguments, which kernels do not keep alive.
        queue: the usual one.
    """

    kernels: Sequence[tuple[cl.Kernel, tuple[int, ...], tuple[int, ...]]]
    arrays: Sequence[cl.Buffer]
    queue: cl.CommandQueue

    def __call__(self, queue: cl.CommandQueue | None = None) -> cl.Event:
        """Launch them, and return the event of the last."""
        for kernel, in_all, of_a_group in self.kernels:
            event = cl.enqueue_nd_range_kernel(queue or self.queue, kernel, in_all, of_a_group)
        return event


class OpenCLSlice(DeviceSlice):
    """A runnable slice; see `DeviceSlice`."""

    def __init__(self, library: Library, plan: SlicePlan, weights: DeviceParams, concurrent: bool) -> None:
        super().__init__(library, plan, weights, concurrent)
        self._programs = library.module.programs(self._device)
        functions = [library.function(library.calls[kernel].function) for kernel in self._running]
        most = max((ends(function)[-1] for function in functions), default=0)
        self._scratch = self._mirrors.empty(most)  # of the function that runs, which is one at a time

    def timed(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Seconds:
        """Run once, and return the seconds of each call that is not a view, in order.

        As in `devices/cuda_events.py`, a call takes the time by which it makes the pass longer, by the device's clock.
        """
        return clocked(self._begin(inputs, outputs), self._device)

    def _compute(self, calls: Calls) -> None:
        for call in calls:
            call()
        self._mirrors.device.sync()

    def _calls(self, tensors: Mapping[Entry, Any]) -> Sequence[OpenCLCall]:
        bound = self._library.bound(self._running, tensors, self._weights.__getitem__)
        return [call_of(*each, self._programs, self._mirrors, self._scratch) for each in bound]


def call_of(
    function: Launches, arrays: Sequence[cl.Buffer], programs: Programs, mirrors: Mirrors, scratch: cl.Buffer
) -> OpenCLCall:
    """Return what launches the kernels of a function on arrays of the device.

    Args:
        scratch: room for its scratch arrays.
    """
    parts = [
        mirrors.part(scratch, begin, (size,), "uint8")
        for begin, size in zip(ends(function), function.scratch_bytes, strict=False)
    ]
    arrays, bound = (*arrays, *parts), []
    for launch in function.launches:
        kernel = programs.kernel(launch.kernel)
        for position, argument in enumerate(launch.arguments):
            kernel.set_arg(position, arrays[argument])
        in_all = tuple(blocks * threads for blocks, threads in zip(launch.blocks, launch.threads, strict=True))
        bound.append((kernel, in_all, launch.threads))
    return OpenCLCall(bound, arrays, mirrors.device.queue)


def clocked(calls: Calls, device: OpenCLDevice) -> Seconds:
    """Return the seconds of calls of `call_of`, one after the other, by the device's clock."""
    device.sync()
    events = [call(device.timing_queue) for call in calls]
    cl.wait_for_events(events)
    first = events[0].profile.start if events else 0
    finished = [first, *(event.profile.end for event in events)]
    return np.array([end - begin for begin, end in pairwise(finished)], "float64") / 1e9


def ends(function: Launches) -> list[int]:
    """Return where each scratch array of a function begins in the memory of all, and where the last one ends."""
    return list(accumulate((size + -size % ALIGNMENT for size in function.scratch_bytes), initial=0))
