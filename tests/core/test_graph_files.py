"""Graphs from files of nodes and edges, from networkx, and merged; networkx itself says what is right."""

from __future__ import annotations

import doctest
import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.graphs import graphs, randoms
from tvm_pipeline.core import graph_files
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.graph_files import Node, graph_from_networkx, graph_of_nodes, merge_graphs, read_graph
from tvm_pipeline.core.platform import read_platform
from tvm_pipeline.errors import GraphError

KERAS = sorted((Path(__file__).parents[2] / "profiles" / "keras").glob("*.json"))
PLATFORMS = sorted((Path(__file__).parents[2] / "profiles" / "platforms").glob("*.toml"))


def node(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "output_bytes": 1, **fields}


def read(folder: Path, nodes: list[Any], edges: list[Any], **fields: Any) -> OperatorGraph:
    (folder / "net.json").write_text(json.dumps({"name": "net", "nodes": nodes, "edges": edges, **fields}))
    return read_graph(folder / "net.json")


def as_networkx(graph: OperatorGraph) -> networkx.DiGraph:
    """Which operator reads which."""
    writer = {tensor.name: operator.name for operator in graph.operators for tensor in operator.outputs}
    digraph = networkx.DiGraph()
    digraph.add_nodes_from(graph.operator_names)
    digraph.add_edges_from((writer[r], o.name) for o in graph.operators for r in o.inputs if r in writer)
    return digraph


def random_digraph(rng: random.Random, most: int = 9) -> networkx.DiGraph:
    """Any order of the nodes, with every figure that is read; connected."""
    keys = list(range(100, 100 + rng.randint(1, most)))
    shuffled = rng.sample(keys, len(keys))
    digraph = networkx.DiGraph(name="random")
    for key in keys:
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(0, 3)))
        digraph.add_node(key, output_shape=shape, param_bytes=rng.randint(0, 9), macs=rng.randint(0, 9), op="conv")
    for position, key in enumerate(shuffled[1:], 1):
        digraph.add_edges_from(
            (source, key) for source in rng.sample(shuffled[:position], rng.randint(1, min(3, position)))
        )
    return digraph


@pytest.mark.parametrize("path", KERAS, ids=lambda path: path.stem)
def test_keras_networks_have_the_figures_that_their_files_state(path: Path) -> None:
    stated = json.loads(path.read_bytes())
    graph = read_graph(path)
    digraph = as_networkx(graph)
    assert graph.name == stated["name"] == path.stem
    assert len(graph) == stated["V"]
    assert digraph.number_of_edges() == stated["E"]
    assert networkx.dag_longest_path_length(digraph) + 1 == stated["depth_nodes"]
    assert max(degree for _, degree in digraph.in_degree()) == stated["max_in_degree"]
    assert sum(operator.param_bytes for operator in graph.operators) == stated["params"]
    assert sum(operator.macs for operator in graph.operators) == stated["macs"]
    assert [o.output_bytes for o in graph.operators] == [n["output_bytes"] for n in stated["nodes"]]
    assert [list(o.outputs[0].shape) for o in graph.operators] == [n["output_shape"] for n in stated["nodes"]]


def test_all_thirteen_are_there() -> None:
    assert len(KERAS) == 13


def test_a_hand_worked_file(tmp_path: Path) -> None:
    nodes = [
        node("add", op="Add", output_bytes=8, output_shape=[2, 4]),
        node("image", op="InputLayer", output_bytes=6, output_shape=[2, 2]),
        {"name": "conv", "op": "Conv2D", "param_bytes": 5, "macs": 7.0, "output_shape": [4, 2]},
    ]
    # An edge twice, by index and by name; keys that nobody asked for.
    graph = read(tmp_path, nodes, [[1, 2], ["conv", 0], [2, 0], ["image", "add"]], V=3, source="by hand")
    assert graph == OperatorGraph(
        "net",
        (),
        (
            Operator("image", "InputLayer", (), (Tensor("image", (6,), "int8"),)),
            Operator("conv", "Conv2D", ("image",), (Tensor("conv", (4, 2), "int8"),), 5, 7),
            Operator("add", "Add", ("conv", "image"), (Tensor("add", (2, 4), "int8"),)),
        ),
        ("add",),
    )


