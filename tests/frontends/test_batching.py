"""Models widened for several frames a call: shapes that name the frame follow, and numbers stay those of each frame."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.onnx_models import onnx_bytes, write_picture_net
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline.frontends import load
from tvm_pipeline.frontends.batching import batched

onnx = pytest.importorskip("onnx")
helper = onnx.helper


def computed(model: Model, frames: np.ndarray) -> np.ndarray:
    """Return the first output of an ONNX model, by the reference evaluator of the package onnx."""
    evaluator = onnx.reference.ReferenceEvaluator(onnx.load_from_string(model.content))
    return evaluator.run(None, {model.inputs[0].name: frames})[0]


def net_of(tmp_path, nodes, constants=None, *, shape=(1, 3, 4, 4), outputs=("y",)) -> Model:
    path = tmp_path / "net.onnx"
    path.write_bytes(onnx_bytes(nodes, constants, shape=shape, outputs=outputs))
    return load(path)


@pytest.mark.parametrize("by", ["initializer", "node"])
@pytest.mark.parametrize("shape", [[1, 3, 16], [1, -1], [0, 3, -1], [-1, 48], [1, 48]])
def test_a_shape_that_names_the_frame_follows(tmp_path, by, shape):
    constants = {"shape": np.array(shape)} if by == "initializer" else {}
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Reshape", ["r", "shape"], ["y"])]
    if by == "node":
        value = onnx.numpy_helper.from_array(np.array(shape))
        nodes.insert(0, helper.make_node("Constant", [], ["shape"], value=value))
    model = net_of(tmp_path, nodes, constants)
    frames = np.random.default_rng(0).standard_normal((3, 3, 4, 4), dtype=np.float32)
    wide = batched(model, model.inputs, 3)
    assert wide.inputs == (Tensor("x", (3, 3, 4, 4)),)
    expected = np.concatenate([computed(model, frame[None]) for frame in frames])
    np.testing.assert_array_equal(computed(wide, frames).reshape(expected.shape), expected)


def test_what_is_of_no_frame_stays(tmp_path):
    """A weight that is reshaped is the same for all frames."""
    constants = {"w": np.arange(3, dtype=np.float32), "shape": np.array([1, 3, 1, 1])}
    nodes = [helper.make_node("Reshape", ["w", "shape"], ["b"]), helper.make_node("Add", ["x", "b"], ["y"])]
    model = net_of(tmp_path, nodes, constants)
    frames = np.random.default_rng(0).standard_normal((2, 3, 4, 4), dtype=np.float32)
    np.testing.assert_array_equal(
        computed(batched(model, model.inputs, 2), frames), frames + np.arange(3, dtype="float32")[:, None, None]
    )


def test_a_net_with_branches(tmp_path):
    model = load(write_picture_net(tmp_path / "net.onnx"))
    frames = np.random.default_rng(0).random((4, 3, 32, 32), "float32")
    expected = np.concatenate([computed(model, frame[None]) for frame in frames])
    np.testing.assert_allclose(computed(batched(model, model.inputs, 4), frames), expected, rtol=1e-5)
    assert batched(model, model.inputs, 4).tolerance == model.tolerance


def test_an_input_without_a_first_axis_is_refused(tmp_path):
    model = net_of(tmp_path, [helper.make_node("Relu", ["x"], ["y"])], shape=())
    with pytest.raises(ModelError, match="input x is one number"):
        batched(model, model.inputs, 2)


@pytest.mark.parametrize("kind", ["relay", "relay.json", "relax.json"])
def test_a_module_of_tvm_is_refused(kind):
    with pytest.raises(ModelError, match="a module of TVM fixes its shapes itself"):
        batched(Model("net", kind, b"..."), (Tensor("x", (1, 8)),), 2)


def test_a_built_in_network():
    model = load("resnet-18", {"data": (1, 3, 64, 64)})
    assert batched(model, model.inputs, 2).inputs == (Tensor("data", (2, 3, 64, 64)),)
