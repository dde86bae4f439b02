"""ONNX files as Relax modules: the values of onnxruntime, names that stay, and refusals that name the operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tvm import relax

from tests.relax.imported import assert_as_onnxruntime, kinds, model_of, noise
from tests.support.log_lines import log_lines
from tests.support.onnx_models import onnx_bytes
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.relax.distinct_outputs import output_names
from tvm_pipeline_tvm.relax.importer import import_model
from tvm_pipeline_tvm.relax.simplify import simplified

node = helper.make_node


def test_a_graph_is_one_block_of_dataflow_with_names() -> None:
    content = onnx_bytes(
        [
            node("Conv", ["input.1", "w", "b"], ["a"], pads=[1, 1, 1, 1]),
            node("BatchNormalization", ["a", "b", "b", "b", "v"], ["n"]),
            node("Relu", ["n"], ["scores/relu"]),
            node("GlobalAveragePool", ["scores/relu"], ["mean:0"]),
        ],
        {"w": noise((8, 3, 3, 3)), "b": noise((8,)), "v": np.full(8, 1e-3, "float32")},
        inputs=[helper.make_tensor_value_info("input.1", TensorProto.FLOAT, [1, 3, 8, 8])],
        outputs=("scores/relu", "mean:0"),
    )
    told = log_lines("INFO")
    mod = import_model(model_of(content))
    main = mod["main"]
    assert [parameter.name for parameter in main.params] == ["input.1"]
    assert output_names(mod) == ("scores/relu", "mean:0")
    assert [type(block) for block in main.body.blocks] == [relax.DataflowBlock]
    assert told == ["importing net"]
    assert kinds(simplified(mod)) == ["nn.conv2d", "add", "nn.relu", "mean"]
    assert output_names(simplified(mod)) == output_names(mod)
    assert_as_onnxruntime(content)


def test_what_depends_on_shapes_alone_is_known() -> None:
    """Also a slice from the back, whose end is near the least int64."""
    content = onnx_bytes(
        [
            node("Shape", ["x"], ["s"]),
            node("Neg", ["greatest"], ["least"]),
            node("Slice", ["s", "one", "least", "zero", "back"], ["nc"]),
            node("Slice", ["nc", "zero", "one", "zero"], ["c"]),
            node("Mul", ["c", "two"], ["larger"]),
            node("Concat", ["larger", "rest"], ["shape"], axis=0),
            node("Relu", ["x"], ["r"]),
            node("Reshape", ["r", "shape"], ["y"]),
        ],
        {
            "zero": np.array([0]),
            "one": np.array([1]),
            "greatest": np.array([2**63 - 1]),
            "back": np.array([-1]),
            "two": np.array([2]),
            "rest": np.array([-1]),
        },
        shape=(2, 3, 4),
        outputs=(helper.make_tensor_value_info("y", TensorProto.FLOAT, [6, 4]),),
    )
    mod = simplified(import_model(model_of(content)))
    assert kinds(mod) == ["nn.relu", "reshape"]
    assert_as_onnxruntime(content)


def test_outputs_are_tensors_of_their_own() -> None:
    content = onnx_bytes(
        [
            node("Exp", ["x"], ["y"]),
            node("Identity", ["y"], ["again"]),
            node("Reshape", ["y", "flat"], ["reshaped"]),
            node("Identity", ["x"], ["input"]),
        ],
        {"flat": np.array([-1])},
        outputs=("y", "again", "reshaped", "input"),
    )
    mod = simplified(import_model(model_of(content)))
    assert kinds(mod).count("astype") == 4  # a copy, two behind the reshape, and one of the input
    assert output_names(mod) == ("y", "again", "reshaped", "input")
    assert_as_onnxruntime(content)


def test_functions_of_the_file_are_written_out() -> None:
    graph = helper.make_graph(
        [node("Twice", ["x"], ["y"], domain="own")],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])],
    )
    opsets = [helper.make_opsetid("", 15)]
    twice = helper.make_function("own", "Twice", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])], opsets)
    opsets = [*opsets, helper.make_opsetid("own", 1)]
    proto = helper.make_model(graph, functions=[twice], opset_imports=opsets, ir_version=9)
    assert kinds(import_model(model_of(proto.SerializeToString()))) == ["add"]


def branch(value: str) -> onnx.GraphProto:
    return helper.make_graph(
        [node("Identity", ["x"], [value])], value, [], [helper.make_empty_tensor_value_info(value)]
    )


BOOL = helper.make_tensor_value_info("b", TensorProto.BOOL, [])
FLOAT = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
OPEN = helper.make_tensor_value_info("y", TensorProto.INT64, None)
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a branch": (
        {
            "nodes": [node("If", ["b"], ["y"], "choice", then_branch=branch("t"), else_branch=branch("e"))],
            "inputs": [FLOAT, BOOL],
        },
        ["operator If (node choice)", "depends on data"],
    ),
    "several kinds": (
        {
            "nodes": [
                node("Det", ["x"], ["d"], "first"),
                node("Det", ["x"], ["e"], "second"),
                node("FusedConv", ["x", "x"], ["f"], domain="com.microsoft"),
                node("Sum", ["d", "e"], ["y"]),
            ],
            "shape": (3, 3),
        },
        [
            "operator Det (node first) and 1 more: TVM's importer has none",
            "operator FusedConv (output f)",
            "com.microsoft",
        ],
    ),
    "a selection": (
        {"nodes": [node("NonZero", ["x"], ["y"], "boxes")], "outputs": (OPEN,)},
        ["operator NonZero (node boxes)", "its shape depends on data", "export the model with fixed shapes"],
    ),
    "training": (
        {
            "nodes": [node("BatchNormalization", ["x", "c", "c", "c", "c"], ["y", "m", "v"], "norm", training_mode=1)],
            "constants": {"c": np.ones(3, "float32")},
            "opset": 14,
        },
        ["operator BatchNormalization (node norm)", "training mode", "model.eval()"],
    ),
    "an output of constants": (
        {"nodes": [node("Exp", ["x"], ["y"]), node("Shape", ["x"], ["s"])], "outputs": ("y", "s")},
        ["output s does not depend on the inputs"],
    ),
    "blocks": (
        {
            "nodes": [
                node("DequantizeLinear", ["q", "s"], ["w"], "blocked", axis=0, block_size=2),
                node("Add", ["x", "w"], ["y"]),
            ],
            "constants": {"q": np.ones((2, 3), "int8"), "s": np.ones((1, 3), "float32")},
            "opset": 21,
            "ir_version": 10,
        },
        ["operator DequantizeLinear (node blocked)", "no scales for blocks"],
    ),
    "an index outside": (
        {"nodes": [node("Gather", ["x", "i"], ["y"], "pick", axis=1)], "constants": {"i": np.array(3)}},
        ["operator Gather (node pick)", "takes 3 to 3 of 3 along axis 1"],
    ),
    "an image smaller than a kernel": (
        {
            "nodes": [node("Conv", ["x", "w"], ["y"], "wide")],
            "constants": {"w": np.ones((1, 1, 5, 5), "float32")},
            "shape": (1, 1, 2, 6),
            "outputs": (helper.make_tensor_value_info("y", TensorProto.FLOAT, None),),
        },
        ["operator Conv (node wide)", "too small", "[1, 1, -2, 2]"],
    ),
    "weights that are inputs": (
        {
            "nodes": [node("LSTM", ["x", "w", "r"], ["y"], "cell", hidden_size=2)],
            "inputs": [
                helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
                for name, shape in (("x", [3, 1, 2]), ("w", [1, 8, 2]), ("r", [1, 8, 2]))
            ],
        },
        ["operator LSTM (node cell)", "its weights are no constants"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_operator_and_what_to_do(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    arguments, told = REFUSED[name]
    with pytest.raises(ModelError) as error:
        import_model(model_of(onnx_bytes(**arguments), "boxes.onnx"))
    assert str(error.value).startswith("boxes.onnx: ")
    for each in told:
        assert each in str(error.value)
    assert capfd.readouterr() == ("", "")  # TVM's importer prints where it fails


def test_models_without_inputs_are_refused() -> None:
    content = onnx_bytes([node("Add", ["x", "x"], ["y"])], {"x": np.ones((2, 3), "float32")})
    with pytest.raises(ModelError, match="no inputs besides its parameters"):
        import_model(model_of(content))


@pytest.mark.parametrize("kind", ["relay", "relay.json", "relay.testing"])
def test_other_formats_need_relay(kind: Any) -> None:
    with pytest.raises(ModelError, match=rf"net: a model of the format {kind} needs TVM with Relay: .*pip install"):
        import_model(Model("net", kind, b""))