def test_one_node_is_a_graph(tmp_path: Path) -> None:
    graph = read(tmp_path, [node("only")], [])
    assert graph.operators == (Operator("only", "operator", (), (Tensor("only", (1,), "int8"),)),)


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ([], [], "has no nodes"),
        ([node("a"), node("a")], [], "two nodes are called a"),
        ([node("a"), node("b")], [[0, 2]], r"edge \[0, 2\] names node 2, .* from 0 to 1"),
        ([node("a"), node("b")], [[0, -1]], "names node -1"),
        ([node("a"), node("b")], [["a", "c"]], "names node 'c'"),
        ([node("a"), node("b")], [[0, 1], [1, 1]], "operator b reads its own output"),
        ([node("a"), node("b")], [[0, 1], [1, 0]], "cyclic: (a -> b -> a|b -> a -> b);"),
        ([node("a"), node("b")], [], "several parts: no edges join a and b; .*merge_graphs"),
        ([node("a", param_bytes=-1)], [], "param_bytes of operator a is -1; it must be a whole number"),
        ([node("a", macs=float("nan"))], [], "macs of operator a is nan"),
        ([node("a", macs=float("inf"))], [], "macs of operator a is inf"),
        ([node("a", output_bytes=1.5)], [], "output_bytes of operator a is 1.5"),
        ([node("a", output_shape=[2, -1])], [], "output_shape of operator a is -1"),
        ([{"name": "a"}], [], "operator a has neither output_bytes nor output_shape"),
        ([node("# a")], [], "an operator cannot be called '# a'"),
        ([node("a\nb")], [], "an operator cannot be called"),
        ([node("")], [], "an operator cannot be called"),
        ([node("a", macs="7")], [], r"Expected `int \| float`, got `str` - at `\$.nodes\[0\].macs`"),
        ([node("a")], [[0]], r"Expected `array` of length 2, got 1 - at `\$.edges\[0\]`"),
        ([{"op": "Add"}], [], "missing required field `name`"),
    ],
)
def test_what_is_refused(tmp_path: Path, nodes: list[Any], edges: list[Any], message: str) -> None:
    with pytest.raises(GraphError, match=message) as raised:
        read(tmp_path, nodes, edges)
    assert str(raised.value).count("net.json") == 1


def test_a_long_cycle_is_told_in_short(tmp_path: Path) -> None:
    nodes = [node(f"n{i}") for i in range(50)]
    with pytest.raises(GraphError, match=r"\.\.\. \(49 in all\)") as raised:
        read(tmp_path, nodes, [[i, i + 1] for i in range(49)] + [[49, 1]])
    assert len(str(raised.value)) < 400


def test_a_file_of_neither_form(tmp_path: Path) -> None:
    (tmp_path / "net.json").write_text('{"name": "net", "layers": []}')
    with pytest.raises(GraphError, match=r"net\.json: .*missing required field"):
        read_graph(tmp_path / "net.json")
    (tmp_path / "net.json").write_text("[" * 200_000)
    with pytest.raises(GraphError, match=r"net\.json"):
        read_graph(tmp_path / "net.json")


@given(randoms())
def test_networkx_graphs_keep_their_edges_and_figures(rng: random.Random) -> None:
    digraph = random_digraph(rng)
    graph = graph_from_networkx(digraph)
    assert graph.name == "random"
    found = as_networkx(graph)
    assert set(found.nodes) == {str(key) for key in digraph.nodes}
    assert set(found.edges) == {(str(source), str(reader)) for source, reader in digraph.edges}
    assert set(graph.outputs) == {str(key) for key, degree in digraph.out_degree() if degree == 0}
    for operator in graph.operators:
        stated = digraph.nodes[int(operator.name)]
        assert (operator.kind, operator.param_bytes, operator.macs) == ("conv", stated["param_bytes"], stated["macs"])
        assert operator.outputs[0].shape == stated["output_shape"]


