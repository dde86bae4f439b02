"""Random graphs with exact plans as arrays, and what a sequence of their operators comes to: what RESPECT learns from.

RESPECT is trained on synthetic graphs of 30 operators (Yin et al., DAC 2023, section IV). The repair of a sequence and
its cut into stages are those of `learned/sequences.py` for `memory,communication`, on arrays: a step of
training asks for 128 of them. Operators are numbered as the embedding's rows. Next: `train_respect.py`.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from planner import of_bytes

from tests.support.generators import random_dag
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.problem import Objective
from tvm_pipeline.errors import OptionError
from tvm_pipeline.planning.search.cuts import Integers
from tvm_pipeline.planning.search.dynamic_programming import ideals
from tvm_pipeline.solvers.hot import hot
from tvm_pipeline_papers.learned.respect_embedding import embedding
from tvm_pipeline_papers.learned.weights import Floats32

OBJECTIVE: Objective = "memory,communication"
OPERATORS = 30
DEGREES = range(2, 7)  # the greatest in-degree of a graph; there are as many graphs of each
STAGES = range(2, 7)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LabelledGraphs:
    """G graphs of n operators each.

    Attributes:
        graphs: the graphs themselves, whose operators are in another order.
        rows: G x n x w; their embeddings.
        rank: G x n; the operators' places in their graph.
        needs: G x n x n; whether the first operator reads the second.
        param_bytes, sent_bytes: G x n; of the operators: their parameters, and what others read of their output.
        stages: G; for how many each graph is planned.
        label: G x n; the operators as the exact scheduler's stages have them, within a stage by level.
        label_stages: G x n; rho of the label: the stage of each operator, from 1.
        least_bytes: G; the proven optimum of the peak.
    """

    graphs: list[OperatorGraph]
    rows: Floats32
    rank: Integers
    needs: npt.NDArray[np.bool_]
    param_bytes: Integers
    sent_bytes: Integers
    stages: Integers
    label: Integers
    label_stages: Integers
    least_bytes: Integers

    def __len__(self) -> int:
        return len(self.rows)

    def costs(self, which: Integers, sequences: Integers) -> Costs:
        """Return what sequences cost, b x n of the b graphs `which`."""
        taken, excess, violated = np.empty(len(which)), np.empty(len(which)), 0
        for place, (index, sequence) in enumerate(zip(which.tolist(), sequences, strict=True)):
            needs = self.needs[index]
            order, wrong = _repaired(sequence, needs, self.rank[index])
            stage_of, peak = _cut(order, needs, self.param_bytes[index], self.sent_bytes[index], self.stages[index])
            taken[place] = 1 - _cosine(stage_of, self.label_stages[index])
            excess[place] = peak / self.least_bytes[index] - 1
            violated += wrong
        return Costs(taken, excess, violated / int(self.needs[which].sum()))


@dataclass(frozen=True, eq=False)
class Costs:
    """What b sequences cost.

    Attributes:
        cosine: b; 1 - R, with R the cosine of the operators' stages and those of the label (the paper's equation 3).
        gap: b; the peak of parameter bytes over its optimum, minus 1.
        violated: the part of all edges whose reader stands before its writer, before repair.
    """

    cosine: Floats
    gap: Floats
    violated: float


def labelled_graphs(rng: random.Random, count: int) -> LabelledGraphs:
    """Draw graphs and solve each of them exactly, 12 ms of CPU each."""
    found: list[tuple[Any, ...]] = []
    while len(found) < count:
        graph = random_dag(rng, OPERATORS, DEGREES[len(found) % len(DEGREES)])
        with suppress(OptionError):  # one of some thousand has too many downsets to list
            found.append(_labelled(graph, rng.choice(STAGES)))
    graphs, *arrays = zip(*found, strict=True)
    return LabelledGraphs(list(graphs), *map(np.array, arrays))


def _labelled(graph: OperatorGraph, stages: int) -> tuple[Any, ...]:
    queue, rows = embedding(graph)
    place = np.argsort(queue)
    operators = [graph.operators[index] for index in queue]
    needs = np.zeros((len(graph), len(graph)), np.bool_)
    for index, parents in enumerate(graph.edges.before):
        needs[place[index], place[list(parents)]] = True
    param_bytes = np.array([operator.param_bytes for operator in operators], np.int64)
    sent_bytes = np.array([operator.output_bytes for operator in operators], np.int64) * needs.any(axis=0)
    plan = ideals(of_bytes(graph, stages, OBJECTIVE))
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.operators}
    label = np.argsort([stage_of[operator.name] for operator in operators], kind="stable")
    label_stages, least = _cut(label, needs, param_bytes, sent_bytes, stages)
    if least != plan.value[0]:
        raise SystemExit(f"{graph.name}: rho of the label has a peak of {least} bytes, the exact plan {plan.value[0]}")
    return graph, rows, queue, needs, param_bytes, sent_bytes, stages, label, label_stages, least


@hot
def _repaired(sequence: Any, needs: Any, rank: Any) -> Any:
    """Return what `sequences.repaired` makes of the sequence, and how many edges the sequence violates."""
    count, wrong = len(sequence), 0
    place = np.argsort(sequence)
    due = place.copy()
    for operator in range(count):  # the rows are sorted by level, so parents come first
        for parent in range(operator):
            if needs[operator, parent]:
                wrong += place[parent] > place[operator]
                due[operator] = max(due[operator], due[parent])
    return np.argsort(due * count + rank), wrong


@hot
def _cut(order: Any, needs: Any, param_bytes: Any, sent_bytes: Any, stages: int) -> Any:
    """Return the stage of each operator, from 1, and the peak of the parameter bytes of a stage."""
    count = len(order)
    held, crossing = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    for position in range(count):
        operator = order[position]
        held[position + 1] = held[position] + param_bytes[operator]
        for reader in range(count - 1, position, -1):
            if needs[order[reader], operator]:
                crossing[position + 1 : reader + 1] += sent_bytes[operator]
                break
    never = held[count] + crossing.max() + 1
    peak, widest = np.full((stages + 1, count + 1), never), np.full((stages + 1, count + 1), never)
    choice = np.zeros((stages + 1, count + 1), np.int64)
    peak[0, 0] = widest[0, 0] = 0
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            for start in range(stage - 1, end):
                peak[stage, end] = min(peak[stage, end], max(peak[stage - 1, start], held[end] - held[start]))
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            for start in range(stage - 1, end):
                worse = max(widest[stage - 1, start], crossing[start])
                if held[end] - held[start] <= peak[stages, count] and worse < widest[stage, end]:
                    widest[stage, end], choice[stage, end] = worse, start
    stage_of, end = np.empty(count, np.int64), count
    for stage in range(stages, 0, -1):
        start = choice[stage, end]
        stage_of[order[start:end]] = stage
        end = start
    return stage_of, peak[stages, count]


def _cosine(a: Integers, b: Integers) -> float:
    return float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-8))
