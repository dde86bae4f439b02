"""Cuts against a naive enumeration of downsets, and against the counts that were published."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.graphs import graphs, random_dag
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor, crossing_tensors, handed_on_bytes, readers_of
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.planning.search.cuts import Cuts, ideals, prefixes

KERAS = Path(__file__).parents[2] / "profiles" / "keras"

# Counted by another program before this one was written.
PUBLISHED = {
    "ResNet50": 242,
    "ResNet101": 412,
    "ResNet152": 582,
    "ResNet50V2": 255,
    "ResNet101V2": 442,
    "ResNet152V2": 629,
    "DenseNet121": 430,
    "DenseNet169": 598,
    "DenseNet201": 710,
    "Xception": 189,
    "InceptionResNetV2": 6603,
}


def as_networkx(graph: OperatorGraph) -> networkx.DiGraph:
    edges = networkx.DiGraph()
    edges.add_nodes_from(operator.name for operator in graph.operators)
    edges.add_edges_from((writer, reader) for writer, readers in readers_of(graph).items() for reader in readers)
    return edges


def downsets(graph: OperatorGraph) -> set[frozenset[str]]:
    """Return every set of operators that holds all that its members read from."""
    edges = as_networkx(graph)
    names = list(edges)
    found = set()
    for bits in range(1 << len(names)):
        chosen = frozenset(name for i, name in enumerate(names) if bits >> i & 1)
        if all(source in chosen for name in chosen for source in edges.predecessors(name)):
            found.add(chosen)
    return found


def sets(cuts: Cuts) -> list[frozenset[str]]:
    """Return the operators of each cut."""
    last = len(cuts) - 1
    return [frozenset(cuts.stages([cut, last])[0]) for cut in range(len(cuts))]


def check(graph: OperatorGraph, cuts: Cuts, expected: set[frozenset[str]]) -> None:
    """Check that the cuts are those expected, each once, with the figures of their sets of operators."""
    listed = sets(cuts)
    assert len(listed) == len(expected)
    assert set(listed) == expected
    operators = {operator.name: operator for operator in graph.operators}
    keys = [
        (int(cuts.zone[i]), sum(operators[name].param_bytes for name in cut), len(cut)) for i, cut in enumerate(listed)
    ]
    assert keys == sorted(keys)
    assert cuts.param_bytes.tolist() == [key[1] for key in keys]
    position = {name: index for index, name in enumerate(operators)}
    weights = [float(index * index + 1) for index in range(len(operators))]
    sums = cuts.sums(weights)
    for index, cut in enumerate(listed):
        rest = operators.keys() - cut
        groups = [cut, rest]
        assert cuts.crossing_bytes[index] == sum(tensor.bytes for tensor in crossing_tensors(graph, groups)[1])
        assert cuts.handed_on_bytes[index] == handed_on_bytes(graph, groups)[0]
        split = any(set(readers) & cut and set(readers) & rest for readers in readers_of(graph).values())
        assert cuts.together[index] == (not split)
        assert sums[index] == sum(weights[position[name]] for name in cut)
        earlier = np.arange(index)
        assert cuts.inside(earlier, index).tolist() == [listed[other] <= cut for other in earlier]
    # A cut is its parent and one operator.
    for index in range(1, len(listed)):
        parent, added = int(cuts.parent[index]), graph.operators[int(cuts.added[index])].name
        assert parent < index
        assert listed[index] - listed[parent] == {added}


@given(graphs(1, 8))
def test_ideals_are_all_downsets_each_once(graph: OperatorGraph) -> None:
    cuts = ideals(graph)
    assert cuts is not None
    assert cuts.complete
    check(graph, cuts, downsets(graph))


@given(graphs(1, 8))
def test_prefixes_are_those_of_the_graph_s_order(graph: OperatorGraph) -> None:
    names = [operator.name for operator in graph.operators]
    cuts = prefixes(graph)
    assert not cuts.complete
    check(graph, cuts, {frozenset(names[:end]) for end in range(len(names) + 1)})


@pytest.mark.parametrize("seed", range(6))
def test_there_are_as_many_ideals_as_antichains(seed: int) -> None:
    """The downsets of a wider graph, by another library: a downset is named by its maximal operators."""
    graph = random_dag(random.Random(seed), 15)
    cuts = ideals(graph)
    assert cuts is not None
    assert len(cuts) == sum(1 for _ in networkx.antichains(as_networkx(graph)))


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_published_networks_have_as_many_ideals_as_published(name: str, count: int) -> None:
    cuts = ideals(read_graph(KERAS / f"{name}.json"))
    assert cuts is not None
    assert len(cuts) == count


@given(graphs(1, 8), st.data())
def test_stages_lie_between_consecutive_cuts(graph: OperatorGraph, data: st.DataObject) -> None:
    cuts = ideals(graph)
    assert cuts is not None
    chosen = [0]
    while chosen[-1] < len(cuts) - 1:
        later = [c for c in range(chosen[-1] + 1, len(cuts)) if cuts.inside(np.array([chosen[-1]]), c)[0]]
        chosen.append(data.draw(st.sampled_from(later)))
    listed, names = sets(cuts), [operator.name for operator in graph.operators]
    between = [listed[b] - listed[a] for a, b in pairwise(chosen)]
    assert cuts.stages(chosen[1:]) == [tuple(name for name in names if name in stage) for stage in between]


def test_too_many_pairs_in_a_zone_are_refused_and_a_chain_has_none() -> None:
    wide = read_graph(KERAS / "InceptionResNetV2.json")
    assert ideals(wide, most_pairs=10_000) is None
    assert ideals(read_graph(KERAS / "DenseNet121.json"), most_pairs=0) is not None


def test_a_diamond_by_hand() -> None:
    """s feeds a and b, which t reads: the two middle operators may come in either order."""

    def tensor(name: str, size: int) -> Tensor:
        return Tensor(name, (size,), "int8")

    graph = OperatorGraph(
        "diamond",
        (tensor("in", 5),),
        (
            Operator("s", "k", ("in",), (tensor("ts", 10),), 1),
            Operator("a", "k", ("ts",), (tensor("ta", 20),), 4),
            Operator("b", "k", ("ts",), (tensor("tb", 40),), 2),
            Operator("t", "k", ("ta", "tb"), (tensor("out", 80),), 8),
        ),
        ("out",),
    )
    cuts = ideals(graph)
    assert cuts is not None
    assert ["".join(sorted(cut)) for cut in sets(cuts)] == ["", "s", "bs", "as", "abs", "abst"]
    assert cuts.param_bytes.tolist() == [0, 1, 3, 5, 7, 15]
    assert cuts.crossing_bytes.tolist() == [5, 10, 50, 30, 60, 80]
    assert cuts.handed_on_bytes.tolist() == [0, 10, 50, 30, 60, 0]
    assert cuts.together.tolist() == [True, True, False, False, True, True]
