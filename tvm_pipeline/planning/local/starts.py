"""First plans for local search: an order of the nodes, cut so that the largest stage is about as small as possible.

Next: `local_search.py`, which improves them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_pipeline.cost.stage_table import computing, fetched, moving
from tvm_pipeline.planning.local.device_figures import MACS, PARAMS
from tvm_pipeline.planning.local.search_state import BYTES
from tvm_pipeline.solvers.hot import hot

# Each halves the distance between a cap that is too small and one that suffices.
HALVINGS = 22


@hot
def cut_order(graph: Any, devices: Any, aim: Any, order: Any, device: Any, stages: Any) -> Any:
    """Return the stage of each node after cutting `order` into `stages` segments.

    The least cap is bisected for which the segments fit, if each takes as many nodes as it can. For objectives of bytes
    a segment's cost is its parameters, else its seconds. Segments of equal length are the answer where none fit.
    """
    count = len(order)
    sums = np.zeros((count + 1, graph.weights.shape[1]))
    for index in range(count):
        for column in range(graph.weights.shape[1]):
            sums[index + 1, column] = sums[index, column] + graph.weights[order[index], column]
    crossing = order_crossing(graph, order)
    ends, found = np.empty(stages, np.int64), np.empty(stages, np.int64)
    for s in range(stages):
        found[s] = count * (s + 1) // stages
    start, low, high, widest = 0, 0.0, 0.0, 0.0
    for index in range(count + 1):
        widest = max(widest, crossing[index])
    for s in range(stages):
        high = max(high, segment(devices, aim, sums, crossing, device, s, start, count))
        d = device[s]
        p = device[s - 1] if s else len(devices.capacity)
        through = moving(devices.table, p, d, widest, widest) - moving(devices.table, p, d, 0.0, 0.0)
        high = max(high, high + through * devices.slowdown[stages, d])
    for _ in range(HALVINGS):
        cap = (low + high) / 2.0
        if fill(devices, aim, sums, crossing, device, stages, cap, ends):
            for s in range(stages):
                found[s] = ends[s]
            high = cap
        else:
            low = cap
    stage = np.empty(count, np.int64)
    for s in range(stages):
        for index in range(start, found[s]):
            stage[order[index]] = s
        start = found[s]
    return stage


@hot
def order_crossing(graph: Any, order: Any) -> Any:
    """Return the bytes that cross each of the N+1 boundaries of an order; zeros where edges are counted."""
    count = len(order)
    place, change = np.empty(count, np.int64), np.zeros(count + 2)
    for index in range(count):
        place[order[index]] = index
        change[index + 1] += graph.written[order[index]]
    for tensor in range(len(graph.tensor_bytes)):
        last = 0
        for entry in range(graph.readers_starts[tensor], graph.readers_starts[tensor + 1]):
            last = max(last, place[graph.readers[entry]])
        if graph.writer[tensor] < 0:
            change[0] += graph.tensor_bytes[tensor]
        change[last + 1] -= graph.tensor_bytes[tensor]
    crossing = np.empty(count + 1)
    total = graph.always
    for index in range(count + 1):
        total += change[index]
        crossing[index] = total
    return crossing


@hot
def segment(
    devices: Any, aim: Any, sums: Any, crossing: Any, device: Any, s: Any, start: Any, end: Any
) -> Any:  # fmt: skip
    """Return the cost of a segment as stage s: its parameters, or its seconds with its transfers."""
    d = device[s]
    params = sums[end, PARAMS] - sums[start, PARAMS]
    if aim.objective == BYTES:
        return params
    p = device[s - 1] if s else len(devices.capacity)
    seconds = work(devices, sums, d, start, end) + moving(devices.table, p, d, crossing[start], crossing[end])
    return seconds * devices.slowdown[len(device), d]


@hot
def work(devices: Any, sums: Any, d: Any, start: Any, end: Any) -> Any:
    """Return the seconds of computing a segment on device d."""
    added = sums[end, devices.added[d]] - sums[start, devices.added[d]] if devices.added[d] >= 0 else 0.0
    macs, params = sums[end, MACS] - sums[start, MACS], sums[end, PARAMS] - sums[start, PARAMS]
    return computing(devices.table, d, added, macs * devices.s_per_mac[d], fetched(devices.table, d, params))


@hot
def fill(devices: Any, aim: Any, sums: Any, crossing: Any, device: Any, stages: Any, cap: Any, ends: Any) -> Any:
    """Give each stage as many nodes as its cap and its device allow; return whether all nodes are placed."""
    count, start = len(crossing) - 1, 0
    for s in range(stages):
        d = device[s]
        furthest, most = -1, count - (stages - 1 - s)
        for end in range(start + 1, most + 1):
            params = sums[end, PARAMS] - sums[start, PARAMS]
            if params > devices.capacity[d]:
                break
            if devices.blocked[d] >= 0 and sums[end, devices.blocked[d]] > sums[start, devices.blocked[d]]:
                break
            least = params if aim.objective == BYTES else work(devices, sums, d, start, end)
            if least > cap:
                break
            if (s < stages - 1 or end == count) and segment(devices, aim, sums, crossing, device, s, start, end) <= cap:
                furthest = end
        if furthest < 0:
            return False
        ends[s] = furthest
        start = furthest
    return start == count


@hot
def deep_order(graph: Any) -> Any:
    """Return a topological order that follows a branch to its end: of the ready nodes, the last that became ready."""
    count = len(graph.written)
    missing = np.empty(count, np.int64)
    ready, order = np.empty(count, np.int64), np.empty(count, np.int64)
    height, done = 0, 0
    for node in range(count - 1, -1, -1):
        missing[node] = graph.starts[1, node + 1] - graph.starts[1, node]
        if missing[node] == 0:
            ready[height] = node
            height += 1
    while height:
        height -= 1
        node = ready[height]
        order[done] = node
        done += 1
        for edge in range(graph.starts[0, node], graph.starts[0, node + 1]):
            other = graph.next[0, edge]
            missing[other] -= 1
            if missing[other] == 0:
                ready[height] = other
                height += 1
    return order
