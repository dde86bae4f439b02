"""A slice on a CUDA device: the loop of `device_loop.py` over compiled functions, which launch on the default stream.

It ran on an H100; arrays that the GPU uses in place, as on a Jetson, ran on software CUDA only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from tvm_pipeline.backends.contract import Array, Seconds
from tvm_pipeline_tvm.devices.cuda_events import device_clock
from tvm_pipeline_tvm.devices.device_arrays import DeviceParams
from tvm_pipeline_tvm.kernels import Entry
from tvm_pipeline_tvm.relax.build import Library
from tvm_pipeline_tvm.relax.device_loop import Calls, DeviceSlice
from tvm_pipeline_tvm.slice_plan import SlicePlan


class CudaSlice(DeviceSlice):
    """A runnable slice; see `DeviceSlice`.

    Args:
        target: of the device, with its index.
    """

    def __init__(self, library: Library, plan: SlicePlan, weights: DeviceParams, concurrent: bool, target: str) -> None:
        super().__init__(library, plan, weights, concurrent)
        self._target = target

    def timed(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Seconds:
        """Run once, and return the seconds of each call that is not a view, in order.

        They are of the device's own clock where it is at hand, and else of the host's, with a wait for each call.
        """
        return clocked(self._begin(inputs, outputs), self._device, self._target)

    def _compute(self, calls: Calls) -> None:
        """TVM's copies are on the default stream, which does not wait for a stream that TVM makes."""
        stream = stream_of_kernels(self._device)
        self._device.set_raw_stream(stream)  # of this thread
        try:
            for call in calls:
                call()
            self._device.sync(stream)
        finally:
            self._device.set_raw_stream(0)

    def _calls(self, tensors: Mapping[Entry, Any]) -> Calls:
        bound = self._library.bound(self._running, tensors, self._weights.__getitem__)
        return [partial(function, *arrays) for function, arrays in bound]


@cache
def stream_of_kernels(device: Any) -> Any:
    """Return the stream of a device for kernels that run beside copies, which lives as long as the process."""
    return device.create_raw_stream()


def clocked(calls: Calls, device: Any, target: str) -> Seconds:
    """Return the seconds of calls in a row, by the device's clock, or the host's if the device has none."""
    clock, now = device_clock(target), time.perf_counter
    if clock is not None:
        return np.array(clock(calls))
    device.sync()
    seconds = np.zeros(len(calls))
    for index, call in enumerate(calls):
        begin = now()
        call()
        device.sync()
        seconds[index] = now() - begin
    return seconds
