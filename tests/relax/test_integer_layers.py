"""Quantised layers in integers: the values of the file's own scales, exactly, and what stays in float32."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from tests.plugins.kernels.relax.layers import convolution
from tests.relax.fused import MCPU, target_of
from tests.relax.imported import kinds, model_of
from tests.support.examples import examples
from tests.support.parts import needs
from tests.support.stages import model_outputs, random_stages, run_stages
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.frontends.tflite import read
from tvm_pipeline_tvm.relax.build import in_integers
from tvm_pipeline_tvm.relax.compiled import RelaxModel
from tvm_pipeline_tvm.relax.importer import import_model
from tvm_pipeline_tvm.relax.integer_layers import integer_layers, integers_of
from tvm_pipeline_tvm.relax.simplify import simplified

RANGE = {"int8": (-128, 127), "uint8": (0, 255)}
# Without dot products of bytes, and with them.
AARCH64 = [f"llvm -keys=cpu -mtriple=aarch64-linux-gnu -mcpu={name}" for name in ("cortex-a72", "cortex-a76")]
TYPE = {"int8": TensorProto.INT8, "uint8": TensorProto.UINT8, "float32": TensorProto.FLOAT}


class Net:
    """A quantised network as onnxruntime writes it, and what it computes: exact sums, one multiplication in float32."""

    def __init__(self, dtype: str, shape: Sequence[int], seed: int = 0) -> None:
        self.dtype, self._draw = dtype, np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self._weights: list[Any] = []
        self._low, self._high = RANGE[dtype]
        self.input = self._draw.integers(self._low, self._high + 1, shape).astype(dtype)
        self.name, self.scale, self.zero, self.value = "x", 0.037, self._low + 17, self.input

    def constant(self, array: Any) -> str:
        name = f"c{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name, **attributes))
        return name

    def _points(self, scale: float, zero: int) -> tuple[str, str]:
        return self.constant(np.float32(scale)), self.constant(np.array(zero, self.dtype))

    def _rounded(self, name: str, sums: Any, steps: Any, scale: float, zero: int, low: float, high: float) -> None:
        """Quantise, and have the same in numpy."""
        self.name = self.node("QuantizeLinear", [name, *self._points(scale, zero)])
        factor = (steps / np.float32(scale)).astype("float32").reshape(1, -1, *[1] * (sums.ndim - 2))
        least = self._low if low == -np.inf else max(self._low, round(low / scale) + zero)
        most = self._high if high == np.inf else min(self._high, round(high / scale) + zero)
        value = np.rint(sums.astype("float32") * factor) + np.float32(zero)
        self.value = np.clip(value, least, most).astype(self.dtype)
        self.scale, self.zero = scale, zero

    def conv(
        self,
        outputs: int,
        window: tuple[int, int],
        *,
        activation: str = "",
        depthwise: bool = False,
        groups: int = 1,
        scale: float = 0.5,
        zero: int | None = None,
        **attributes: Any,
    ) -> Net:
        channels = self.value.shape[1]
        groups = channels if depthwise else groups
        weights = self._draw.integers(-127, 128, (outputs, channels // groups, *window)).astype("int8")
        scales = self._draw.uniform(0.001, 0.03, outputs).astype("float32")
        steps = np.float32(self.scale) * scales
        bias = self._draw.integers(-3000, 3000, outputs).astype("int32")
        zeros = self.constant(np.zeros(outputs, "int8"))
        data = self.node("DequantizeLinear", [self.name, *self._points(self.scale, self.zero)])
        kernel = self.node("DequantizeLinear", [self.constant(weights), self.constant(scales), zeros], axis=0)
        added = self.constant((bias * steps.astype("float64")).astype("float32"))
        name = self.node("Conv", [data, kernel, added], group=groups, kernel_shape=window, **attributes)
        low, high = -np.inf, np.inf
        if activation == "Relu":
            name, low = self.node("Relu", [name]), 0.0
        elif activation == "Clip":
            name, low, high = (
                self.node("Clip", [name, self.constant(np.float32(0)), self.constant(np.float32(6))]),
                0.0,
                6.0,
            )
        options = {
            "strides": attributes.get("strides", (1, 1)),
            "padding": attributes.get("pads", (0, 0, 0, 0)),
            "dilation": attributes.get("dilations", (1, 1)),
        }
        sums = convolution(self.value.astype("int64") - self.zero, weights, groups, **options)
        zero = self._low + 40 if zero is None else zero
        self._rounded(name, sums + bias.reshape(1, -1, 1, 1), steps, scale, zero, low, high)
        return self

    def pool(self) -> Net:
        data = self.node("DequantizeLinear", [self.name, *self._points(self.scale, self.zero)])
        pooled = self.node("MaxPool", [data], kernel_shape=(2, 2), strides=(2, 2))
        self.name = self.node("QuantizeLinear", [pooled, *self._points(self.scale, self.zero)])
        n, channels, height, width = self.value.shape
        whole = self.value[:, :, : height // 2 * 2, : width // 2 * 2]
        self.value = whole.reshape(n, channels, height // 2, 2, width // 2, 2).max(axis=(3, 5))
        return self

    def dense(self, outputs: int) -> Net:
        flat = self.value.reshape(1, -1)
        weights = self._draw.integers(-127, 128, (flat.shape[1], outputs)).astype("int8")
        scale = np.float32(0.002)
        data = self.node("DequantizeLinear", [self.node("Flatten", [self.name]), *self._points(self.scale, self.zero)])
        zero = self.constant(np.int8(0))
        kernel = self.node("DequantizeLinear", [self.constant(weights), self.constant(scale), zero])
        name = self.node("MatMul", [data, kernel])
        sums = (flat.astype("int64") - self.zero) @ weights.astype("int64")
        steps = np.full(outputs, np.float32(self.scale) * scale)
        self._rounded(name, sums, steps, 4.0, self._low + 100, -np.inf, np.inf)
        return self

    def model(self) -> Model:
        kind = TYPE[self.dtype]
        inputs = [helper.make_tensor_value_info("x", kind, self.input.shape)]
        outputs = [helper.make_tensor_value_info(self.name, kind, self.value.shape)]
        graph = helper.make_graph(self.nodes, "net", inputs, outputs, self._weights)
        opset = [helper.make_opsetid("", 13)]
        return model_of(helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString())


def on(model: Model, *targets: str) -> RelaxModel:
    return RelaxModel.compile(model, targets, lambda _: None)


def outputs(compiled: RelaxModel, stages: Any, frame: dict[str, Any]) -> list[np.ndarray]:
    return model_outputs(compiled, run_stages(compiled, stages, frame))


def whole(compiled: RelaxModel, target: str, frame: dict[str, Any]) -> np.ndarray:
    names = compiled.graph.operator_names
    [found] = outputs(compiled, [(names, Device("cpu0", "host", (0,), target))], frame)
    return found


def nets(dtype: str) -> list[Net]:
    same = {"pads": (1, 1, 1, 1)}
    return [
        Net(dtype, (1, 3, 13, 11)).conv(8, (3, 3), strides=(2, 2), **same),
        Net(dtype, (2, 8, 9, 14)).conv(24, (1, 1), activation="Relu").conv(24, (3, 3), depthwise=True, **same),
        Net(dtype, (1, 16, 10, 10))
        .conv(16, (5, 5), depthwise=True, strides=(2, 2), pads=(2, 1, 2, 3))
        .pool()
        .conv(4, (1, 1)),
        Net(dtype, (1, 6, 8, 8))
        .conv(16, (3, 3), activation="Clip", dilations=(2, 2), scale=0.05, zero=RANGE[dtype][0])
        .conv(16, (2, 2), depthwise=True, dilations=(1, 2), pads=(0, 2, 1, 1)),
        Net(dtype, (1, 4, 6, 6)).conv(24, (3, 3)).conv(16, (2, 2), groups=2).dense(20),
    ]


@pytest.mark.parametrize(("dtype", "lanes"), [("int8", 16), ("uint8", 8), ("int8", 4)])
def test_values_are_those_of_exact_sums(dtype: str, lanes: int) -> None:
    target_of(lanes)
    target = f"llvm -mcpu={MCPU[lanes]}"
    for net in nets(dtype)[: None if dtype == "uint8" else 3]:
        model = net.model()
        compiled = on(model, target)
        rules = {rule for rule in compiled.libraries[target].rules.values() if not rule.startswith(("plain", "pool"))}
        assert rules <= {"conv2d_int8", "depthwise_int8"}, rules
        np.testing.assert_array_equal(whole(compiled, target, {"x": net.input}), net.value)


def test_stages_equal_the_whole_and_two_targets_align() -> None:
    target_of(8)
    net = nets("int8")[2].conv(16, (3, 3), pads=(1, 1, 1, 1))
    targets = [f"llvm -mcpu={MCPU[lanes]}" for lanes in (8, 4)]
    compiled = on(net.model(), *targets)
    assert len(compiled.graph.operators) >= 3
    for seed in range(3):
        cut = random_stages(compiled.graph, Random(seed), 2)
        stages = [(names, Device(f"cpu{i}", "host", (0,), targets[i])) for i, names in enumerate(cut)]
        np.testing.assert_array_equal(outputs(compiled, stages, {"x": net.input})[0], net.value)


def test_some_layers_stay_in_float32() -> None:
    """Groups of three channels, and three channels; each beside a layer of integers."""
    net = Net("uint8", (1, 6, 9, 9)).conv(8, (3, 3), groups=2).conv(3, (1, 1))
    found = kinds(integer_layers(simplified(import_model(net.model()))))
    assert found.count("nn.conv2d") == 2
    assert found.count("dequantize") == 2
    assert "round" not in found


@pytest.mark.parametrize("shape", [(1, 1, 2, 4), (8,)])
def test_what_is_added_by_pixels_is_no_bias(shape: tuple[int, ...]) -> None:
    """As many numbers as there are channels, along other axes."""
    draw, data = (
        np.random.default_rng(5),
        relax.Var("x", relax.TensorType((1, 4, 2, 8 if len(shape) == 1 else 4), "uint8")),
    )
    builder, number = relax.BlockBuilder(), relax.const
    weights = draw.integers(-9, 9, (8, 4, 1, 1)).astype("float32") / 4
    with builder.function("main", [data]):
        with builder.dataflow():
            wide = builder.emit(relax.op.dequantize(data, number(0.1, "float32"), number(3, "int32")))
            sums = builder.emit(relax.op.nn.conv2d(wide, number(weights)))
            added = builder.emit(relax.op.add(sums, number(draw.standard_normal(shape).astype("float32"))))
            made = relax.op.quantize(added, number(0.1, "float32"), number(3, "int32"), 1, "uint8")
            output = builder.emit_output(made)
        builder.emit_func_output(output)
    assert kinds(integer_layers(builder.get())) == ["dequantize", "nn.conv2d", "add", "quantize"]


def test_scales_of_channels_behind_a_convolution() -> None:
    """An image in blocks has no axis of channels."""
    target_of(8)
    target, draw = f"llvm -mcpu={MCPU[8]}", np.random.default_rng(4)
    weights, scales = (
        draw.standard_normal((16, 8, 3, 3)).astype("float32"),
        draw.uniform(0.02, 0.2, 16).astype("float32"),
    )
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=(3, 3)),
        helper.make_node("QuantizeLinear", ["y", "s", "z"], ["q"], axis=1),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["r"], axis=1),
    ]
    arrays = {"w": weights, "s": scales, "z": np.zeros(16, "int8")}
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    tensors = [("x", (1, 8, 7, 9)), ("r", (1, 16, 5, 7))]
    [given_, made] = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in tensors]
    graph = helper.make_graph(nodes, "net", [given_], [made], constants)
    content = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8).SerializeToString()
    frame = {"x": draw.standard_normal((1, 8, 7, 9)).astype("float32")}
    found = whole(on(model_of(content), target), target, frame)
    steps = convolution(frame["x"], weights) / scales.reshape(1, -1, 1, 1)
    expected = np.clip(np.rint(steps), -128, 127) * scales.reshape(1, -1, 1, 1)
    assert np.mean(np.abs(found - expected) > 1e-5) < 0.01  # a sum between two steps may go to the other one


def test_weights_of_other_networks_are_no_integers() -> None:
    draw = np.random.default_rng(0)
    assert integers_of(draw.standard_normal((4, 9)).astype("float32")) is None


@examples(30)
@given(
    weights=st.lists(st.integers(-128, 127), min_size=2, max_size=24),
    scale=st.floats(2**-30, 1024, width=32),
)
def test_weights_are_found_again(weights: list[int], scale: float) -> None:
    integers = np.array([weights], "int8")
    values = (integers * np.float32(scale)).astype("float32")
    found = integers_of(values)
    assert found is not None
    np.testing.assert_allclose(found[0] * found[1][:, None].astype("float64"), values, rtol=3e-7, atol=0)
    assert np.gcd.reduce(found[0][0]) in (0, 1)


@pytest.mark.thorough
def test_a_real_network_has_the_bits_of_xnnpack() -> None:
    needs("ai_edge_litert")
    from tests.edgetpu.networks import MOBILENET, run

    target_of(8)
    target, content = f"llvm -mcpu={MCPU[8]}", MOBILENET.read_bytes()
    model = read("mobilenet", MOBILENET, content, {})
    [tensor] = model.inputs
    frame = {tensor.name: np.random.default_rng(0).integers(-128, 128, tensor.shape).astype(tensor.dtype)}
    [expected] = run(content, frame, xnnpack=True).values()
    np.testing.assert_array_equal(whole(on(model, target), target, frame), expected)


def test_what_a_gpu_shares_is_computed_in_float32() -> None:
    assert in_integers(["llvm -mcpu=x86-64-v3", "llvm -mcpu=x86-64-v2", *AARCH64])
    assert not in_integers(["llvm -mcpu=x86-64-v3", "cuda -arch=sm_87"])


@pytest.mark.needs("linker for AArch64")
def test_aarch64_has_the_operators_of_x86_in_integers() -> None:
    """So stages of one model may run on either; `benchmarks/emulated_relax.py` compares what they compute."""
    targets = [f"llvm -mcpu={MCPU[4]}", *AARCH64]
    net = nets("int8")[1].conv(8, (3, 3))
    compiled = RelaxModel.compile(net.model(), targets, lambda _: None, elsewhere=dict.fromkeys(AARCH64, "a board"))
    for library in compiled.libraries.values():
        assert sorted(rule for rule in library.rules.values() if rule != "plain") == [
            *("conv2d_int8", "conv2d_int8", "depthwise_int8")
        ]
