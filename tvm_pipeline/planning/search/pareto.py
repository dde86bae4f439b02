"""The Pareto front: the pipelines that no other pipeline beats in throughput, latency and energy together.

Dynamic programming with labels: a state (cut, devices used, last device) keeps all combinations of slowest stage,
latency and energy that no other combination of the state beats in all three. Each device serves one stage, so a beaten
label can never win: every continuation costs it as much as the label that beats it. The energy of a label is the active
energy; the idle power adds to it by the slowest stage, which is no less where the label is beaten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tvm_pipeline.core.plan import Plan, Prediction, Stage
from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.batches import of_calls, of_frames
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, PlanError
from tvm_pipeline.planning.conflict import explain
from tvm_pipeline.planning.search.cost_tables import buses, capacities, stage_joules, stage_seconds
from tvm_pipeline.planning.search.cuts import Cuts, Floats, Integers, ideals, prefixes
from tvm_pipeline.solvers.hot import hot

# The work grows with the square of the number of cuts. If there are more, this many are used, spread over the graph.
MOST_CUTS = 256


def pareto(problem: Problem) -> list[Plan]:
    """Return the front, fastest first; energy counts if it is known of every plan.

    If the graph has at most MOST_CUTS downsets, all of them are cuts, and the front is `optimal`. Else MOST_CUTS cuts
    of its own order are used, spread evenly over the seconds, and the front of these is `feasible`. The search does not
    count buses, so the front is `feasible` if there is one. The plans keep the problem's limits and name its objective.

    Raises:
        InfeasibleError: no plan keeps the limits.
    """
    if (batch := problem.graph.batch) > 1:
        return [of_frames(plan, batch) for plan in pareto(of_calls(problem))]
    cuts = ideals(problem.graph)
    if cuts is None or len(cuts) > MOST_CUTS:
        cuts = prefixes(problem.graph)
    usable = cuts.together.copy() if problem.children_together else np.ones(len(cuts), bool)
    complete = cuts.complete and len(cuts) <= MOST_CUTS and not buses(problem, problem.platform.devices)
    if usable.sum() > MOST_CUTS:
        usable &= _spread(problem, cuts, usable)
    found: dict[tuple[Stage, ...], Prediction] = {}
    for devices in disjoint_sets(problem.platform.devices):
        # The number of working devices decides how much they slow each other down, so each number has its own front.
        for working in range(1, len(devices) + 1):
            for stages in _front(problem, cuts, usable, devices, working):
                try:
                    found[stages] = evaluate(problem, stages).predicted
                except PlanError:
                    continue  # it breaks a limit of the problem
    plans = [
        Plan(problem.graph.name, "pareto", problem.objective, stages, predicted, "optimal" if complete else "feasible")
        for stages, predicted in found.items()
        if problem.stages in (None, len(stages))
    ]
    if not plans:
        raise InfeasibleError(explain(problem, lambda _: False))
    figures = _figures([plan.predicted for plan in plans])
    order = np.lexsort(figures.T[::-1])
    kept = _not_beaten(figures[order])
    front = [plans[i] for i in order[kept]]
    return [replace(plan, bound=plan.value if complete else None) for plan in front]


def _figures(predictions: list[Prediction]) -> Floats:
    """Return a row of figures for each plan, of which less is better; they are rounded, so that sums compare equal."""
    powered = all(predicted.energy_j is not None for predicted in predictions)
    rows = [
        (-(p.throughput_fps or 0.0), p.latency_s or 0.0, (p.energy_j or 0.0) if powered else 0.0) for p in predictions
    ]
    return np.array([[float(f"{figure:.12g}") for figure in row] for row in rows])


def _spread(problem: Problem, cuts: Cuts, usable: Any) -> Any:
    """Return MOST_CUTS of the usable cuts, spread evenly over the seconds of each operator on its fastest device."""
    costs = stage_seconds(problem, cuts, problem.platform.devices)
    done = np.min(costs.added + costs.work, axis=0)
    positions = np.flatnonzero(usable)
    targets = np.linspace(0, done[positions[-1]], MOST_CUTS - 2)
    chosen = np.zeros(len(cuts), bool)
    chosen[positions[np.clip(np.searchsorted(done[positions], targets), 0, len(positions) - 1)]] = True
    chosen[[0, len(cuts) - 1]] = True
    return chosen


@dataclass(slots=True, eq=False)
class _Labels:
    """The labels of a state at all cuts so far.

    Attributes:
        figures: n x 3; slowest stage, latency and energy.
        cut: n; the cut at which the pipeline of a label ends.
        before: n; the state and the position of the label before the last stage.
    """

    figures: Floats
    cut: Integers
    before: list[tuple[int, int]]


def _front(
    problem: Problem, cuts: Cuts, usable: Any, devices: Sequence[Device], working: int
) -> list[tuple[Stage, ...]]:
    """Return the front of the pipelines that use exactly `working` of the devices, each device once."""
    busy = stage_seconds(problem, cuts, devices, working)
    idle = stage_seconds(problem, cuts, devices)
    joules = stage_joules(problem, cuts, devices)
    param_bytes = cuts.param_bytes.astype(np.float64)
    capacity = capacities(devices)
    world = len(devices)
    states: dict[tuple[int, int], int] = {(0, world): 0}
    labels = [_Labels(np.zeros((1, 3)), np.zeros(1, np.int64), [(-1, -1)])]
    keys = [(0, world)]
    positions = np.flatnonzero(usable)[1:]
    for end in positions:
        for device in range(world):
            # Labels of all states that `device` may follow, gathered by the state it leads to.
            arriving: dict[int, list[tuple[Floats, Integers, int]]] = {}
            for state, (mask, last) in enumerate(list(keys)):
                if mask >> device & 1 or mask.bit_count() >= working:
                    continue
                known = labels[state]
                may = (known.cut < end) & (param_bytes[end] - param_bytes[known.cut] <= capacity[device])
                may &= cuts.inside(known.cut, int(end))
                which = np.flatnonzero(may)
                start = known.cut[which]
                seconds = busy.stage(param_bytes, device, last, start, int(end))
                fine = seconds < busy.impossible  # the device can run every operator
                which, start, seconds = which[fine], start[fine], seconds[fine]
                if not len(which):
                    continue
                before = known.figures[which]
                new = np.stack(
                    [
                        np.maximum(before[:, 0], seconds),
                        before[:, 1] + idle.stage(param_bytes, device, last, start, int(end)),
                        before[:, 2] + joules.stage(param_bytes, device, last, start, int(end)),
                    ],
                    axis=1,
                )
                key = (mask | 1 << device, device)
                if key not in states:
                    states[key] = len(labels)
                    keys.append(key)
                    labels.append(_Labels(np.zeros((0, 3)), np.zeros(0, np.int64), []))
                arriving.setdefault(states[key], []).append((new, which, state))
            for state, groups in arriving.items():
                _admit(labels[state], groups, int(end))
    last_cut = len(cuts) - 1
    fronts = []
    for state, (mask, _) in enumerate(keys):
        if mask.bit_count() == working:
            fronts += [(state, int(i)) for i in np.flatnonzero(labels[state].cut == last_cut)]
    return [_trace(cuts, devices, keys, labels, *label) for label in fronts]


def _admit(known: _Labels, groups: list[tuple[Floats, Integers, int]], end: int) -> None:
    """Add to a state's labels those of the groups that no other of them beats; all end at the cut `end`."""
    figures = np.concatenate([group[0] for group in groups])
    which = np.concatenate([group[1] for group in groups])
    state = np.concatenate([np.full(len(group[1]), group[2]) for group in groups])
    order = np.lexsort(figures.T[::-1])
    kept = order[_not_beaten(figures[order])]
    known.figures = np.concatenate([known.figures, figures[kept]])
    known.cut = np.concatenate([known.cut, np.full(len(kept), end)])
    known.before += list(zip(state[kept].tolist(), which[kept].tolist(), strict=True))


