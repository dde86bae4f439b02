"""The weights that are shipped: their note says where they are from, and the network with them does what it learned."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.support.generators import random_dag
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline_papers.learned.pointer_network import PURPOSE, VERSION, untrained
from tvm_pipeline_papers.learned.respect import SHIPPED, ReadGraph, network_weights, respect
from tvm_pipeline_papers.learned.respect_embedding import COLUMNS
from tvm_pipeline_papers.learned.sequences import violated_edges
from tvm_pipeline_papers.learned.weights import Weights, read_weights

HIDDEN = 256  # the paper's cells of an LSTM
MOST_BYTES = 2_000_000


def test_the_note_says_how_to_make_the_weights_again() -> None:
    weights, note = read_weights(SHIPPED, PURPOSE, VERSION)
    assert note.command.startswith("python benchmarks/train_respect.py ")
    assert f"--seed {note.seed} " in note.command
    assert note.command.endswith("/respect.npz")
    assert len(note.sha256) == 64
    measured = {name.split(":")[0] for name in note.figures}
    assert {"trained", "only supervised", "untrained", "own order", "random order"} <= measured
    assert weights["pointer/vector"].shape == (HIDDEN,)
    assert SHIPPED.stat().st_size < MOST_BYTES


@pytest.mark.thorough
def test_the_network_learned_which_operators_come_first() -> None:
    """On graphs like those that it was trained on it violates few edges, and an untrained network most of them."""
    rng = random.Random(7)
    graphs = [random_dag(rng, 30, 2 + index % 5) for index in range(10)]
    edges = sum(len(found) for graph in graphs for found in graph.edges.before)

    def violated(weights: Weights) -> float:
        return sum(violated_edges(graph.edges.before, ReadGraph.by(graph, weights).sequence()) for graph in graphs)

    assert violated(network_weights()) < 0.15 * edges
    assert violated(untrained(COLUMNS, HIDDEN, seed=0)) > 0.3 * edges


def test_a_small_graph_is_ordered_and_planned() -> None:
    graph = random_dag(random.Random(1), 12)
    sequence = ReadGraph.by(graph, network_weights()).sequence()
    assert sorted(sequence) == list(range(len(graph)))
    drawn = ReadGraph.by(graph, network_weights()).sequence(rng=np.random.default_rng(0))
    assert sorted(drawn) == list(range(len(graph)))
    platform = Platform("equal", tuple(Device(f"d{index}", cache_bytes=8 << 20) for index in range(3)))
    problem = Problem(graph, platform, unmeasured(graph), "memory,communication", 3)
    plan = respect(problem)
    # The judge refuses stages that are not stages of the graph.
    assert evaluate(problem, plan.stages).predicted == plan.predicted
    assert len(plan.stages) == 3
