"""Floats that are only moved or joined between two roundings: bytes are moved instead, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view
from onnx import helper
from tvm import relax
from tvm.relax import op

from tests.relax.fused import MCPU, target_of
from tests.relax.imported import TARGET, kinds
from tests.relax.test_integer_layers import RANGE, Net, on, outputs, whole
from tests.support.examples import examples
from tests.support.stages import random_stages
from tvm_pipeline.core.platform import Device
from tvm_pipeline_tvm.relax.dataflow import name_of
from tvm_pipeline_tvm.relax.importer import import_model
from tvm_pipeline_tvm.relax.integer_layers import integer_layers
from tvm_pipeline_tvm.relax.simplify import simplified

MOVES = ("concat", "nn.max_pool2d", "permute_dims", "strided_slice", "split", "image.resize2d")
SAME = (0.037, 17)  # as `Net` has it: a scale, and a zero above the least byte


class Moves(Net):
    """A network of `Net` with operators that move numbers, or join tensors."""

    def then(self, kind: str, value: Any, *others: Any, scale: float = 0.0, zero: int = 0, **attributes: Any) -> Moves:
        """Add an operator on floats, and round its result; without a scale its value is of the scale that was.

        Args:
            value: the integers that the result is; with a scale, floats.
            others: what it reads beside the last tensor: arrays, or names of floats.
        """
        read = [each if isinstance(each, str) else self.constant(each) for each in others]
        name = self.node(kind, [self.floats(), *read], **attributes)
        low, high = RANGE[self.dtype]
        if scale:
            steps = np.rint(value / np.float32(scale)) + np.float32(low + zero)
            value = np.clip(steps, low, high).astype(self.dtype)
            self.scale, self.zero = scale, low + zero
        self.name, self.value = self.node("QuantizeLinear", [name, *self._points(self.scale, self.zero)]), value
        return self

    def floats(self) -> str:
        return self.node("DequantizeLinear", [self.name, *self._points(self.scale, self.zero)])

    def numbers(self) -> Any:
        return (self.value.astype("int32") - self.zero).astype("float32") * np.float32(self.scale)

    def relu(self, scale: float, zero: int) -> Moves:
        return self.then("Relu", np.maximum(self.numbers(), 0), scale=scale, zero=zero)

    def largest(self, window: int, stride: int, before: int) -> Moves:
        around = ((0, 0), (0, 0), (before, 0), (before, 0))
        wide = np.pad(self.value, around, constant_values=RANGE[self.dtype][0])
        value = sliding_window_view(wide, (window, window), (2, 3))[:, :, ::stride, ::stride].max(axis=(4, 5))
        how = {"strides": (stride, stride), "pads": (before, before, 0, 0)}
        return self.then("MaxPool", value, kernel_shape=(window, window), **how)

    def turned(self) -> Moves:
        return self.then("Transpose", self.value.transpose(0, 1, 3, 2), perm=(0, 1, 3, 2))

    def sliced(self) -> Moves:
        ends = [np.array(each, "int64") for each in ([1, 0], [99, 99], [1, 2], [1, 2])]
        return self.then("Slice", self.value[:, 1:, ::2], *ends)

    def enlarged(self) -> Moves:
        value = self.value.repeat(2, axis=2).repeat(2, axis=3)
        scales = np.array([1, 1, 2, 2], "float32")
        how = {"coordinate_transformation_mode": "asymmetric", "mode": "nearest", "nearest_mode": "floor"}
        return self.then("Resize", value, "", scales, **how)

    def half(self) -> Moves:
        """The second part of a split."""
        count = self.value.shape[1]
        sizes = self.constant(np.array([count // 2, count - count // 2], "int64"))
        data, parts = self.floats(), [f"half{side}_{len(self.nodes)}" for side in (0, 1)]
        self.nodes.append(helper.make_node("Split", [data, sizes], parts, parts[0], axis=1))
        self.name = self.node("QuantizeLinear", [parts[1], *self._points(self.scale, self.zero)])
        self.value = self.value[:, count // 2 :]
        return self

    def joined(self, axis: int, change: Callable[[Moves], Any], points: tuple[float, int] | None) -> Moves:
        """A tensor and what is made of it, side by side; without points of the scale of the tensor itself."""
        first, own, numbers = self.floats(), (self.scale, self.zero - RANGE[self.dtype][0]), self.numbers()
        change(self)
        scale, zero = points or own
        value = np.concatenate([self.numbers(), numbers], axis)
        return self.then("Concat", value, first, scale=scale, zero=zero, axis=axis)


STEPS: dict[str, Callable[[Moves], Moves]] = {
    "relu": lambda net: net.relu(0.05, 3),
    "pool": lambda net: net.largest(2, 2, 0),
    "padded pool": lambda net: net.largest(3, 1, 2),
    "transpose": Moves.turned,
    "slice": Moves.sliced,
    "split": Moves.half,
    "resize": Moves.enlarged,
    "join": lambda net: net.joined(1, lambda same: same.turned().turned(), None),
    "join of two scales": lambda net: net.joined(2, lambda other: other.relu(0.05, 3), None),
    "join to another scale": lambda net: net.joined(3, lambda other: other.relu(0.05, 3), (0.06, 20)),
}


def values(mod: tvm.IRModule, data: Any) -> Any:
    machine = relax.VirtualMachine(tvm.compile(mod, TARGET), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(data)).numpy()


@examples(8)
@given(st.sampled_from(sorted(RANGE)), st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=5))
def test_bits_are_those_of_floats(dtype: str, steps: list[str]) -> None:
    net = Moves(dtype, (1, 6, 8, 12))
    for step in steps:
        if min(net.value.shape[1:]) >= 3:
            STEPS[step](net)
    before = simplified(import_model(net.model()))
    after = integer_layers(before)
    for binding in after["main"].body.blocks[0].bindings:
        if name_of(binding.value).removeprefix("relax.") in MOVES:
            assert str(binding.var.ty.dtype) in RANGE, steps
    np.testing.assert_array_equal(values(after, net.input), net.value)
    np.testing.assert_array_equal(values(before, net.input), net.value)


def rewritten(build: Callable[..., Any], made: tuple[float, int], *given_: tuple[float, int]) -> list[str]:
    """Return the operators of quantize(build(emit, *floats)), where floats are dequantised from (1, 4, 6, 6) bytes."""
    builder, number = relax.BlockBuilder(), relax.const
    inputs = [relax.Var(f"x{index}", relax.TensorType((1, 4, 6, 6), "uint8")) for index in range(len(given_))]

    def points(scale: float, zero: int) -> tuple[Any, Any]:
        return number(scale, "float32"), number(zero, "int32")

    with builder.function("main", inputs):
        with builder.dataflow():
            pairs = zip(inputs, given_, strict=True)
            floats = [builder.emit(op.dequantize(data, *points(*each), 1)) for data, each in pairs]
            result = builder.emit(build(builder.emit, *floats))
            output = builder.emit_output(op.quantize(result, *points(*made), 1, "uint8"))
        builder.emit_func_output(output)
    return kinds(integer_layers(builder.get()))


def test_a_concatenation_requantises_the_parts_of_other_scales() -> None:
    def join(_: Any, *parts: Any) -> Any:
        return op.concat(parts, 1)

    assert rewritten(join, SAME, SAME, SAME) == ["concat"]
    assert rewritten(join, SAME, SAME, (0.5, 17)) == ["dequantize", "quantize", "concat"]
    assert rewritten(join, SAME, (0.037, 16)) == ["dequantize", "quantize", "concat"]


def test_moves_are_those_of_the_bytes() -> None:
    def moves(emit: Any, x: Any) -> Any:
        pooled = emit(op.nn.max_pool2d(x, (3, 3), (1, 1), (1, 1, 1, 1)))
        larger = emit(op.image.resize2d(pooled, (12, 12), method="nearest_neighbor"))
        part = emit(relax.TupleGetItem(emit(op.split(larger, 3, 2)), 1))
        return op.reshape(emit(op.permute_dims(part, (0, 2, 3, 1))), (1, 16, 12))

    moved = ["nn.max_pool2d", "image.resize2d", "strided_slice", "permute_dims", "reshape"]
    assert rewritten(moves, SAME, SAME) == moved
    assert rewritten(moves, (0.05, 17), SAME)[0] == "dequantize"


@pytest.mark.parametrize(
    "build",
    [
        lambda _, x, y: op.add(x, y),
        lambda _, x, y: op.nn.avg_pool2d(x, (2, 2)),
        lambda _, x, y: op.image.resize2d(x, (12, 12), method="linear"),
        lambda emit, x, y: op.concat((x, emit(op.nn.relu(y))), 1),
    ],
)
def test_what_computes_stays_between_its_roundings(build: Callable[..., Any]) -> None:
    found = rewritten(build, SAME, SAME, SAME)
    assert (found[0], found[-1]) == ("dequantize", "quantize")


def test_maxima_of_a_negative_scale_are_minima() -> None:
    negative = (-0.5, 3)
    found = rewritten(lambda _, x: op.nn.max_pool2d(x, (2, 2)), negative, negative)
    assert found == ["dequantize", "nn.max_pool2d", "quantize"]
    assert rewritten(lambda _, x: x, SAME, (1e-38, 3)) == ["dequantize", "quantize"]
    assert rewritten(lambda _, x: x, (1e-38, 3), (1e-38, 3)) == ["dequantize", "quantize"]


def branching(dtype: str) -> Moves:
    """Pools and concatenations between convolutions; one concatenation is of blocks of 8 and of 16 channels."""
    net = Moves(dtype, (1, 16, 10, 12))
    net.conv(32, (1, 1))
    net.joined(1, lambda other: other.largest(3, 1, 2).conv(16, (3, 3), pads=(1, 1, 1, 1), scale=0.7), None)
    net.largest(2, 2, 0).conv(48, (3, 3), depthwise=True, pads=(1, 1, 1, 1))
    net.joined(1, lambda same: same.largest(3, 1, 2).largest(2, 1, 1), None)
    net.conv(24, (1, 1)).joined(1, lambda other: other.conv(16, (2, 2), pads=(1, 0, 0, 1)), (0.6, 30))
    return net.conv(8, (1, 1))


@pytest.mark.parametrize(("dtype", "lanes"), [("int8", 16), pytest.param("uint8", 8, marks=pytest.mark.thorough)])
def test_images_stay_in_blocks_of_bytes(dtype: str, lanes: int) -> None:
    target_of(lanes)
    net, target = branching(dtype), f"llvm -mcpu={MCPU[lanes]}"
    compiled = on(net.model(), target)
    np.testing.assert_array_equal(whole(compiled, target, {"x": net.input}), net.value)
    rules = compiled.libraries[target].rules
    assert not any("failed" in rule for rule in rules.values())
    assert {"pooling", "concatenate"} <= set(rules.values())
    assert sum("layout_transform" in name for name in rules) == 2  # of the input and of the output
    for seed in range(2):
        cut = random_stages(compiled.graph, Random(seed), 3)
        stages = [(names, Device(f"cpu{i}", "host", (0,), target)) for i, names in enumerate(cut)]
        np.testing.assert_array_equal(outputs(compiled, stages, {"x": net.input})[0], net.value)
