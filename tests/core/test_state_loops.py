"""The graph of a model with state: each loop is one operator, and every cut of it is one of the model."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.fake_backend import random_model
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.partition import check_stage
from tvm_pipeline.core.state_loops import carry_of, parse_carry, with_loops
from tvm_pipeline.errors import OptionError


def graph_of(*operators: tuple[str, str, str], inputs: str, outputs: str, shapes=None) -> OperatorGraph:
    """Operators as (name, tensors it reads, tensors it writes), each tensor named by a letter."""

    def tensor(name: str) -> Tensor:
        return Tensor(name, (shapes or {}).get(name, (2, 3)))

    made = (
        Operator(name, "add", tuple(read), tuple(map(tensor, written)), param_bytes=10, macs=1)
        for name, read, written in operators
    )
    return OperatorGraph("net", tuple(map(tensor, inputs)), tuple(made), tuple(outputs))


def members(graph: OperatorGraph, *carry: tuple[str, str]) -> dict[str, tuple[str, ...]]:
    return dict(with_loops(graph, carry)[1])


TWO_LAYERS = graph_of(
    ("front", "x", "a"),
    ("cell1", "ah", "i"),
    ("gate1", "i", "H"),
    ("middle", "H", "b"),
    ("cell2", "bk", "K"),
    ("head", "Ka", "y"),
    inputs="xhk",
    outputs="yHK",
)


def test_layers_with_a_state_of_their_own_stay_apart():
    graph, stands_for = with_loops(TWO_LAYERS, (("h", "H"), ("k", "K")))
    assert dict(stands_for) == {
        "front": ("front",),
        "loop/h": ("cell1", "gate1"),
        "middle": ("middle",),
        "loop/k": ("cell2",),
        "head": ("head",),
    }
    loop = graph.operators[1]
    assert (loop.inputs, [tensor.name for tensor in loop.outputs]) == (("a",), ["H"])
    assert (loop.param_bytes, loop.macs, loop.ordered, loop.is_host) == (20, 2, True, False)
    assert [tensor.name for tensor in graph.inputs] == ["x"]
    assert graph.outputs == ("y", "H", "K")
    assert carry_of(graph) == (("h", "H"), ("k", "K"))


def test_states_that_cross_the_layers_join_them():
    """What the second layer leaves is the first one's state: nothing of the second frame may begin before its end."""
    assert members(TWO_LAYERS, ("h", "K"), ("k", "H")) == {
        "front": ("front",),
        "loop/h": ("cell1", "gate1", "middle", "cell2"),
        "head": ("head",),
    }


def test_a_reader_that_does_not_lead_to_the_state_belongs_to_the_loop():
    """`late` only looks at what the frame before left; `between` would leave the loop and come back."""
    graph = graph_of(
        ("early", "x", "s"), ("between", "s", "b"), ("late", "bh", "y"), ("other", "x", "z"), inputs="xh", outputs="syz"
    )
    assert members(graph, ("h", "s")) == {"loop/h": ("early", "between", "late"), "other": ("other",)}


def test_a_model_without_a_state_stays_as_it_is():
    graph, stands_for = with_loops(TWO_LAYERS, ())
    assert graph == TWO_LAYERS
    assert graph.fingerprint == TWO_LAYERS.fingerprint
    assert dict(stands_for) == {operator.name: (operator.name,) for operator in graph.operators}


@pytest.mark.parametrize("seed", range(40))
def test_every_cut_between_loops_is_a_cut_of_the_model(seed):
    random = np.random.default_rng(seed)
    model = random_model(random, 14).graph
    states, operators = [], list(model.operators)
    for number in range(int(random.integers(1, 4))):
        output = str(random.choice(model.outputs))
        reader = int(random.integers(len(operators)))
        state = Tensor(f"state{number}", model.tensors[output].shape, model.tensors[output].dtype)
        old = operators[reader]
        operators[reader] = Operator(old.name, old.kind, (*old.inputs, state.name), old.outputs)
        states.append((state, output))
    model = OperatorGraph("random", (*model.inputs, *(s for s, _ in states)), tuple(operators), model.outputs)
    graph, stands_for = with_loops(model, tuple((state.name, output) for state, output in states))
    assert sorted(part for own in stands_for.values() for part in own) == sorted(o.name for o in operators)
    for state, output in states:  # what reads a state and what writes it are one operator
        touching = {o.name for o in operators if state.name in o.inputs or output in [t.name for t in o.outputs]}
        assert any(touching <= set(own) for own in stands_for.values())
    names = graph.operator_names
    for first in range(len(names)):
        for last in range(first + 1, len(names) + 1):
            check_stage(model, [part for name in names[first:last] for part in stands_for[name]])


@pytest.mark.parametrize(
    ("carry", "told"),
    [
        ((("q", "H"),), "`carry` q:H: net has no input q; its inputs are x, h, k"),
        ((("h", "b"),), "`carry` h:b: net has no output b; its outputs are y, H, K"),
        ((("h", "H"), ("h", "K")), "h is carried already"),
        ((("h", "y"),), r"h \(float32 \[2, 3\]\) and y \(float32 \[3, 2\]\) differ"),
    ],
)
def test_what_cannot_be_carried_is_told_by_its_names(carry, told):
    graph = graph_of(
        *((o.name, "".join(o.inputs), "".join(t.name for t in o.outputs)) for o in TWO_LAYERS.operators),
        inputs="xhk",
        outputs="yHK",
        shapes={"y": (3, 2)},  # of the same size
    )
    with pytest.raises(OptionError, match=told):
        with_loops(graph, carry)


def test_an_input_that_is_an_output_or_that_nothing_reads_is_no_state():
    graph = graph_of(("only", "x", "y"), inputs="xhu", outputs="yu")
    with pytest.raises(OptionError, match="output u of net is an input as it is"):
        with_loops(graph, (("h", "u"),))
    with pytest.raises(OptionError, match="no operator of net reads input h"):
        with_loops(graph, (("h", "y"),))


@pytest.mark.parametrize("text", ["state", ":state", "state:", "a:b:c", ""])
def test_a_pair_that_is_none_is_refused(text):
    with pytest.raises(OptionError, match="give it as INPUT:OUTPUT"):
        parse_carry(text)
