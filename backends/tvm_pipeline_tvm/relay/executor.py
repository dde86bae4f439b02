"""A slice with its graph executor: the part of a stage that its thread runs.

The graph executor asks for the storage of every tensor through its `lookup_linked_param` hook. It gets the library's
own parameter, so that slices share parameters, or a view of the slice's arena (`memory/arena.py`). Inputs and outputs
are pointers into the caller's buffers; a run sets those that changed.

Nothing here reads Relay. The file is in Relay's folder because `relay.build` alone writes the JSON that this
executor and `slicing.py` take, while Relax compiles for a virtual machine and would bring a slice of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm

from tvm_pipeline.backends.contract import Array
from tvm_pipeline.backends.ports import aligned_empty, bytes_as
from tvm_pipeline_tvm.compiled_model import RunnableSlice
from tvm_pipeline_tvm.kernels import tensor_bytes
from tvm_pipeline_tvm.relay.library import Library
from tvm_pipeline_tvm.relay.slicing import SliceGraph
from tvm_pipeline_tvm.relay.stack_placement import PLACE_OF_NODE, placed


class HostArrays:
    """Arrays of the host as TVM's, each wrapped once."""

    def __init__(self) -> None:
        self._wrapped: dict[int, tuple[Array, list[Any]]] = {}

    def __call__(self, array: Array, tensors: Callable[[Array], list[Array]]) -> list[Any]:
        """Return the tensors that lie in an array."""
        known = self._wrapped.get(id(array))
        if known is None:
            if len(self._wrapped) > 64:
                self._wrapped.clear()
            known = self._wrapped[id(array)] = array, [tvm.nd.from_dlpack(tensor) for tensor in tensors(array)]
        return known[1]


class Slice(RunnableSlice):
    """A runnable slice. Not thread-safe: one thread runs it."""

    def __init__(self, library: Library, part: SliceGraph, *, debug: bool = False) -> None:
        self.inputs, self.outputs, self.graph = part.inputs, part.outputs, part
        self.activation_bytes = part.activation_bytes
        ports = [*part.inputs, *part.outputs]
        largest = max(tensor_bytes(port.shape, port.dtype) for port in ports)
        # Inputs and outputs point here until their first buffers are given; nothing is ever written there.
        self._arena = aligned_empty((max(part.activation_bytes, largest),), "uint8")
        self._library = library
        self._views: dict[int, Array] = {}
        kind = "graph_executor_debug" if debug else "graph_executor"
        create = tvm.get_global_func(f"tvm.{kind}.create")
        # The executor keeps the function for ever, and the function must not keep this slice: TVM hides the cycle from
        # the garbage collector.
        storage_of = [self._storage_of]
        self.executor = create(
            part.graph_json, library.module, lambda *request: storage_of[0](*request), library.device_type, 0
        )
        storage_of.clear()
        self._run = placed(self.executor["run"])
        self._set_input = self.executor["set_input_zero_copy"]
        self._set_output = self.executor["set_output_zero_copy"]
        self._set: dict[tuple[bool, int], Array] = {}
        self._wrap = HostArrays()
        self._within = [[w for w in part.within if w.output == index] for index in range(len(part.outputs))]

    def _storage_of(self, _module: Any, entry: int, _template: Any, _device: Any) -> Any:
        """Return the storage of an entry: the executor calls this once for each storage id while it is created."""
        name = self.graph.params.get(entry)
        if name is not None:
            return self._library.params[name]
        shape, dtype = self.graph.shapes[entry], self.graph.dtypes[entry]
        start = self.graph.offsets.get(entry, 0)
        view = bytes_as(self._arena, start, shape, dtype)
        if entry in self.graph.copied.values():
            self._views[entry] = view
        return tvm.nd.from_dlpack(view)

    def set_buffers(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Point the slice at these arrays, in the order and with the shapes of the ports."""
        for index, array in enumerate(inputs):
            if self._set.get((True, index)) is not array:
                self._set_input(f"input_{index}", *self._wrap(array, lambda tensor: [tensor]))
                self._set[True, index] = array
        for index, array in enumerate(outputs):
            if index not in self.graph.copied and self._set.get((False, index)) is not array:
                self._point_into(index, array)
                self._set[False, index] = array

    def _point_into(self, index: int, array: Array) -> None:
        """Tell the executor that an output, and what else lies in it, is in this array."""
        lie_there = self._within[index]
        tensors = self._wrap(array, lambda whole: [bytes_as(whole, w.begin, w.shape, w.dtype) for w in lie_there])
        for within, tensor in zip(lie_there, tensors, strict=True):
            point = self._set_input if isinstance(within.called, str) else self._set_output
            point(within.called, tensor)

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Compute `outputs` from `inputs`."""
        self.set_buffers(inputs, outputs)
        self._run()
        for index, entry in self.graph.copied.items():
            outputs[index].reshape(-1)[:] = self._views[entry].reshape(-1)

    def execute(self) -> Callable[[int], None]:
        """Return what runs one node, of a slice made with `debug`."""
        return placed(self.executor["execute_node"], PLACE_OF_NODE)