def _not_beaten(figures: Floats) -> Integers:
    """Return the positions of the rows that no earlier row equals or beats in all figures.

    Args:
        figures: rows in lexicographic order.
    """
    kept = np.zeros(len(figures), np.bool_)
    _sift(figures, kept, np.zeros(len(figures), np.int64))
    return np.flatnonzero(kept)


@hot
def _sift(figures: Any, kept: Any, front: Any) -> None:
    """Mark in `kept` the rows that no earlier row beats; `front` is space for their positions."""
    count = 0
    for i in range(len(figures)):
        beaten = False
        for k in range(count):
            other = front[k]
            if figures[other, 1] <= figures[i, 1] and figures[other, 2] <= figures[i, 2]:
                beaten = True
                break
        if not beaten:
            kept[i] = True
            front[count] = i
            count += 1


def _trace(
    cuts: Cuts,
    devices: Sequence[Device],
    keys: list[tuple[int, int]],
    labels: list[_Labels],
    state: int,
    label: int,
) -> tuple[Stage, ...]:
    """Return the stages of the pipeline that leads to a label."""
    ends, names = [], []
    while state > 0:
        ends.append(int(labels[state].cut[label]))
        names.append(devices[keys[state][1]].name)
        state, label = labels[state].before[label]
    return tuple(map(Stage, ((name,) for name in reversed(names)), cuts.stages(ends[::-1])))
