"""A slice on a CUDA device as a loop over compiled functions: what `call_loop.py` is for CPU cores.

Each function launches its kernels on the device's default stream and returns, so that the device works through them
while the host goes on; the loop waits once, behind the last. Weights are on the device once for all slices
(`devices/device_arrays.py`), activations in one arena there. A tensor that crosses a cut stands in an array of the
host. The device uses that array itself, or a copy (`devices/mirrors.py`). Between two stages on the device a tensor may
stay there (`keep`).

It ran on an H100; arrays that the GPU uses in place, as on a Jetson, ran on software CUDA only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tvm

from tvm_pipeline.backends.contract import Array, Seconds
from tvm_pipeline.errors import RunError
from tvm_pipeline_tvm.devices.crossings import Crossing, SliceOnDevice
from tvm_pipeline_tvm.devices.cuda_events import device_clock
from tvm_pipeline_tvm.devices.device_arrays import DeviceParams, part
from tvm_pipeline_tvm.devices.mirrors import mirrors_on
from tvm_pipeline_tvm.devices.releasing import keep_where_lost, release_with
from tvm_pipeline_tvm.devices.targets import index_of, kind_of
from tvm_pipeline_tvm.devices.tvm_arrays import empty
from tvm_pipeline_tvm.kernels import Entry, entry_dtype, entry_shape, tensor_bytes
from tvm_pipeline_tvm.relax.build import BoundCalls, Library
from tvm_pipeline_tvm.relax.cuda_kernels import check_code, ready_to_run
from tvm_pipeline_tvm.slice_plan import SlicePlan
from tvm_pipeline_tvm.tvm_errors import TVMError, reason

_MOST_KEPT = 64  # sets of arrays whose calls are kept


def weights_on(library: Library, target: str) -> DeviceParams:
    """Return a library's weights on a device, for all its slices there; each is copied when it is first used.

    Raises:
        PlatformError: TVM cannot use a CUDA device here, or the device does not run the library's kernels.
    """
    ready_to_run()
    check_code(target)
    return DeviceParams(dict(enumerate(library.constants)), tvm.runtime.device(kind_of(target), index_of(target)))


class CudaSlice(SliceOnDevice):
    """A runnable slice. Not thread-safe: one thread runs it.

    Args:
        weights: of `weights_on`.
        target: of the device, with its index.
    """

    def __init__(self, library: Library, plan: SlicePlan, weights: DeviceParams, target: str) -> None:
        self.inputs, self.outputs, self.activation_bytes = plan.inputs, plan.outputs, plan.activation_bytes
        self._library, self._plan, self._weights, self._target = library, plan, weights, target
        self._device = weights.device
        release_with(self, self._device, vars(self))
        self._arena = empty((max(plan.activation_bytes, 1),), "uint8", self._device)
        self._running = [call.kernel for call in plan.calls if not call.is_view]
        self._in_arena = {entry: self._part(entry) for entry in plan.offsets}
        self._kept: dict[tuple[int, ...], tuple[list[Any], BoundCalls]] = {}
        # What stands on the device for each input and then each output; None for an output that has its place there.
        self._crossing: list[Any] = [None] * (len(plan.inputs) + len(plan.outputs))
        mirrors, count = mirrors_on(self._device), len(plan.inputs)
        self._received = [
            Crossing(shape, port.dtype, mirrors, partial(self._crossing.__setitem__, index))
            for index, (port, (_, shape)) in enumerate(zip(plan.inputs, plan.imports, strict=True))
        ]
        self._sent = []
        for index, (port, entry) in enumerate(zip(plan.outputs, plan.exports, strict=True)):
            shape, own = entry_shape(library, entry), plan.copied.get(index)
            if own is None:
                tie = partial(self._crossing.__setitem__, count + index)
                self._sent.append(Crossing(shape, port.dtype, mirrors, tie))
            else:
                size = tensor_bytes(entry_shape(library, own), entry_dtype(library, own))
                place = part(self._arena, plan.offsets[own], (size,), "uint8")
                self._sent.append(Crossing(shape, port.dtype, mirrors, None, place))

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Compute `outputs` from `inputs`; both are arrays of the host.

        Raises:
            RunError: a kernel or a copy failed.
        """
        try:
            for function, tensors in self._begin(inputs, outputs):
                function(*tensors)
            self.give_to_host()
        except TVMError as error:
            keep_where_lost(self._device)
            raise RunError(f"a kernel or a copy failed: {reason(error)}") from error

    def timed(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Seconds:
        """Run once, and return the seconds of each call that is not a view, in order.

        They are of the device's own clock where it is at hand, and else of the host's, with a wait for each call.
        """
        clock, now = device_clock(self._target), time.perf_counter
        calls = [partial(function, *tensors) for function, tensors in self._begin(inputs, outputs)]
        if clock is not None:
            return np.array(clock(calls))
        self._device.sync()
        seconds = np.zeros(len(calls))
        for index, call in enumerate(calls):
            begin = now()
            call()
            self._device.sync()
            seconds[index] = now() - begin
        return seconds

    def _begin(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> BoundCalls:
        """Give the arrays to the device, the inputs with their values, and return the calls on them."""
        self.set_buffers(inputs, outputs)
        key = tuple(map(id, self._crossing))
        known = self._kept.get(key)
        if known is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            known = self._kept[key] = list(self._crossing), self._calls()
        return known[1]

    def _calls(self) -> BoundCalls:
        """Return the functions and their tensors for what stands on the device now."""
        plan, library, count = self._plan, self._library, len(self._plan.inputs)
        tensors: dict[Entry, Any] = dict(self._in_arena)
        tensors |= {entry: self._crossing[index] for entry, index in plan.read_from.items()}
        tensors |= {entry: self._crossing[count + index] for entry, index in plan.written.items()}
        return library.bound(self._running, tensors, self._weights.__getitem__)

    def _part(self, entry: Entry) -> Any:
        shape, dtype = entry_shape(self._library, entry), entry_dtype(self._library, entry)
        return part(self._arena, self._plan.offsets[entry], shape, dtype)
