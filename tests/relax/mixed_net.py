"""A network with every kind of operator that has a layout or a rule of its own, for tests of whole models."""

from __future__ import annotations

import numpy as np
from onnx import helper

from tests.support.onnx_models import onnx_bytes
from tvm_pipeline import frontends
from tvm_pipeline.core.model import Model

INPUTS = {"picture": (1, 3, 19, 17), "scale": (1, 48, 1, 1)}


def mixed_net(name: str = "mixed", *, seed: int = 0) -> Model:
    """Return a network of two inputs and two outputs, with branches that join by addition and by concatenation."""
    draw = np.random.default_rng(seed)
    constants = {
        "w1": (24, 3, 3, 3),
        "b1": (24,),
        "w2": (24, 1, 3, 3),
        "w3": (40, 24, 1, 1),
        "w4": (24, 24, 1, 1),
        "w5": (48, 16, 3, 3),
        "w6": (48, 12, 2, 2),
        "w7": (12, 10),
        "norm_scale": (48,),
        "norm_shift": (48,),
        "norm_mean": (48,),
    }
    weights = {key: (draw.standard_normal(shape) * 0.3).astype("float32") for key, shape in constants.items()}
    weights["norm_variance"] = draw.uniform(0.5, 2, 48).astype("float32")
    nodes = [
        helper.make_node("Conv", ["picture", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], pads=[1, 1, 1, 1], group=24),
        helper.make_node("Clip", ["c2", "zero", "six"], ["r2"]),
        helper.make_node("Conv", ["r2", "w3"], ["c3"]),
        helper.make_node("Conv", ["r1", "w4"], ["c4"]),
        helper.make_node("Add", ["c4", "r2"], ["a4"]),
        helper.make_node("MaxPool", ["a4"], ["p4"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("AveragePool", ["c3"], ["p3"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("Concat", ["p4", "p3"], ["joined"], axis=1),
        helper.make_node("Slice", ["joined", "first", "last", "channels"], ["some"]),
        helper.make_node("Conv", ["some", "w5"], ["c5"], pads=[1, 1, 1, 1], group=3),
        helper.make_node(
            "BatchNormalization", ["c5", "norm_scale", "norm_shift", "norm_mean", "norm_variance"], ["n5"]
        ),
        helper.make_node("Mul", ["n5", "scale"], ["m5"]),
        helper.make_node("Sigmoid", ["m5"], ["s5"]),
        helper.make_node("Mul", ["m5", "s5"], ["swish"]),
        helper.make_node("ConvTranspose", ["swish", "w6"], ["image"], strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["image"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "w7"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["scores"], axis=1),
    ]
    bounds = {"zero": np.float32(0), "six": np.float32(6)}
    slicing = {"first": np.array([8]), "last": np.array([56]), "channels": np.array([1])}
    content = onnx_bytes(
        nodes,
        {**weights, **bounds, **slicing},
        inputs=[helper.make_tensor_value_info(key, 1, shape) for key, shape in INPUTS.items()],
        outputs=("image", "scores"),
    )
    return frontends.onnx.read(name, f"{name}.onnx", content, {}, {})
