"""Operator graphs: what is refused, what crosses a boundary, and their files."""

from __future__ import annotations

import copy
import json
import pickle
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given

from tests.support.graphs import graphs, randoms
from tests.support.simulation import naive_crossing
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor, crossing_tensors
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.errors import GraphError

X, Y, Z = Tensor("x", (2, 3)), Tensor("y", (4,), "int8"), Tensor("z", (1,))


def graph(*operators: Operator, inputs: tuple[Tensor, ...] = (X,), outputs: tuple[str, ...] = ("y",)) -> OperatorGraph:
    return OperatorGraph("net", inputs, operators, outputs)


def test_bytes_are_those_of_numpy() -> None:
    for dtype in ("float32", "float64", "float16", "int8", "uint8", "int32", "int64", "bool"):
        assert Tensor("t", (3, 5), dtype).bytes == np.zeros((3, 5), dtype).nbytes
    assert Tensor("scalar", ()).bytes == 4
    assert Operator("op", "k", (), (X, Y)).output_bytes == 24 + 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: graph(inputs=(X, X), outputs=()), "net: two inputs bear the same name"),
        (lambda: graph(Operator("a", "k", ("x",), (Y,)), Operator("a", "k", ("y",), (Z,))), "two operators bear"),
        (lambda: graph(Operator("a", "k", ("q",), (Y,))), "operator a reads q, which nothing before it writes"),
        (
            lambda: graph(Operator("a", "k", ("z",), (Y,)), Operator("b", "k", ("y",), (Z,))),
            "operator a reads z, which nothing before it writes; list the operators in topological order",
        ),
        (lambda: graph(Operator("a", "k", ("x",), (Y,), -1)), "operator a has a negative size"),
        (lambda: graph(Operator("a", "k", ("x",), (Y,), 0, -1)), "operator a has a negative size"),
        (lambda: graph(Operator("a", "k", ("x",), (Y, Y))), "tensor y is written twice"),
        (lambda: graph(Operator("a", "k", ("x",), (X,))), "tensor x is written twice"),
        (lambda: graph(Operator("a", "k", ("x",), (Tensor("y", (-1, 3)),))), r"tensor y has shape \(-1, 3\)"),
        (lambda: graph(inputs=(Tensor("y", (-1,)),)), r"tensor y has shape \(-1,\)"),
        (lambda: graph(inputs=(Tensor("y", (1,), "float31"),)), "tensor y has dtype float31"),
        (lambda: graph(Operator("a", "k", ("x",), (Tensor("y", (1,), "str8"),))), "tensor y has dtype str8"),
        (lambda: graph(Operator("a", "k", ("x",), (Z,))), "nothing writes the output y"),
    ],
)
def test_an_impossible_graph_is_refused_with_the_place(make: object, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("name", ["", " a", "a ", "# a", "a\nb", "a\tb", "a\u2028b"])
def test_an_operator_s_name_must_fit_a_line_of_a_plan(name: str) -> None:
    with pytest.raises(GraphError, match="an operator cannot be called"):
        graph(Operator(name, "k", ("x",), (Y,)))


@given(graphs(), randoms())
def test_crossing_tensors_are_those_that_exist_and_are_still_wanted(net: OperatorGraph, rng: random.Random) -> None:
    groups: list[list[str]] = [[] for _ in range(rng.randint(1, len(net)))]
    ends = sorted(rng.randint(0, len(groups) - 1) for _ in net.operators)
    for operator, group in zip(net.operators, ends, strict=True):
        groups[group].append(operator.name)
    boundaries = crossing_tensors(net, groups)
    assert len(boundaries) == len(groups) + 1
    for index, boundary in enumerate(boundaries):
        names = [tensor.name for tensor in boundary]
        assert len(set(names)) == len(names)
        assert set(names) == naive_crossing(net, groups, index)
        assert all(net.tensors[tensor.name] == tensor for tensor in boundary)
    assert {tensor.name for tensor in boundaries[-1]} == set(net.outputs)


def test_groups_in_the_wrong_order_are_refused() -> None:
    net = graph(Operator("a", "k", ("x",), (Y,)), Operator("b", "k", ("y",), (Z,)), outputs=("z",))
    with pytest.raises(GraphError, match="operator b of stage 0 reads y, which a later stage writes"):
        crossing_tensors(net, [["b"], ["a"]])


@given(graphs())
def test_edges_say_who_writes_and_reads(net: OperatorGraph) -> None:
    edges = net.edges
    assert [net.operators[index].name for index in edges.index.values()] == list(edges.index)
    assert list(edges.readers) == list(net.tensors)
    assert len(edges.before) == len(edges.after) == len(net)
    for name, readers in edges.readers.items():
        assert readers == tuple(index for index, operator in enumerate(net.operators) if name in operator.inputs)
    for index, operator in enumerate(net.operators):
        assert all(edges.writer[tensor.name] == index for tensor in operator.outputs)
        assert edges.before[index] == tuple(sorted({edges.writer[t] for t in operator.inputs if t in edges.writer}))
        assert edges.after[index] == tuple(sorted({r for t in operator.outputs for r in edges.readers[t.name]}))
    assert edges.writer.keys() == net.tensors.keys() - {tensor.name for tensor in net.inputs}


@given(graphs())
def test_what_is_computed_once_is_no_part_of_the_graph(net: OperatorGraph) -> None:
    """Files, copies, pickles and equality know nothing of it."""
    content = msgspec.json.encode(net)
    assert (net.edges, net.tensors, net.fingerprint) == (net.edges, net.tensors, net.fingerprint)
    assert net.edges is net.edges
    assert hash(net) == hash((net.name, net.inputs, net.operators, net.outputs, net.batch))
    assert msgspec.json.encode(net) == content
    assert set(json.loads(content)) == {"name", "inputs", "operators", "outputs", "batch"}
    for other in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net), replace(net)):
        assert other == net
        assert hash(other) == hash(net)
        assert not hasattr(other, "_edges")
    assert replace(net, name="other").fingerprint != net.fingerprint


