"""Small ONNX files that compile in seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def onnx_bytes(nodes, constants=None, *, shape=(2, 3), dtype=1, inputs=None, outputs=("y",), opset=13, ir_version=8):
    """Return a checked ONNX file of one input x (or `inputs`, as value infos) and outputs whose types are inferred.

    Args:
        constants: arrays by name, as initializers.
        outputs: names, or value infos where onnx does not infer them.
    """
    from onnx import checker, helper, numpy_helper, shape_inference

    inputs = inputs or [helper.make_tensor_value_info("x", dtype, shape)]
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    named = [helper.make_empty_tensor_value_info(o) if isinstance(o, str) else o for o in outputs]
    graph = helper.make_graph(nodes, "net", inputs, named, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    model = shape_inference.infer_shapes(model)
    checker.check_model(model)
    return model.SerializeToString()


def write_picture_net(path: Path, *, batch: int | str = 1, seed: int = 0) -> Path:
    """Write a net for a 32 x 32 picture: three convolutions, one of them on a branch that joins again, ten scores."""
    from onnx import TensorProto, checker, helper, numpy_helper, save

    draw = np.random.default_rng(seed)

    def weight(name: str, *shape: int):
        return numpy_helper.from_array((draw.standard_normal(shape) * 0.1).astype("float32"), name)

    nodes = [
        helper.make_node("Conv", ["picture", "w1"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w2"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["b", "w3"], ["d"], pads=[0, 0, 0, 0]),
        helper.make_node("Add", ["c", "d"], ["e"]),
        helper.make_node("Relu", ["e"], ["f"]),
        helper.make_node("GlobalAveragePool", ["f"], ["g"]),
        helper.make_node("Flatten", ["g"], ["h"]),
        helper.make_node("Gemm", ["h", "w4"], ["scores"]),
    ]
    graph = helper.make_graph(
        nodes,
        "picture_net",
        [helper.make_tensor_value_info("picture", TensorProto.FLOAT, [batch, 3, 32, 32])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [batch, 10])],
        [weight("w1", 16, 3, 3, 3), weight("w2", 16, 16, 3, 3), weight("w3", 16, 16, 1, 1), weight("w4", 16, 10)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    checker.check_model(model)
    save(model, str(path))
    return path
