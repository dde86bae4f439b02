"""One model cut anew while the others stay: dynamic programming over its downsets, with its devices in their order.

The loops of `annealed_cuts.py` move cuts along one order of the operators; this moves them to any downset. The load of
a device counts what its other models do there, and how the parameters of all share its cache.

Next: `first_deployment.py`, which takes turns between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tvm_pipeline.cost.stage_table import computing, fetched_share, moving
from tvm_pipeline.planning.search.cuts import Floats, Integers, is_inside
from tvm_pipeline.planning.together.annealed_cuts import State
from tvm_pipeline.planning.together.model_figures import Models
from tvm_pipeline.solvers.hot import hot


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
