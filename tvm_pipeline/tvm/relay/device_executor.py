"""A slice on a device with memory of its own: what `executor.py` is for the CPU.

Parameters are on the device once for all slices (`devices/device_arrays.py`), activations in one arena there. A run
copies the inputs to the device, runs the kernels, copies the outputs back and waits until all is done. So only what
crosses a cut is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm

from tvm_pipeline.backends.contract import Array
from tvm_pipeline.errors import RunError
from tvm_pipeline.tvm.devices.device_arrays import DeviceParams, part
from tvm_pipeline.tvm.relay.build import Library
from tvm_pipeline.tvm.relay.executor import HostArrays
from tvm_pipeline.tvm.relay.importer import reason
from tvm_pipeline.tvm.relay.slicing import SliceGraph


class DeviceSlice:
    """A runnable slice. Not thread-safe: one thread runs it."""

    def __init__(self, library: Library, graph: SliceGraph, params: DeviceParams, *, debug: bool = False) -> None:
        self.inputs, self.outputs, self.graph = graph.inputs, graph.outputs, graph
        self._params, self._device = params, params.device
        self._arena = tvm.nd.empty((max(graph.activation_bytes, 1),), "uint8", self._device)
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
        get_input, get_output = self.executor["get_input"], self.executor["get_output"]
        self._received = [get_input(f"input_{index}") for index in range(len(graph.inputs))]
        self._sent = [get_output(index) for index in range(len(graph.outputs))]
        self._wrap = HostArrays()

    def _storage_of(self, _module: Any, entry: int, _template: Any, _device: Any) -> Any:
        """Return the storage of an entry: the executor calls this once for each storage id while it is created."""
        name = self.graph.params.get(entry)
        if name is not None:
            return self._params[name]
        shape, dtype = self.graph.shapes[entry], self.graph.dtypes[entry]
        if entry in self.graph.offsets:
            return part(self._arena, self.graph.offsets[entry], shape, dtype)
        return tvm.nd.empty(shape, dtype, self._device)  # what crosses a cut

    def set_buffers(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Copy the inputs to the device; the outputs are copied back by `run`."""
        for own, array in zip(self._received, inputs, strict=True):
            self._wrap(array).copyto(own)

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Compute `outputs` from `inputs`; both are arrays of the host.

        Raises:
            RunError: a kernel or a copy failed.
        """
        try:
            self.set_buffers(inputs, outputs)
            self._run()
            for own, array, shape in zip(self._sent, outputs, self.graph.head_shapes, strict=True):
                own.copyto(self._wrap(array, shape))
            self._device.sync()
        except tvm.TVMError as error:  # whose message has the source of all kernels
            raise RunError(f"a kernel or a copy failed: {reason(error)}") from error

    def execute(self) -> Callable[[int], None]:
        """Return what runs one node, of a slice made with `debug`, and waits for it."""
        node, sync = self.executor["execute_node"], self._device.sync

        def run(index: int) -> None:
            node(index)
            sync()

        return run
