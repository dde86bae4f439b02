"""A slice on a device with memory of its own as a loop over launches: what `call_loop.py` is for CPU cores.

Each call launches kernels in the one queue of the device and returns, so that the device works through them while the
host goes on; the loop waits once, behind the last. Weights are on the device once for all slices
(`devices/device_arrays.py`), activations in one arena there. A tensor that crosses a cut stands in an array of the
host. The device uses that array itself, or a copy (`devices/mirrors.py`). Between two stages on the device a tensor may
stay there (`keep`). Where copies are to run beside the kernels of another slice (`take_turns`), they have a queue of
their own, and the host waits between copies and kernels.

`cuda_loop.py` and `opencl_loop.py` say what a call is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from tvm_pipeline.backends.contract import Array, Seconds
from tvm_pipeline.errors import RunError
from tvm_pipeline_tvm.devices.crossings import Crossing, SliceOnDevice
from tvm_pipeline_tvm.devices.device_arrays import DeviceParams
from tvm_pipeline_tvm.devices.releasing import keep_where_lost, release_with
from tvm_pipeline_tvm.kernels import Entry, entry_dtype, entry_shape, tensor_bytes
from tvm_pipeline_tvm.relax.build import Library
from tvm_pipeline_tvm.slice_plan import SlicePlan
from tvm_pipeline_tvm.tvm_errors import reason

Calls = Sequence[Callable[..., Any]]  # without an argument they go on the queue of the device
_MOST_KEPT = 64  # sets of arrays whose calls are kept


class DeviceSlice(SliceOnDevice):
    """A runnable slice. Not thread-safe: one thread runs it.

    Args:
        weights: of the library, on the device.
        concurrent: whether copies have a queue of their own.
    """

    def __init__(self, library: Library, plan: SlicePlan, weights: DeviceParams, concurrent: bool) -> None:
        self.inputs, self.outputs, self.activation_bytes = plan.inputs, plan.outputs, plan.activation_bytes
        self._library, self._plan, self._weights = library, plan, weights
        self._mirrors = weights.mirrors
        self._turn: AbstractContextManager[object] | None = None
        copies = self._mirrors.on_a_queue_of_their_own() if concurrent else self._mirrors
        self._device = copies.device
        release_with(self, self._device, vars(self))
        self._arena = self._mirrors.empty(max(plan.activation_bytes, 1))
        self._running = [call.kernel for call in plan.calls if not call.is_view]
        self._in_arena = {entry: self._part(entry) for entry in plan.offsets}
        self._kept: dict[tuple[int, ...], tuple[list[Any], Calls]] = {}
        # What stands on the device for each input and then each output; None for an output that has its place there.
        self._crossing: list[Any] = [None] * (len(plan.inputs) + len(plan.outputs))
        count = len(plan.inputs)
        self._received = [
            Crossing(shape, port.dtype, copies, partial(self._crossing.__setitem__, index))
            for index, (port, (_, shape)) in enumerate(zip(plan.inputs, plan.imports, strict=True))
        ]
        self._sent = []
        for index, (port, entry) in enumerate(zip(plan.outputs, plan.exports, strict=True)):
            shape, own = entry_shape(library, entry), plan.copied.get(index)
            if own is None:
                tie = partial(self._crossing.__setitem__, count + index)
                self._sent.append(Crossing(shape, port.dtype, copies, tie))
            else:
                size = tensor_bytes(entry_shape(library, own), entry_dtype(library, own))
                place = self._mirrors.part(self._arena, plan.offsets[own], (size,), "uint8")
                self._sent.append(Crossing(shape, port.dtype, copies, None, place))

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Compute `outputs` from `inputs`; both are arrays of the host.

        Raises:
            RunError: a kernel or a copy failed.
        """
        try:
            calls = self._begin(inputs, outputs)
            if self._turn is None:
                for call in calls:
                    call()
            else:
                self._device.sync()  # the copies are there
                with self._turn:
                    self._compute(calls)
            self.give_to_host()
        except self._mirrors.failures as error:
            keep_where_lost(self._device)
            raise RunError(f"a kernel or a copy failed: {reason(error)}") from error

    def take_turns(self, turn: AbstractContextManager[object]) -> bool:
        self._turn = turn
        return True

    @abstractmethod
    def _compute(self, calls: Calls) -> None:
        """Make the calls beside copies of another slice, and wait until the device has done them."""

    @abstractmethod
    def timed(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Seconds:
        """Run once, and return the seconds of each call that is not a view, in order."""

    @abstractmethod
    def _calls(self, tensors: Mapping[Entry, Any]) -> Calls:
        """Return what launches each kernel of the slice on these arrays of the device."""

    def _begin(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Calls:
        """Give the arrays to the device, the inputs with their values, and return the calls on them."""
        self.set_buffers(inputs, outputs)
        key = tuple(map(id, self._crossing))
        known = self._kept.get(key)
        if known is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            known = self._kept[key] = list(self._crossing), self._calls(self._tensors())
        return known[1]

    def _tensors(self) -> Mapping[Entry, Any]:
        """Return what stands on the device now for each entry."""
        plan, count = self._plan, len(self._plan.inputs)
        tensors: dict[Entry, Any] = dict(self._in_arena)
        tensors |= {entry: self._crossing[index] for entry, index in plan.read_from.items()}
        tensors |= {entry: self._crossing[count + index] for entry, index in plan.written.items()}
        return tensors

    def _part(self, entry: Entry) -> Any:
        shape, dtype = entry_shape(self._library, entry), entry_dtype(self._library, entry)
        return self._mirrors.part(self._arena, self._plan.offsets[entry], shape, dtype)
