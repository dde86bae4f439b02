"""Kahn's algorithm in its three forms, separators and cycles; networkx says what is right."""

from __future__ import annotations

import random
from typing import Literal

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.graphs import graphs, randoms
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.topology import find_cycle, separators, successors, topological_order


def digraph_of(before: list[list[int]]) -> networkx.DiGraph:
    digraph = networkx.DiGraph()
    digraph.add_nodes_from(range(len(before)))
    digraph.add_edges_from((source, node) for node, sources in enumerate(before) for source in sources)
    return digraph


@given(graphs(), randoms(), st.sampled_from(["least", "first", "last"]))
def test_an_order_holds_every_node_behind_those_it_needs(
    net: OperatorGraph, rng: random.Random, choose: Literal["least", "first", "last"]
) -> None:
    names = rng.sample(range(len(net)), len(net))
    before: list[list[int]] = [[] for _ in names]
    for index, sources in enumerate(net.edges.before):
        before[names[index]] = [names[source] for source in sources]
    order = topological_order(before, successors(before), choose)
    assert sorted(order) == list(range(len(net)))
    position = {node: turn for turn, node in enumerate(order)}
    assert all(position[source] < position[node] for node in order for source in before[node])
    if choose == "least":
        assert order == list(networkx.lexicographical_topological_sort(digraph_of(before)))


def test_a_queue_goes_by_levels_and_a_stack_follows_branches() -> None:
    before = [[], [0], [0], [1], [2]]  # 0 -> 1 -> 3 and 0 -> 2 -> 4
    assert topological_order(before, successors(before), "first") == [0, 1, 2, 3, 4]
    assert topological_order(before, successors(before), "last") == [0, 2, 4, 1, 3]


@given(graphs())
def test_separators_are_comparable_to_all_others(net: OperatorGraph) -> None:
    before, after = net.edges.before, net.edges.after
    digraph = digraph_of([list(sources) for sources in before])
    comparable = {
        node
        for node in digraph
        if len(networkx.ancestors(digraph, node)) + len(networkx.descendants(digraph, node)) == len(net) - 1
    }
    assert separators(before, after) == comparable


@pytest.mark.parametrize("seed", range(20))
def test_a_cycle_is_one_of_the_graph(seed: int) -> None:
    digraph = networkx.gnp_random_graph(12, 0.15, seed=seed, directed=True)
    before = [sorted(digraph.predecessors(node)) for node in digraph]
    order = topological_order(before, successors(before))
    assert (len(order) == len(before)) == networkx.is_directed_acyclic_graph(digraph)
    if len(order) < len(before):
        cycle = find_cycle(before, order)
        assert len(set(cycle)) == len(cycle)
        assert all(digraph.has_edge(*edge) for edge in zip(cycle, [*cycle[1:], cycle[0]], strict=True))
