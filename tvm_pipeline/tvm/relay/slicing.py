"""Make some operators of a compiled library a runnable stage: compile once, cut anywhere.

A slice is the part of the library's graph JSON that computes these operators. Its inputs are the tensors that it reads
from outside, its outputs the tensors that are read outside. Nothing is compiled and no parameter is copied:

    whole:  data -> conv_0 -> pool_1 -> conv_2 -> add_3(conv_2, pool_1) -> softmax_4
    slice {conv_2, add_3}:  pool_1 -> conv_2 -> add_3(conv_2, pool_1)

This file makes the slice as data (SliceGraph); `executor.py` runs it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tvm_pipeline.backends.contract import Port
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.partition import check_stage
from tvm_pipeline.errors import PlanError
from tvm_pipeline.memory.arena import ALIGNMENT, Lifetime, exact_layout, plan_arena
from tvm_pipeline.tvm.alignment import Alignment
from tvm_pipeline.tvm.kernel_order import TIME_LIMIT_S, kernel_order
from tvm_pipeline.tvm.kernels import Entry, tensor_bytes
from tvm_pipeline.tvm.relay.build import Library


@dataclass(slots=True)
class SliceGraph:
    """A slice as data, before an executor exists.

    Attributes:
        inputs, outputs: the tensors that cross, in the order in which a run takes them.
        head_shapes: the shape under which each output is computed; its port may have another.
        copied: outputs (by index) that must be copied out of their entry instead of being written in place.
        params: name of the library's parameter for each entry that is, or shows, one.
        shapes, dtypes: of every entry.
        offsets: position in the arena of each activation; `activation_bytes` is the arena's size, and
            `unordered_bytes` its size in the library's order.
        operator_nodes: for each node that runs a kernel, the operator whose time it counts to.
    """

    graph_json: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    head_shapes: tuple[tuple[int, ...], ...]
    copied: dict[int, int]
    params: dict[int, str]
    offsets: dict[int, int]
    shapes: list[tuple[int, ...]]
    dtypes: list[str]
    activation_bytes: int
    unordered_bytes: int
    operator_nodes: list[tuple[int, str]]


class _Selection:
    """Collects the kernels of a slice: those of its operators, and the glue that they and the outputs need."""

    def __init__(self, library: Library, alignment: Alignment, operators: Sequence[str]) -> None:
        self.library, self.alignment = library, alignment
        self.kernels = {k for name in operators for k in alignment.kernels[name]}
        self.own = frozenset(self.kernels)
        self.imports: dict[tuple[Entry, tuple[int, ...]], int] = {}
        for kernel in sorted(self.own):
            for entry in library.kernels[kernel].reads:
                self.need(entry)

    def need(self, entry: Entry) -> None:
        """Take in the glue behind `entry`, or make it an input."""
        kernel, _ = entry
        if kernel in self.kernels:
            return
        if kernel >= 0 and self.library.kernels[kernel].is_glue:
            behind = self.library.kernels[kernel].reads  # several where it is given a tuple, of which it shows a field
            if not self.library.is_reshape(kernel) or self.inside(behind[0]):
                self.kernels.add(kernel)
                for each in behind:
                    self.need(each)
                return
        origin, shape = self.origin(entry)
        self.imports.setdefault((origin, shape), len(self.imports))

    def inside(self, entry: Entry) -> bool:
        """Return whether the bytes of `entry` are computed here rather than read from an input."""
        kernel, _ = entry
        if kernel < 0 or kernel in self.own:
            return kernel >= 0
        if not self.library.kernels[kernel].is_glue:
            return False
        return not self.library.is_reshape(kernel) or self.inside(self.library.kernels[kernel].reads[0])

    def origin(self, entry: Entry) -> tuple[Entry, tuple[int, ...]]:
        """Return the entry whose bytes `entry` shows under a shape of its own, and that shape."""
        shape = self.library.entry_shape(entry)
        while entry[0] >= 0 and self.library.is_reshape(entry[0]):
            entry = self.library.kernels[entry[0]].reads[0]
        return entry, shape


def slice_graph(
    library: Library,
    alignment: Alignment,
    graph: OperatorGraph,
    operators: Sequence[str],
    memory_ordered: bool = False,
    alignment_bytes: int = ALIGNMENT,
) -> SliceGraph:
    """Cut `operators` out of the library's graph.

    Args:
        memory_ordered: the kernels run in the order that needs the least memory, and their results are packed as
            closely as possible, if that makes the arena smaller; else they run in the library's order and are laid out
            greedily.
        alignment_bytes: activations begin at multiples of it.

    Raises:
        PlanError: an operator is not in the graph, a path leaves the slice and comes back to it, or a tensor that
            crosses has no name.
    """
    check_stage(graph, operators)
    chosen = _Selection(library, alignment, operators)
    exports = _exports(chosen, graph, set(operators))
    for entry, _ in exports.values():
        chosen.need(entry)
    greedy = partial(plan_arena, alignment=alignment_bytes)
    plain = _Assembly(chosen, exports, operators, sorted(chosen.kernels), greedy).finish()
    if not memory_ordered:
        return plain
    exact = partial(_least_arena, alignment=alignment_bytes)
    ordered = _Assembly(chosen, exports, operators, _least_memory_order(chosen, exports), exact).finish()
    if ordered.activation_bytes >= plain.activation_bytes:
        return plain
    return replace(ordered, unordered_bytes=plain.activation_bytes)


def _least_arena(tensors: Sequence[Lifetime], alignment: int) -> tuple[Sequence[int], int]:
    layout = exact_layout(tensors, time_limit_s=TIME_LIMIT_S, alignment=alignment)
    return layout.offsets, layout.arena_bytes


def _least_memory_order(chosen: _Selection, exports: Mapping[str, tuple[Entry, Entry]]) -> list[int]:
    library = chosen.library
    kernels = {kernel: library.kernels[kernel] for kernel in sorted(chosen.kernels)}
    written = {origin for _, origin in exports.values()}
    # As in `_with_storage`: an output that is also shown under another shape lies in the arena.
    shown = {chosen.origin((kernel, 0))[0] for kernel in kernels if library.is_reshape(kernel)}
    return kernel_order(kernels, library.is_reshape, written & shown, written - shown)


def _exports(chosen: _Selection, graph: OperatorGraph, operators: set[str]) -> dict[str, tuple[Entry, Entry]]:
    """Return for each tensor that is read outside the entry that shows it and the entry whose bytes it shares."""
    heads = dict(zip(graph.outputs, chosen.library.heads, strict=True))
    written: dict[str | None, Entry] = {}
    for kernel in sorted(chosen.own):
        for index, value in enumerate(chosen.alignment.values[kernel]):
            written.setdefault(chosen.alignment.names.get(value), (kernel, index))
    edges = graph.edges
    inside = {edges.index[name] for name in operators}
    exports: dict[str, tuple[Entry, Entry]] = {}
    for operator in graph.operators:
        for tensor in operator.outputs if operator.name in operators else ():
            if tensor.name in heads or not inside.issuperset(edges.readers[tensor.name]):
                entry = heads[tensor.name] if tensor.name in heads else written[tensor.name]
                exports[tensor.name] = entry, chosen.origin(entry)[0]
    return exports


@dataclass(slots=True)
class _Assembly:
    """Writes the graph JSON of a selection: inputs, then kernels in `order` with their parameters."""

    chosen: _Selection
    exports: dict[str, tuple[Entry, Entry]]
    operators: Sequence[str]
    order: Sequence[int]
    lay_out: Callable[[Sequence[Lifetime]], tuple[Sequence[int], int]]
    nodes: list[dict[str, Any]] = field(default_factory=list)
    rows: list[int] = field(default_factory=lambda: [0])
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    node_of: dict[Entry | str, tuple[int, int]] = field(default_factory=dict)
    params: dict[int, str] = field(default_factory=dict)
    input_ports: list[Port] = field(default_factory=list)
    same_bytes: dict[int, int] = field(default_factory=dict)  # entry of a reshape -> entry it shows

    def finish(self) -> SliceGraph:
        library = self.chosen.library
        for (entry, shape), index in self.chosen.imports.items():
            self._input(index, entry, shape)
        owner = self._owners()
        operator_nodes = [(self._kernel(kernel), owner[kernel]) for kernel in self.order]
        outputs, heads = [], []
        for name, (entry, origin) in self.exports.items():
            heads.append(self.node_of[origin])
            kernel, index = entry
            layout = library.kernels[kernel].outputs[index].layout
            outputs.append(Port(name, library.entry_shape(entry), library.entry_dtype(entry), layout))
        return self._with_storage(heads, tuple(outputs), operator_nodes)

    def _owners(self) -> dict[int, str]:
        """Return the operator of each kernel; glue counts to the operator behind it in the library, or to the last."""
        owner = {k: name for name in self.operators for k in self.chosen.alignment.kernels[name]}
        behind = owner[max(owner)]
        for kernel in sorted(self.chosen.kernels, reverse=True):
            behind = owner.setdefault(kernel, behind)
        return owner

    def _add(self, node: dict[str, Any], outputs: Sequence[tuple[tuple[int, ...], str]]) -> int:
        self.nodes.append(node)
        for shape, dtype in outputs:
            self.shapes.append(tuple(shape))
            self.dtypes.append(dtype)
        self.rows.append(len(self.shapes))
        return len(self.nodes) - 1

    def _input(self, index: int, entry: Entry, shape: tuple[int, ...]) -> None:
        library, alignment = self.chosen.library, self.chosen.alignment
        kernel, output = entry
        dtype = library.entry_dtype(entry)
        layout = library.kernels[kernel].outputs[output].layout if kernel >= 0 else ""
        value = alignment.values[kernel][output] if kernel >= 0 else (-1, output)
        if value not in alignment.names:
            held = ", ".join(self.operators[:3]) + (", ..." if len(self.operators) > 3 else "")
            raise PlanError(
                f"the stage of {held} reads a tensor that no operator hands on, on {library.target}; put it into one "
                "stage with the operators in front of it, and report this as a fault of tvm-pipeline"
            )
        node = self._add({"op": "null", "name": f"input_{index}", "inputs": []}, [(shape, dtype)])
        self.node_of[f"{entry}{shape}"] = node, 0
        self.input_ports.append(Port(alignment.names[value], shape, dtype, layout))

    def _kernel(self, kernel: int) -> int:
        library = self.chosen.library
        source = library.graph["nodes"][library.kernels[kernel].node]
        inputs = []
        for producer, index, version in source["inputs"]:
            entry = library.entry_of_node.get((producer, index))
            node, output = self._param(producer) if entry is None else self._resolve(entry)
            inputs.append([node, output, version])
        outputs = [(output.shape, output.dtype) for output in library.kernels[kernel].outputs]
        node = self._add({**source, "inputs": inputs}, outputs)
        for index in range(len(outputs)):
            self.node_of[kernel, index] = node, index
        if library.is_reshape(kernel):
            shown = inputs[0]
            below = self.rows[shown[0]] + shown[1]
            self.same_bytes[self.rows[node]] = self.same_bytes.get(below, below)
        return node

    def _resolve(self, entry: Entry) -> tuple[int, int]:
        if entry in self.node_of:
            return self.node_of[entry]
        origin, shape = self.chosen.origin(entry)
        return self.node_of[f"{origin}{shape}"]

    def _param(self, producer: int) -> tuple[int, int]:
        library = self.chosen.library
        name = library.graph["nodes"][producer]["name"]
        if name not in self.node_of:
            entry = library.graph["node_row_ptr"][producer]
            attributes = library.graph["attrs"]
            shape, dtype = attributes["shape"][1][entry], attributes["dltype"][1][entry]
            node = self._add({"op": "null", "name": name, "inputs": []}, [(shape, dtype)])
            self.node_of[name] = node, 0
            self.params[self.rows[node]] = name
        return self.node_of[name]

    def _with_storage(
        self, heads: list[tuple[int, int]], outputs: tuple[Port, ...], operator_nodes: list[tuple[int, str]]
    ) -> SliceGraph:
        imported = {self.rows[node] for node in range(len(self.input_ports))}
        exported = {self.rows[node] + index: position for position, (node, index) in enumerate(heads)}
        # An output that is also shown under another shape cannot be redirected: its other readers would not follow.
        shown = set(self.same_bytes.values())
        copied = {position: entry for entry, position in exported.items() if entry in shown}
        written: dict[int, int] = {}
        last: dict[int, int] = {}
        for step, node in enumerate(self.nodes):
            for producer, index, _ in node["inputs"]:
                entry = self.rows[producer] + index
                last[self.same_bytes.get(entry, entry)] = step
            for entry in range(self.rows[step], self.rows[step + 1]):
                written[entry] = step
        for entry in copied.values():
            last[entry] = len(self.nodes)
        outside = imported | (exported.keys() - set(copied.values())) | self.params.keys() | self.same_bytes.keys()
        kept = [entry for entry in range(len(self.shapes)) if entry not in outside]
        starts, arena_bytes = self.lay_out(
            [
                Lifetime(
                    written[entry],
                    max(last.get(entry, 0), written[entry]),
                    tensor_bytes(self.shapes[entry], self.dtypes[entry]),
                )
                for entry in kept
            ]
        )
        offsets = dict(zip(kept, starts, strict=True))
        for entry, below in self.same_bytes.items():
            if below in self.params:
                self.params[entry] = self.params[below]
            else:
                offsets[entry] = offsets[below]
        entries = len(self.shapes)
        attributes = {
            "shape": ["list_shape", self.shapes],
            "dltype": ["list_str", self.dtypes],
            "device_index": ["list_int", [self.chosen.library.device_type] * entries],
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
            tuple(self.input_ports),
            outputs,
            tuple(self.shapes[self.rows[node] + index] for node, index in heads),
            copied,
            self.params,
            offsets,
            self.shapes,
            self.dtypes,
            arena_bytes,
            arena_bytes,
            operator_nodes,
        )
