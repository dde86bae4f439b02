"""Operator graphs that no frontend makes: from files, from networkx, and several graphs joined into one.

A file contains either the fields of an OperatorGraph (key `operators`), or nodes and edges, which other tools write:

    {"name": "net",
     "nodes": [{"name": "image", "op": "InputLayer", "output_shape": [1, 8, 8, 3]},
               {"name": "conv", "op": "Conv2D", "param_bytes": 108, "output_bytes": 256, "macs": 6912}],
     "edges": [[0, 1]]}

`profiles/keras/` has such files. Next: `graph.py`, which defines the operator graph.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.graph_limits import MOST_FILE_BYTES, MOST_OPERATORS
from tvm_pipeline.core.topology import find_cycle, topological_order
from tvm_pipeline.documents import blamed
from tvm_pipeline.errors import GraphError
from tvm_pipeline.files import read_bytes


class Node(msgspec.Struct, frozen=True):
    """An operator with one output, which its successors read.

    Attributes:
        name: unique in the graph.
        op: the operation.
        param_bytes: bytes of its weights.
        output_bytes: bytes of its output; if it is left out, the shape is needed and an element counts as one byte.
        macs: multiply-accumulates.
        output_shape: used if it has as many elements as the output has bytes; else the output is a flat tensor.
    """

    name: str
    op: str = "operator"
    param_bytes: int | float = 0
    output_bytes: int | float | None = None
    macs: int | float = 0
    output_shape: Sequence[int | float] | None = None


class _NodeFile(msgspec.Struct):
    name: str
    nodes: list[Node]
    edges: list[tuple[int | str, int | str]]


def read_graph(path: Path | str) -> OperatorGraph:
    """Read an operator graph from a JSON file of either form; unknown keys are ignored.

    Raises:
        GraphError: the file cannot be read, or OperatorGraph or `graph_of_nodes` refuses its graph; the message names
            the file.

    Examples:
        >>> import json, tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        ...     nodes = [{"name": "image", "output_bytes": 192}, {"name": "conv", "output_bytes": 256, "macs": 6912}]
        ...     _ = file.write(json.dumps({"name": "net", "nodes": nodes, "edges": [["image", "conv"]]}))
        ...     file.flush()
        ...     graph = read_graph(file.name)
        >>> [(operator.name, operator.inputs, operator.output_bytes) for operator in graph.operators]
        [('image', (), 192), ('conv', ('image',), 256)]
    """
    content = read_bytes(path, GraphError, MOST_FILE_BYTES)
    with blamed(path, GraphError, "`tvm-pipeline profile MODEL --graph FILE` writes one"):
        # msgspec's own reader refuses a NaN. This one accepts it, so that the message can name its operator.
        fields = json.loads(content)
        if isinstance(fields, dict) and "nodes" not in fields:
            return msgspec.convert(fields, OperatorGraph)
        file = msgspec.convert(fields, _NodeFile)
        return graph_of_nodes(file.name, file.nodes, file.edges)


def graph_of_nodes(name: str, nodes: Sequence[Node], edges: Iterable[tuple[int | str, int | str]]) -> OperatorGraph:
    """Return the graph of `nodes`, with one operator for each.

    The operators keep the given order if it is topological; else the node of least index that is ready comes next.
    Tensors are named after the operators that write them; tensors that no operator reads are the graph's outputs. The
    graph has no inputs: its first operators write the input.

    Args:
        edges: pairs of nodes, where the second reads what the first writes. A node is given by its index or by its
            name. An edge that is given twice counts once.

    Raises:
        GraphError: there are no nodes, two have the same name, a size is negative or not a whole number, an edge names
            no node, or the graph is cyclic or in several parts.

    Examples:
        >>> graph = graph_of_nodes("net", [Node("conv", output_bytes=256), Node("image", output_bytes=192)], [(1, 0)])
        >>> graph.operator_names, graph.outputs
        (['image', 'conv'], ('conv',))
    """
    if not nodes:
        raise GraphError(f"graph {name} has no nodes; it needs at least one")
    if len(nodes) > MOST_OPERATORS:
        raise GraphError(
            f"graph {name} has {len(nodes)} nodes, and plans are made for up to {MOST_OPERATORS}; merge some"
        )
    before, after = _neighbours(name, nodes, edges)
    order = topological_order(before, after)
    if len(order) < len(nodes):
        cycle = [nodes[index].name for index in find_cycle(before, order)]
        shown = [*cycle[:6], *([f"... ({len(cycle)} in all)"] if len(cycle) > 6 else []), cycle[0]]
        raise GraphError(f"graph {name} is cyclic: {' -> '.join(shown)}; remove an edge of the cycle")
    _check_connected(name, nodes, before, after)
    operators = tuple(
        Operator(
            nodes[index].name,
            nodes[index].op,
            tuple(nodes[source].name for source in before[index]),
            (Tensor(nodes[index].name, _output_shape(name, nodes[index]), "int8"),),
            _whole(name, nodes[index], "param_bytes", nodes[index].param_bytes),
            _whole(name, nodes[index], "macs", nodes[index].macs),
        )
        for index in order
    )
    return OperatorGraph(name, (), operators, tuple(nodes[index].name for index in order if not after[index]))


def graph_from_networkx(digraph: Any, name: str | None = None) -> OperatorGraph:
    """Return the operator graph of a networkx DiGraph (see `graph_of_nodes`); an edge leads from writer to reader.

    Args:
        digraph: the keys of its nodes become the operators' names. A node has the attributes of Node: `output_bytes`
            (bytes) or `output_shape` (of one-byte elements), and optionally `param_bytes` (bytes), `macs` and `op`.
            Other attributes are ignored.
        name: of the graph; by default the digraph's own name, else "networkx".

    Raises:
        GraphError: the graph is not directed, or `graph_of_nodes` refuses it.

    Examples:
        >>> import networkx
        >>> digraph = networkx.DiGraph(name="net")
        >>> digraph.add_node("image", output_shape=(1, 8, 8, 3))
        >>> digraph.add_node("conv", op="Conv2D", param_bytes=108, output_shape=(1, 8, 8, 4), macs=6912)
        >>> digraph.add_edge("image", "conv")
        >>> graph = graph_from_networkx(digraph)
        >>> graph.name, [operator.output_bytes for operator in graph.operators], graph.outputs
        ('net', [192, 256], ('conv',))
    """
    name = name or digraph.name or "networkx"
    if not digraph.is_directed():
        raise GraphError(f"graph {name} has no directions; give a networkx.DiGraph, its edges from writer to reader")
    attributes: Mapping[Any, Mapping[str, Any]] = digraph.nodes
    nodes = [
        Node(str(key), **{field: found[field] for field in Node.__struct_fields__[1:] if field in found})
        for key, found in attributes.items()
    ]
    position = {key: index for index, key in enumerate(attributes)}
    return graph_of_nodes(name, nodes, ((position[source], position[reader]) for source, reader in digraph.edges()))


def merge_graphs(graphs: Sequence[OperatorGraph], name: str) -> OperatorGraph:
    """Return one graph of several models that run together, between a source and a sink that cost nothing.

    A scheduler of connected graphs can then spread several models over one pipeline (co-compilation, Yin et al.,
    "Exact Memory- and Communication-aware Scheduling of DNNs on Pipelined Edge TPUs", SEC 2022). The operators that
    read no other operator of their model read the source as well, and the sink reads every output of every model. The
    merged graph has the inputs and outputs of all models. Every name gets the name of its graph in front, as in
    `net/conv`; if two graphs have the same name, the second is called `net#2`.

    Raises:
        GraphError: there are no graphs, the names lead to two operators of one name, or calls compute several frames.

    Examples:
        >>> net = OperatorGraph("net", (), (Operator("conv", "conv2d", (), (Tensor("out", (8,)),)),), ("out",))
        >>> merged = merge_graphs([net, net], "two")
        >>> merged.operator_names
        ['source', 'net/conv', 'net#2/conv', 'sink']
        >>> merged.outputs
        ('net/out', 'net#2/out')
    """
    if not graphs:
        raise GraphError(f"graph {name}: there are no graphs to merge; give at least one")
    if wide := next((graph for graph in graphs if graph.batch > 1), None):
        raise GraphError(f"graph {wide.name}: its calls compute {wide.batch} frames; merge graphs of one frame a call")
    start = Tensor("source", (0,), "int8")
    operators = [Operator("source", "source", (), (start,))]
    inputs: list[Tensor] = []
    outputs: list[str] = []
    prefixes: set[str] = set()
    for graph in graphs:
        prefix, number = f"{graph.name}/", 1
        while prefix in prefixes:
            number += 1
            prefix = f"{graph.name}#{number}/"
        prefixes.add(prefix)
        from_outside = {tensor.name for tensor in graph.inputs}
        inputs += (replace(tensor, name=prefix + tensor.name) for tensor in graph.inputs)
        outputs += (prefix + output for output in graph.outputs)
        for part in graph.operators:
            reads = [prefix + read for read in part.inputs]
            if from_outside.issuperset(part.inputs):
                reads.append(start.name)
            writes = tuple(replace(tensor, name=prefix + tensor.name) for tensor in part.outputs)
            operators.append(replace(part, name=prefix + part.name, inputs=tuple(reads), outputs=writes))
    operators.append(Operator("sink", "sink", tuple(outputs), ()))
    return OperatorGraph(name, tuple(inputs), tuple(operators), tuple(outputs))


def _neighbours(
    name: str, nodes: Sequence[Node], edges: Iterable[tuple[int | str, int | str]]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return for each node the nodes that it reads and the nodes that read it, each once, in the order of the edges."""
    position = {node.name: index for index, node in enumerate(nodes)}
    if len(position) != len(nodes):
        twice = next(node.name for index, node in enumerate(nodes) if position[node.name] != index)
        raise GraphError(f"graph {name}: two nodes are called {twice}; give each a name of its own")

    def find(end: int | str, edge: tuple[int | str, int | str]) -> int:
        index = position.get(end, -1) if isinstance(end, str) else end
        if not 0 <= index < len(nodes):
            raise GraphError(
                f"graph {name}: edge {list(edge)} names node {end!r}, which is not there; give a node's name, or its "
                f"index from 0 to {len(nodes) - 1}"
            )
        return index

    before: list[list[int]] = [[] for _ in nodes]
    after: list[list[int]] = [[] for _ in nodes]
    for source, reader in dict.fromkeys((find(edge[0], edge), find(edge[1], edge)) for edge in edges):
        if source == reader:
            raise GraphError(f"graph {name}: operator {nodes[source].name} reads its own output; remove that edge")
        before[reader].append(source)
        after[source].append(reader)
    return before, after


