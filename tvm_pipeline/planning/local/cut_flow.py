"""Minimum cuts of one network with many prices and many fixed operators: arrays, and a loop that numba compiles.

`least_crossing.py` builds a small network for each window of work. A search that branches asks for thousands of cuts of
the same graph; here the graph is laid out once, and operators that are fixed are left out while the flow is searched.

Dinic, "Algorithm for solution of a problem of maximum flow in a network with power estimation", Soviet Mathematics
Doklady 11, 1970. Next: `furthest_tree.py`, which branches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tvm_pipeline.planning.local.least_crossing import Network
from tvm_pipeline.planning.search.cuts import Floats
from tvm_pipeline.solvers.hot import hot

FREE, INSIDE, OUTSIDE = 0, 1, 2
_NEVER = 1 << 58  # the capacity of an arc that no minimum cut has
_MOST_FLOW, _FINEST = 2.0**54, 2.0**20  # the units of a flow, in all and for each byte


class CutArrays(NamedTuple):
    """The arcs between the N operators, the tensors that several of them read, and the model's inputs.

    Arcs come in pairs, an arc and its way back; those that leave node n are at starts[n] to starts[n + 1].

    Attributes:
        starts, head, back, capacity: of the arcs; `back` is the index of the other one of the pair.
        bytes: how many bytes cross at most.
    """

    starts: Any
    head: Any
    back: Any
    capacity: Any
    bytes: float


def cut_arrays(network: Network) -> CutArrays:
    """Return the network of all downsets as arrays; its last node stands for the inputs of the model."""
    arcs: list[tuple[int, int, int]] = []
    count = len(network)
    several = sum(len(readers) > 1 for _, readers, _ in network.flows)
    entry, nodes = count + several, count
    for v, found in enumerate(network.before):
        arcs += ((v, u, _NEVER) for u in found)
    for v, leader in network.together:
        arcs += ((v, leader, _NEVER), (leader, v, _NEVER))
    for writer, readers, size in network.flows:
        tail = entry if writer < 0 else writer
        if len(readers) == 1:
            arcs.append((tail, readers[0], size))
            continue
        arcs.append((tail, nodes, size))
        arcs += ((nodes, reader, _NEVER) for reader in readers)
        nodes += 1
    table = np.array(arcs, np.int64).reshape(-1, 3)
    tails = np.concatenate((table[:, 0], table[:, 1]))
    heads = np.concatenate((table[:, 1], table[:, 0]))
    sizes = np.concatenate((table[:, 2], np.zeros(len(table), np.int64)))
    order = np.argsort(tails, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    back = place[(order + len(table)) % (2 * len(table))] if len(table) else order
    starts = np.concatenate(([0], np.cumsum(np.bincount(tails, minlength=entry + 1)))).astype(np.int64)
    return CutArrays(starts, heads[order], back, sizes[order], network.bytes)


def least_cut(arrays: CutArrays, network: Network, work: Floats, price: float, state: Any) -> tuple[float, Any]:
    """Return a value just below the least X(D) - price w(D), and the D that has it, as N booleans.

    X(D) are the bytes that cross behind a downset D and w(D) the work of its operators, see `least_crossing.py`.

    Args:
        state: N; FREE, INSIDE or OUTSIDE. Each operator inside has all that it needs inside, each outside all that
            need it.
    """
    gain = price * work - network.kept
    scale = min(_FINEST, _MOST_FLOW / max(arrays.bytes + float(np.abs(gain).sum()), 1.0))
    # Capacities are rounded down, so the flow is never above the minimum cut.
    whole = np.floor(np.abs(gain) * scale).astype(np.int64)
    flow, side = greatest_flow(
        arrays.starts, arrays.head, arrays.back, arrays.capacity, scale, np.where(gain > 0, whole, -whole), state
    )
    inside, free = state == INSIDE, state == FREE
    least = flow / scale - float(gain[free & (gain > 0)].sum()) - float(gain[inside].sum()) + network.always
    return least - 1e-9 * abs(least), side


@hot
def greatest_flow(starts: Any, head: Any, back: Any, capacity: Any, scale: Any, gain: Any, state: Any) -> Any:
    """Return the greatest flow from the fixed operators inside to those outside, and the side of each operator.

    A free operator with a gain has an arc of that capacity from the source, and one with a loss one to the sink.
    """
    nodes, count = len(starts) - 1, len(gain)
    fixed = np.zeros(nodes, np.int64)
    fixed[:count] = state
    fixed[nodes - 1] = INSIDE
    room = np.zeros(len(head), np.int64)
    supply, demand = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    flow = 0
    for v in range(count):
        if fixed[v] == FREE:
            supply[v] = max(gain[v], 0)
            demand[v] = max(-gain[v], 0)
    for v in range(nodes):
        if fixed[v] == OUTSIDE:
            continue
        for arc in range(starts[v], starts[v + 1]):
            w, size = head[arc], capacity[arc]
            if size == 0 or fixed[w] == INSIDE:
                continue
            if size < _NEVER:
                size = np.int64(np.floor(size * scale))
            if fixed[v] == INSIDE and fixed[w] == OUTSIDE:
                flow += size
            elif fixed[v] == INSIDE:
                supply[w] = min(supply[w] + size, _NEVER)
            elif fixed[w] == OUTSIDE:
                demand[v] = min(demand[v] + size, _NEVER)
            else:
                room[arc] = size
    for v in range(nodes):
        if fixed[v] == FREE:
            both = min(supply[v], demand[v])
            flow += both
            supply[v] -= both
            demand[v] -= both
    level, queue = np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    at, path = np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    while True:
        level[:] = -1
        filled, done, found = 0, 0, False
        for v in range(nodes):
            if fixed[v] == FREE and supply[v] > 0:
                level[v] = 0
                queue[filled] = v
                filled += 1
        while done < filled:
            v = queue[done]
            done += 1
            found = found or demand[v] > 0
            for arc in range(starts[v], starts[v + 1]):
                w = head[arc]
                if room[arc] > 0 and level[w] < 0:
                    level[w] = level[v] + 1
                    queue[filled] = w
                    filled += 1
        if not found:
            break
        at[:] = starts[:-1]
        for source in range(nodes):
            if level[source] != 0:
                continue
            depth, v = 0, source
            while supply[source] > 0:
                if demand[v] > 0:
                    pushed = min(supply[source], demand[v])
                    for step in range(depth):
                        pushed = min(pushed, room[path[step]])
                    for step in range(depth):
                        room[path[step]] -= pushed
                        room[back[path[step]]] += pushed
                    supply[source] -= pushed
                    demand[v] -= pushed
                    flow += pushed
                    depth, v = 0, source
                    continue
                advanced = False
                while at[v] < starts[v + 1]:
                    arc = at[v]
                    w = head[arc]
                    if room[arc] > 0 and level[w] == level[v] + 1:
                        path[depth] = arc
                        depth += 1
                        v = w
                        advanced = True
                        break
                    at[v] += 1
                if advanced:
                    continue
                if depth == 0:
                    break
                depth -= 1
                v = head[back[path[depth]]]
                at[v] += 1
    side = np.zeros(count, np.bool_)
    for v in range(count):
        side[v] = fixed[v] == INSIDE or (fixed[v] == FREE and level[v] >= 0)
    return flow, side
