"""One model cut anew while the others stay: dynamic programming over its downsets, with its devices in their order.

The loops of `annealed_cuts.py` move cuts along one order of the operators; this moves them to any downset. The load of
a device counts what its other models do there, and how the parameters of all share its cache.

Next: `first_deployment.py`, which takes turns between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tvm_pipeline.planning.search.cuts import Floats, is_inside
from tvm_pipeline.planning.together.annealed_cuts import State
from tvm_pipeline.planning.together.model_figures import Models
from tvm_pipeline.solvers.hot import hot


class Others(NamedTuple):
    """What the other models do on each of S devices: J x S, zeros where a model does nothing.

    Attributes:
        fixed: the load without work and fetches.
        work, params, spill, cached: as in `Figures`.
    """

    fixed: Floats
    work: Floats
    params: Floats
    spill: Floats
    cached: Floats


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


def _others(models: Models, state: State, index: int, devices: Sequence[int]) -> Others:
    """Return what the other models do on the devices."""
    f = models.figures
    count, place = len(f.call), {d: s for s, d in enumerate(devices)}
    found = Others(*(np.zeros((count, len(devices))) for _ in Others._fields))
    for j in range(count):
        for s in range(int(state.stages[j]) if j != index else 0):
            d = int(state.device[j, s])
            if d not in place:
                continue
            at, (start, end) = place[d], (int(f.first[j] + state.cuts[j, b]) for b in (s, s + 1))
            fixed = f.call[j, d] + f.added[d, end] - f.added[d, start]
            fixed += f.receive[0, j, d] + f.receive[1, j, d] * f.crossing[start]
            fixed += f.send[0, j, d] + f.send[1, j, d] * f.crossing[end]
            if s:
                p = int(state.device[j, s - 1])
                fixed += f.link[0, j, p, d] + f.link[1, j, p, d] * f.crossing[start]
            found.fixed[j, at] = fixed
            found.work[j, at] = f.work[d, end] - f.work[d, start]
            found.params[j, at] = f.params[end] - f.params[start]
            found.spill[j, at], found.cached[j, at] = f.spill[j, d], f.cached[j, d]
    return found


@hot
def fetched(params: Any, all_params: Any, cached: Any) -> Any:
    """Return the bytes that a stage fetches for a frame if all stages on the device have so many parameters."""
    return (all_params - cached) * params / all_params if all_params > cached else 0.0


@hot
def best_chain(f: Any, i: Any, zone: Any, members: Any, devices: Any, others: Any, most: Any) -> Any:
    """Return the cut behind each stage, by its place in the row of the cuts; -1 where a load always reaches `most`."""
    count, stages, first = len(zone), len(devices), f.first[i]
    value, parent = np.full((stages + 1, count), np.inf), np.full((stages + 1, count), -1)
    value[0, 0] = 0.0
    for s in range(stages):
        d = devices[s]
        least = 0.0  # what the others take at least
        beside = 0.0
        for j in range(len(others.fixed)):
            least += others.fixed[j, s] + others.work[j, s]
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
                if least + f.call[i, d] + f.added[d, here] + f.work[d, here] - most_before[start] >= most:
                    break
                if value[s, start] >= most:
                    continue
                there = first + start
                params = f.params[here] - f.params[there]
                if params < 0 or params + beside > f.capacity[d] or f.blocked[d, here] > f.blocked[d, there]:
                    continue
                load = f.call[i, d] + f.added[d, here] - f.added[d, there]
                load += f.receive[0, i, d] + f.receive[1, i, d] * f.crossing[there]
                load += f.send[0, i, d] + f.send[1, i, d] * f.crossing[here]
                if s > 0:
                    p = devices[s - 1]
                    load += f.link[0, i, p, d] + f.link[1, i, p, d] * f.crossing[there]
                work = f.work[d, here] - f.work[d, there]
                if f.spill[i, d] > 0.0:
                    work = max(work, f.spill[i, d] * fetched(params, params + beside, f.cached[i, d]))
                load += work
                for j in range(len(others.fixed)):
                    own = others.work[j, s]
                    if others.spill[j, s] > 0.0:
                        bytes_ = fetched(others.params[j, s], params + beside, others.cached[j, s])
                        own = max(own, others.spill[j, s] * bytes_)
                    load += others.fixed[j, s] + own
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
