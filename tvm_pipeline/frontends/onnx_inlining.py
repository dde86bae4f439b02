"""Subgraphs of ONNX (branches, bodies of loops) become part of the graph around them. Next: `onnx_control_flow.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
from onnx import helper

DEEPEST = 100  # functions inside functions, and graphs inside graphs, which onnx goes through by recursion


class Names:
    """The names of tensors and nodes in a graph and the graphs inside it; `free` and `free_node` give new ones."""

    def __init__(self, graph: Any) -> None:
        inner = [each for node in all_nodes(graph) for each in subgraphs(node)]
        listed = [value for each in (graph, *inner) for value in (*each.input, *each.output, *each.initializer)]
        self._tensors = dict.fromkeys((value.name for value in listed), 0)  # and the number that was added last
        self._tensors.update((name, 0) for node in all_nodes(graph) for name in (*node.input, *node.output))
        self._nodes = dict.fromkeys((node.name for node in graph.node), 0)

    def free(self, name: str) -> str:
        """Return the name of a tensor, numbered where it is taken, and take it."""
        return _free(name, self._tensors)

    def free_node(self, name: str) -> str:
        """Return the name of a node, numbered where it is taken, and take it; a node may have none."""
        return name and _free(name, self._nodes)


def _free(name: str, taken: dict[str, int]) -> str:
    found = name
    while found in taken:
        taken[name] += 1
        found = f"{name}/{taken[name]}"
    taken[found] = 0
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


def expanded_nodes(model: Any) -> float:
    """Return how many nodes a model has with the functions of its file expanded; infinite where these have no end."""
    functions = {(each.domain, each.name, each.overload): each for each in model.functions}
    known: dict[tuple[str, str, str], tuple[float, int]] = {}

    def counted(nodes: Any) -> tuple[float, int]:
        """Return the number of nodes and how deep they are nested."""
        total, deepest = 0.0, 0
        for node in nodes:
            inner = [counted(graph.node) for graph in subgraphs(node)]
            called = (node.domain, node.op_type, node.overload)
            if called in functions:
                if called not in known:
                    known[called] = math.inf, 0  # where it comes by itself again
                    known[called] = counted(functions[called].node)
                inner.append(known[called])
            total += 1 + sum(count for count, _ in inner)
            deepest = max(deepest, 1 + max((depth for _, depth in inner), default=0))
        return total, deepest

    try:
        total, deepest = counted(model.graph.node)
    except RecursionError:
        return math.inf
    return total if deepest <= DEEPEST else math.inf


def label(node: Any) -> str:
    """Return a node's operator and name; where it has no name, its first output."""
    return f"operator {node.op_type} ({named(node)})"


def named(node: Any) -> str:
    """Return a node's name; where it has none, its first output."""
    return f"node {node.name}" if node.name else f"output {next(iter(node.output), '?')}"


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
        inputs: the tensor outside that each of its inputs stands for; also of an initializer that is not copied.
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
    for node in nodes:
        node.name = names.free_node(node.name)
    found = []
    for output, outer in zip(graph.output, outputs, strict=True):
        made = mapped.get(output.name, output.name)
        if outer and made != outer:
            nodes.append(helper.make_node("Identity", [made], [outer]))
            made = outer
        found.append(made)
    weights = []
    for tensor in graph.initializer:
        if tensor.name in inputs:
            continue
        weights.append(copied(tensor, mapped[tensor.name]))
    return nodes, weights, found


def copied(tensor: Any, name: str) -> Any:
    """Return a copy of an initializer with another name."""
    weight = onnx.TensorProto()
    weight.CopyFrom(tensor)
    weight.name = name
    return weight


def prune(graph: Any) -> None:
    """Take out the nodes and initializers that no output of the graph needs."""
    needed = {value.name for value in graph.output}
    kept = []
    for node in reversed(graph.node):
        if needed.isdisjoint(node.output):
            continue
        kept.append(node)
        for name in reads(node):
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


def reads(node: Any) -> Iterator[str]:
    """Yield all names that a node reads, in the graphs inside it, too."""
    yield from node.input
    for graph in subgraphs(node):
        for inner in graph.node:
            yield from reads(inner)
        yield from (output.name for output in graph.output)
