"""The graphs of `tests/support/generators.py`: what they promise, and the figures that the papers publish."""

from __future__ import annotations

import random

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.generators import (
    FIXED_OPERATORS,
    LAYER_OPERATORS,
    chain,
    nasnet,
    random_dag,
    randwire,
    transformer,
    transformer_of,
)
from tvm_pipeline.core.graph import OperatorGraph

seeds = st.integers(0, 2**32)


def as_networkx(graph: OperatorGraph) -> networkx.DiGraph:
    digraph = networkx.DiGraph()
    digraph.add_nodes_from(graph.operator_names)
    digraph.add_edges_from((read, operator.name) for operator in graph.operators for read in operator.inputs)
    return digraph


def check(graph: OperatorGraph) -> networkx.DiGraph:
    """Check what all generated graphs promise."""
    digraph = as_networkx(graph)
    assert len(digraph) == len(graph)
    assert networkx.is_directed_acyclic_graph(digraph)
    assert networkx.is_weakly_connected(digraph)
    for operator in graph.operators:
        figures = (operator.param_bytes, operator.macs, operator.output_bytes)
        assert all(type(figure) is int for figure in figures)
        assert operator.param_bytes >= 0
        assert operator.macs > 0
        assert operator.output_bytes > 0
    return digraph


def sources(digraph: networkx.DiGraph) -> int:
    return sum(degree == 0 for _, degree in digraph.in_degree())


def sinks(digraph: networkx.DiGraph) -> int:
    return sum(degree == 0 for _, degree in digraph.out_degree())


def params(graph: OperatorGraph) -> int:
    return sum(operator.param_bytes for operator in graph.operators)


@given(seeds, st.integers(1, 60))
def test_a_chain_is_one(seed: int, operators: int) -> None:
    graph = chain(random.Random(seed), operators)
    digraph = check(graph)
    assert networkx.dag_longest_path_length(digraph) == operators - 1 == digraph.number_of_edges()
    assert graph == chain(random.Random(seed), operators)


@given(seeds, st.integers(1, 60), st.integers(1, 4), st.integers(1, 9))
def test_random_dags_keep_their_limits(seed: int, operators: int, most_reads: int, reach: int) -> None:
    graph = random_dag(random.Random(seed), operators, most_reads, reach)
    digraph = check(graph)
    position = {operator.name: index for index, operator in enumerate(graph.operators)}
    assert len(graph) == operators
    assert sources(digraph) == 1
    assert max(degree for _, degree in digraph.in_degree()) <= most_reads
    assert all(position[end] - position[start] <= reach for start, end in digraph.edges)
    assert all(position[output] >= operators - reach for output in graph.outputs)
    assert graph == random_dag(random.Random(seed), operators, most_reads, reach)


@given(seeds, st.integers(1, 3))
def test_randwire_counts(seed: int, stages: int) -> None:
    graph = randwire(random.Random(seed), stages=stages)
    digraph = check(graph)
    assert len(graph) == 1 + stages * (32 + 1)
    assert sources(digraph) == sinks(digraph) == 1
    # WS(32, 4) has 32 * 4 / 2 edges, however they are rewired; each wired node is then read, or goes into the mean.
    wired = [operator for operator in graph.operators if operator.kind == "sepconv"]
    entries = {operator.name for operator in graph.operators if operator.kind != "sepconv"}
    assert sum(not entries & set(operator.inputs) for operator in wired) >= 1
    assert sum(len(operator.inputs) for operator in wired if not entries & set(operator.inputs)) == stages * 64
    assert graph == randwire(random.Random(seed), stages=stages)


def test_randwire_has_the_sizes_of_the_paper() -> None:
    # Table 2 of Xie et al.: 5.6 M parameters and 583 M multiply-adds, with the first convolution and the classifier.
    graph = randwire(random.Random(0), stages=3)
    assert params(graph) + 27 * 39 + 312 * 1280 + 1280 * 1000 == pytest.approx(5.6e6, rel=0.02)
    around = 112**2 * 27 * 39 + 7**2 * 312 * 1280 + 1280 * 1000
    assert sum(operator.macs for operator in graph.operators) + around == pytest.approx(583e6, rel=0.02)


def test_nasnet_is_keras_nasnetmobile() -> None:
    # 5 326 716 parameters, 771 layers: https://keras.io/api/applications and the source of keras.applications.nasnet.
    graph = nasnet()
    digraph = check(graph)
    assert len(graph) == 771
    assert params(graph) == 5_326_716
    assert graph.operators[-1].output_bytes == 1000
    assert sources(digraph) == sinks(digraph) == 1
    # The paper counts 564 M multiply-adds of convolutions.
    weighty = sum(operator.macs for operator in graph.operators if operator.kind in ("conv", "sepconv", "dense"))
    assert weighty == pytest.approx(564e6, rel=0.02)


@given(st.integers(1, 6))
def test_fused_nasnet_is_the_same_network(cells: int) -> None:
    fine, fused = nasnet(cells), nasnet(cells, fused=True)
    digraph = check(fused)
    check(fine)
    assert sources(digraph) == sinks(digraph) == 1
    assert {operator.kind for operator in fused.operators}.isdisjoint({"relu", "batch_norm", "pad"})
    # A pair of separable convolutions is one operator: five pairs in each normal and each reduction cell.
    pairs = 5 * (3 * cells + 4)
    assert [sum(operator.kind == "sepconv" for operator in graph.operators) for graph in (fine, fused)] == [
        2 * pairs,
        pairs,
    ]
    # Of the four parameters a channel of a normalisation, folding leaves one.
    norms = sum(operator.param_bytes for operator in fine.operators if operator.kind == "batch_norm")
    assert params(fine) - params(fused) == norms * 3 // 4


def test_the_transformer_is_bert_base() -> None:
    # 109 482 240 parameters: Hugging Face's BertModel of bert-base-uncased.
    assert params(transformer(12)) == 109_482_240
    assert params(transformer(12, shared_mask=True)) == 109_482_240


@given(st.integers(1, 5), st.booleans())
def test_transformer_counts(layers: int, shared_mask: bool) -> None:
    graph = transformer(layers, shared_mask=shared_mask)
    digraph = check(graph)
    assert len(graph) == FIXED_OPERATORS + layers * LAYER_OPERATORS + shared_mask * (1 + layers)
    assert sources(digraph) == sinks(digraph) == 1
    assert [d for name, d in digraph.out_degree() if name.startswith("mask")] == [layers] * shared_mask


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("operators", [1, 100, 1000, 19_000])
def test_a_transformer_of_so_many_operators(operators: int) -> None:
    graph = transformer_of(operators)
    assert abs(len(graph) - operators) <= max(LAYER_OPERATORS / 2, FIXED_OPERATORS + LAYER_OPERATORS - operators)