@given(randoms())
def test_the_order_is_the_nearest_to_the_given_one(rng: random.Random) -> None:
    digraph = random_digraph(rng)
    position = {key: index for index, key in enumerate(digraph.nodes)}
    order = networkx.lexicographical_topological_sort(digraph, key=position.__getitem__)
    assert graph_from_networkx(digraph).operator_names == [str(key) for key in order]


@given(randoms(), st.integers(0, 2))
def test_cycles_and_parts_are_found(rng: random.Random, extra: int) -> None:
    """With arbitrary edges: an error exactly where networkx sees a cycle or several parts; the cycle named is one."""
    digraph = random_digraph(rng, most=6)
    keys = list(digraph.nodes)
    digraph.add_edges_from((a, b) for a, b in (rng.sample(keys, 2) for _ in range(extra) if len(keys) > 1))
    digraph.remove_edges_from(rng.sample(list(digraph.edges), min(digraph.number_of_edges(), extra)))
    acyclic, connected = networkx.is_directed_acyclic_graph(digraph), networkx.is_weakly_connected(digraph)
    try:
        graph_from_networkx(digraph)
    except GraphError as error:
        message = str(error)
        assert not (acyclic and connected)
        if "is cyclic" in message:
            cycle = [int(key) for key in message.split(": ")[1].split("; ")[0].split(" -> ")]
            assert cycle[0] == cycle[-1]
            assert all(digraph.has_edge(*edge) for edge in pairwise(cycle))
        else:
            a, b = (int(key) for key in message.split("no edges join ")[1].split("; ")[0].split(" and "))
            assert not networkx.has_path(digraph.to_undirected(), a, b)
    else:
        assert acyclic
        assert connected


def test_what_networkx_graphs_may_carry() -> None:
    digraph = networkx.MultiDiGraph()
    digraph.add_node("a", output_bytes=np.int64(4), weight=0.5)
    digraph.add_node(("b", 1), output_shape=np.array([2, 3]), macs=np.float64(8))
    digraph.add_edges_from([("a", ("b", 1)), ("a", ("b", 1))])
    graph = graph_from_networkx(digraph, name="net")
    assert [(o.name, o.inputs, o.output_bytes, o.macs) for o in graph.operators] == [
        ("a", (), 4, 0),
        ("('b', 1)", ("a",), 6, 8),
    ]
    assert graph.fingerprint


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({}, "operator 1 has neither output_bytes nor output_shape"),
        ({"output_bytes": None}, "operator 1 has neither"),
        ({"output_bytes": "4"}, "output_bytes of operator 1 is 4"),
        ({"output_shape": 4.5}, "output_shape of operator 1 is 4.5"),
        ({"output_shape": "12"}, "output_shape of operator 1 is 1"),
        ({"output_shape": (None, 4)}, "output_shape of operator 1 is None"),
        ({"output_bytes": 4, "macs": float("nan")}, "macs of operator 1 is nan"),
    ],
)
def test_bad_attributes_of_networkx_graphs(attributes: dict[str, Any], message: str) -> None:
    digraph = networkx.DiGraph()
    digraph.add_node(1, **attributes)
    with pytest.raises(GraphError, match=message):
        graph_from_networkx(digraph)


def test_networkx_graphs_that_are_none_of_operators() -> None:
    with pytest.raises(GraphError, match="graph networkx has no directions"):
        graph_from_networkx(networkx.path_graph(3))
    with pytest.raises(GraphError, match="graph networkx has no nodes"):
        graph_from_networkx(networkx.DiGraph())
    digraph = networkx.DiGraph([(1, "1")])
    networkx.set_node_attributes(digraph, 1, "output_bytes")
    with pytest.raises(GraphError, match="two nodes are called 1"):
        graph_from_networkx(digraph)


