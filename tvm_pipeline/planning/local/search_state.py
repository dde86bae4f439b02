"""The state of a local search: where the nodes stand, what follows from that, and what is minimised.

Shapes use the letters of `graph_arrays.py` and `device_figures.py`; there are K stages. Next: `annealing.py`, whose
loops change it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tvm_pipeline.planning.local.device_figures import DeviceArrays
from tvm_pipeline.planning.local.graph_arrays import GraphArrays

# What is minimised. With BYTES the parts of the objective are in `Aim.parts`.
PERIOD, LATENCY, ENERGY, BYTES = 0, 1, 2, 3
MEMORY, OVERFLOW, COMMUNICATION, NOTHING = 0, 1, 2, 3


class Aim(NamedTuple):
    """What is minimised, and under which limits.

    Attributes:
        objective: PERIOD, LATENCY, ENERGY or BYTES.
        parts: 3; for BYTES, the parts of the objective in their order, filled up with NOTHING.
        edges: whether communication counts edges.
        lock_s, idle_w: as in `device_costs.py`.
        most_s, most_latency_s: limits of the seconds between frames and of those of a frame; infinite for none.
        level: for BYTES, the part that is minimised; the parts before it must keep `caps`.
        caps: 3.
        scale: 3; figures that parts are divided by.
        smooth: the weight of the smooth part of the cost, beside the maximum.
        penalty: the weight of what is beyond limits.
    """

    objective: int
    parts: Any
    edges: bool
    lock_s: float
    idle_w: float
    most_s: float
    most_latency_s: float
    level: int
    caps: Any
    scale: Any
    smooth: float
    penalty: float


class State(NamedTuple):
    """Where the nodes stand, what follows from that, and the best that was seen.

    Attributes:
        stage: N.
        device: D; the device of each of the K stages, then the devices that are not used.
        sums: K x C; sums of the weights.
        crossing: K+1; bytes at each boundary (with `Aim.edges`, those that edges bring into each stage).
        last: T; the last stage that reads a tensor.
        same: 2 x N; how many nodes of the same stage read from a node, and how many it reads from.
        free: 2 x N; the nodes that may move one stage on, and one stage back.
        place: 2 x N; where a node stands in `free`, or -1.
        free_count: 2.
        busy, alone, active_j, excess: K; the figures of each stage: seconds while all work, seconds alone, joules, and
            how far it is beyond its device.
        on_bus: K x B.
        best_stage, best_device: as `stage` and `device`.
        best: 5; the excess of the best, then its figures. best[4] is 1 while the best was not saved yet.
        taken, mark: N; the nodes of a move.
        random: 1; the state of the generator.
    """

    stage: Any
    device: Any
    sums: Any
    crossing: Any
    last: Any
    same: Any
    free: Any
    place: Any
    free_count: Any
    busy: Any
    alone: Any
    active_j: Any
    excess: Any
    on_bus: Any
    best_stage: Any
    best_device: Any
    best: Any
    taken: Any
    mark: Any
    random: Any


def new_state(graph: GraphArrays, arrays: DeviceArrays, stages: int, seed: int) -> State:
    """Return a state without a plan."""
    nodes, columns = graph.weights.shape
    devices = len(arrays.capacity)
    return State(
        stage=np.zeros(nodes, np.int64),
        device=np.arange(devices),
        sums=np.zeros((stages, columns)),
        crossing=np.zeros(stages + 1),
        last=np.zeros(len(graph.tensor_bytes), np.int64),
        same=np.zeros((2, nodes), np.int64),
        free=np.zeros((2, nodes), np.int64),
        place=np.full((2, nodes), -1),
        free_count=np.zeros(2, np.int64),
        busy=np.zeros(stages),
        alone=np.zeros(stages),
        active_j=np.zeros(stages),
        excess=np.zeros(stages),
        on_bus=np.zeros((stages, arrays.buses)),
        best_stage=np.zeros(nodes, np.int64),
        best_device=np.arange(devices),
        best=np.array([math.inf, math.inf, math.inf, math.inf, 0.0]),
        taken=np.zeros(nodes, np.int64),
        mark=np.zeros(nodes, np.int64),
        random=np.array([_scrambled(seed)], np.uint64),
    )


def _scrambled(seed: int) -> int:
    """Return a state of the generator for a seed: not zero, and far apart for neighbouring seeds."""
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]) or 1


def place_all(graph: GraphArrays, aim: Aim, state: State) -> None:
    """Compute what follows from `state.stage`, apart from the figures of the stages."""
    stage, stages = state.stage, len(state.busy)
    for column in range(graph.weights.shape[1]):
        state.sums[:, column] = np.bincount(stage, graph.weights[:, column], stages)
    ends = np.array([0, stages - 1])
    for side in range(2):
        node = np.repeat(np.arange(len(stage)), np.diff(graph.starts[side]))
        together = stage[graph.next[side]] == stage[node]
        state.same[side] = np.bincount(node, together, len(stage))
        found = np.flatnonzero((state.same[side] == 0) & (stage != ends[1 - side]))
        state.place[side] = -1
        state.place[side, found] = np.arange(len(found))
        state.free[side, : len(found)] = found
        state.free_count[side] = len(found)
    tensor = np.repeat(np.arange(len(graph.tensor_bytes)), np.diff(graph.readers_starts))
    state.last[:] = 0
    np.maximum.at(state.last, tensor, stage[graph.readers])
    if aim.edges:
        state.crossing[:] = np.bincount(stage[node], graph.edge_bytes[1] * ~together, stages + 1)
        return
    # A tensor crosses the boundaries behind its writer, or all, and none behind its last reader.
    change = np.bincount(stage + 1, graph.written, stages + 2) - np.bincount(
        state.last + 1, graph.tensor_bytes, stages + 2
    )
    change[0] += graph.always + graph.tensor_bytes[graph.writer < 0].sum()
    state.crossing[:] = np.cumsum(change)[: stages + 1]
