"""A slice on a device with memory of its own: what `executor.py` is for the CPU.

Parameters are on the device once for all slices (`devices/device_arrays.py`), activations in one arena there. A tensor
that crosses a cut stands in an array of the host. The device uses that array itself, or a copy (`devices/mirrors.py`).
Between two stages on the device a tensor may stay there (`keep`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tvm

from tvm_pipeline.backends.contract import Array
from tvm_pipeline.errors import RunError
from tvm_pipeline_tvm.devices.crossings import Crossing, SliceOnDevice
from tvm_pipeline_tvm.devices.device_arrays import DeviceParams, part
from tvm_pipeline_tvm.devices.releasing import release_with
from tvm_pipeline_tvm.kernels import tensor_bytes
from tvm_pipeline_tvm.relay.library import Library
from tvm_pipeline_tvm.relay.slicing import SliceGraph
from tvm_pipeline_tvm.tvm_errors import reason


class DeviceSlice(SliceOnDevice):
    """A runnable slice. Not thread-safe: one thread runs it."""

    def __init__(self, library: Library, graph: SliceGraph, params: DeviceParams, *, debug: bool = False) -> None:
        self._params, self._device = params, params.device
        release_with(self, self._device, vars(self))
        self.inputs, self.outputs, self.graph = graph.inputs, graph.outputs, graph
        self.activation_bytes = graph.activation_bytes
        # What crosses the cut points here until its first array is given; nothing is ever written there.
        largest = max(tensor_bytes(port.shape, port.dtype) for port in (*graph.inputs, *graph.outputs))
        self._arena = tvm.nd.empty((max(graph.activation_bytes, largest, 1),), "uint8", self._device)
        kind = "graph_executor_debug" if debug else "graph_executor"
        create = tvm.get_global_func(f"tvm.{kind}.create")
        # As in `executor.py`: the executor keeps the function for ever, and the function must not keep this slice.
        storage_of = [self._storage_of]
        self.executor = create(
            graph.graph_json,
            library.module,
            lambda *request: storage_of[0](*request),
            self._device.device_type,
            self._device.device_id,
        )
        storage_of.clear()
        self._run = self.executor["run"]
        tie_input, tie_output = self.executor["set_input_zero_copy"], self.executor["set_output_zero_copy"]
        mirrors = params.mirrors
        self._received = [
            Crossing(port.shape, port.dtype, mirrors, partial(tie_input, f"input_{index}"))
            for index, port in enumerate(graph.inputs)
        ]
        self._sent = [
            Crossing(shape, port.dtype, mirrors, *self._output(index, tie_output))
            for index, (port, shape) in enumerate(zip(graph.outputs, graph.head_shapes, strict=True))
        ]

    def _output(self, index: int, tie: Callable[[int, Any], object]) -> tuple[Callable[[Any], object] | None, Any]:
        """Return how to tie an output, or where the executor has it, if other entries are the same bytes."""
        entry = self.graph.copied.get(index)
        if entry is None:
            return partial(tie, index), None
        size = tensor_bytes(self.graph.shapes[entry], self.graph.dtypes[entry])
        return None, part(self._arena, self.graph.offsets[entry], (size,), "uint8")

    def _storage_of(self, _module: Any, entry: int, _template: Any, _device: Any) -> Any:
        """Return the storage of an entry: the executor calls this once for each storage id while it is created."""
        name = self.graph.params.get(entry)
        if name is not None:
            return self._params[name]
        shape, dtype = self.graph.shapes[entry], self.graph.dtypes[entry]
        return part(self._arena, self.graph.offsets.get(entry, 0), shape, dtype)

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Compute `outputs` from `inputs`; both are arrays of the host.

        Raises:
            RunError: a kernel or a copy failed.
        """
        try:
            self.set_buffers(inputs, outputs)
            self._run()
            self.give_to_host()
        except tvm.TVMError as error:  # whose message has the source of all kernels
            raise RunError(f"a kernel or a copy failed: {reason(error)}") from error

    def execute(self) -> Callable[[int], None]:
        """Return what runs one node, of a slice made with `debug`, and waits for it."""
        node, sync = self.executor["execute_node"], self._device.sync

        def run(index: int) -> None:
            node(index)
            sync()

        return run
