"""A slice of a library as the graph executor takes it: the plan of `slice_plan.py` becomes graph JSON.

This file makes the slice as data (SliceGraph); `executor.py` runs it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tvm_pipeline.backends.contract import Port
from tvm_pipeline_tvm.kernels import Entry, entry_dtype
from tvm_pipeline_tvm.relay.library import Library
from tvm_pipeline_tvm.slice_plan import Call, SlicePlan


class SliceActivation(NamedTuple):
    """An activation that lies in an output of the slice, the output itself among them.

    Attributes:
        begin: the byte of the output at which it begins.
        called: how the executor is told where it lies: a head of the graph, by its index, or an input, by its name. An
            input stands for a kernel that does not run, since the executor knows no pointers to what that would make.
    """

    output: int
    begin: int
    shape: tuple[int, ...]
    dtype: str
    called: int | str


@dataclass(slots=True)
class SliceGraph:
    """A slice as data, before an executor exists.

    Attributes:
        inputs, outputs: the tensors that cross, in the order in which a run takes them.
        head_shapes: the shape under which each output is computed; its port may have another.
        copied: outputs (by index) that must be copied out of their entry instead of being written in place.
        params: name of the library's parameter for each entry that is one.
        shapes, dtypes: of every entry.
        offsets: position in the arena of each activation; `activation_bytes` is the arena's size, and
            `unordered_bytes` its size in the library's order.
        within: the activations that lie in an output.
        operator_nodes: for each node that runs a kernel, the operator whose time it counts to.
    """

    graph_json: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    head_shapes: tuple[tuple[int, ...], ...]
    copied: dict[int, int]
    params: dict[int, str]
    offsets: dict[int, int]
    within: list[SliceActivation]
    shapes: list[tuple[int, ...]]
    dtypes: list[str]
    activation_bytes: int
    unordered_bytes: int
    operator_nodes: list[tuple[int, str]]


def as_graph(library: Library, plan: SlicePlan) -> SliceGraph:
    """Return a planned slice as graph JSON: inputs, then kernels in running order with their parameters."""
    return _Assembly(library, plan).finish()


@dataclass(slots=True)
class _Assembly:
    """Writes the graph JSON of a plan."""

    library: Library
    plan: SlicePlan
    nodes: list[dict[str, Any]] = field(default_factory=list)
    rows: list[int] = field(default_factory=lambda: [0])
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    node_of: dict[Entry | str, tuple[int, int]] = field(default_factory=dict)
    params: dict[int, str] = field(default_factory=dict)

    def finish(self) -> SliceGraph:
        plan = self.plan
        for index, (entry, shape) in enumerate(plan.imports):
            node = {"op": "null", "name": f"input_{index}", "inputs": []}
            self._add(node, [(shape, entry_dtype(self.library, entry))])
        self.node_of.update({entry: (index, 0) for entry, index in plan.read_from.items()})
        operator_nodes = [(self._kernel(call), call.operator) for call in plan.calls]
        heads = [self.node_of[entry] for entry in plan.exports]
        places = {entry: (index, 0) for index, entry in enumerate(plan.exports) if index not in plan.copied}
        within = []
        for entry, (output, begin) in (places | dict(plan.within)).items():
            made_by = self.nodes[self.node_of[entry][0]]
            called: int | str = output if entry in places else len(heads)
            if made_by["op"] == "null":
                called = made_by["name"]
            elif entry not in places:
                heads.append(self.node_of[entry])
            position = self._position(entry)
            within.append(SliceActivation(output, begin, self.shapes[position], self.dtypes[position], called))
        entries = len(self.shapes)
        attributes = {
            "shape": ["list_shape", self.shapes],
            "dltype": ["list_str", self.dtypes],
            "device_index": ["list_int", [self.library.device_type] * entries],
            "storage_id": ["list_int", list(range(entries))],
        }
        graph = {
            "nodes": self.nodes,
            "arg_nodes": [i for i, node in enumerate(self.nodes) if node["op"] == "null"],
            "heads": [[node, index, 0] for node, index in heads],
            "attrs": attributes,
            "node_row_ptr": self.rows,
        }
        return SliceGraph(
            json.dumps(graph),
            plan.inputs,
            plan.outputs,
            tuple(self.shapes[self._position(entry)] for entry in plan.exports),
            {index: self._position(entry) for index, entry in plan.copied.items()},
            self.params,
            {self._position(entry): start for entry, start in plan.offsets.items()},
            within,
            self.shapes,
            self.dtypes,
            plan.activation_bytes,
            plan.unordered_bytes,
            operator_nodes,
        )

    def _position(self, entry: Entry) -> int:
        """Return where the graph lists an entry."""
        node, output = self.node_of[entry]
        return self.rows[node] + output

    def _add(self, node: dict[str, Any], outputs: Sequence[tuple[tuple[int, ...], str]]) -> int:
        self.nodes.append(node)
        for shape, dtype in outputs:
            self.shapes.append(tuple(shape))
            self.dtypes.append(dtype)
        self.rows.append(len(self.shapes))
        return len(self.nodes) - 1

    def _kernel(self, call: Call) -> int:
        library, kernel = self.library, call.kernel
        source = library.graph["nodes"][library.kernels[kernel].node]
        inputs = []
        for producer, index, version in source["inputs"]:
            entry = library.entry_of_node.get((producer, index))
            node, output = self._param(producer) if entry is None else self.node_of[entry]
            inputs.append([node, output, version])
        outputs = [(output.shape, output.dtype) for output in library.kernels[kernel].outputs]
        made: dict[str, Any] = {**source, "inputs": inputs}
        if call.is_view and ((kernel, 0) in self.plan.within or (kernel, 0) in self.plan.written):
            made = {"op": "null", "name": f"within_{kernel}", "inputs": []}
        elif call.is_view:
            made["attrs"] = {**source["attrs"], "func_name": "__nop"}
        node = self._add(made, outputs)
        for index in range(len(outputs)):
            self.node_of[kernel, index] = node, index
        return node

    def _param(self, producer: int) -> tuple[int, int]:
        library = self.library
        name = library.graph["nodes"][producer]["name"]
        if name not in self.node_of:
            entry = library.graph["node_row_ptr"][producer]
            attributes = library.graph["attrs"]
            shape, dtype = attributes["shape"][1][entry], attributes["dltype"][1][entry]
            node = self._add({"op": "null", "name": name, "inputs": []}, [(shape, dtype)])
            self.node_of[name] = node, 0
            self.params[self.rows[node]] = name
        return self.node_of[name]
