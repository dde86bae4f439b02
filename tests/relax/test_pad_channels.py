"""Padded channels change no result, and are cut off behind what follows channel by channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tvm_pipeline_tvm.numpy_rules import Array
from tvm_pipeline_tvm.relax.dataflow import name_of
from tvm_pipeline_tvm.relax.numpy_table import constant
from tvm_pipeline_tvm.relax.pad_channels import pad_channels

FRAME = np.random.default_rng(3).standard_normal((1, 16, 5, 5)).astype("float32")
Ends = Callable[[relax.BlockBuilder, Any], Any]


def numbers(*shape: int) -> Any:
    return constant(np.random.default_rng(len(shape)).standard_normal(shape).astype("float32"))


def module(end: Ends, channels: int = 100) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(FRAME.shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(op.nn.conv2d(x, numbers(channels, 16, 1, 1)))
            output = builder.emit_output(builder.emit(end(builder, y)))
        builder.emit_func_output(output)
    return builder.get()


def kinds(mod: tvm.IRModule) -> list[str]:
    values = (binding.value for binding in mod["main"].body.blocks[0].bindings)
    return [name_of(value).removeprefix("relax.") for value in values if name_of(value)]


def classifier(builder: relax.BlockBuilder, y: Any) -> Any:
    y = op.nn.relu(op.add(y, numbers(1, 100, 1, 1)))
    return op.nn.softmax(op.reshape(op.mean(y, [2, 3], keepdims=True), (1, 100)))


def swish(builder: relax.BlockBuilder, y: Any) -> Any:
    return op.multiply(y, builder.emit(op.sigmoid(y)))


def two_readers(builder: relax.BlockBuilder, y: Any) -> Any:
    return op.subtract(builder.emit(op.nn.relu(y)), builder.emit(op.exp(y)))


ENDS: dict[str, tuple[Ends, list[str]]] = {
    "nothing": (lambda _, y: op.exp(y), ["nn.conv2d", "strided_slice", "exp"]),
    "classifier": (
        classifier,
        ["nn.conv2d", "add", "nn.relu", "mean", "strided_slice", "reshape", "nn.softmax"],
    ),
    "a product for each channel": (
        lambda _, y: op.multiply(y, numbers(1, 100, 1, 1)),
        ["nn.conv2d", "multiply", "strided_slice"],
    ),
    "a number": (lambda _, y: op.multiply(y, relax.const(3.0)), ["nn.conv2d", "multiply", "strided_slice"]),
    "a pool": (
        lambda _, y: op.nn.max_pool2d(y, (2, 2), (2, 2)),
        ["nn.conv2d", "nn.max_pool2d", "strided_slice"],
    ),
    "two padded tensors": (swish, ["nn.conv2d", "sigmoid", "multiply", "strided_slice"]),
    "an image that is added": (
        lambda _, y: op.add(y, numbers(1, 100, 5, 5)),
        ["nn.conv2d", "strided_slice", "add"],
    ),
    "a mean of channels": (lambda _, y: op.mean(y, [1], keepdims=True), ["nn.conv2d", "strided_slice", "mean"]),
    "two readers": (
        two_readers,
        ["nn.conv2d", "strided_slice", "nn.relu", "strided_slice", "exp", "subtract"],
    ),
}


@pytest.fixture(scope="module")
def machine() -> relax.VirtualMachine:
    functions = {}
    for index, (end, _) in enumerate(ENDS.values()):
        mod = module(end)
        for kind, each in (("plain", mod), ("padded", pad_channels(mod))):
            functions[f"{kind}{index}"] = each["main"].with_attr("global_symbol", f"{kind}{index}")
    target = tvm.target.Target({"kind": "llvm", "opt-level": 0})
    return relax.VirtualMachine(tvm.compile(tvm.IRModule(functions), target), tvm.cpu())


@pytest.mark.parametrize("name", ENDS)
def test_results_are_the_same(name: str, machine: relax.VirtualMachine) -> None:
    index, (end, expected) = list(ENDS).index(name), ENDS[name]
    padded = pad_channels(module(end))
    assert sorted(kinds(padded)) == sorted(expected)
    assert pad_channels(padded) is padded
    frame = tvm.runtime.tensor(FRAME)
    wanted, own = (machine[f"{kind}{index}"](frame).numpy() for kind in ("plain", "padded"))
    np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-6)


def test_only_what_gains_is_padded() -> None:
    mod = module(lambda _, y: op.exp(y), 96)
    assert pad_channels(mod) is mod


def test_weights_that_are_no_constants_are_left_alone() -> None:
    builder = relax.BlockBuilder()
    shapes: dict[str, tuple[int, ...]] = {"x": FRAME.shape, "w": (100, 16, 1, 1)}
    params = [relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()]
    with builder.function("main", params):
        with builder.dataflow():
            output = builder.emit_output(builder.emit(op.nn.conv2d(*params)))
        builder.emit_func_output(output)
    mod = builder.get()
    assert pad_channels(mod) is mod


def test_cut_off_channels_that_nobody_padded_stay_cut_off() -> None:
    """A slice of the model's own is not moved."""

    def end(builder: relax.BlockBuilder, y: Any) -> Array:
        return op.nn.relu(builder.emit(op.strided_slice(y, [1], [0], [90])))

    mod = module(end, 96)
    assert pad_channels(mod) is mod