@given(graphs(), graphs())
def test_the_fingerprint_tells_graphs_apart(net: OperatorGraph, other: OperatorGraph) -> None:
    assert (net.fingerprint == other.fingerprint) == (net == other)


@given(graphs())
def test_files_round_trip(tmp_path_factory: pytest.TempPathFactory, net: OperatorGraph) -> None:
    path = tmp_path_factory.mktemp("graph") / "net.json"
    path.write_bytes(msgspec.json.encode(net))
    assert read_graph(path) == net
    assert read_graph(path).fingerprint == net.fingerprint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Expecting value: line 1 column 1"),
        ('{"name": "net", "inputs": [', "Expecting value: line 1 column 28"),
        ("[]", "Expected `object`, got `array`"),
        ('{"name": "net", "inputs": [], "operators": []}', "missing required field `outputs`"),
        ('{"name": "net", "inputs": [], "operators": [], "outputs": ["y"]}', "nothing writes the output y"),
        ("\xff", "net.json"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "net.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(GraphError, match=message) as raised:
        read_graph(path)
    assert str(raised.value).count(str(path)) == 1


def test_a_missing_file_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"cannot read .*: No such file") as raised:
        read_graph(tmp_path / "absent.json")
    assert str(raised.value).count("absent.json") == 1


def test_a_dag_in_the_wrong_order_on_file(tmp_path: Path) -> None:
    net = graph(Operator("a", "k", ("x",), (Y,)), Operator("b", "k", ("y",), (Z,)), outputs=("z",))
    content = json.loads(msgspec.json.encode(net))
    content["operators"].reverse()
    (tmp_path / "net.json").write_text(json.dumps(content))
    with pytest.raises(GraphError, match=r"net\.json: graph net: operator b reads y"):
        read_graph(tmp_path / "net.json")
