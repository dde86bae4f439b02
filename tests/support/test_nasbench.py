"""The networks and segments that PredPar's predictor learns from, `benchmarks/nasbench.py` and `predpar_data.py`."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from nasbench import (
    MOST_EDGES,
    MOST_VERTICES,
    OPERATORS,
    PARAM_BYTES,
    Cell,
    nasbench,
    param_bytes,
    random_cell,
    random_nasbench,
    segments_of,
)
from predpar_data import CHOSEN, LEARNED, TESTED, board, labelled, networks, partitions, role

from tests.support.examples import examples
from tests.support.test_generators import check, sinks, sources

seeds = st.integers(0, 2**32)


@given(seeds)
def test_a_cell_is_one_of_nasbench(seed: int) -> None:
    cell = random_cell(random.Random(seed))
    assert cell == random_cell(random.Random(seed))
    assert 3 <= cell.output + 1 <= MOST_VERTICES
    assert len(set(cell.edges)) == len(cell.edges) <= MOST_EDGES
    assert all(start < end for start, end in cell.edges)
    digraph = networkx.DiGraph(cell.edges)
    # Each vertex is on a way from the input to the output.
    assert set(digraph) == set(range(cell.output + 1))
    assert (
        networkx.descendants(digraph, 0) | {0}
        == set(digraph)
        == networkx.ancestors(digraph, cell.output) | {cell.output}
    )


def test_the_network_of_a_known_cell() -> None:
    # Input -> conv3x3 -> output, input -> conv1x1 -> output, and input -> output: by hand.
    cell = Cell(("conv3x3", "conv1x1"), ((0, 1), (0, 2), (0, 3), (1, 3), (2, 3)))
    graph = nasbench(cell, stacks=2, cells=1, width=16, picture=8)
    check(graph)
    kinds = [operator.kind for operator in graph.operators]
    in_cell = ["conv", "conv", "conv", "conv", "concat", "conv", "add"]
    assert kinds == ["input", "conv", *in_cell, "pool", *in_cell, "mean", "dense"]
    # Weights and four bytes of bias a channel: each of two branches has half of the channels.
    cells = [
        2 * (read * half + 4 * half)
        + (9 * half * half + 4 * half)
        + (half * half + 4 * half)
        + read * 2 * half
        + 8 * half
        for read, half in ((16, 8), (16, 16))
    ]
    assert param_bytes(graph) == 27 * 16 + 4 * 16 + sum(cells) + (32 + 4) * 10
    assert [operator.outputs[0].shape for operator in graph.operators if operator.kind == "concat"] == [
        (8, 8, 16),
        (4, 4, 32),
    ]


def test_the_default_network_has_the_parameters_that_are_published() -> None:
    # The Inception-like cell of https://github.com/google-research/nasbench has 2 694 282 trainable parameters, with
    # two of a normalisation for each channel of a convolution, where there are four bytes of bias here.
    edges = ((0, 1), (0, 2), (0, 3), (0, 5), (1, 6), (2, 6), (3, 4), (4, 6), (5, 6))
    graph = nasbench(Cell(("conv1x1", "conv3x3", "conv3x3", "conv3x3", "maxpool3x3"), edges))
    digraph = check(graph)
    assert sources(digraph) == sinks(digraph) == 1
    channels = sum(operator.outputs[0].shape[-1] for operator in graph.operators if operator.kind == "conv")
    assert param_bytes(graph) - 2 * channels - 3 * 10 == 2_694_282


@examples(8)
@given(seeds)
def test_random_networks_keep_their_limits(seed: int) -> None:
    graph = random_nasbench(random.Random(seed))
    digraph = check(graph)
    assert sources(digraph) == sinks(digraph) == 1
    assert len(graph) in OPERATORS
    assert PARAM_BYTES[0] <= param_bytes(graph) <= PARAM_BYTES[1]
    assert (segments_of(graph) - 1) * 6e6 <= param_bytes(graph) or segments_of(graph) == 2
    assert param_bytes(graph) <= segments_of(graph) * 6e6 or segments_of(graph) == 8
    assert graph == random_nasbench(random.Random(seed))


@pytest.mark.thorough
def test_networks_are_all_different_and_have_one_role_each() -> None:
    found = list(networks(30))
    assert found[:10] == list(networks(10))
    assert len({graph.fingerprint for graph in found}) == 30
    assert {graph.name for graph in found} >= {"nasbench", "resnet", "inception", "dense"}
    for graph in found:
        check(graph)
    roles = [role(index) for index in range(600)]
    assert [roles.count(name) for name in (LEARNED, CHOSEN, TESTED)] == [360, 120, 120]


def test_labels_are_the_boards_seconds_with_their_noise() -> None:
    graph = next(networks(1))
    device, found = board(), labelled(next(networks(1)), board(), 0)
    assert len(set(found.segments)) == len(found.segments)
    parts = {
        part for cuts in partitions(graph, np.random.default_rng((1, 0))) for part in pairwise((0, *cuts, len(graph)))
    }
    assert set(found.segments) == parts
    exact_s = device.seconds(graph)
    errors = found.seconds / np.array([exact_s[segment] for segment in found.segments]) - 1
    # Of the mean of ten runs with a noise of 1.5 % each.
    assert errors.std() == pytest.approx(0.015 / 10**0.5, rel=0.3)
    again = labelled(graph, device, 0)
    assert (again.seconds == found.seconds).all()
    some = labelled(graph, device, 0, most=20).up_to(9)
    assert set(some.segments) < set(found.segments)
    assert all(end - start <= 9 for start, end in some.segments)
