"""The types of an ONNX file's tensors, inferred without its large weights, are those that onnx infers with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.parts import needs

needs("onnx")

import onnx
from onnx import TensorProto, helper, numpy_helper

from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.frontends import load
from tvm_pipeline.frontends.onnx_graph import OnnxGraph, with_fixed_inputs


def model_with_weights() -> Model:
    """Return a model in which a large weight, a small one and its own value say shapes."""
    weight = np.random.default_rng(0).standard_normal((64, 32), np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "weight"], ["y"]),
            helper.make_node("Reshape", ["y", "shape"], ["z"]),
            helper.make_node("Shape", ["weight"], ["extents"]),
            helper.make_node("ConstantOfShape", ["extents"], ["zeros"]),
            helper.make_node("Add", ["zeros", "weight"], ["same"]),
        ],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 64])],
        [helper.make_empty_tensor_value_info("z"), helper.make_empty_tensor_value_info("same")],
        [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(np.array([2, 2, 8, 4]), "shape")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return Model("net", "onnx", made.SerializeToString(), (Tensor("x", (4, 64)),))


def test_the_types_are_those_that_onnx_infers_with_all_weights() -> None:
    model = model_with_weights()
    whole = onnx.shape_inference.infer_shapes(with_fixed_inputs(model), data_prop=True).graph
    expected = {
        value.name: tuple(extent.dim_value for extent in value.type.tensor_type.shape.dim)
        for value in (*whole.value_info, *whole.output)
    }
    graph = OnnxGraph(model).graph
    found = {tensor.name: tensor.shape for operator in graph.operators for tensor in operator.outputs}
    assert found == expected
    assert (found["z"], found["same"]) == ((2, 2, 8, 4), (64, 32))
    assert [tensor.name for tensor in graph.inputs] == ["x"]
    assert sum(operator.param_bytes for operator in graph.operators) >= 64 * 32 * 4


def test_given_input_shapes_replace_all_shapes_of_the_file(tmp_path: Path) -> None:
    """The file has pictures of 32 x 32 in a batch of ten, also for its inner tensor and its output."""
    names = "x", "inner", "y"
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (10, 3, 32, 32)) for name in names]
    nodes = [helper.make_node("Relu", [names[index]], [names[index + 1]]) for index in range(2)]
    graph = helper.make_graph(nodes, "net", values[:1], values[2:], value_info=values[1:2])
    onnx.save(helper.make_model(graph), tmp_path / "net.onnx")
    found = OnnxGraph(load(tmp_path / "net.onnx", {"x": (1, 3, 64, 96)})).graph
    assert {tensor.shape for tensor in found.tensors.values()} == {(1, 3, 64, 96)}
