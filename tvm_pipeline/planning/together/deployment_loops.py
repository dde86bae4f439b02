"""The loops of the first deployment: all models moved at random, and one model cut anew while the others stay.

A state has for each model a number of stages, their cuts (positions in its row of cuts) and a permutation of the
devices, of which the first ones run the stages. Simulated annealing moves cuts along one order of the operators, and
devices. Dynamic programming over the downsets of one model cuts it anywhere, with its devices in their order: the load
of a device counts what its other models do there, and how the parameters of all share its cache.

Next: `first_deployment.py`, which takes turns between the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tvm_pipeline.cost.stage_table import computing, fetched, fetched_share, moving, over_link
from tvm_pipeline.planning.search.cuts import Floats, Integers, is_inside
from tvm_pipeline.planning.together.model_figures import Models
from tvm_pipeline.solvers.hot import hot

# The weight of the mean square of the loads beside the greatest one, which leads over plateaus.
SMOOTH = 0.1
# What is beyond memory, relative to it, and beyond a latency, counts so many times.
BEYOND = 10.0
# An operator on a device that cannot run it.
BLOCKED = 100.0


class State(NamedTuple):
    """Stages of I models on D devices.

    Attributes:
        stages: I; the number of stages.
        cuts: I x (D + 1); the cut in front of each stage, and the last one.
        device: I x D; a permutation of the devices.
        load: D + buses; the utilisation, which `weigh` writes.
        params, held: D; bytes of parameters, and with activations.
    """

    stages: Integers
    cuts: Integers
    device: Integers
    load: Floats
    params: Floats
    held: Floats


@hot
def weigh(f: Any, state: Any) -> Any:
    """Return the greatest utilisation, what is beyond limits, and the mean square of the loads."""
    (models, devices), table = f.scale.shape, f.table
    state.load[:] = 0.0
    state.params[:] = 0.0
    state.held[:] = 0.0
    for i in range(models):
        for s in range(state.stages[i]):
            d = state.device[i, s]
            state.params[d] += f.params[f.first[i] + state.cuts[i, s + 1]] - f.params[f.first[i] + state.cuts[i, s]]
    beyond = 0.0
    for i in range(models):
        latency = 0.0
        size = f.first[i + 1] - f.first[i]
        for s in range(state.stages[i]):
            d, start, end = state.device[i, s], f.first[i] + state.cuts[i, s], f.first[i] + state.cuts[i, s + 1]
            column = i * devices + d
            params = f.params[end] - f.params[start]
            added, work = f.added[d, end] - f.added[d, start], f.work[d, end] - f.work[d, start]
            p = state.device[i, s - 1] if s > 0 else devices
            moved = moving(table, p, column, f.crossing[start], f.crossing[end])
            if s > 0 and f.bus[i, p, d] >= 0:
                carried = over_link(table, p, column, f.crossing[start]) / f.slowdown[i, d]
                state.load[devices + f.bus[i, p, d]] += carried
            shared = fetched_share(table, column, params, state.params[d])
            if f.fetch_bus[i, d] >= 0:
                state.load[devices + f.fetch_bus[i, d]] += table.spill[column] * shared / f.slowdown[i, d]
            state.load[d] += computing(table, column, added, work, shared) + moved
            if f.blocked[d, end] > f.blocked[d, start]:
                beyond += BLOCKED * (f.blocked[d, end] - f.blocked[d, start])
            if f.most_s[i] < math.inf:
                own = computing(table, column, added, work, fetched(table, column, params))
                latency += (own + moved) / f.scale[i, d]
            state.held[d] += params
            if len(f.need):
                state.held[d] += f.need[f.need_first[i] + state.cuts[i, s] * size + state.cuts[i, s + 1]]
        if latency > f.most_s[i] * (1 + 1e-9):
            beyond += BEYOND * (latency / f.most_s[i] - 1)
    greatest, square = f.held, 0.0
    for load in state.load:
        greatest = max(greatest, load)
        square += load * load
    for d in range(devices):
        if state.held[d] > f.capacity[d]:
            beyond += BEYOND * (state.held[d] / f.capacity[d] - 1) + 1e-3
    return greatest, beyond, square / len(state.load)


@hot
def move(f: Any, state: Any) -> Any:
    """Change the state at random; return whether it is another one."""
    models, devices = f.scale.shape
    i = np.random.randint(models)
    count, size = state.stages[i], f.first[i + 1] - f.first[i]
    kind = np.random.random()
    if kind < 0.7 and count > 1:
        b = 1 + np.random.randint(count - 1)
        # Steps of every size are as likely as others of the same order of magnitude.
        step = int(math.exp(np.random.random() * math.log(size)))
        to = state.cuts[i, b] + (step if np.random.random() < 0.5 else -step)
        if to <= state.cuts[i, b - 1] or to >= state.cuts[i, b + 1]:
            return False
        state.cuts[i, b] = to
    elif kind < 0.85:
        if devices < 2:
            return False
        one, two = np.random.randint(count), np.random.randint(devices)
        if one == two:
            return False
        state.device[i, one], state.device[i, two] = state.device[i, two], state.device[i, one]
    elif f.stages[i] > 0:
        return False
    elif kind < 0.925:
        s = np.random.randint(count)
        if count == devices or state.cuts[i, s + 1] - state.cuts[i, s] < 2:
            return False
        between = state.cuts[i, s] + 1 + np.random.randint(state.cuts[i, s + 1] - state.cuts[i, s] - 1)
        at = s + np.random.randint(2)  # the new device runs the part in front or the one behind
        chosen = count + np.random.randint(devices - count)
        new = state.device[i, chosen]
        for other in range(chosen, at, -1):
            state.device[i, other] = state.device[i, other - 1]
        state.device[i, at] = new
        for b in range(count + 1, s + 1, -1):
            state.cuts[i, b] = state.cuts[i, b - 1]
        state.cuts[i, s + 1] = between
        state.stages[i] = count + 1
    else:
        if count < 2:
            return False
        b = 1 + np.random.randint(count - 1)
        gone = b - np.random.randint(2)
        old = state.device[i, gone]
        for other in range(gone, count - 1):
            state.device[i, other] = state.device[i, other + 1]
        state.device[i, count - 1] = old
        for other in range(b, count):
            state.cuts[i, other] = state.cuts[i, other + 1]
        state.stages[i] = count - 1
    return True


@hot
def anneal(f: Any, state: Any, best: Any, moves: Any, hot_from: Any, cold: Any, seed: Any) -> Any:
    """Try so many moves, from the temperature `hot_from` down to `cold`; keep the best state that was seen in `best`.

    Returns the greatest utilisation of the best state, and what it has beyond limits.
    """
    np.random.seed(seed)
    greatest, beyond, square = weigh(f, best)
    best_greatest, best_beyond = greatest, beyond
    greatest, beyond, square = weigh(f, state)
    scale = max(greatest, 1e-12)
    value = (greatest + SMOOTH * math.sqrt(square)) / scale + beyond
    count, cuts, device = state.stages.copy(), state.cuts.copy(), state.device.copy()
    for turn in range(moves):
        heat = hot_from * (cold / hot_from) ** (turn / moves)
        if move(f, state):
            greatest, beyond, square = weigh(f, state)
            new = (greatest + SMOOTH * math.sqrt(square)) / scale + beyond
            if new <= value or np.random.random() < math.exp((value - new) / heat):
                value = new
                count[:] = state.stages
                cuts[:] = state.cuts
                device[:] = state.device
                if beyond < best_beyond or (beyond == best_beyond and greatest < best_greatest):
                    best_greatest, best_beyond = greatest, beyond
                    best.stages[:] = state.stages
                    best.cuts[:] = state.cuts
                    best.device[:] = state.device
                continue
        state.stages[:] = count
        state.cuts[:] = cuts
        state.device[:] = device
    return best_greatest, best_beyond


class OtherModels(NamedTuple):
    """What the other models do on each of S devices: J x S, of which the first `filled` of a device count.

    Attributes:
        filled: S; how many have a stage there.
        column: of the device in the stage table.
        added, work, params: of its stage there.
        moved: the load of its transfers.
    """

    filled: Integers
    column: Integers
    added: Floats
    work: Floats
    params: Floats
    moved: Floats


def recut_chain(models: Models, every: Models, state: State, index: int, most: float) -> list[int] | None:
    """Return the downsets behind the stages of a model for which its busiest device is the least busy.

    Args:
        models: what the state is of.
        every: the same with all downsets of the model of this index.
        state: stages of all models.
        most: only loads below this one are of use; None is returned where one is not.
    """
    f, cuts, ends = every.figures, every.cuts[index], every.ends[index]
    stages = int(state.stages[index])
    devices = state.device[index, :stages].copy()
    found = best_chain(
        f,
        index,
        cuts.zone[ends],
        cuts.members[ends],
        devices,
        _others(models, state, index, devices.tolist()),
        float(most),
    )
    return None if found[0] < 0 else ends[found].tolist()


def _others(models: Models, state: State, index: int, devices: Sequence[int]) -> OtherModels:
    """Return what the other models do on the devices."""
    f = models.figures
    (count, width), place = f.scale.shape, {d: s for s, d in enumerate(devices)}
    shape = count, len(devices)
    added, work, params, moved = np.zeros((4, *shape))
    found = OtherModels(np.zeros(len(devices), np.int64), np.zeros(shape, np.int64), added, work, params, moved)
    for j in range(count):
        for s in range(int(state.stages[j]) if j != index else 0):
            d = int(state.device[j, s])
            if d not in place:
                continue
            at = int(found.filled[place[d]]), place[d]
            start, end = (int(f.first[j] + state.cuts[j, b]) for b in (s, s + 1))
            p = int(state.device[j, s - 1]) if s else width
            found.filled[place[d]] += 1
            found.column[at] = j * width + d
            found.added[at], found.work[at] = f.added[d, end] - f.added[d, start], f.work[d, end] - f.work[d, start]
            found.params[at] = f.params[end] - f.params[start]
            found.moved[at] = moving(f.table, p, j * width + d, f.crossing[start], f.crossing[end])
    return found


@hot
def best_chain(f: Any, i: Any, zone: Any, members: Any, devices: Any, others: Any, most: Any) -> Any:
    """Return the cut behind each stage, by its place in the row of the cuts; -1 where a load always reaches `most`."""
    count, stages, first, table = len(zone), len(devices), f.first[i], f.table
    value, parent = np.full((stages + 1, count), np.inf), np.full((stages + 1, count), -1)
    value[0, 0] = 0.0
    for s in range(stages):
        d = devices[s]
        column = i * f.scale.shape[1] + d
        p = devices[s - 1] if s > 0 else f.scale.shape[1]
        least, beside = 0.0, 0.0  # what the others take at least, and hold
        for j in range(others.filled[s]):
            least += computing(table, others.column[j, s], others.added[j, s], others.work[j, s], 0.0)
            least += others.moved[j, s]
            beside += others.params[j, s]
        most_before = np.empty(count)
        for index in range(count):
            most_before[index] = f.added[d, first + index] + f.work[d, first + index]
            if index:
                most_before[index] = max(most_before[index], most_before[index - 1])
        for end in range(s + 1, count):
            if (s == stages - 1) != (end == count - 1):
                continue
            here = first + end
            for start in range(end - 1, s - 1, -1):
                if least + table.call[column] + f.added[d, here] + f.work[d, here] - most_before[start] >= most:
                    break
                if value[s, start] >= most:
                    continue
                there = first + start
                params = f.params[here] - f.params[there]
                if params < 0 or params + beside > f.capacity[d] or f.blocked[d, here] > f.blocked[d, there]:
                    continue
                added, work = f.added[d, here] - f.added[d, there], f.work[d, here] - f.work[d, there]
                shared = fetched_share(table, column, params, params + beside)
                load = computing(table, column, added, work, shared)
                load += moving(table, p, column, f.crossing[there], f.crossing[here])
                for j in range(others.filled[s]):
                    own, size = others.column[j, s], others.params[j, s]
                    shared = fetched_share(table, own, size, params + beside)
                    load += computing(table, own, others.added[j, s], others.work[j, s], shared) + others.moved[j, s]
                load = max(load, value[s, start])
                if load >= most or load >= value[s + 1, end]:
                    continue
                if not is_inside(zone, members, start, end):
                    continue
                value[s + 1, end] = load
                parent[s + 1, end] = start
    found = np.full(stages, -1)
    if value[stages, count - 1] < most:
        cut = count - 1
        for s in range(stages, 0, -1):
            found[s - 1] = cut
            cut = parent[s, cut]
    return found
