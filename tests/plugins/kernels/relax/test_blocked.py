"""What works on blocked images between two convolutions: values as in onnxruntime, and bits that no cut changes."""

from __future__ import annotations

from random import Random

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from tests.relax.fused import TARGETS
from tests.relax.imported import model_of, noise
from tests.support.onnx_models import onnx_bytes
from tests.support.stages import model_outputs, random_frame, random_stages, run_stages
from tvm_pipeline.core.platform import Device
from tvm_pipeline_tvm.relax.compiled import RelaxModel

node = helper.make_node
SHAPE = (1, 16, 12, 10)
CONSTANTS = {
    "w24": noise((24, 16, 3, 3)) / 12,
    "w16": noise((16, 16, 3, 3), seed=1) / 12,
    "twice": np.array([1, 1, 2, 3], "float32"),
    "odd": np.array([1, 1, 0.75, 1.7], "float32"),
    "sizes": np.array([1, 24, 7, 20]),
    "around": np.array([0, 0, 0, 1, 0, 0, 2, 1]),
}
FLOOR = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
BETWEEN: dict[str, list[onnx.NodeProto]] = {
    "each pixel repeated": [node("Resize", ["a", "", "twice"], ["b"], mode="nearest", **FLOOR)],
    "each pixel repeated from its middle": [node("Resize", ["a", "", "twice"], ["b"], mode="nearest")],
    "the nearest pixel": [node("Resize", ["a", "", "odd"], ["b"], mode="nearest", **FLOOR)],
    "between pixels": [node("Resize", ["a", "", "twice"], ["b"], mode="linear")],
    "between corners": [
        node("Resize", ["a", "", "", "sizes"], ["b"], mode="linear", coordinate_transformation_mode="align_corners")
    ],
    "channels of like blocks": [node("Sigmoid", ["a"], ["s"]), node("Concat", ["a", "s"], ["b"], axis=1)],
    "channels of unlike blocks": [
        node("Conv", ["x", "w16"], ["c"], kernel_shape=[3, 3]),
        node("Concat", ["a", "c"], ["b"], axis=1),
    ],
    "zeros around": [node("Pad", ["a", "around"], ["b"])],
}


@pytest.mark.parametrize("name", BETWEEN)
def test_between_two_convolutions(name: str) -> None:
    nodes = [
        node("Conv", ["x", "w24"], ["a"], kernel_shape=[3, 3]),
        *BETWEEN[name],
        node("Conv", ["b", "last"], ["y"], kernel_shape=[3, 3], strides=[2, 2]),
    ]
    channels = {"channels of like blocks": 48, "channels of unlike blocks": 40}.get(name, 24)
    read = {each for one in nodes for each in one.input}
    weights = {"last": noise((8, channels, 3, 3), seed=2) / 12, **CONSTANTS}
    constants = {key: value for key, value in weights.items() if key in read}
    content = onnx_bytes(nodes, constants, shape=SHAPE, outputs=("b", "y"), opset=13)
    model = model_of(content)
    target = f"llvm -mcpu={TARGETS[0].attrs['mcpu']}"
    device = Device("core", "host", (0,), target)
    compiled = RelaxModel.compile(model, [target], lambda _: None)
    frame = random_frame(compiled.graph.inputs)
    whole = compiled.graph.operator_names
    found = model_outputs(compiled, run_stages(compiled, [(whole, device)], frame))
    expected = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"]).run(None, dict(frame))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    for seed in range(2):
        cut = [(stage, device) for stage in random_stages(compiled.graph, Random(seed), 3)]
        for one, other in zip(model_outputs(compiled, run_stages(compiled, cut, frame)), found, strict=True):
            np.testing.assert_array_equal(one, other)
