"""Subgraphs of ONNX (branches, bodies of loops) become part of the graph around them. Next: `onnx_control_flow.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
from onnx import helper


class Names:
    """The names of tensors in a graph; `free` gives new ones."""

    def __init__(self, graph: Any) -> None:
        listed = (*graph.input, *graph.output, *graph.initializer)
        self._taken = {value.name for value in listed}
        self._taken.update(name for node in graph.node for name in (*node.input, *node.output))

    def free(self, name: str) -> str:
        """Return the name, numbered where it is taken, and take it."""
        found, number = name, 0
        while found in self._taken:
            number += 1
            found = f"{name}/{number}"
        self._taken.add(found)
        return found


def subgraphs(node: Any) -> Iterator[Any]:
    """Yield the graphs among a node's attributes."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_nodes(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a graph and of all graphs inside it."""
    for node in graph.node:
        yield node
        for inner in subgraphs(node):
            yield from all_nodes(inner)


def renamed(node: Any, names: Mapping[str, str]) -> Any:
    """Return a copy of a node with other names for tensors, in the graphs inside it, too."""
    made = onnx.NodeProto()
    made.CopyFrom(node)
    _rename(made, names)
    return made


def _rename(node: Any, names: Mapping[str, str]) -> None:
    for field in (node.input, node.output):
        for index, name in enumerate(field):
            field[index] = names.get(name, name)
    for graph in subgraphs(node):
        own = {value.name for value in (*graph.input, *graph.initializer)}
        own.update(name for inner in graph.node for name in inner.output)
        outer = {name: other for name, other in names.items() if name not in own}
        for inner in graph.node:
            _rename(inner, outer)
        for output in graph.output:
            output.name = outer.get(output.name, output.name)


def inlined(
    graph: Any, inputs: Mapping[str, str], outputs: Sequence[str], names: Names
) -> tuple[list[Any], list[Any], list[str]]:
    """Return the nodes and initializers of a subgraph for the graph around it, and the names of its outputs there.

        before: If(c) -> y  { then: a = Relu(x); b = Neg(a)  -> b }
        after:  a = Relu(x); y = Neg(a)

    Args:
        inputs: the tensor outside that each of its inputs stands for.
        outputs: the names that its outputs get; an empty one leaves the name to `names`.
    """
    mapped = dict(inputs)
    written = {name for node in graph.node for name in node.output}
    for inner, outer in zip((output.name for output in graph.output), outputs, strict=True):
        if outer and inner in written and inner not in mapped:
            mapped[inner] = outer
    for name in (*(tensor.name for tensor in graph.initializer), *(n for node in graph.node for n in node.output)):
        if name and name not in mapped:
            mapped[name] = names.free(name)
    nodes = [renamed(node, mapped) for node in graph.node]
    found = []
    for output, outer in zip(graph.output, outputs, strict=True):
        made = mapped.get(output.name, output.name)
        if outer and made != outer:
            nodes.append(helper.make_node("Identity", [made], [outer]))
            made = outer
        found.append(made)
    weights = []
    for tensor in graph.initializer:
        weight = onnx.TensorProto()
        weight.CopyFrom(tensor)
        weight.name = mapped[tensor.name]
        weights.append(weight)
    return nodes, weights, found


def prune(graph: Any) -> None:
    """Take out the nodes and initializers that no output of the graph needs."""
    needed = {value.name for value in graph.output}
    kept = []
    for node in reversed(graph.node):
        if needed.isdisjoint(node.output):
            continue
        kept.append(node)
        for name in _reads(node):
            needed.add(name)
    replace_nodes(graph, kept[::-1])
    listed = {value.name for value in graph.input}
    weights = [tensor for tensor in graph.initializer if tensor.name in needed or tensor.name in listed]
    if len(weights) < len(graph.initializer):
        del graph.initializer[:]
        graph.initializer.extend(weights)


def replace_nodes(graph: Any, nodes: Sequence[Any]) -> None:
    """Give a graph other nodes."""
    copies = list(nodes)
    del graph.node[:]
    graph.node.extend(copies)


def _reads(node: Any) -> Iterator[str]:
    """Yield all names that a node reads, in the graphs inside it, too."""
    yield from node.input
    for graph in subgraphs(node):
        for inner in graph.node:
            yield from _reads(inner)
        yield from (output.name for output in graph.output)
