"""Which groups of operators are legal stages, checked against the definition on paths of networkx."""

from __future__ import annotations

import random
from itertools import pairwise

import networkx
import pytest
from hypothesis import given

from tests.support.graphs import graphs, randoms
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor, crossing_tensors
from tvm_pipeline.core.partition import check_partition, check_stage, longest_stages
from tvm_pipeline.errors import PlanError

NET = OperatorGraph(
    "net",
    (Tensor("x", (2,)),),
    (
        Operator("op0", "relu", ("x",), (Tensor("y", (2,)),)),
        Operator("op1", "relu", ("y",), (Tensor("z", (2,)),)),
        Operator("op2", "add", ("y", "z"), (Tensor("sum", (2,)),)),
    ),
    ("sum",),
)


def test_a_legal_partition_gives_what_crosses() -> None:
    groups = [["op0"], ["op2", "op1"]]
    assert check_partition(NET, groups) == crossing_tensors(NET, groups)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "the plan has no stages; it needs at least one"),
        ([["op0", "op1", "op2"], []], "stage 1 has no operators"),
        ([["op0"], ["op9"]], "stage 1 names operator op9, which net does not have"),
        ([["op0"], ["op2"]], r"operator op1 is in no stage \(1 missing in all\)"),
        ([["op0", "op1"], ["op1", "op2"]], "operator op1 stands twice in the plan, last in stage 1"),
        ([["op1", "op2"], ["op0"]], "the stages form a cycle or stand in the wrong order: operator op1 of stage 0"),
        ([["op0", "op2"], ["op1"]], "operator op2 of stage 0 reads z, which a later stage writes"),
    ],
)
def test_an_illegal_partition_is_named(groups: list[list[str]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_partition(NET, groups)


@pytest.mark.parametrize(
    ("operators", "message"),
    [
        ([], "a stage of net holds no operators"),
        (["op0", "op9"], "net has no operator op9; the plan is of another model or target"),
        (["op0", "op2"], "no stage of net: a path leaves it and comes back at op2"),
    ],
)
def test_what_is_no_stage_is_named(operators: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_stage(NET, operators)


@given(graphs(), randoms())
def test_a_stage_is_closed_under_between(net: OperatorGraph, rng: random.Random) -> None:
    inside = {index for index in range(len(net)) if rng.random() < 0.5} or {0}
    digraph = networkx.DiGraph((source, node) for node, found in enumerate(net.edges.before) for source in found)
    digraph.add_nodes_from(range(len(net)))
    closed = not any(
        networkx.ancestors(digraph, other) & inside and networkx.descendants(digraph, other) & inside
        for other in set(digraph) - inside
    )
    names = [net.operators[index].name for index in inside]
    try:
        check_stage(net, names)
    except PlanError:
        assert not closed
    else:
        assert closed


@given(graphs(), randoms())
def test_longest_stages_are_legal_and_cannot_be_joined(graph: OperatorGraph, random: random.Random) -> None:
    names = graph.operator_names
    chosen = {name for name in names if random.random() < 0.7}
    stages = longest_stages(graph, chosen)
    assert [name for name in names if name in chosen] == sorted((n for stage in stages for n in stage), key=names.index)
    for stage in stages:
        check_stage(graph, stage)
    for stage, after in pairwise(stages):
        with pytest.raises(PlanError, match=f"comes back at {after[0]}"):
            check_stage(graph, [*stage, after[0]])
    assert longest_stages(graph, names) == [names]
    assert longest_stages(graph, []) == []


def test_what_reads_an_operator_left_out_is_one_stage_behind_it() -> None:
    tensors = {name: Tensor(name, (2,)) for name in "abcd"}
    reads = {"a": (), "b": ("a",), "c": ("b",), "d": ("b",)}
    operators = tuple(Operator(name, "relu", read, (tensors[name],)) for name, read in reads.items())
    assert longest_stages(OperatorGraph("net", (), operators, ("c", "d")), "acd") == [["a"], ["c", "d"]]
