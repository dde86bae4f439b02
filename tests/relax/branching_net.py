"""A small network with branches, for tests of devices: tensors skip operators, and one output is read inside."""

from __future__ import annotations

import numpy as np
from onnx import helper

from tests.support.onnx_models import onnx_bytes
from tvm_pipeline import frontends
from tvm_pipeline.backends.contract import Array, Port
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.core.model import Model

PICTURE = "0/picture.1"  # no name in C++
SHAPE = (1, 3, 21, 21)


def branching_net() -> Model:
    draw = np.random.default_rng(0)
    shapes = {"w1": (16, 3, 3, 3), "w2": (16, 1, 3, 3), "w3": (16, 16, 1, 1), "w4": (16, 10)}
    weights = {name: (draw.standard_normal(shape) * 0.3).astype("float32") for name, shape in shapes.items()}
    nodes = [
        helper.make_node("Conv", [PICTURE, "w1"], ["c1"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], pads=[1, 1, 1, 1], group=16),
        helper.make_node("Conv", ["c2", "w3"], ["c3"]),
        helper.make_node("Add", ["c3", "r1"], ["image"]),
        helper.make_node("GlobalAveragePool", ["image"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "w4"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["scores"], axis=1),
    ]
    inputs = [helper.make_tensor_value_info(PICTURE, 1, SHAPE)]
    content = onnx_bytes(nodes, weights, inputs=inputs, outputs=("image", "scores"))
    return frontends.onnx.read("branches", "branches.onnx", content, {}, {})


def picture() -> dict[str, Array]:
    return {PICTURE: noise(Port(PICTURE, SHAPE, "float32"))}
