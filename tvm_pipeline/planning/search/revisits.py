"""Pipelines of three or four stages in which a device serves two stages, as in CPU -> GPU -> CPU.

Velasco-Montero et al. (IEEE Access 2023) consider such pipelines. The load of a device is the sum of its stages, so a
plan is as fast as its most loaded device. For any number of stages the problem is weakly NP-hard even with two devices;
for at most four stages it is polynomial, by meeting in the middle:

For a sequence of devices and a middle cut, one cut is free among the first two stages, and another one among the last
two. On either side only those cuts count that no other beats in both loads (a Pareto staircase). Along a staircase the
load of one device rises while the load of the other falls, so bisection finds the best partner of each cut. This takes
O(M^2 log M) for a sequence, while trying all cuts takes O(M^3).

For energy, the idle power counts for the seconds of the most loaded device, and the joules of the stages are a third
figure beside the two loads. There all cuts of three stages are tried, in O(M^2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np

from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import cost_of, idle_w, lock_s
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError
from tvm_pipeline.planning.search.cost_tables import StageCosts, capacities, stage_joules, stage_seconds
from tvm_pipeline.planning.search.cuts import Cuts, Floats, Integers, ideals, prefixes
from tvm_pipeline.solvers.hot import hot

# If there are more downsets, the cuts are the prefixes of the graph's own order.
MOST_CUTS = 1500


def revisits(problem: Problem) -> Plan:
    """Return the best pipeline of three or four stages (for energy: three) in which a device serves two of them.

    A device serves one stage where its memory may be too small for several, or where it has a parameter cache. The cuts
    are all downsets of the graph if there are at most MOST_CUTS, else the prefixes of its own order.

    Raises:
        InfeasibleError: no device can serve two stages, or the graph is too short.
        OptionError: the objective is neither throughput nor energy, or there is a limit.
    """
    listed = ideals(problem.graph)
    cuts = listed if listed is not None and len(listed) <= MOST_CUTS else prefixes(problem.graph)
    of_energy = problem.objective == "energy"
    lengths = [count for count in ((3,) if of_energy else (3, 4)) if problem.stages in (None, count)]
    best: _Choice | None = None
    for devices in disjoint_sets(problem.platform.devices):
        by_count: dict[int, StageCosts] = {}
        for sequence in (s for count in lengths for s in _sequences(problem, devices, count)):
            working = len(set(sequence))
            if working not in by_count:
                by_count[working] = stage_seconds(problem, cuts, devices, working)
            cut = _cut_for_energy if of_energy else _cut
            best = cut(problem, cuts, by_count[working], devices, sequence, best.value if best else np.inf) or best
    if best is None:
        raise InfeasibleError(
            "no device can serve two of three or four stages: that takes two devices that share no cores, one of them "
            "without cached_bytes and with memory_bytes for whatever stages it serves (or none), that can run the "
            "operators, and three operators"
        )
    stages = tuple(map(Stage, ((name,) for name in best.devices), cuts.stages(best.ends)))
    predicted = evaluate(problem, stages).predicted
    plan = Plan(problem.graph.name, "revisits", problem.objective, stages, predicted, "optimal")
    plan = replace(plan, bound=plan.value)
    if of_energy:
        # The search does not count the seconds of buses.
        proven = predicted.energy_j is None or predicted.energy_j <= best.value * (1 + 1e-9)
        return plan if proven else replace(plan, status="feasible", bound=(best.value,))
    least_s = max(best.value, lock_s(problem))
    if plan.value and 1 / plan.value[0] > least_s * (1 + 1e-9):
        # The search does not count buses, and one of them is slower than every device.
        return replace(plan, status="feasible", bound=(1 / least_s,))
    return plan


@dataclass(frozen=True, slots=True)
class _Choice:
    """The value of a pipeline (seconds or joules), the devices of its stages, and the cuts at which they end."""

    value: float
    devices: tuple[str, ...]
    ends: tuple[int, ...]


def _sequences(problem: Problem, devices: tuple[Device, ...], count: int) -> Iterator[tuple[int, ...]]:
    """Yield sequences of devices: no device serves consecutive stages, and at least one serves two stages."""
    again = [not cost_of(problem, device).serves_once for device in devices]
    for sequence in product(range(len(devices)), repeat=count):
        repeated = [device for device in set(sequence) if sequence.count(device) > 1]
        neighbours = any(a == b for a, b in pairwise(sequence))
        if repeated and not neighbours and all(again[device] for device in repeated):
            yield sequence


def _cut(
    problem: Problem,
    cuts: Cuts,
    costs: StageCosts,
    devices: tuple[Device, ...],
    sequence: tuple[int, ...],
    at_most: float,
) -> _Choice | None:
    """Return the best cuts for one sequence of devices; None if no period is below `at_most`."""
    param_bytes = cuts.param_bytes.astype(np.float64)
    capacity = capacities(devices)
    last, world = len(cuts) - 1, len(devices)
    usable = cuts.together if problem.children_together else np.ones(len(cuts), bool)
    positions = np.flatnonzero(usable[1:last]) + 1
    first, second, third, *rest = sequence
    whole = cuts.inside(positions, last)
    best, ends = min(at_most, costs.impossible), None
    for middle in map(int, positions):
        early = positions[positions < middle]
        early = early[cuts.inside(early, middle)]
        x1 = costs.stage(param_bytes, first, world, 0, early)
        x2 = costs.stage(param_bytes, second, first, early, middle)
        fits = (param_bytes[early] <= capacity[first]) & (param_bytes[middle] - param_bytes[early] <= capacity[second])
        fits &= (x1 < best) & (x2 < best)
        if rest:
            late = positions[(positions > middle) & whole]
            late = late[cuts.inside(middle, late)]
            y1 = costs.stage(param_bytes, third, second, middle, late)
            y2 = costs.stage(param_bytes, rest[0], third, late, last)
            suits = (param_bytes[late] - param_bytes[middle] <= capacity[third]) & (
                param_bytes[last] - param_bytes[late] <= capacity[rest[0]]
            )
        else:
            late = np.array([last])
            y1 = costs.stage(param_bytes, third, second, np.array([middle]), last)
            y2 = np.zeros(1)
            suits = np.array([param_bytes[last] - param_bytes[middle] <= capacity[third]])
        suits &= (y1 < best) & (y2 < best)
        if not fits.any() or not suits.any():
            continue
        early, x1, x2 = early[fits], x1[fits], x2[fits]
        late, y1, y2 = late[suits], y1[suits], y2[suits]
        # u is the load of a device that serves two stages. w is the load of the other device of the first two stages;
        # it is added to z if that device serves two stages, too.
        u, w = (x1, x2) if first in sequence[2:] else (x2, x1)
        repeated = first if first in sequence[2:] else second
        v, z = (y1, y2) if third == repeated else (y2, y1)
        front, back = _staircase(u, w), _staircase(v, z)
        adds = len(set(sequence)) == 2 and bool(rest)
        value, f, b = _meet(u[front], w[front], v[back], z[back], adds, best)
        if value < best:
            best = float(value)
            ends = (int(early[front[f]]), middle, int(late[back[b]]), last) if rest else (
                int(early[front[f]]), int(middle), last
            )  # fmt: skip
    return _Choice(best, tuple(devices[d].name for d in sequence), ends) if ends else None


def _cut_for_energy(
    problem: Problem,
    cuts: Cuts,
    seconds: StageCosts,
    devices: tuple[Device, ...],
    sequence: tuple[int, ...],
    at_most: float,
) -> _Choice | None:
    """Return the best cuts for devices that serve in the order a, b, a; None if no energy is below `at_most`."""
    param_bytes = cuts.param_bytes.astype(np.float64)
    joules = stage_joules(problem, cuts, devices)
    last, outer, inner = len(cuts) - 1, *sequence[:2]
    usable = cuts.together if problem.children_together else np.ones(len(cuts), bool)
    positions = np.flatnonzero(usable[1:last]) + 1
    watts, held_s = idle_w(problem), lock_s(problem)
    best, ends = at_most, None

    def both(costs: StageCosts, early: Integers, late: int) -> tuple[Floats, Floats]:
        """Return the costs of the device that serves twice, and of the other one."""
        twice = costs.stage(param_bytes, outer, len(devices), 0, early)
        twice = twice + costs.stage(param_bytes, outer, inner, late, last)
        return twice, costs.stage(param_bytes, inner, outer, early, late)

    for late in map(int, positions):
        early = positions[positions < late]
        early = early[cuts.inside(early, late)]
        early = early[param_bytes[late] - param_bytes[early] <= capacities(devices)[inner]]
        if not len(early):
            continue
        load_s = np.maximum(*both(seconds, early, late))
        value = np.add(*both(joules, early, late)) + watts * np.maximum(load_s, held_s)
        value[load_s >= seconds.impossible] = np.inf
        index = int(np.argmin(value))
        if value[index] < best:
            best, ends = float(value[index]), (int(early[index]), late, last)
    return _Choice(best, tuple(devices[d].name for d in sequence), ends) if ends else None


def _staircase(u: Floats, w: Floats) -> Integers:
    """Return the positions that no other position beats in both figures, by rising u and therefore by falling w."""
    order = np.lexsort((w, u))
    lowest = np.minimum.accumulate(w[order])
    keep = np.insert(w[order][1:] < lowest[:-1], 0, True)
    positions: Integers = order[keep]
    return positions


@hot
def _meet(u: Any, w: Any, v: Any, z: Any, adds: bool, at_most: float) -> Any:
    """Return the least max(u + v, w + z), or max(u + v, w, z) unless it `adds` w and z, and the steps that give it."""
    best, best_f, best_b = at_most, -1, -1
    for f in range(len(u)):
        near, far = 0, len(v) - 1
        while near < far:
            middle = (near + far) // 2
            other = w[f] + z[middle] if adds else max(w[f], z[middle])
            if u[f] + v[middle] >= other:
                far = middle
            else:
                near = middle + 1
        # The loads cross at `near`, so this step or the one before is best.
        for b in range(max(near - 1, 0), near + 1):
            other = w[f] + z[b] if adds else max(w[f], z[b])
            load = max(u[f] + v[b], other)
            if load < best:
                best, best_f, best_b = load, f, b
    return best, best_f, best_b
