"""First plans for local search: an order of the nodes, cut so that the stages are about even.

Next: `local_search.py`, which improves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tvm_pipeline.planning.local.device_figures import MACS, PARAMS, DeviceArrays
from tvm_pipeline.planning.local.graph_arrays import GraphArrays
from tvm_pipeline.planning.local.search_state import BYTES, Aim
from tvm_pipeline.planning.search.cuts import Floats, Integers
from tvm_pipeline.solvers.hot import hot


def cut_order(
    graph: GraphArrays, devices: DeviceArrays, aim: Aim, order: Integers, device: Integers, stages: int
) -> Integers:
    """Return the stage of each node after cutting `order` into stages of about equal seconds.

    Stage s is on device[s]. Transfers, fetches and limits do not count. For objectives of bytes, the stages have about
    equal bytes of parameters.
    """
    rows = [graph.weights[:, PARAMS]] * stages
    if aim.objective != BYTES:
        rows = [node_seconds(graph, devices, d) for d in device[:stages].tolist()]
    totals = [max(float(row.sum()), 1e-12) for row in rows]
    relative = sum(row / total for row, total in zip(rows, totals, strict=True))
    ends = even_ends(np.concatenate(([0.0], np.cumsum(relative[order]))), [1 / total for total in totals])
    stage = np.empty(len(order), np.int64)
    stage[order] = np.repeat(np.arange(stages), np.diff(ends))
    return stage


def node_seconds(graph: GraphArrays, devices: DeviceArrays, d: int) -> Floats:
    """Return the seconds of each node on device d, without fetches of parameters."""
    seconds: Floats = graph.weights[:, MACS] * devices.s_per_mac[d]
    return seconds + graph.weights[:, devices.added[d]] if devices.added[d] >= 0 else seconds


def even_ends(sums: Floats, shares: Sequence[float]) -> Integers:
    """Return ascending positions, from the first to the last, that cut ascending sums about in proportion to shares."""
    wanted = np.cumsum(shares)[:-1] / np.sum(shares) * sums[-1]
    found = np.array([0, *np.searchsorted(sums, wanted), len(sums) - 1])
    for index in range(1, len(shares)):
        found[index] = max(found[index], found[index - 1] + 1)
    for index in range(len(shares) - 1, 0, -1):
        found[index] = min(found[index], found[index + 1] - 1)
    return found


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
