"""ONNX files that are rewritten: what the command line takes and says of them, and the names of their outputs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.parts import needs

needs("onnx")

from onnx import TensorProto, helper

from tests.support.onnx_models import onnx_bytes

INPUTS = [
    helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 4)),
    helper.make_tensor_value_info("sr", TensorProto.INT64, ()),
]


def branch(kind):
    node = helper.make_node(kind, ["x"], ["b"])
    return helper.make_graph([node], kind, [], [helper.make_tensor_value_info("b", TensorProto.FLOAT, (1, 4))])


@pytest.fixture
def choosing(tmp_path):
    """A file that computes Relu(x) or Exp(x) by its input sr, and a product of that, which is its output `louder`."""
    nodes = [
        helper.make_node("Equal", ["sr", "rate"], ["c"]),
        helper.make_node("If", ["c"], ["a"], name="by rate", then_branch=branch("Relu"), else_branch=branch("Exp")),
        helper.make_node("MatMul", ["a", "w"], ["louder"]),
    ]
    weights = {"rate": np.array(16000), "w": np.eye(4, dtype="float32")}
    path = tmp_path / "choosing.onnx"
    path.write_bytes(onnx_bytes(nodes, weights, inputs=INPUTS, outputs=("louder",)))
    return path


def test_a_bound_input_is_none_any_more_and_outputs_keep_their_names(cli, choosing):
    outcome = cli("memory", choosing, "--input-values", "sr=8000", "--json")
    assert outcome.code == 0
    assert "choosing: If with a known condition replaced by its branch" in outcome.err
    (part,) = outcome.json["parts"]
    assert [tensor["name"] for tensor in part["fullest"][0]["alive"]] == ["x", "exp_0", "louder"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("rate=8000", "has no input rate; its inputs are x, sr"),
        ("sr", 'give it as "sr=16000, scale=[1,2]"'),
        ("sr=1.5", "input sr is of int64, not 1.5"),
    ],
)
def test_values_that_no_input_takes(cli, choosing, given, message):
    outcome = cli("plan", choosing, "--input-values", given)
    assert outcome.code == 2
    assert "--input-values" in outcome.err
    assert message in " ".join(outcome.err.split())
