"""Values in float64 of Relax modules, against numpy and against what a compiled model has in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
from tvm import relax

from tests.relax.fused import module_of
from tests.support.onnx_networks import Net, onnx_network
from tests.support.stages import random_frame
from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.host.detection import host_target
from tvm_pipeline_tvm.relax.build import build_library, prepared
from tvm_pipeline_tvm.relax.importer import import_model
from tvm_pipeline_tvm.relax.numpy_table import constant
from tvm_pipeline_tvm.relax.pad_channels import pad_channels
from tvm_pipeline_tvm.relax.reference import error_of, in_float64
from tvm_pipeline_tvm.relax.simplify import simplified

Array = np.ndarray[Any, Any]


@pytest.mark.parametrize("name", ["branching", "splitting", "shapes"])
def test_a_network_has_the_values_of_onnxruntime(name: str) -> None:
    model = onnx_network(name)
    frame = random_frame(model.inputs)
    expected = onnxruntime.InferenceSession(model.content).run(None, frame)
    found = in_float64(pad_channels(simplified(import_model(model))), frame)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == "float64"
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6 * np.abs(other).max())


def _transposed(x: Array) -> Array:
    made = np.zeros((1, 2, 7, 7))
    for row in range(3):
        for column in range(3):
            made[0, :, row : row + 5 : 2, column : column + 5 : 2] += np.einsum(
                "io,iyx->oyx", KERNEL[:, :, row, column], x[0]
            )
    return made[:, :, 1:, 1:]


KERNEL = np.random.default_rng(1).standard_normal((4, 2, 3, 3))
_WEIGHTS = constant(KERNEL.astype("float32"))
OPERATORS: dict[str, tuple[Callable[[Any], Any], Callable[[Array], Any]]] = {
    "silu": (relax.op.nn.silu, lambda x: x / (1 + np.exp(-x))),
    "softmax": (lambda x: relax.op.nn.softmax(x, 1), lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True)),
    "leaky": (lambda x: relax.op.nn.leakyrelu(x, 0.125), lambda x: np.where(x > 0, x, x / 8)),
    "by TVM alone": (lambda x: relax.op.nn.max_pool2d(x, (3, 3)), lambda x: x.max((2, 3), keepdims=True)),
    "a slice": (lambda x: relax.op.strided_slice(x, [1], [1], [3]), lambda x: x[:, 1:3]),
    "parts": (lambda x: relax.op.split(x, 2, 1)[1], lambda x: x[:, 2:]),
    "product": (lambda x: relax.op.matmul(x, x), lambda x: x @ x),
    "transposed": (
        lambda x: relax.op.nn.conv2d_transpose(x, _WEIGHTS, (2, 2), (1, 1), (1, 1)),
        lambda x: _transposed(x),
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_has_the_values_of_numpy(name: str) -> None:
    build, expected = OPERATORS[name]
    x = np.random.default_rng(0).standard_normal((1, 4, 3, 3)).astype("float32")
    [found] = in_float64(module_of(lambda emit, data: emit(build(data)), x.shape), {"x0": x})
    weights = 1e-7 if name == "transposed" else 0.0  # they were float32
    np.testing.assert_allclose(found, expected(x.astype("float64")), rtol=0, atol=1e-13 + 40 * weights)


def test_of_nearly_equal_values_a_library_may_pick_any() -> None:
    """In float32 most of these scores are equal, so that float64 would pick other rows."""
    net = Net()
    rows = net.reshape(net.conv(net.input("x", 1, 16, 16, 16), 16, 16), 1, 4096)
    scores = net.op("Add", net.op("Mul", rows, net.const(1e-7)), net.const(1.0))
    _, indices = net.ops("TopK", 2, scores, net.const([64], "int64"))
    model = net.model("ties", net.op("GatherElements", rows, indices, axis=1))
    assert error_of(build_library(model, host_target()), prepared(simplified(import_model(model)), False)) < 1e-5


def test_what_cannot_be_computed_is_refused_by_name() -> None:
    mod = module_of(lambda emit, x: emit(relax.op.call_pure_packed("nowhere.known", x, ty_args=x.ty)), (2, 2))
    with pytest.raises(ModelError, match="is not computed in float64"):
        in_float64(mod, {"x0": np.ones((2, 2), "float32")})
