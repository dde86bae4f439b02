"""First plans for local search: an order of the nodes, cut so that the stages are about even.

Next: `local_search.py`, which improves them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tvm_pipeline.core.topology import topological_order
from tvm_pipeline.planning.local.device_figures import MACS, PARAMS, DeviceArrays
from tvm_pipeline.planning.local.graph_arrays import GraphArrays
from tvm_pipeline.planning.local.search_state import BYTES, Aim
from tvm_pipeline.planning.search.cuts import Floats, Integers


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


def deep_order(graph: GraphArrays) -> Integers:
    """Return a topological order that follows a branch to its end: of the ready nodes, the last that became ready."""
    before, after = ([row.tolist() for row in np.split(graph.next[side], graph.starts[side, 1:-1])] for side in (1, 0))
    return np.array(topological_order(before, after, "last"))
