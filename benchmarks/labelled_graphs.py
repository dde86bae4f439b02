"""Random graphs with exact plans as arrays, and what a sequence of their operators comes to: what RESPECT learns from.

RESPECT is trained on synthetic graphs of 30 operators (Yin et al., DAC 2023, section IV). The repair of a sequence and
its cut into stages are those of `learned/sequences.py` for `memory,communication`, on arrays: a step of
training asks for 128 of them. Operators are numbered as the embedding's rows. Next: `train_respect.py`.

The authors' code (github.com/Yu-Utah/RESPECT, now Yu-Maryland/RESPECT: `dataset/dataset_generator.py`,
`problems/toposort/problem_toposort.py`) labels, embeds and rewards in another way than the paper says:
`released_embedding`, `steps_from_the_outputs`, and the cost in `LabelledGraphs.costs`.
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
from tvm_pipeline_papers.learned.respect_embedding import PARENTS, embedding
from tvm_pipeline_papers.learned.weights import Floats32

OBJECTIVE: Objective = "memory,communication"
OPERATORS = 30
DEGREES = range(2, 7)  # the greatest in-degree of a graph; there are as many graphs of each
STAGES = range(2, 7)
# Of the authors' code: the largest weight of an operator in training, and the largest of a step of list scheduling.
MOST_WEIGHT, STEP_WEIGHT = 5.0, 35.0

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
        label_stages: G x n; rho of the label: the stage of each operator, from 1. As released: its step.
        least_bytes: G; the proven optimum of the peak.
        released: whether rows and labels are those of the authors' code. Its sequences begin at the outputs.
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
    released: bool

    def __len__(self) -> int:
        return len(self.rows)

    def costs(self, which: Integers, sequences: Integers) -> Costs:
        """Return what sequences cost, b x n of the b graphs `which`."""
        taken, excess, violated = np.empty(len(which)), np.empty(len(which)), 0
        for place, (index, sequence) in enumerate(zip(which.tolist(), sequences, strict=True)):
            needs, label_stages = self.needs[index], self.label_stages[index]
            order, wrong = _repaired(sequence[::-1].copy() if self.released else sequence, needs, self.rank[index])
            stage_of, peak = _cut(order, needs, self.param_bytes[index], self.sent_bytes[index], self.stages[index])
            if self.released:
                taken[place] = 1 - _cosine(label_stages[sequence], np.sort(label_stages))
            else:
                taken[place] = 1 - _cosine(stage_of, label_stages)
            excess[place] = peak / self.least_bytes[index] - 1
            violated += wrong
        return Costs(taken, excess, violated / int(self.needs[which].sum()))


@dataclass(frozen=True, eq=False)
class Costs:
    """What b sequences cost.

    Attributes:
        cosine: b; 1 - R, with R the cosine of the operators' stages and those of the label (the paper's equation 3). As
            released: of the labels along the sequence and the labels sorted.
        gap: b; the peak of parameter bytes over its optimum, minus 1.
        violated: the part of all edges whose reader stands before its writer, before repair.
    """

    cosine: Floats
    gap: Floats
    violated: float


def labelled_graphs(rng: random.Random, count: int, *, released: bool = False) -> LabelledGraphs:
    """Draw graphs and solve each of them exactly, 12 ms of CPU each.

    Args:
        released: whether rows and labels are those of the authors' code. The graphs are the same.
    """
    found: list[tuple[Any, ...]] = []
    while len(found) < count:
        graph = random_dag(rng, OPERATORS, DEGREES[len(found) % len(DEGREES)])
        with suppress(OptionError):  # one of some thousand has too many downsets to list
            found.append(_labelled(graph, rng.choice(STAGES), released))
    graphs, *arrays = zip(*found, strict=True)
    return LabelledGraphs(list(graphs), *map(np.array, arrays), released)


def released_embedding(graph: OperatorGraph) -> tuple[Integers, Floats32]:
    """Return the operators in the order in which the network reads them, and their rows, as the authors' code has them.

    The columns are those of `respect_embedding.embedding`, unscaled: levels from 1, IDs a permutation of 0..n-1, drawn
    with the graph's fingerprint as the seed, and weights from 0 to 5, as its training graphs have. (For networks the
    code feeds bytes of float32, far beyond the weights that it trains on.) Missing parents are 0 and -1. Rows are
    shuffled.
    """
    draw, count = np.random.default_rng(int(graph.fingerprint, 16)), len(graph)
    queue, rows = embedding(graph)
    ids = draw.permutation(count)
    rows[:, : 1 + PARENTS] *= len(np.unique(rows[:, 0]))
    parents = rows[:, 1 + PARENTS : 1 + 2 * PARENTS]
    parents[parents >= 0] = ids[np.rint(parents[parents >= 0] * count).astype(int)]
    param_bytes = np.array([operator.param_bytes for operator in graph.operators], np.float64)[queue]
    rows[:, -2], rows[:, -1] = ids[queue], MOST_WEIGHT * param_bytes / max(1, param_bytes.max())
    shuffled = draw.permutation(count)
    return queue[shuffled], rows[shuffled]


def steps_from_the_outputs(needs: npt.NDArray[np.bool_], levels: Floats32, weights: Floats32) -> Integers:
    """Return the step of each operator, from 1, in which the authors' list scheduling takes it.

    It walks the graph from the outputs. An operator is ready once all its readers are taken. A step takes the ready
    operators by falling level, those of one level in the order of the rows, until the next would exceed STEP_WEIGHT.

    Args:
        needs: n x n; whether the first operator reads the second.
        levels, weights: n; at most STEP_WEIGHT each.
    """
    step, number, waiting = np.zeros(len(needs), np.int64), 0, np.lexsort((np.arange(len(needs)), -levels))
    while len(waiting):
        number += 1
        ready = waiting[~needs[waiting][:, waiting].any(axis=0)]
        taken = ready[np.cumsum(weights[ready]) <= STEP_WEIGHT]
        step[taken], waiting = number, waiting[~np.isin(waiting, taken)]
    return step


def _labelled(graph: OperatorGraph, stages: int, released: bool) -> tuple[Any, ...]:
    queue, rows = released_embedding(graph) if released else embedding(graph)
    place = np.argsort(queue)
    operators = [graph.operators[index] for index in queue]
    needs = np.zeros((len(graph), len(graph)), np.bool_)
    for index, parents in enumerate(graph.edges.before):
        needs[place[index], place[list(parents)]] = True
    param_bytes = np.array([operator.param_bytes for operator in operators], np.int64)
    sent_bytes = np.array([operator.output_bytes for operator in operators], np.int64) * needs.any(axis=0)
    plan = ideals(of_bytes(graph, stages, OBJECTIVE))
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.operators}
    label = np.lexsort((queue, rows[:, 0], [stage_of[operator.name] for operator in operators]))
    label_stages, least = _cut(label, needs, param_bytes, sent_bytes, stages)
    if least != plan.value[0]:
        raise SystemExit(f"{graph.name}: rho of the label has a peak of {least} bytes, the exact plan {plan.value[0]}")
    if released:
        label_stages = steps_from_the_outputs(needs, rows[:, 0], rows[:, -1])
        label = np.argsort(label_stages, kind="stable")
    return graph, rows, queue, needs, param_bytes, sent_bytes, stages, label, label_stages, least


@hot
def _repaired(sequence: Any, needs: Any, rank: Any) -> Any:
    """Return what `sequences.repaired` makes of the sequence, and how many edges the sequence violates."""
    count, wrong = len(sequence), 0
    place = np.argsort(sequence)
    due = place.copy()
    for operator in np.argsort(rank):  # parents come first in the graph's order
        for parent in range(count):
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
