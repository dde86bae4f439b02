"""A first deployment of models of any size: cuts along an order of each model, moved by simulated annealing.

It proves nothing. Then each model in turn is cut anew at any of its downsets, where these can be listed, while the
others stay; this gives a new order of its operators, along which cuts move again. A model whose downsets are too many
takes its order from `local_search`.

Activations count with a lower bound of each segment (`search/with_activations.py`); a segment of the best deployment
that needs more gets what it needs in its best order, and the search goes on from there.

Next: `annealed_cuts.py` and `recut_models.py`, the loops; `load_bound.py`, how far a deployment may be from the best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.topology import topological_order
from tvm_pipeline.errors import NoPlanError, OptionError, PlanError
from tvm_pipeline.planning.local.local_search import local_search
from tvm_pipeline.planning.search.cuts import Cuts, prefixes, reordered
from tvm_pipeline.planning.together.annealed_cuts import State
from tvm_pipeline.planning.together.deployment_judge import Demand, fitted_together, judge_deployment, scarce_devices
from tvm_pipeline.planning.together.deployment_states import (
    anneal_until,
    copied,
    first_state,
    needs_more,
    plans_of,
    rank,
)
from tvm_pipeline.planning.together.model_figures import Models, listed_cuts, models_of
from tvm_pipeline.planning.together.recut_models import recut_chain

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
