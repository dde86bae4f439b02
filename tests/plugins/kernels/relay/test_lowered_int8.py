"""A network of int8 as .tflite stores it: its bits are those of TVM, and each convolution is one kernel."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")

from tests.support.networks import module_of
from tests.tvm.targets import run, runs_here
from tvm_pipeline_kernels.relay.lowered_int8 import lowered_int8
from tvm_pipeline_tvm.relay.channels_first import channels_first
from tvm_pipeline_tvm.relay.fold import fast_build, fast_context

import tvm  # isort: skip
from tvm import relay  # isort: skip

TARGETS = ["llvm -mcpu=x86-64-v3"]
FRAME = {"image": np.random.default_rng(2).integers(-128, 128, (1, 9, 9, 3)).astype("int8")}
ZERO = -128  # of tensors behind a ReLU


class Writer:
    """Writes layers as TVM's importer of .tflite does; a layer's scales are chosen so that its values spread."""

    def __init__(self) -> None:
        self._draw = np.random.default_rng(1)

    def requantized(self, sums: relay.Expr, channels: int, terms: int, zero: int) -> relay.Expr:
        bias = self._draw.integers(-900, 900, channels).astype("int32")
        scales = self._draw.uniform(0.5, 1, channels).astype("float32") / (40 * terms**0.5)
        axis = 3 if sums.op.name == "qnn.conv2d" else 1
        biased = relay.nn.bias_add(sums, relay.const(bias), axis=axis)
        per_channel = relay.const(scales), relay.const(0)
        return relay.qnn.requantize(
            biased, *per_channel, relay.const(1.0), relay.const(zero), axis=axis, out_dtype="int8"
        )

    def convolution(
        self, x: relay.Expr, read: int, zero_read: int, channels: int, window: int, zero: int, **options: Any
    ) -> relay.Expr:
        depthwise = options.get("groups", 1) > 1
        shape = (window, window, read, 1 if depthwise else channels)
        kernel = self._draw.integers(-127, 128, shape).astype("int8")
        sums = relay.qnn.conv2d(
            x,
            relay.const(kernel),
            relay.const(zero_read),
            relay.const(0),
            relay.const(1.0),
            relay.const(np.ones(channels, "float32")),
            kernel_size=(window, window),
            channels=channels,
            data_layout="NHWC",
            kernel_layout="HWOI" if depthwise else "HWIO",
            **options,
        )
        return self.requantized(sums, channels, window**2 * (1 if depthwise else read), zero)

    def dense(self, x: relay.Expr, read: int, zero_read: int, outputs: int) -> relay.Expr:
        kernel = self._draw.integers(-127, 128, (outputs, read)).astype("int8")
        one = relay.const(1.0)
        sums = relay.qnn.dense(x, relay.const(kernel), relay.const(zero_read), relay.const(0), one, one, outputs)
        return self.requantized(sums, outputs, read, 3)


def network() -> tvm.IRModule:
    """Return a stem, an inverted residual whose depthwise layer has a pad of its own, and a classifier."""
    write, half = Writer(), relay.const(0.5)
    x = relay.nn.pad(relay.var("image", shape=(1, 9, 9, 3), dtype="int8"), ((0, 0), (1, 1), (1, 1), (0, 0)), -14.0)
    x = relay.clip(write.convolution(x, 3, -14, 16, 3, ZERO, strides=(2, 2)), -128, 100)
    y = write.convolution(x, 16, ZERO, 32, 1, ZERO)
    y = relay.nn.pad(y, ((0, 0), (1, 1), (1, 1), (0, 0)), float(ZERO))
    y = write.convolution(y, 32, ZERO, 32, 3, ZERO, groups=32)
    y = write.convolution(y, 32, ZERO, 16, 1, -7)
    zeros = (relay.const(zero) for zero in (ZERO, -7, 11))
    x = relay.qnn.add(x, y, *(part for zero in zeros for part in (half, zero)))
    x = relay.mean(relay.cast(x, "int32"), axis=(1, 2))
    x = relay.qnn.requantize(x, half, relay.const(11), half, relay.const(ZERO), out_dtype="int8")
    x = write.dense(relay.reshape(x, (1, 16)), 16, ZERO, 72)
    return module_of(x)


@pytest.fixture(scope="module")
def libraries() -> dict[str, Any]:
    return {target: fast_build(channels_first(network()), target) for target in TARGETS}


@pytest.mark.thorough
def test_bits_are_those_of_tvm(libraries: dict[str, Any]) -> None:
    with fast_context():
        (expected,) = run(relay.build(network(), TARGETS[0]), FRAME)
    assert len(np.unique(expected)) > 20, "a check of hardly any values"
    for target, library in libraries.items():
        if runs_here(target):
            np.testing.assert_array_equal(run(library, FRAME)[0], expected)


def operators(function: relay.Function) -> list[str]:
    found: list[str] = []

    def visit(each: relay.Expr) -> None:
        if isinstance(each, relay.Call) and isinstance(each.op, tvm.ir.Op):
            found.append(each.op.name)

    relay.analysis.post_order_visit(function.body, visit)
    return found


@pytest.mark.thorough
def test_a_convolution_is_one_kernel_with_all_that_belongs_to_it(libraries: dict[str, Any]) -> None:
    for library in libraries.values():
        metadata = library.function_metadata
        functions = {str(name): list(info.relay_primfuncs.values()) for name, info in metadata.items()}
        called = [
            node["attrs"]["func_name"] for node in json.loads(library.get_graph_json())["nodes"] if "attrs" in node
        ]
        kernels = [operators(functions[name][0]) for name in called if name in functions]
        convolutions = [index for index, names in enumerate(kernels) if any("conv2d" in name for name in names)]
        assert convolutions == [1, 2, 3, 4, 7], "the image comes first; the mean and its rounding are two"
        assert not any("nn.pad" in names for names in kernels[1:])
        for index in convolutions[:3]:
            assert kernels[index][1:5] == ["add", "cast", "multiply", "add"], "bias and zero point are one constant"
            assert kernels[index][-1] == "cast"
            assert "floor" in kernels[index]
        assert "floor" in kernels[4], "the residual addition"
        assert len(kernels) == 9


def test_networks_without_int8_and_other_targets_are_left_alone() -> None:
    x = relay.nn.relu(relay.var("x", shape=(1, 4)))
    mod = tvm.IRModule.from_expr(relay.Function(relay.analysis.free_vars(x), x))
    assert lowered_int8(mod, TARGETS[0]) is mod
    quantised = network()
    assert lowered_int8(quantised, "llvm -mtriple=aarch64-linux-gnu") is quantised
    assert lowered_int8(quantised, "opencl -device=mali") is quantised
