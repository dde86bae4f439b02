"""Values in float64: layers against loops and an identity, networks against what plain TVM computes in float64."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.parts import needs

needs("Relay")

from tests.support.networks import Weights, module_of, relay_module
from tests.support.stages import random_frame
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.float64 import convolution, transposed_convolution, worst_error
from tvm_pipeline_tvm.relay.reference import in_float64
from tvm_pipeline_tvm.relay.refused_lets import without_refused_lets

import tvm  # isort: skip
from tvm import relay  # isort: skip
from tvm.contrib import graph_executor  # isort: skip

small = st.integers(1, 3)


def by_loops(data: Array, kernel: Array, strides: Any, padding: Any, dilation: Any, groups: int) -> Array:
    top, left, bottom, right = padding
    padded = np.pad(data, ((0, 0), (0, 0), (top, bottom), (left, right)))
    channels, inputs, rows, columns = kernel.shape
    height = (padded.shape[2] - dilation[0] * (rows - 1) - 1) // strides[0] + 1
    width = (padded.shape[3] - dilation[1] * (columns - 1) - 1) // strides[1] + 1
    made = np.zeros((len(data), channels, height, width))
    for o, y, x, i, r, c in itertools.product(*map(range, (channels, height, width, inputs, rows, columns))):
        read = o // (channels // groups) * inputs + i
        at = y * strides[0] + r * dilation[0], x * strides[1] + c * dilation[1]
        made[:, o, y, x] += padded[:, read, at[0], at[1]] * kernel[o, i, r, c]
    return made


@given(small, small, small, st.tuples(small, small), st.tuples(small, small), st.tuples(small, small), st.data())
def test_a_convolution_is_that_of_loops(
    groups: int, inputs: int, outputs: int, window: Any, strides: Any, dilation: Any, data: st.DataObject
) -> None:
    draw, padding = np.random.default_rng(0), data.draw(st.tuples(*[st.integers(0, 2)] * 4))
    image = draw.standard_normal((2, groups * inputs, 7, 8))
    kernel = draw.standard_normal((groups * outputs, inputs, *window))
    options = strides, padding, dilation, groups
    np.testing.assert_allclose(convolution(image, kernel, *options), by_loops(image, kernel, *options), atol=1e-12)


@given(small, small, st.tuples(small, small), st.tuples(small, small), st.data())
def test_a_transposed_convolution_is_the_adjoint_of_a_convolution(
    inputs: int, outputs: int, window: Any, strides: Any, data: st.DataObject
) -> None:
    """For all x and y, <convolution(x), y> = <x, transposed(y)>."""
    draw = np.random.default_rng(0)
    padding = [data.draw(st.integers(0, extent - 1)) for extent in (*window, *window)]
    image = draw.standard_normal((1, outputs, 6, 7))
    kernel = draw.standard_normal((inputs, outputs, *window))
    forth = convolution(image, kernel, strides, padding, (1, 1), 1)
    other = draw.standard_normal(forth.shape)
    back = transposed_convolution(other, kernel, strides, padding, image.shape)
    assert back.shape == image.shape
    np.testing.assert_allclose((forth * other).sum(), (image * back).sum(), atol=1e-10)


def in_tvm(mod: tvm.IRModule, params: dict[str, Any], frame: dict[str, Array]) -> list[Array]:
    """Return what plain TVM computes in float64: the module with every type widened."""

    class Widening(relay.ExprMutator):
        def visit_var(self, var: relay.Var) -> relay.Expr:
            type_ = var.type_annotation
            return relay.var(var.name_hint, shape=type_.shape, dtype=wide(type_.dtype))

        def visit_constant(self, constant: relay.Constant) -> relay.Expr:
            value = constant.data.numpy()
            return relay.const(value, wide(str(value.dtype)))

        def visit_call(self, call: relay.Call) -> relay.Expr:
            made = super().visit_call(call)
            if call.op.name == "cast":
                return relay.cast(made.args[0], wide(call.attrs.dtype))
            return made

    main, widening = mod["main"], Widening()
    body = widening.visit(main.body)
    function = relay.Function([widening.visit(param) for param in main.params], body)
    given_ = {name: value.numpy().astype(wide(value.dtype)) for name, value in params.items()}
    with without_refused_lets(), tvm.transform.PassContext(opt_level=0):
        factory = relay.build(tvm.IRModule.from_expr(function), "llvm", params=given_)
    executor = graph_executor.GraphModule(factory["default"](tvm.cpu()))
    executor.set_input(**{name: value.astype(wide(str(value.dtype))) for name, value in frame.items()})
    executor.run()
    return [executor.get_output(index).numpy() for index in range(executor.get_num_outputs())]


def wide(dtype: str) -> str:
    return "float64" if dtype == "float32" else dtype


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["mobile", "shapes"])
def test_a_network_has_the_values_of_plain_tvm_in_float64(name: str) -> None:
    mod, params = relay_module(name)
    frame = random_frame(
        [
            Tensor(p.name_hint, tuple(map(int, p.checked_type.shape)), p.checked_type.dtype)
            for p in mod["main"].params
            if p.name_hint not in params
        ]
    )
    expected, found = in_tvm(mod, params, frame), in_float64(mod, params, frame)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11 * np.abs(other).max())


def _batch_norm(x: relay.Expr, weights: Weights) -> relay.Expr:
    variance = relay.abs(weights(6)) + relay.const(0.1)
    return relay.nn.batch_norm(x, weights(6), weights(6), weights(6), variance)[0]


LAYERS = {
    "normalised": _batch_norm,
    "silu": lambda x, weights: x * relay.sigmoid(x),
    "pooled": lambda x, weights: relay.nn.avg_pool2d(x, (3, 3), (2, 2), padding=(1, 1), count_include_pad=False),
    "transposed": lambda x, weights: relay.nn.conv2d_transpose(
        x, weights(6, 5, 3, 3), channels=5, kernel_size=(3, 3), strides=(2, 2), padding=(1, 1), output_padding=(1, 1)
    ),
    "attention": lambda x, weights: relay.nn.softmax(
        relay.nn.batch_matmul(relay.reshape(x, (6, 9, 8)), relay.reshape(x, (6, 9, 8)))
    ),
    "resized": lambda x, weights: relay.image.resize2d(x, (18, 16), method="linear"),
    "leaky": lambda x, weights: relay.nn.leaky_relu(relay.nn.bias_add(x, weights(6)), 0.1),
    "channels last": lambda x, weights: relay.nn.conv2d(
        relay.transpose(x, (0, 2, 3, 1)),
        weights(3, 3, 6, 4),
        channels=4,
        kernel_size=(3, 3),
        data_layout="NHWC",
        kernel_layout="HWIO",
    ),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_has_the_values_of_plain_tvm_in_float64(layer: str) -> None:
    weights = Weights()
    mod = module_of(LAYERS[layer](relay.var("data", shape=(1, 6, 9, 8)), weights))
    frame = random_frame([Tensor("data", (1, 6, 9, 8))])
    [expected], [found] = in_tvm(mod, weights.params, frame), in_float64(mod, weights.params, frame)
    assert found.dtype == "float64"
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11 * np.abs(expected).max())


def test_what_cannot_be_computed_is_refused_by_name() -> None:
    x, condition = relay.var("data", shape=(2, 2)), relay.var("flag", shape=(), dtype="bool")
    mod = module_of(relay.If(condition, x, relay.negative(x)))
    with pytest.raises(ModelError, match="control flow \\(If\\) is not computed in float64"):
        in_float64(mod, {}, {"data": np.ones((2, 2), "float32"), "flag": np.array(True)})


def test_the_error_is_that_of_the_worst_output_over_its_largest_value() -> None:
    random = Random(0)
    exact = np.array([random.uniform(-1, 1) for _ in range(10)])
    exact[3] = -2.0
    found = exact.astype("float32")
    found[5] += np.float32(0.01)
    indices = np.arange(3)
    assert worst_error([found, indices], [exact, indices + 1]) == pytest.approx(0.005, rel=1e-3)
    assert worst_error([np.zeros(2, "float32")], [np.zeros(2)]) == 0.0
    assert worst_error([np.ones(2, "float32")], [np.zeros(2)]) == np.inf
    assert worst_error([np.array([np.nan], "float32")], [np.ones(1)]) == np.inf
    assert worst_error([np.array([np.inf, 1], "float32")], [np.array([np.inf, 1])]) == 0.0