def test_the_documented_example_runs() -> None:
    results = doctest.testmod(graph_files)
    assert results.attempted
    assert not results.failed


@given(st.lists(graphs(), min_size=1, max_size=3))
def test_merged_graphs_hold_their_parts(parts: list[OperatorGraph]) -> None:
    merged = merge_graphs(parts, "both")
    source, *inner, sink = merged.operators
    assert merged.name == "both"
    assert [tensor.bytes for tensor in source.outputs] == [0]
    assert (source.inputs, source.param_bytes, source.macs) == ((), 0, 0)
    assert (sink.inputs, sink.outputs, sink.param_bytes, sink.macs) == (merged.outputs, (), 0, 0)
    assert networkx.is_directed_acyclic_graph(as_networkx(merged))
    # Taking the names' fronts and the source away gives the parts back.
    rest = iter(inner)
    inputs, outputs = iter(merged.inputs), iter(merged.outputs)
    for index, part in enumerate(parts):
        twins = sum(other.name == part.name for other in parts[:index])
        front = f"{part.name}#{twins + 1}/" if twins else f"{part.name}/"
        assert [next(inputs) for _ in part.inputs] == [Tensor(front + t.name, t.shape, t.dtype) for t in part.inputs]
        assert [next(outputs) for _ in part.outputs] == [front + name for name in part.outputs]
        written = {tensor.name for operator in part.operators for tensor in operator.outputs}
        for operator in part.operators:
            found = next(rest)
            first = not written.intersection(operator.inputs)
            assert found.name == front + operator.name
            assert found.inputs == (*(front + name for name in operator.inputs), *(["source"] * first))
            assert [t.name for t in found.outputs] == [front + t.name for t in operator.outputs]
            assert (found.param_bytes, found.macs) == (operator.param_bytes, operator.macs)
            assert found.output_bytes == operator.output_bytes
    assert next(rest, None) is None


def test_merging_joins_what_was_apart() -> None:
    parts = [graph_of_nodes(name, [Node("a", output_bytes=3), Node("b", output_bytes=2)], [(0, 1)]) for name in "xx"]
    merged = merge_graphs(parts, "both")
    assert sorted(as_networkx(merged).edges) == sorted(
        [("source", "x/a"), ("x/a", "x/b"), ("x/b", "sink"), ("source", "x#2/a"), ("x#2/a", "x#2/b"), ("x#2/b", "sink")]
    )
    again = merge_graphs([merged, merged], "four")
    assert networkx.is_weakly_connected(as_networkx(again))
    with pytest.raises(GraphError, match="no graphs to merge"):
        merge_graphs([], "none")


@given(graphs())
def test_both_forms_of_files_are_read(tmp_path_factory: pytest.TempPathFactory, graph: OperatorGraph) -> None:
    path = tmp_path_factory.mktemp("graph") / "net.json"
    path.write_bytes(msgspec.json.encode(graph))
    assert read_graph(path) == graph


@pytest.mark.parametrize("path", PLATFORMS, ids=lambda path: path.stem)
def test_platforms_are_what_their_names_say(path: Path) -> None:
    coral, kind, count = path.stem.split("-")
    platform = read_platform(path)
    assert platform.name == path.stem
    assert (coral, len(platform.devices)) == ("coral", int(count))
    # Equal devices: a difference would be a slip of the hand.
    assert len({replace(device, name="", target="") for device in platform.devices}) == 1
    assert [device.target.split(":")[1] for device in platform.devices] == [d.name[3:] for d in platform.devices]
    device = platform.devices[0]
    assert (device.backend, device.bus) == ("edgetpu", "usb" if kind == "usb" else "")
    # SEC 2022, Table II: of 8 MiB of SRAM 6.72 hold parameters.
    assert device.cache_bytes == 8 * 2**20
    assert device.model is not None
    assert device.model.cached_bytes == int(6.72 * 2**20)