def _check_connected(name: str, nodes: Sequence[Node], before: list[list[int]], after: list[list[int]]) -> None:
    seen, waiting = {0}, [0]
    while waiting:
        index = waiting.pop()
        found = [other for other in (*before[index], *after[index]) if other not in seen]
        seen.update(found)
        waiting += found
    if len(seen) < len(nodes):
        apart = next(node.name for index, node in enumerate(nodes) if index not in seen)
        raise GraphError(
            f"graph {name} is in several parts: no edges join {nodes[0].name} and {apart}; plan each part on its own, "
            "or join them with tvm_pipeline.merge_graphs"
        )


def _output_shape(graph: str, node: Node) -> tuple[int, ...]:
    """Return the shape of the node's output in elements of one byte."""
    shape = None
    if node.output_shape is not None:
        # An attribute of a networkx graph may be anything. numpy takes a single number for a shape as well.
        extents = node.output_shape if isinstance(node.output_shape, Iterable) else (node.output_shape,)
        shape = tuple(_whole(graph, node, "output_shape", extent) for extent in extents)
    if node.output_bytes is None:
        if shape is None:
            raise GraphError(f"graph {graph}: operator {node.name} has neither output_bytes nor output_shape; give one")
        return shape
    size = _whole(graph, node, "output_bytes", node.output_bytes)
    return shape if shape is not None and math.prod(shape) == size else (size,)


def _whole(graph: str, node: Node, what: str, figure: Any) -> int:
    """Return the figure as an int; numpy's integers and floats such as 3.0 are accepted."""
    try:
        whole = operator.index(figure)
    except TypeError:
        whole = int(figure) if isinstance(figure, float) and figure.is_integer() else -1
    if whole < 0:
        raise GraphError(
            f"graph {graph}: {what} of operator {node.name} is {figure}; it must be a whole number, 0 or more"
        )
    return whole
