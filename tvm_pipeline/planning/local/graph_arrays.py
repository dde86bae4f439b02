"""The graph of a problem as arrays for the loops of local search: nodes, edges, tensors and weights.

A node is an operator or, under `children_together`, operators that stand in one stage in every plan. Weights of nodes
are whole numbers of a unit so small that rounding to it does not show. Their sums are exact in float64, in any order
and after any number of moves.

Next: `device_figures.py`, the devices; `annealing.py`, the loops.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from tvm_pipeline.core.graph import OperatorGraph, edge_bytes
from tvm_pipeline.core.problem import Problem, counts_edges
from tvm_pipeline.planning.sat.staging import leaders_of
from tvm_pipeline.planning.search.cuts import Floats, Integers
from tvm_pipeline.solvers.hot import hot


class GraphArrays(NamedTuple):
    """N nodes in a topological order, and the T tensors that are not alive to the end.

    Lists of lists are in rows: those of node n are `items[starts[n]:starts[n + 1]]`.

    Attributes:
        next, starts: 2 x E and 2 x N+1; for each node, the nodes that read from it (row 0), and those that it reads.
        edge_bytes: 2 x E; the bytes of these edges.
        weights: N x C; what a node adds to the sums of its stage, see `device_figures.py`.
        written: N; bytes of the tensors that it writes and that cross the boundary behind it.
        read, read_starts: for each node, the tensors that it reads.
        readers, readers_starts: for each tensor, the nodes that read it.
        tensor_bytes: T.
        writer: T; the node that writes it; -1 for an input of the model.
        always: bytes that cross every boundary: inputs of the model that are also outputs of it.
    """

    next: Any
    starts: Any
    edge_bytes: Any
    weights: Any
    written: Any
    read: Any
    read_starts: Any
    readers: Any
    readers_starts: Any
    tensor_bytes: Any
    writer: Any
    always: float


def nodes_of(problem: Problem) -> Integers:
    """Return the node of each operator, numbered in a topological order of the nodes."""
    graph = problem.graph
    if not problem.children_together:
        return np.arange(len(graph))
    leader = np.array(leaders_of(graph.edges.before))
    edges = _edges(graph)
    after, starts, _ = _rows(leader[edges[:, 0]], leader[edges[:, 1]], len(graph))
    component: Integers = _components(len(graph), after, starts, leader)
    return component


def graph_arrays(problem: Problem, node: Integers, weights: Floats) -> GraphArrays:
    """Return the arrays of the problem's graph.

    Args:
        node: for each operator, its node.
        weights: one row for each operator; those of a node are added.
    """
    graph, edges = problem.graph, problem.graph.edges
    count = int(node.max()) + 1
    ends, sizes = _node_edges(graph, node, count, with_bytes=counts_edges(problem.objective))
    kept = set() if problem.is_lexicographic else set(graph.outputs)
    written, always = np.zeros(count), 0.0
    readers: list[tuple[int, ...]] = []
    tensor_bytes: list[int] = []
    writers: list[int] = []
    numbers = node.tolist()
    for name, tensor in graph.tensors.items():
        writer = numbers[edges.writer[name]] if name in edges.writer else -1
        if not tensor.bytes or (problem.is_lexicographic and writer < 0):
            continue
        if name in kept:
            if writer < 0:
                always += tensor.bytes
            else:
                written[writer] += tensor.bytes
            continue
        found = {numbers[reader] for reader in edges.readers[name]}
        found.discard(writer)
        if found:
            if writer >= 0:
                written[writer] += tensor.bytes
            readers.append(tuple(sorted(found)))
            tensor_bytes.append(tensor.bytes)
            writers.append(writer)
    lengths = np.array([len(found) for found in readers], np.int64)
    tensors = np.repeat(np.arange(len(readers)), lengths)
    reader = np.fromiter(chain.from_iterable(readers), np.int64, int(lengths.sum()))
    read, read_starts, _ = _rows(reader, tensors, count)
    summed = np.zeros((count, weights.shape[1]))
    np.add.at(summed, node, weights)
    sides = [_rows(ends[:, side], ends[:, 1 - side], count) for side in range(2)]
    following, starts = (np.stack([side[part] for side in sides]) for part in range(2))
    edge_sizes = np.stack([sizes[order] for _, _, order in sides])
    return GraphArrays(
        following, starts, edge_sizes, summed, written,
        read, read_starts, reader, np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        np.array(tensor_bytes, np.float64), np.array(writers, np.int64), always,
    )  # fmt: skip


def whole_units(figures: Floats) -> Floats:
    """Return the figures, none of them negative, as multiples of a unit of which their sum has fewer than 2**52."""
    total = float(figures.sum())
    if not total:
        return figures
    unit = 2.0 ** (math.ceil(math.log2(total)) - 51)
    rounded: Floats = np.rint(figures / unit) * unit
    return rounded


def _edges(graph: OperatorGraph) -> Integers:
    """Return the writer and the reader of each edge between operators."""
    before = graph.edges.before
    lengths = [len(sources) for sources in before]
    writers = np.fromiter(chain.from_iterable(before), np.int64, sum(lengths))
    return np.stack((writers, np.repeat(np.arange(len(before)), lengths)), axis=1)


def _node_edges(graph: OperatorGraph, node: Integers, count: int, *, with_bytes: bool) -> tuple[Integers, Floats]:
    """Return the distinct edges between different nodes, and the bytes of each (zeros unless they are asked for)."""
    if with_bytes:
        found = edge_bytes(graph)
        edges = np.array(list(found), np.int64).reshape(-1, 2)
        sizes = np.array(list(found.values()), np.float64)
    else:
        edges = _edges(graph)
        sizes = np.zeros(len(edges))
    ends = node[edges]
    apart = ends[:, 0] != ends[:, 1]
    keys, inverse = np.unique(ends[apart, 0] * count + ends[apart, 1], return_inverse=True)
    summed: Floats = np.bincount(inverse, sizes[apart], len(keys)).astype(np.float64)
    return np.stack((keys // count, keys % count), axis=1), summed


def _rows(owner: Integers, item: Integers, count: int) -> tuple[Integers, Integers, Integers]:
    """Return the items of each of `count` owners in rows: the items, where rows start, and the order of the items."""
    order = np.argsort(owner, kind="stable")
    starts = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=count)))).astype(np.int64)
    return item[order], starts, order


@hot
def _components(count: Any, after: Any, starts: Any, leader: Any) -> Any:
    """Return the strongly connected component of each operator's leader, numbered in a topological order.

    Tarjan, "Depth-first search and linear graph algorithms", SIAM Journal on Computing 1, 1972, without recursion.
    """
    index, low = np.full(count, -1), np.zeros(count, np.int64)
    component, position = np.full(count, -1), np.zeros(count, np.int64)
    stack, path = np.empty(count, np.int64), np.empty(count, np.int64)
    visited, height, found = 0, 0, 0
    for root in range(count):
        if leader[root] != root or index[root] >= 0:
            continue
        depth = 1
        path[0] = root
        while depth:
            node = path[depth - 1]
            if index[node] < 0:
                index[node] = low[node] = visited
                position[node] = starts[node]
                visited += 1
                stack[height] = node
                height += 1
            descended = False
            while position[node] < starts[node + 1]:
                other = after[position[node]]
                if index[other] < 0:
                    path[depth] = other
                    depth += 1
                    descended = True
                    break
                if component[other] < 0:
                    low[node] = min(low[node], low[other])
                position[node] += 1
            if descended:
                continue
            if low[node] == index[node]:
                while True:
                    height -= 1
                    component[stack[height]] = found
                    if stack[height] == node:
                        break
                found += 1
            depth -= 1
    # Components are found in the reverse of a topological order.
    for node in range(count):
        component[node] = found - 1 - component[leader[node]] if leader[node] != node else component[node]
    for node in range(count):
        if leader[node] == node:
            component[node] = found - 1 - component[node]
    return component
