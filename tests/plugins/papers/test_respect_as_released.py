"""RESPECT's rows, labels and reward as the authors' code has them, against that code's own walk of a graph.

The code is github.com/Yu-Utah/RESPECT (now Yu-Maryland/RESPECT): `dataset/dataset_generator.py` and
`problems/toposort/problem_toposort.py`.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.generators import random_dag

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from labelled_graphs import labelled_graphs, released_embedding, steps_from_the_outputs

PARENTS = 6


def schedule(reads: list[list[int]], levels: list[float], weights: list[float]) -> list[int]:
    """Return the step of each operator by the words of `_scheduling`: pop ready nodes of the reversed graph."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(reads)))
    graph.add_edges_from((reader, writer) for reader, found in enumerate(reads) for writer in found)
    step, number = [0] * len(reads), 0
    while graph:
        number += 1
        ready = [node for node, degree in graph.in_degree() if degree == 0]
        ready.sort(key=lambda node: (levels[node], -node), reverse=True)
        while sum(weights[node] for node in ready) > 35:
            ready.pop()
        for node in ready:
            step[node] = number
        graph.remove_nodes_from(ready)
    return step


@examples(60)
@given(st.integers(0, 10**6), st.integers(2, 60), st.integers(1, 12))
def test_labels_are_the_steps_of_its_list_scheduling(seed: int, count: int, reach: int) -> None:
    graph = random_dag(random.Random(seed), count, 3, reach)
    levels = [0.0] * count
    for operator, parents in enumerate(graph.edges.before):
        levels[operator] = 1.0 + max((levels[parent] for parent in parents), default=0.0)
    weights = np.random.default_rng(seed).uniform(0, 5, count).astype(np.float32)
    needs = np.zeros((count, count), np.bool_)
    for operator, parents in enumerate(graph.edges.before):
        needs[operator, list(parents)] = True
    found = steps_from_the_outputs(needs, np.array(levels, np.float32), weights)
    assert found.tolist() == schedule([list(each) for each in graph.edges.before], levels, weights.tolist())


@pytest.mark.parametrize("count", [1, 2, 30])
def test_rows_are_unscaled_shuffled_and_name_permuted_operators(count: int) -> None:
    graph = random_dag(random.Random(count), count, 6)
    queue, rows = released_embedding(graph)
    assert sorted(queue.tolist()) == list(range(count))
    identity = {int(operator): int(row[-2]) for operator, row in zip(queue, rows, strict=True)}
    assert sorted(identity.values()) == list(range(count))
    levels: list[int] = []
    for parents in graph.edges.before:
        levels.append(1 + max((levels[parent] for parent in parents), default=0))
    largest = max(operator.param_bytes for operator in graph.operators)
    for operator, row in zip(queue.tolist(), rows, strict=True):
        parents = graph.edges.before[operator]
        assert row[0] == levels[operator]
        told = [(level, name) for level, name in zip(row[1:7], row[7:13], strict=True) if name >= 0]
        assert sorted(told) == sorted((levels[parent], identity[parent]) for parent in parents)
        assert row[1 + len(told) : 7].tolist() == [0.0] * (PARENTS - len(told))
        assert row[7 + len(told) : 13].tolist() == [-1.0] * (PARENTS - len(told))
        assert row[14] == pytest.approx(5 * graph.operators[operator].param_bytes / max(1, largest), rel=1e-6)
    if count == 30:
        assert queue.tolist() != sorted(queue.tolist(), key=levels.__getitem__)
        assert [identity[operator] for operator in range(count)] != list(range(count))


@pytest.mark.thorough
def test_the_reward_reads_labels_along_the_sequence() -> None:
    """1 minus the cosine of the labels along the picks and the labels sorted; the plan begins at the other end."""
    graphs, every = labelled_graphs(random.Random(3), 3, released=True), np.arange(3)
    drawn = np.array([np.random.default_rng(index).permutation(30) for index in range(3)])
    costs = graphs.costs(every, drawn)
    for index in range(3):
        label = graphs.label_stages[index]
        along, sorted_up = label[drawn[index]].astype(float), np.sort(label).astype(float)
        cosine = along @ sorted_up / np.linalg.norm(along) / np.linalg.norm(sorted_up)
        assert costs.cosine[index] == pytest.approx(1 - cosine)
    best = graphs.costs(every, graphs.label)
    assert best.cosine.max() < 1e-9
    assert best.violated == 0  # read backwards, the label's order is one of the graph
    assert (best.gap >= 0).all()
    assert graphs.costs(every, graphs.label[:, ::-1]).violated == 1


def test_plans_of_both_readings_have_the_same_optimum() -> None:
    """Rows and labels differ; graphs, stages and the proven peak do not."""
    papers, released = (labelled_graphs(random.Random(8), 4, released=released) for released in (False, True))
    assert papers.least_bytes.tolist() == released.least_bytes.tolist()
    assert papers.stages.tolist() == released.stages.tolist()
    assert papers.label_stages.tolist() != released.label_stages.tolist()
    own = papers.costs(np.arange(4), np.argsort(papers.rank, axis=1))
    backwards = released.costs(np.arange(4), np.argsort(released.rank, axis=1)[:, ::-1])
    assert own.gap.tolist() == backwards.gap.tolist()
