"""Products and softmax in whole modules: values, and which rule runs them."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import helper

from tests.relax.fused import MCPU, target_of
from tests.support.onnx_models import onnx_bytes
from tests.support.stages import model_outputs, random_frame, run_stages
from tvm_pipeline import frontends
from tvm_pipeline.core.platform import Device
from tvm_pipeline_tvm.relax.compiled import RelaxModel


@pytest.mark.parametrize("lanes", [16, 8, 4])
def test_attention(own_cache: object, lanes: int) -> None:
    """Products with weights, of 4-D activations, softmax of several axes, and biases behind them."""
    target_of(lanes)
    draw = np.random.default_rng(0)
    weights = {name: draw.standard_normal((24, 24)).astype("float32") / 5 for name in ("wq", "wk", "wv")}
    nodes = [helper.make_node("MatMul", ["x", name], [name[1]]) for name in weights]
    nodes += [helper.make_node("Reshape", [name, "heads"], [f"{name}4"]) for name in "qkv"]
    nodes += [
        helper.make_node("Transpose", ["q4"], ["qt"], perm=[0, 2, 1, 3]),
        helper.make_node("Transpose", ["k4"], ["kt"], perm=[0, 2, 3, 1]),
        helper.make_node("Transpose", ["v4"], ["vt"], perm=[0, 2, 1, 3]),
        helper.make_node("MatMul", ["qt", "kt"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["shares"], axis=-1),
        helper.make_node("MatMul", ["shares", "vt"], ["mixed"]),
        helper.make_node("Add", ["mixed", "bias"], ["biased"]),
        helper.make_node("LogSoftmax", ["biased"], ["y"], axis=1),
    ]
    constants = {**weights, "heads": np.array([1, 7, 3, 8]), "bias": draw.standard_normal((8,)).astype("float32")}
    content = onnx_bytes(nodes, constants, shape=(1, 7, 24))
    model = frontends.onnx.read("attention", "attention.onnx", content, {}, {})
    device = Device("cpu0", "host", (0,), f"llvm -mcpu={MCPU[lanes]}")
    compiled = RelaxModel.compile(model, [device.target], lambda _: None)
    frame = random_frame(model.inputs)
    names = compiled.graph.operator_names
    (found,) = model_outputs(compiled, run_stages(compiled, [(names, device)], frame))
    (right,) = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"]).run(None, frame)
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)
    rules = set(compiled.libraries[device.target].rules.values())
    assert {"dense", "softmax"} <= rules
    assert not any("failed" in rule for rule in rules)
