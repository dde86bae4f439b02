"""A first deployment of models of any size: cuts along an order of each model, moved by simulated annealing.

It proves nothing. Activations count with a lower bound of each segment (`search/with_activations.py`); a segment of
the best deployment that needs more gets what it needs in its best order, and the search goes on from there.

Next: `annealed_cuts.py`, the loops; `load_bound.py`, which says how far the deployment may be from the best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import disjoint_sets
from tvm_pipeline.errors import PlanError
from tvm_pipeline.memory import stage_memory
from tvm_pipeline.planning.search.cuts import Floats, Integers
from tvm_pipeline.planning.together.annealed_cuts import State, anneal, weigh
from tvm_pipeline.planning.together.deployment_judge import Demand, fitted_together, judge_deployment
from tvm_pipeline.planning.together.model_figures import Models, models_of

# The moves of a search, and more for each operator; a millionth of a second each.
MOVES, MOVES_OF_OPERATOR = 20_000, 2_000
# The time is looked at after so many moves.
CHUNK = 50_000
# Temperatures, relative to the greatest utilisation of the start.
HOT, COLD = 0.1, 1e-6
# Of a start, and from the best then.
ROUNDS = 4
# How often the search goes on after a segment was found to need more memory than its bound.
MOST_REFUSED = 40


@dataclass(frozen=True, slots=True)
class First:
    """A deployment, None where none was found, and why the last one that was tried does not fit."""

    plans: list[tuple[Stage, ...]] | None
    utilisation: float = math.inf
    reason: str = ""


def first_deployment(demands: Sequence[Demand], deadline: float = math.inf, *, seed: int = 0) -> First:
    """Return a good deployment by the judge, in which each device serves one stage of a model at most.

    Args:
        deadline: of `time.monotonic`; where it has passed, the better one of two simple deployments is returned.

    Raises:
        ProfileError: a device has neither measurements nor a model.
    """
    sets = list(disjoint_sets(demands[0].problem.platform.devices))
    graphs = [demand.problem.graph for demand in demands]
    found = First(None)
    for number, devices in enumerate(sets):
        now = time.monotonic()
        end = now + max(0.0, deadline - now) / (len(sets) - number)
        new = _on_devices(demands, models_of(demands, graphs, devices), end, seed)
        if new.utilisation < found.utilisation or (found.plans is None and not found.reason):
            found = new
    return found


def _on_devices(demands: Sequence[Demand], models: Models, deadline: float, seed: int) -> First:
    """Return the best deployment on these devices."""
    starts = [start for spread in (True, False) if (start := _start(models, spread)) is not None]
    if not starts:
        return First(None)
    moves = MOVES + MOVES_OF_OPERATOR * sum(map(len, models.graphs))
    best = min(starts, key=lambda state: _rank(models, state))
    best = _copied(best)
    for number in range(ROUNDS):
        state = _copied(starts[number] if number < len(starts) else best)
        hot = HOT if number < len(starts) else HOT / 10
        _anneal(models, state, best, moves // ROUNDS, hot, deadline, seed + number)
    reason = ""
    for _ in range(MOST_REFUSED):
        plans = _plans(models, best)
        try:
            fitted = fitted_together(demands, plans)
            utilisation = judge_deployment(demands, fitted)
            return First(fitted, max(utilisation.values(), default=0.0))
        except PlanError as error:
            reason = str(error)
        if not _needs_more(demands, models, best) or time.monotonic() >= deadline:
            break
        again = _copied(best)
        _anneal(models, again, best, moves // ROUNDS, HOT / 10, deadline, seed)
    return First(None, reason=reason)


def _rank(models: Models, state: State) -> tuple[float, float]:
    greatest, beyond, _ = weigh(models.figures, state)
    return beyond, greatest


def _copied(state: State) -> State:
    return State(*(part.copy() for part in state))


def _anneal(models: Models, state: State, best: State, moves: int, hot: float, deadline: float, seed: int) -> None:
    """Anneal in pieces, so that the deadline is kept, along the same fall of the temperature."""
    done = 0
    while done < moves and time.monotonic() < deadline:
        piece = min(CHUNK, moves - done)
        at, to = (hot * (COLD / hot) ** (part / moves) for part in (done, done + piece))
        anneal(models.figures, state, best, piece, at, to, seed + done)
        done += piece


def _start(models: Models, spread: bool) -> State | None:
    """Return a state in which each model is cut into parts of about equal seconds; None where a model has none.

    Args:
        spread: whether each model has as many stages as it may; else the models share the devices by their seconds.
    """
    f = models.figures
    count, devices = f.call.shape
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
        cuts[i, : stages[i] + 1] = _even(row, int(stages[i]))
        device[i] = (np.arange(devices) + taken) % devices
        taken += 0 if spread else int(stages[i])
    return State(stages, cuts, device, np.zeros(devices + f.buses), np.zeros(devices), np.zeros(devices))


def _seconds(models: Models, i: int) -> Floats:
    """Return the mean seconds over the devices of what is in front of each cut of a model."""
    f = models.figures
    here = slice(f.first[i], f.first[i + 1])
    fetched = f.spill[i].mean() * f.params[here]
    return (f.added[:, here] + f.work[:, here]).mean(axis=0) + fetched  # type: ignore[no-any-return]


def _even(row: Floats, stages: int) -> Integers:
    """Return stages + 1 ascending positions that cut a row of sums about evenly."""
    wanted = np.searchsorted(row, np.linspace(0, float(row[-1]), stages + 1)[1:-1])
    found = np.array([0, *wanted, len(row) - 1])
    for index in range(1, stages):
        found[index] = max(found[index], found[index - 1] + 1)
    for index in range(stages - 1, 0, -1):
        found[index] = min(found[index], found[index + 1] - 1)
    return found


def _plans(models: Models, state: State) -> list[tuple[Stage, ...]]:
    plans = []
    for i, (graph, ends) in enumerate(zip(models.graphs, models.ends, strict=True)):
        names = [operator.name for operator in graph.operators]
        cuts = ends[state.cuts[i, : state.stages[i] + 1]]
        plans.append(
            tuple(
                Stage((models.devices[d].name,), tuple(names[start:end]))
                for d, (start, end) in zip(state.device[i].tolist(), pairwise(cuts.tolist()), strict=False)
            )
        )
    return plans


def _needs_more(demands: Sequence[Demand], models: Models, state: State) -> bool:
    """Note what the segments of a state need in their best order; return whether any needs more than was known."""
    f, more = models.figures, False
    if not len(f.need):
        return False
    for i, (demand, graph, ends) in enumerate(zip(demands, models.graphs, models.ends, strict=True)):
        size = len(ends)
        if not demand.problem.activations:
            continue
        for start, end in pairwise(state.cuts[i, : state.stages[i] + 1].tolist()):
            entry = f.need_first[i] + start * size + end
            needed = _least(demand.problem.graph, graph, int(ends[start]), int(ends[end]))
            more = more or needed > f.need[entry]
            f.need[entry] = max(f.need[entry], needed)
    return more


def _least(graph: OperatorGraph, ordered: OperatorGraph, start: int, end: int) -> int:
    names = [operator.name for operator in ordered.operators[start:end]]
    return stage_memory.least_peak(graph, names).peak_bytes
