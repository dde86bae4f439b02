"""A problem as arrays for the loops of local search: nodes, edges, tensors and weights, devices and links.

A node is an operator or, under `children_together`, operators that stand in one stage in every plan. Weights of nodes
are whole numbers of a unit so small that rounding to it does not show. Their sums are exact in float64, in any order
and after any number of moves. Columns of the weights: MACs, bytes of parameters, the number of operators, then the
seconds that an operator adds on each kind of device, its joules, and whether the device cannot run it. Devices with
equal figures share columns.

Next: `annealing.py`, the loops.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from tvm_pipeline.core.graph import OperatorGraph, edge_bytes
from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.problem import Problem, counts_edges
from tvm_pipeline.core.topology import successors
from tvm_pipeline.cost.device_costs import DeviceCosts, busy_factor, cost_of
from tvm_pipeline.cost.stage_table import DeviceTable, device_table
from tvm_pipeline.planning.sat.staging import leaders_of
from tvm_pipeline.planning.search.cost_tables import capacities
from tvm_pipeline.planning.search.cuts import Floats, Integers

MACS, PARAMS, COUNT = 0, 1, 2


class GraphArrays(NamedTuple):
    """N nodes in a topological order, and the T tensors that are not alive to the end.

    Lists of lists are in rows: those of node n are `items[starts[n]:starts[n + 1]]`.

    Attributes:
        next, starts: 2 x E and 2 x N+1; for each node, the nodes that read from it (row 0), and those that it reads.
        edge_bytes: 2 x E; the bytes of these edges.
        weights: N x C; what a node adds to the sums of its stage, see above.
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
    leader = leaders_of(graph.edges.before)
    before: list[set[int]] = [set() for _ in leader]
    for index, sources in enumerate(graph.edges.before):
        before[leader[index]] |= {leader[source] for source in sources} - {leader[index]}
    # Operators that need one another stand together, too: Kosaraju's algorithm finds them in a topological order.
    seen: set[int] = set()
    roots = reversed(_reached(sorted(set(leader)), successors(before), set()))
    groups = (group for root in roots if (group := _reached([root], before, seen)))
    numbers = {node: number for number, group in enumerate(groups) for node in group}
    return np.array([numbers[node] for node in leader])


def _reached(roots: Sequence[int], neighbours: Sequence[Iterable[int]], seen: set[int]) -> list[int]:
    """Return what is reached from the roots and was not seen, in the order in which a depth-first search leaves it."""
    left, stack = [], [(root, False) for root in roots]
    while stack:
        node, is_left = stack.pop()
        if is_left:
            left.append(node)
        elif node not in seen:
            seen.add(node)
            stack += ((node, True), *((other, False) for other in neighbours[node]))
    return left


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


def _whole_units(figures: Floats) -> Floats:
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


class DeviceArrays(NamedTuple):
    """The figures of D devices, and of the links and the B buses between them.

    Attributes:
        table: of the devices.
        added, joule_column, blocked: D; the columns of the weights, -1 where the device has none.
        s_per_mac, capacity, cache, watts: D; see `DeviceCosts`; `cache` is that of overflow.
        slowdown: D+1 x D; the factor of each device while so many devices work.
        link_bus: D x D; the bus of the link from the device of the row; -1 for none.
        bus: D; the bus over which parameters are fetched, -1 for none.
        copies: D; the bus that carries the device's transfers in its place, -1 for none.
        buses: B.
    """

    table: DeviceTable
    added: Any
    joule_column: Any
    blocked: Any
    s_per_mac: Any
    capacity: Any
    cache: Any
    watts: Any
    slowdown: Any
    link_bus: Any
    bus: Any
    copies: Any
    buses: int

    @property
    def are_alike(self) -> bool:
        """Whether all devices and links have equal figures, so that it does not matter which device has which stage."""
        call, spill, cached, receive, send, link = self.table
        alone = [self.added, self.joule_column, self.blocked, self.s_per_mac, self.capacity, self.cache, self.watts]
        alone += [self.bus, self.copies, *self.slowdown, call, spill, cached, *receive, *send]
        apart = ~np.eye(len(call), dtype=bool)
        between = [figures[apart] for figures in (self.link_bus, *link[:, :-1])]
        return all(bool((figures == figures[:1]).all()) for figures in (*alone, *between))


def device_arrays(problem: Problem, devices: Sequence[Device]) -> tuple[DeviceArrays, Floats]:
    """Return the arrays of these devices, and the N x C weights of the operators."""
    operators = problem.graph.operators
    costs = [cost_of(problem, device) for device in devices]
    macs = np.array([operator.macs for operator in operators], np.float64)
    params = np.array([operator.param_bytes for operator in operators], np.float64)
    columns: list[Floats] = [macs, params, np.ones(len(operators))]
    known: dict[bytes, int] = {}

    def column(figures: Floats) -> int:
        if not figures.any():
            return -1
        key = figures.tobytes()
        if key not in known:
            known[key] = len(columns)
            columns.append(_whole_units(figures))
        return known[key]

    added: list[int] = []
    joules: list[int] = []
    blocked: list[int] = []
    for index, cost in enumerate(costs):
        same = next((other for other in range(index) if costs[other].alike(cost)), None)
        if same is not None:
            for found in (added, joules, blocked):
                found.append(found[same])
            continue
        seconds = _added_s(problem, cost)
        blocked.append(column(np.isnan(seconds).astype(np.float64)))
        added.append(column(np.nan_to_num(seconds)))
        measured_j = cost.added_j(operators[0]) is not None and problem.objective == "energy"
        joules.append(column(np.array([cost.added_j(o) for o in operators], np.float64)) if measured_j else -2)
    names = [device.name for device in devices]
    links = [[problem.link(source, target).bus for target in names] for source in names]
    used = {*(bus for row in links for bus in row), *(c.shared_bus for c in costs), *(c.copies_bus for c in costs)}
    buses = sorted(used - {""})
    number = {"": -1, **{bus: index for index, bus in enumerate(buses)}}
    working = (1, *range(1, len(devices) + 1))
    arrays = DeviceArrays(
        table=device_table(problem, devices),
        added=np.array(added, int),
        joule_column=np.array(joules, int),
        blocked=np.array(blocked, int),
        s_per_mac=np.array([float(cost.every_work_s(np.ones(1))[0]) for cost in costs], float),
        capacity=capacities(devices),
        cache=np.array([device.cache_bytes or np.inf for device in devices], float),
        watts=np.array([cost.active_w or 0.0 for cost in costs], float),
        slowdown=np.array([[busy_factor(problem, d, n) for d in devices] for n in working], float),
        link_bus=np.array([[number[bus] for bus in row] for row in links], int),
        bus=np.array([number[cost.shared_bus] for cost in costs], int),
        copies=np.array([number[cost.copies_bus] for cost in costs], int),
        buses=len(buses),
    )
    return arrays, np.stack(columns, axis=1)


def _added_s(problem: Problem, cost: DeviceCosts) -> Floats:
    if problem.is_lexicographic and not cost.is_known:
        return np.zeros(len(problem.graph))
    return cost.every_added_s(problem.graph.operators)
