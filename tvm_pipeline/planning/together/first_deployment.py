"""A first deployment of models of any size: cuts along an order of each model, moved by simulated annealing.

It proves nothing. Then each model in turn is cut anew at any of its downsets, where these can be listed, while the
others stay; this gives a new order of its operators, along which cuts move again. A model whose downsets are too many
takes its order from `local_search`.

Activations count with a lower bound of each segment (`search/with_activations.py`); a segment of the best deployment
that needs more gets what it needs in its best order, and the search goes on from there.

Next: `deployment_loops.py`; `load_bound.py`, how far a deployment may be from the best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.topology import topological_order
from tvm_pipeline.errors import NoPlanError, OptionError, PlanError
from tvm_pipeline.memory import stage_memory
from tvm_pipeline.planning.local.local_search import even_ends, local_search
from tvm_pipeline.planning.search.cuts import Cuts, Floats, prefixes, reordered
from tvm_pipeline.planning.together.deployment_judge import Demand, fitted_together, judge_deployment, scarce_devices
from tvm_pipeline.planning.together.deployment_loops import State, anneal, recut_chain, weigh
from tvm_pipeline.planning.together.model_figures import Models, listed_cuts, models_of

# The moves of a search, and more for each operator; a millionth of a second each.
MOVES, MOVES_OF_OPERATOR = 20_000, 2_000
# The temperature of a start, relative to its greatest utilisation, and of what goes on from the best.
HOT, WARM = 0.1, 0.01
# Of a start, and from the best then.
ROUNDS = 4
# How often the search goes on after a segment was found to need more memory than its bound.
MOST_REFUSED = 40
# How often models are cut anew, and after how many turns without a gain no more. Small models need none.
MOST_TURNS, MOST_VAIN, MOST_SMALL = 40, 4, 60
# The part of the time, and the seconds, in which local search looks for the order of a model.
ORDER_SHARE, ORDER_S = 0.2, 4.0
# The time is looked at after so many moves.
CHUNK = 50_000
# The temperature at the end, relative to the greatest utilisation.
COLD = 1e-6


@dataclass(frozen=True, slots=True)
class FirstDeployment:
    """A deployment, None where none was found, and why the last one that was tried does not fit."""

    plans: list[tuple[Stage, ...]] | None
    utilisation: float = math.inf
    reason: str = ""


def first_deployment(demands: Sequence[Demand], deadline: float = math.inf, *, seed: int = 0) -> FirstDeployment:
    """Return a good deployment by the judge, in which each device serves one stage of a model at most.

    Args:
        deadline: of `time.monotonic`; where it has passed, the better one of two simple deployments is returned.

    Raises:
        ProfileError: a device has neither measurements nor a model.
    """
    sets = list(disjoint_sets(demands[0].problem.platform.devices))
    found = FirstDeployment(None)
    for number, devices in enumerate(sets):
        now = time.monotonic()
        end = now + max(0.0, deadline - now) / (len(sets) - number)
        new = _on_devices(demands, devices, end, seed)
        if new.utilisation < found.utilisation or (found.plans is None and not found.reason):
            found = new
    return found


def _on_devices(demands: Sequence[Demand], devices: tuple[Device, ...], deadline: float, seed: int) -> FirstDeployment:
    """Return the best deployment on these devices."""
    models = models_of(demands, [prefixes(demand.problem.graph) for demand in demands], devices)
    best = _annealed(models, deadline, seed)
    if best is None:
        return FirstDeployment(None)
    operators = sum(len(demand.problem.graph) for demand in demands)
    if operators > MOST_SMALL and not scarce_devices(demands) and time.monotonic() < deadline:
        models, best = _recut(demands, models, best, deadline, seed)
    reason = ""
    for turn in range(MOST_REFUSED):
        plans = plans_of(models, best)
        try:
            fitted = fitted_together(demands, plans)
            utilisation = judge_deployment(demands, fitted)
            return FirstDeployment(fitted, max(utilisation.values(), default=0.0))
        except PlanError as error:
            reason = str(error)
        if not needs_more(demands, models, best) or time.monotonic() >= deadline:
            break
        again = copied(best)
        hot = HOT if rank(models, best)[0] > 0 else WARM
        anneal_until(models, again, best, _moves(models) // ROUNDS, hot, deadline, seed + turn)
    return FirstDeployment(None, reason=reason)


def _moves(models: Models) -> int:
    return MOVES + MOVES_OF_OPERATOR * sum(map(len, models.ends))


def _annealed(models: Models, deadline: float, seed: int) -> State | None:
    """Return the best state along the orders of the models, from two starts; None where there is none."""
    starts = [start for spread in (True, False) if (start := first_state(models, spread)) is not None]
    if not starts:
        return None
    best = copied(min(starts, key=lambda state: rank(models, state)))
    for number in range(ROUNDS):
        state = copied(starts[number] if number < len(starts) else best)
        hot = HOT if number < len(starts) else WARM
        anneal_until(models, state, best, _moves(models) // ROUNDS, hot, deadline, seed + number)
    return best


def _recut(demands: Sequence[Demand], models: Models, best: State, deadline: float, seed: int) -> tuple[Models, State]:
    """Return a state, with its models, that is as good or better: models are cut anew and cuts are moved, in turns."""
    devices = models.devices
    listed = [listed_cuts(demand.problem.graph) for demand in demands]
    models, best = _with_found_orders(demands, listed, models, best, deadline, seed)
    # A model whose downsets are not listed, or whose latency is limited, is not cut anew.
    rows = [None if d.problem.max_latency_s else row for d, row in zip(demands, listed, strict=True)]
    every = models_of(demands, [row or known for row, known in zip(rows, models.cuts, strict=True)], devices)
    places = [_deep_places(demand.problem) for demand in demands]
    vain = 0
    for turn in range(MOST_TURNS):
        if time.monotonic() >= deadline or vain == MOST_VAIN:
            break
        trial, state = models, best
        orders = places if turn % 2 else [range(len(place)) for place in places]
        for index, row in enumerate(rows):
            if row is not None:
                trial, state = _cut_anew(demands, trial, every, state, index, row, orders)
        kept = copied(state)
        hot = WARM if turn % 3 else HOT
        anneal_until(trial, copied(state), kept, _moves(trial) // ROUNDS, hot, deadline, seed + 1000 * turn)
        new, old = rank(trial, kept), rank(models, best)
        vain = 0 if new < (old[0], old[1] * (1 - 1e-4)) else vain + 1
        if new <= old:
            models, best = trial, kept
    return models, best


def _cut_anew(
    demands: Sequence[Demand],
    models: Models,
    every: Models,
    state: State,
    index: int,
    row: Cuts,
    places: Sequence[Sequence[int]],
) -> tuple[Models, State]:
    """Return the models and the state with the best stages of one model beside those of the others."""
    rank(models, state)  # writes the loads
    most = max(float(state.load[d]) for d in state.device[index, : state.stages[index]])
    chain = recut_chain(models, every, state, index, most * (1 + 1e-9))
    groups = [[stage.operators for stage in stages] for stages in plans_of(models, state)]
    if chain is not None:
        groups[index] = row.stages(chain)
    return _along(demands, models.devices, groups, state, places)


def _along(
    demands: Sequence[Demand],
    devices: tuple[Device, ...],
    groups: Sequence[Sequence[tuple[str, ...]]],
    state: State,
    places: Sequence[Sequence[int]],
) -> tuple[Models, State]:
    """Return models whose orders have these stages one after another, and the state with these stages.

    Args:
        places: of the operators of each model in some order, which holds within a stage.
    """
    cuts, counts = [], []
    for demand, stages, place in zip(demands, groups, places, strict=True):
        graph = demand.problem.graph
        of = {name: number for number, stage in enumerate(stages) for name in stage}
        keys = [(of[operator.name], place[v]) for v, operator in enumerate(graph.operators)]
        order = sorted(range(len(graph)), key=keys.__getitem__)
        cuts.append(prefixes(reordered(graph, order)))
        counts.append(np.cumsum([0, *map(len, stages)]))
    models, new = models_of(demands, cuts, devices), copied(state)
    for i, (ends, count) in enumerate(zip(models.ends, counts, strict=True)):
        new.cuts[i, : len(count)] = np.searchsorted(ends, count)
    return models, new


def _with_found_orders(
    demands: Sequence[Demand],
    listed: Sequence[Cuts | None],
    models: Models,
    best: State,
    deadline: float,
    seed: int,
) -> tuple[Models, State]:
    """Return a better state along orders of local search, which models without listed downsets get, if there is one."""
    groups = [[stage.operators for stage in stages] for stages in plans_of(models, best)]
    left_s = deadline - time.monotonic()
    found = False
    for index, (demand, row) in enumerate(zip(demands, listed, strict=True)):
        if row is None and left_s > 0:
            stages = demand.problem.stages or min(len(models.devices), len(demand.problem.graph))
            limit_s = min(ORDER_S, ORDER_SHARE * left_s)
            with suppress(NoPlanError, OptionError):
                plan = local_search(replace(demand.problem, stages=stages, time_limit_s=limit_s), seed=seed)
                groups[index], found = [stage.operators for stage in plan.stages], True
    if not found:
        return models, best
    places = [range(len(demand.problem.graph)) for demand in demands]
    others, _ = _along(demands, models.devices, groups, best, places)
    state = _annealed(others, deadline, seed)
    return (others, state) if state is not None and rank(others, state) < rank(models, best) else (models, best)


def _deep_places(problem: Problem) -> list[int]:
    """Return the place of each operator in an order that follows a branch to its end."""
    edges = problem.graph.edges
    if problem.children_together:  # such an order may part operators that stay together
        return list(range(len(problem.graph)))
    return [int(place) for place in np.argsort(topological_order(edges.before, edges.after, "last"))]


def rank(models: Models, state: State) -> tuple[float, float]:
    """Return what a state has beyond limits, and its greatest utilisation; less is better."""
    greatest, beyond, _ = weigh(models.figures, state)
    return beyond, greatest


def copied(state: State) -> State:
    """Return a state that does not change with this one."""
    return State(*(part.copy() for part in state))


def anneal_until(models: Models, state: State, best: State, moves: int, hot: float, deadline: float, seed: int) -> None:
    """Anneal in pieces, so that the deadline is kept, along the same fall of the temperature."""
    done = 0
    while done < moves and time.monotonic() < deadline:
        piece = min(CHUNK, moves - done)
        at, to = (hot * (COLD / hot) ** (part / moves) for part in (done, done + piece))
        anneal(models.figures, state, best, piece, at, to, seed + done)
        done += piece


def first_state(models: Models, spread: bool) -> State | None:
    """Return a state in which each model is cut into parts of about equal seconds; None where a model has none.

    Args:
        spread: whether each model has as many stages as it may; else the models share the devices by their seconds.
    """
    f = models.figures
    count, devices = f.scale.shape
    cuts, device = np.zeros((count, devices + 1), np.int64), np.zeros((count, devices), np.int64)
    stages = np.zeros(count, np.int64)
    seconds = [_seconds(models, i) for i in range(count)]
    whole = sum(float(row[-1]) for row in seconds) or 1.0
    taken = 0
    for i, row in enumerate(seconds):
        share = devices if spread else max(1, round(devices * float(row[-1]) / whole))
        stages[i] = f.stages[i] or min(share, len(row) - 1)
        if not 0 < stages[i] <= min(devices, len(row) - 1):
            return None
        cuts[i, : stages[i] + 1] = even_ends(row, [1.0] * int(stages[i]))
        device[i] = (np.arange(devices) + taken) % devices
        taken += 0 if spread else int(stages[i])
    return State(stages, cuts, device, np.zeros(devices + f.buses), np.zeros(devices), np.zeros(devices))


def _seconds(models: Models, i: int) -> Floats:
    """Return the mean seconds over the devices of what is in front of each cut of a model."""
    f = models.figures
    here = slice(f.first[i], f.first[i + 1])
    devices = f.scale.shape[1]
    fetched = f.table.spill[i * devices : (i + 1) * devices].mean() * f.params[here]
    return (f.added[:, here] + f.work[:, here]).mean(axis=0) + fetched  # type: ignore[no-any-return]


def plans_of(models: Models, state: State) -> list[tuple[Stage, ...]]:
    """Return the stages of each model, which is cut along an order."""
    plans = []
    for i, (row, ends) in enumerate(zip(models.cuts, models.ends, strict=True)):
        names = [operator.name for operator in row.graph.operators]
        cuts = ends[state.cuts[i, : state.stages[i] + 1]]
        plans.append(
            tuple(
                Stage((models.devices[d].name,), tuple(names[start:end]))
                for d, (start, end) in zip(state.device[i].tolist(), pairwise(cuts.tolist()), strict=False)
            )
        )
    return plans


def needs_more(demands: Sequence[Demand], models: Models, state: State) -> bool:
    """Note what the segments of a state need in their best order; return whether any needs more than was known."""
    f, more = models.figures, False
    if not len(f.need):
        return False
    for i, (demand, row, ends) in enumerate(zip(demands, models.cuts, models.ends, strict=True)):
        size = len(ends)
        if not demand.problem.activations:
            continue
        for start, end in pairwise(state.cuts[i, : state.stages[i] + 1].tolist()):
            entry = f.need_first[i] + start * size + end
            needed = _least(demand.problem.graph, row.graph, int(ends[start]), int(ends[end]))
            more = more or needed > f.need[entry]
            f.need[entry] = max(f.need[entry], needed)
    return more


def _least(graph: OperatorGraph, ordered: OperatorGraph, start: int, end: int) -> int:
    names = [operator.name for operator in ordered.operators[start:end]]
    return stage_memory.least_peak(graph, names).peak_bytes
