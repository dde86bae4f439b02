"""A small ONNX file with an operator that TVM 0.19 does not import."""

from __future__ import annotations

from pathlib import Path

import numpy as np

UNKNOWN = "Det"


def write_determinants(path: Path) -> Path:
    """Write a convolution, the determinants of its four channels, and a matrix product of these: five operators."""
    from onnx import TensorProto, checker, helper, numpy_helper, save

    draw = np.random.default_rng(5)

    def weight(name: str, *shape: int):
        return numpy_helper.from_array((draw.standard_normal(shape) * 0.3).astype("float32"), name)

    nodes = [
        helper.make_node("Conv", ["x", "filters"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Tanh", ["a"], ["b"]),
        helper.make_node(UNKNOWN, ["b"], ["c"]),
        helper.make_node("Gemm", ["c", "weights"], ["d"]),
        helper.make_node("Relu", ["d"], ["scores"]),
    ]
    graph = helper.make_graph(
        nodes,
        "determinants",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 6, 6])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, 3])],
        [weight("filters", 4, 2, 3, 3), weight("weights", 4, 3)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    checker.check_model(model)
    save(model, str(path))
    return path
