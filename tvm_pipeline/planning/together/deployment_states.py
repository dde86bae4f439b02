"""States of the loops that cut all models: first ones, their rank, and the stages that they mean.

Next: `first_deployment.py`, which improves them; `annealed_cuts.py`, the loops.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.memory import stage_memory
from tvm_pipeline.planning.local.starts import even_ends
from tvm_pipeline.planning.search.cuts import Floats
from tvm_pipeline.planning.together.annealed_cuts import State, anneal, weigh
from tvm_pipeline.planning.together.deployment_judge import Demand
from tvm_pipeline.planning.together.model_figures import Models

# The time is looked at after so many moves.
CHUNK = 50_000
# The temperature at the end, relative to the greatest utilisation.
COLD = 1e-6


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
