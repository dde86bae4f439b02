"""Small ONNX files that compile in seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def onnx_bytes(
    nodes, constants=None, *, shape=(2, 3), dtype=1, inputs=None, outputs=("y",), weights=(), opset=13, ir_version=9
):
    """Return a checked ONNX file of one input x (or `inputs`, as value infos) and outputs whose types are inferred.

    Args:
        constants: arrays by name, as initializers; `weights` are further ones, as protocol buffers.
        outputs: names, or value infos where onnx does not infer them.
    """
    from onnx import checker, helper, numpy_helper, shape_inference

    inputs = inputs or [helper.make_tensor_value_info("x", dtype, shape)]
    constants = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    named = [helper.make_empty_tensor_value_info(o) if isinstance(o, str) else o for o in outputs]
    graph = helper.make_graph(nodes, "net", inputs, named, [*constants, *weights])
    domains = {"": opset} | {node.domain: 1 for node in nodes if node.domain}
    opsets = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
    model = shape_inference.infer_shapes(model)
    checker.check_model(model)
    return model.SerializeToString()


def write_pooling_net(path: Path) -> Path:
    """Write the least net that can be cut: a convolution of an 8 x 8 picture, and a pool."""
    from onnx import helper

    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("MaxPool", ["a"], ["y"], kernel_shape=[2, 2], strides=[2, 2]),
    ]
    weights = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    path.write_bytes(onnx_bytes(nodes, {"w": weights}, shape=(1, 3, 8, 8)))
    return path


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


def write_remembering_net(path: Path) -> Path:
    """Write a net for a 16 x 16 picture whose scores hang on all pictures before: `state` in, `state_next` out."""
    from onnx import TensorProto, checker, helper, numpy_helper, save

    draw = np.random.default_rng(0)
    shapes = {"w1": (8, 3, 3, 3), "w2": (8, 8), "w3": (8, 8), "w4": (8, 4)}
    weights = [
        numpy_helper.from_array((draw.standard_normal(shape) / 3).astype("float32"), name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Conv", ["picture", "w1"], ["a"], strides=[2, 2]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("GlobalAveragePool", ["b"], ["c"]),
        helper.make_node("Flatten", ["c"], ["d"]),
        helper.make_node("Gemm", ["d", "w2"], ["e"]),
        helper.make_node("Gemm", ["state", "w3"], ["f"]),
        helper.make_node("Add", ["e", "f"], ["g"]),
        helper.make_node("Tanh", ["g"], ["state_next"]),
        helper.make_node("Gemm", ["state_next", "w4"], ["scores"]),
    ]

    def value(name: str, *shape: int):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    inputs, outputs = (
        (value("picture", 1, 3, 16, 16), value("state", 1, 8)),
        (value("scores", 1, 4), value("state_next", 1, 8)),
    )
    graph = helper.make_graph(nodes, "remembering_net", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    checker.check_model(model)
    save(model, str(path))
    return path
