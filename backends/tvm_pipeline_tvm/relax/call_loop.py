"""A slice as a loop over compiled functions: the part of a stage that its thread runs.

Nothing of Relax's virtual machine runs. A call is a function and its tensors, both made once:

    for function, tensors in calls:
        function(*tensors)

A tensor lies in the slice's arena, is a weight of the library, or is one of the caller's buffers. TVM releases Python's
lock in each call, so stages run at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm_ffi

from tvm_pipeline.backends.contract import Array, Seconds
from tvm_pipeline.backends.ports import aligned_empty, bytes_as
from tvm_pipeline_tvm.compiled_model import RunnableSlice
from tvm_pipeline_tvm.kernels import Entry, entry_dtype, entry_shape
from tvm_pipeline_tvm.relax.build import BoundCalls, Library
from tvm_pipeline_tvm.slice_plan import SlicePlan

_MOST_KEPT = 64  # sets of buffers whose calls are kept: a stage has a few slots, which come round again


class Slice(RunnableSlice):
    """A runnable slice. Not thread-safe: one thread runs it."""

    def __init__(self, library: Library, plan: SlicePlan) -> None:
        self.inputs, self.outputs, self.activation_bytes = plan.inputs, plan.outputs, plan.activation_bytes
        self._plan = plan
        self._library = library
        self._arena = aligned_empty((max(plan.activation_bytes, 1),), "uint8")
        self._running = [call.kernel for call in plan.calls if not call.is_view]
        self._in_arena = {entry: tvm_ffi.from_dlpack(self._view(entry)) for entry in plan.offsets}
        self._bound: dict[tuple[int, ...], tuple[Sequence[Array], BoundCalls]] = {}

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Compute `outputs` from `inputs`, in the order and with the shapes of the ports."""
        for function, tensors in self.calls(inputs, outputs):
            function(*tensors)
        self._copy_out(outputs)

    def timed(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Seconds:
        """Run once, and return the seconds of each call that is not a view, in order."""
        calls, now = self.calls(inputs, outputs), time.perf_counter
        seconds = np.zeros(len(calls))
        for index, (function, tensors) in enumerate(calls):
            begin = now()
            function(*tensors)
            seconds[index] = now() - begin
        return seconds

    def calls(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> BoundCalls:
        """Return the calls that read and write these buffers."""
        buffers = (*inputs, *outputs)
        key = tuple(map(id, buffers))
        known = self._bound.get(key)
        if known is None:
            if len(self._bound) >= _MOST_KEPT:
                self._bound.clear()
            known = self._bound[key] = buffers, self._bind(inputs, outputs)
        return known[1]

    def _bind(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> BoundCalls:
        plan, library = self._plan, self._library
        tensors: dict[Entry, Any] = dict(self._in_arena)
        for entry, index in plan.read_from.items():
            tensors[entry] = tvm_ffi.from_dlpack(inputs[index].reshape(plan.imports[index][1]))
        for entry, index in plan.written.items():
            tensors[entry] = tvm_ffi.from_dlpack(outputs[index].reshape(entry_shape(library, entry)))
        for entry, (index, begin) in plan.within.items():
            lies = bytes_as(outputs[index], begin, entry_shape(library, entry), entry_dtype(library, entry))
            tensors[entry] = tvm_ffi.from_dlpack(lies)
        return library.bound(self._running, tensors, library.tensors.__getitem__)

    def _copy_out(self, outputs: Sequence[Array]) -> None:
        for index, entry in self._plan.copied.items():
            outputs[index].reshape(-1)[:] = self._view(entry).reshape(-1)

    def _view(self, entry: Entry) -> Array:
        shape, dtype = entry_shape(self._library, entry), entry_dtype(self._library, entry)
        return bytes_as(self._arena, self._plan.offsets[entry], shape, dtype)
