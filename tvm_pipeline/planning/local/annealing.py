"""The state of a local search, and its loops: simulated annealing over the stage of each node and device of each stage.

Kirkpatrick, Gelatt and Vecchi, "Optimization by simulated annealing", Science 220, 1983. A move takes a node from its
stage to another one that its neighbours allow; or a node with all its descendants in the stage one stage on, or with
its ancestors one stage back; or it exchanges two nodes of neighbouring stages, or the devices of two stages. The sums
of the stages and the bytes at the boundaries follow each move, so a move costs as much as the nodes that it takes have
edges, and one pass over the stages. Shapes use the letters of `problem_arrays.py`; there are K stages.

Next: `local_search.py`, which chooses starts and calls `anneal`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tvm_pipeline.cost.stage_table import computing, fetched, moving, over_link
from tvm_pipeline.planning.local.problem_arrays import COUNT, MACS, PARAMS, DeviceArrays, GraphArrays
from tvm_pipeline.solvers.hot import draw, hot

# A limit counts as kept up to this, which is below the rounding that the judge allows.
KEPT = 5e-10
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


@hot
def list_free(state: Any, node: Any) -> None:
    """Keep the lists of the nodes that may move one stage on or back, after a change of `node`."""
    for side in range(2):
        may = state.same[side, node] == 0 and state.stage[node] != (len(state.busy) - 1) * (1 - side)
        at = state.place[side, node]
        if may and at < 0:
            state.place[side, node] = state.free_count[side]
            state.free[side, state.free_count[side]] = node
            state.free_count[side] += 1
        elif not may and at >= 0:
            state.free_count[side] -= 1
            moved = state.free[side, state.free_count[side]]
            state.free[side, at] = moved
            state.place[side, moved] = at
            state.place[side, node] = -1


@hot
def weigh(devices: Any, aim: Any, state: Any, s: Any) -> None:
    """Compute the figures of stage `s` from its sums and from the bytes at its boundaries."""
    d = state.device[s]
    params = state.sums[s, PARAMS]
    excess = params / devices.capacity[d] - 1.0 if params > devices.capacity[d] else 0.0
    if devices.blocked[d] >= 0:
        excess += state.sums[s, devices.blocked[d]]
    state.excess[s] = excess
    if aim.objective == BYTES:
        return
    added = state.sums[s, devices.added[d]] if devices.added[d] >= 0 else 0.0
    beyond = fetched(devices.table, d, params)
    compute = computing(devices.table, d, added, state.sums[s, MACS] * devices.s_per_mac[d], beyond)
    received, sent = state.crossing[s], state.crossing[s + 1]
    p = state.device[s - 1] if s else len(devices.capacity)  # the first stage receives from the source of the frames
    moved = moving(devices.table, p, d, received, sent)
    for bus in range(devices.buses):
        state.on_bus[s, bus] = 0.0
    copies, carried = devices.copies[d], 0.0
    if s and devices.link_bus[p, d] >= 0:
        carried = over_link(devices.table, p, d, received)
        state.on_bus[s, devices.link_bus[p, d]] += carried
    if copies >= 0:
        state.on_bus[s, copies] += moved - carried
    if devices.bus[d] >= 0:
        state.on_bus[s, devices.bus[d]] += devices.table.spill[d] * beyond
    state.alone[s] = compute + moved
    state.busy[s] = (compute if copies >= 0 else compute + moved) * devices.slowdown[len(state.busy), d]
    if aim.objective == ENERGY:
        if devices.joule_column[d] == -2:
            state.active_j[s] = devices.watts[d] * (compute + moved)
        else:
            measured = state.sums[s, devices.joule_column[d]] if devices.joule_column[d] >= 0 else 0.0
            state.active_j[s] = measured + devices.watts[d] * moved


@hot
def part_of(part: Any, memory: Any, overflow: Any, communication: Any) -> Any:
    """Return one part of an objective of bytes."""
    return memory if part == MEMORY else overflow if part == OVERFLOW else communication if part != NOTHING else 0.0


@hot
def figures(devices: Any, aim: Any, state: Any) -> Any:
    """Return the excess over limits, the three figures of the objective, and a smooth companion of the first."""
    stages = len(state.busy)
    excess = 0.0
    if aim.objective == BYTES:
        most, over, crossing, smooth, total = 0.0, 0.0, 0.0, 0.0, 0.0
        for s in range(stages):
            params = state.sums[s, PARAMS]
            most = max(most, params)
            over += max(0.0, params - devices.cache[state.device[s]])
            excess += state.excess[s]
            square = (params / aim.scale[0]) ** 2
            smooth += square * square
            if s:
                crossing = max(crossing, state.crossing[s])
                total += state.crossing[s]
        first = part_of(aim.parts[0], most, over, crossing)
        second = part_of(aim.parts[1], most, over, crossing)
        third = part_of(aim.parts[2], most, over, crossing)
        of_bytes = aim.parts[aim.level] == COMMUNICATION
        smooth = total / aim.scale[aim.level] / stages if of_bytes else math.sqrt(math.sqrt(smooth / stages))
        return excess, first, second, third, smooth
    period, latency, joules, smooth = aim.lock_s, 0.0, 0.0, 0.0
    for s in range(stages):
        period = max(period, state.busy[s])
        latency += state.alone[s]
        joules += state.active_j[s]
        excess += state.excess[s]
        square = (state.busy[s] / aim.scale[0]) ** 2
        smooth += square * square
    for bus in range(devices.buses):
        total = 0.0
        for s in range(stages):
            total += state.on_bus[s, bus]
        period = max(period, total)
    if period > aim.most_s * (1.0 + KEPT):
        excess += period / aim.most_s - 1.0
    if latency > aim.most_latency_s * (1.0 + KEPT):
        excess += latency / aim.most_latency_s - 1.0
    if aim.objective == LATENCY:
        return excess, latency, 0.0, 0.0, latency / aim.scale[0]
    if aim.objective == ENERGY:
        energy = joules + aim.idle_w * period
        return excess, energy, 0.0, 0.0, energy / aim.scale[0]
    return excess, period, 0.0, 0.0, math.sqrt(math.sqrt(smooth / stages))


@hot
def cost_of_figures(aim: Any, excess: Any, a: Any, b: Any, c: Any, smooth: Any) -> Any:
    """Return the cost that is annealed."""
    cost = aim.smooth * smooth
    if excess > 0.0:
        cost += aim.penalty * (0.1 + excess)
    if aim.objective != BYTES:
        return cost + a / aim.scale[0]
    weight = 1.0
    for part in range(3):
        figure = a if part == 0 else b if part == 1 else c
        if part < aim.level:
            if figure > aim.caps[part]:
                cost += 4.0 * (figure - aim.caps[part]) / aim.scale[part]
        else:
            cost += weight * figure / aim.scale[part]
            weight *= 0.01
    return cost


@hot
def shift(graph: Any, aim: Any, state: Any, node: Any, b: Any) -> None:
    """Move a node to stage b in `stage`, `sums`, `crossing` and `last`. The way back undoes it exactly."""
    a = state.stage[node]
    for column in range(state.sums.shape[1]):
        weight = graph.weights[node, column]
        state.sums[a, column] -= weight
        state.sums[b, column] += weight
    state.stage[node] = b
    if aim.edges:
        for side in range(2):
            for edge in range(graph.starts[side, node], graph.starts[side, node + 1]):
                other = state.stage[graph.next[side, edge]]
                if other != a:
                    state.crossing[other if side == 0 else a] -= graph.edge_bytes[side, edge]
                if other != b:
                    state.crossing[other if side == 0 else b] += graph.edge_bytes[side, edge]
        return
    written = graph.written[node]
    if written > 0.0:
        for boundary in range(a + 1, b + 1):
            state.crossing[boundary] -= written
        for boundary in range(b + 1, a + 1):
            state.crossing[boundary] += written
    for entry in range(graph.read_starts[node], graph.read_starts[node + 1]):
        tensor = graph.read[entry]
        old = state.last[tensor]
        if b > old:
            for boundary in range(old + 1, b + 1):
                state.crossing[boundary] += graph.tensor_bytes[tensor]
            state.last[tensor] = b
        elif a == old and b < a:
            last = b
            for other in range(graph.readers_starts[tensor], graph.readers_starts[tensor + 1]):
                last = max(last, state.stage[graph.readers[other]])
                if last == old:
                    break
            for boundary in range(last + 1, old + 1):
                state.crossing[boundary] -= graph.tensor_bytes[tensor]
            state.last[tensor] = last


@hot
def carry_out(
    graph: Any, aim: Any, state: Any, count: Any, goal: Any, partner: Any, source: Any, i: Any, j: Any
) -> None:  # fmt: skip
    """Move `count` nodes to `goal` and their partner to `source`; for no nodes, exchange the devices of i and j."""
    for index in range(count):
        shift(graph, aim, state, state.taken[index], goal)
    if partner >= 0:
        shift(graph, aim, state, partner, source)
    if not count:
        state.device[i], state.device[j] = state.device[j], state.device[i]


@hot
def relist(graph: Any, state: Any, count: Any, a: Any, b: Any) -> None:
    """Bring the counts of neighbours and the lists of free nodes up to date after `taken` moved from stage a to b."""
    for index in range(count):
        state.mark[state.taken[index]] = 1
    for index in range(count):
        node = state.taken[index]
        for side in range(2):
            for edge in range(graph.starts[side, node], graph.starts[side, node + 1]):
                other = graph.next[side, edge]
                here = state.stage[other]
                if not state.mark[other] and here in (a, b):
                    change = 1 if here == b else -1
                    state.same[side, node] += change
                    state.same[1 - side, other] += change
                    list_free(state, other)
    for index in range(count):
        state.mark[state.taken[index]] = 0
        list_free(state, state.taken[index])


@hot
def keep_best(state: Any) -> None:
    """Save where the nodes stand, which is the best so far."""
    for node in range(len(state.stage)):
        state.best_stage[node] = state.stage[node]
    for s in range(len(state.device)):
        state.best_device[s] = state.device[s]
    state.best[4] = 0.0


@hot
def is_better(state: Any, excess: Any, a: Any, b: Any, c: Any) -> Any:
    """Return whether figures are better than the best, which less excess always is."""
    if excess != state.best[0]:
        return excess < state.best[0]
    if a != state.best[1]:
        return a < state.best[1] * (1.0 - 1e-13)
    if b != state.best[2]:
        return b < state.best[2]
    return c < state.best[3]


@hot
def note(state: Any, excess: Any, a: Any, b: Any, c: Any) -> None:
    """Note figures that are the best so far; `keep_best` saves the state before a move makes it worse."""
    state.best[0], state.best[1], state.best[2], state.best[3], state.best[4] = excess, a, b, c, 1.0


@hot
def closure(graph: Any, state: Any, node: Any, side: Any, most: Any) -> Any:
    """Take a node with its descendants (side 0) or ancestors (side 1) in its stage; return how many, 0 for too many."""
    s = state.stage[node]
    state.taken[0], state.mark[node] = node, 1
    count, done = 1, 0
    while done < count and count <= most:
        here = state.taken[done]
        done += 1
        for edge in range(graph.starts[side, here], graph.starts[side, here + 1]):
            other = graph.next[side, edge]
            if state.stage[other] == s and not state.mark[other] and count <= most:
                state.mark[other] = 1
                state.taken[count] = other
                count += 1
    for index in range(count):
        state.mark[state.taken[index]] = 0
    return count if count <= most else 0


@hot
def target(graph: Any, state: Any, node: Any, side: Any) -> Any:
    """Return a stage that a free node may move to: the next one, or any that its neighbours allow."""
    s, step = state.stage[node], 1 - 2 * side
    if draw(state.random, 4):
        return s + step
    room = len(state.busy) - 1 - s if side == 0 else s
    for edge in range(graph.starts[side, node], graph.starts[side, node + 1]):
        room = min(room, abs(state.stage[graph.next[side, edge]] - s))
    return s + step * (1 + draw(state.random, room))


@hot
def partner_of(graph: Any, state: Any, node: Any, side: Any) -> Any:
    """Return a node of the next stage (side 0) or the stage before that may come in exchange for `node`, or -1."""
    other = 1 - side
    if not state.free_count[other]:
        return -1
    goal = state.stage[node] + 1 - 2 * side
    for _ in range(8):
        found = state.free[other, draw(state.random, state.free_count[other])]
        if state.stage[found] != goal:
            continue
        for edge in range(graph.starts[side, node], graph.starts[side, node + 1]):
            if graph.next[side, edge] == found:
                return -1
        return found
    return -1


@hot
def walk(graph: Any, state: Any, node: Any, side: Any, steps: Any) -> Any:
    """Return a node that some steps lead to inside of the stage: back for side 0, on for side 1."""
    for _ in range(steps):
        first = graph.starts[1 - side, node]
        degree = graph.starts[1 - side, node + 1] - first
        if not degree:
            break
        other = graph.next[1 - side, first + draw(state.random, degree)]
        if state.stage[other] != state.stage[node]:
            break
        node = other
    return node


@hot
def anneal(
    graph: Any, devices: Any, aim: Any, state: Any, begin: Any, end: Any, total: Any, hot_t: Any, cold_t: Any,
    swaps: Any, most: Any,
) -> None:  # fmt: skip
    """Try moves `begin` to `end` of `total`, while the temperature falls from `hot_t` to `cold_t`.

    The result of all moves does not depend on how they are divided into calls.

    Args:
        swaps: of 1024 moves, the number that exchange devices.
        most: the most nodes of a move.
    """
    stages, places = len(state.busy), len(state.device)
    excess, a, b, c, smooth = figures(devices, aim, state)
    if is_better(state, excess, a, b, c):
        note(state, excess, a, b, c)
    cost = cost_of_figures(aim, excess, a, b, c, smooth)
    temperature = hot_t
    for turn in range(begin, end):
        if turn == begin or turn % 64 == 0:
            temperature = hot_t * (cold_t / hot_t) ** (turn // 64 * 64 / total)
        count, i, j, source, goal, partner = 0, 0, 0, 0, 0, -1
        if swaps and draw(state.random, 1024) < swaps:
            i, j = draw(state.random, stages), draw(state.random, places)
            if i == j:
                continue
            # A device also has the links to the stage behind it.
            low, high = min(i, j), min((i if j >= stages else max(i, j)) + 1, stages - 1)
        else:
            both = state.free_count[0] + state.free_count[1]
            if not both:
                continue
            pick = draw(state.random, both)
            side = 0 if pick < state.free_count[0] else 1
            node = state.free[side, pick - side * state.free_count[0]]
            source = state.stage[node]
            count, goal, state.taken[0] = 1, source + 1 - 2 * side, node
            kind = draw(state.random, 10)
            if kind < 4:
                goal = target(graph, state, node, side)
            elif kind < 8:
                node = walk(graph, state, node, side, draw(state.random, 1 << (kind - 2)) + 1)
                count = closure(graph, state, node, side, most)
            else:
                partner = partner_of(graph, state, node, side)
                count = 1 if partner >= 0 else 0
            operators = 0.0
            for index in range(count):
                operators += graph.weights[state.taken[index], COUNT]
            if count == 0 or (partner < 0 and operators >= state.sums[source, COUNT]):
                continue
            low, high = min(source, goal), max(source, goal)
        carry_out(graph, aim, state, count, goal, partner, source, i, j)
        for s in range(low, high + 1):
            weigh(devices, aim, state, s)
        excess, a, b, c, smooth = figures(devices, aim, state)
        new = cost_of_figures(aim, excess, a, b, c, smooth)
        worse = new - cost
        if worse <= 0.0 or draw(state.random, 1 << 30) < math.exp(-worse / temperature) * (1 << 30):
            cost = new
            better = is_better(state, excess, a, b, c)
            if state.best[4] > 0.0 and not better:
                # This move leaves the best, which is saved first.
                carry_out(graph, aim, state, count, source, partner, goal, i, j)
                keep_best(state)
                carry_out(graph, aim, state, count, goal, partner, source, i, j)
            if count:
                relist(graph, state, count, source, goal)
            if partner >= 0:
                state.taken[0] = partner
                relist(graph, state, count, goal, source)
            if better:
                note(state, excess, a, b, c)
        else:
            carry_out(graph, aim, state, count, source, partner, goal, i, j)
            for s in range(low, high + 1):
                weigh(devices, aim, state, s)
    if state.best[4] > 0.0:
        keep_best(state)
