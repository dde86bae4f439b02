"""Concatenations of a .tflite in parts: the same outputs, a smaller arena, and what stays whole and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.parts import needs

needs("ai_edge_litert")

from tests.edgetpu.networks import Op, Options, Type, Writer, run, schema
from tests.support.command import run_command
from tvm_pipeline import open_bundle
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import OptionError
from tvm_pipeline.memory.rewriting import fewest
from tvm_pipeline_edgetpu.in_parts import TfliteRewriting
from tvm_pipeline_edgetpu.model import parse_model
from tvm_pipeline_edgetpu.ordering import _spans, arena_bytes, memory_ordered

RELU = schema.ActivationFunctionType.RELU
PIXELS = 12 * 12


class Net(Writer):
    """A float or an int8 network on an image of 12 x 12 pixels and 4 channels."""

    def __init__(self, type_: int = Type.FLOAT32) -> None:
        super().__init__()
        self.type, self.draw = type_, np.random.default_rng(0)
        self.image = self.made(4)

    def made(self, channels: int, size: int = 12, scale: float = 0.05) -> int:
        return self.tensor((1, size, size, channels), self.type, scale=scale if self.type == Type.INT8 else 0)

    def weights(self, *shape: int) -> int:
        if self.type == Type.INT8:
            return self.tensor(shape, scale=0.01, data=self.draw.integers(-60, 61, shape).astype(np.int8))
        values = self.draw.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        return self.tensor(shape, self.type, scale=0, data=values.astype(np.float32))

    def bias(self, channels: int) -> int:
        if self.type == Type.INT8:
            values = self.draw.integers(-999, 999, channels).astype(np.int32)
            return self.tensor((channels,), Type.INT32, scale=0.0005, data=values)
        return self.tensor((channels,), self.type, scale=0, data=self.draw.standard_normal(channels).astype("f4"))

    def conv(self, x: int, channels: int, kernel: int = 1, activation: int = 0) -> int:
        reads = [x, self.weights(channels, kernel, kernel, self.shape(x)[3]), self.bias(channels)]
        options = schema.Conv2DOptionsT(strideW=1, strideH=1, fusedActivationFunction=activation)
        made = self.made(channels, self.shape(x)[1])
        return self.operator(Op.CONV_2D, reads, [made], Options.Conv2DOptions, options, version=3)[0]

    def depthwise(self, x: int, stride: int = 1, multiplier: int = 1) -> int:
        channels = self.shape(x)[3] * multiplier
        options = schema.DepthwiseConv2DOptionsT(
            strideW=stride, strideH=stride, depthMultiplier=multiplier, fusedActivationFunction=RELU
        )
        reads = [x, self.weights(1, 3, 3, channels), self.bias(channels)]
        made = self.made(channels, -(-self.shape(x)[1] // stride))
        kind = Options.DepthwiseConv2DOptions
        return self.operator(Op.DEPTHWISE_CONV_2D, reads, [made], kind, options, version=3)[0]

    def concat(self, *fields: int, scale: float = 0.05) -> int:
        made = self.made(sum(self.shape(x)[3] for x in fields), self.shape(fields[0])[1], scale)
        options = schema.ConcatenationOptionsT(axis=-1)
        return self.operator(Op.CONCATENATION, list(fields), [made], Options.ConcatenationOptions, options)[0]

    def scaled(self, x: int) -> int:
        """Multiply each channel by a constant of its own, which is the first operand."""
        factors = self.tensor((self.shape(x)[3],), self.type, scale=0, data=self.draw.random(self.shape(x)[3], "f4"))
        made = self.made(self.shape(x)[3], self.shape(x)[1])
        return self.operator(Op.MUL, [factors, x], [made], Options.MulOptions, schema.MulOptionsT())[0]

    def relu(self, x: int) -> int:
        return self.operator(Op.RELU, [x], [self.made(self.shape(x)[3], self.shape(x)[1])])[0]

    def branches(self, *widths: int) -> list[int]:
        return [self.conv(self.image, width, activation=RELU) for width in widths]

    def file(self, *outputs: int) -> bytes:
        return self.content([self.image], list(outputs))


def summed(net: Net) -> int:
    return net.conv(net.concat(*net.branches(16, 16, 24)), 8, 3, RELU)


def separable(net: Net) -> int:
    """Depthwise with two filters a channel, by-channel operators, then a convolution that adds the parts up."""
    return net.conv(net.relu(net.scaled(net.depthwise(net.concat(*net.branches(16, 24)), 1, 2))), 4)


def depthwise(net: Net) -> int:
    return net.depthwise(net.concat(*net.branches(24, 16, 8)), 2)


def nested(net: Net) -> int:
    a, b, c = net.branches(16, 16, 16)
    return net.conv(net.concat(net.concat(a, b), c), 4)


def shared(net: Net) -> int:
    """Two readers: one adds the parts up, of the other the parts are put together."""
    joined = net.concat(*net.branches(24, 24))
    return net.conv(net.concat(net.conv(joined, 4), net.depthwise(joined)), 4)


def rewriting_of(net: Net, *outputs: int) -> tuple[TfliteRewriting, bytes]:
    content = net.file(*outputs)
    return TfliteRewriting(Model("net", "tflite", content)), content


def kinds(content: bytes) -> list[str]:
    return [operator.kind for operator in parse_model(Path("net.tflite"), content).graph.operators]


def outputs_of(content: bytes, type_: int, *, xnnpack: bool) -> dict[str, Any]:
    graph = parse_model(Path("net.tflite"), content).graph
    draw = np.random.default_rng(1)
    frame = draw.standard_normal((1, 12, 12, 4)).astype(np.float32)
    if type_ == Type.INT8:
        frame = draw.integers(-128, 128, (1, 12, 12, 4)).astype(np.int8)
    return run(content, {graph.inputs[0].name: frame}, xnnpack=xnnpack)


def check_same(before: bytes, after: bytes, type_: int = Type.FLOAT32, tolerance: float = 1e-5) -> None:
    for xnnpack in (False, True):
        one, other = (outputs_of(content, type_, xnnpack=xnnpack) for content in (before, after))
        assert one.keys() == other.keys()
        for name, values in one.items():
            limit = tolerance * np.abs(values).max()
            assert np.abs(values.astype("f8") - other[name]).max() <= limit
            assert np.ptp(values.astype("f8")) > limit


@pytest.mark.parametrize("build", [summed, separable, depthwise, nested, shared])
def test_float_networks_compute_the_same(build: Any) -> None:
    net = Net()
    rewriting, content = rewriting_of(net, build(net))
    assert rewriting.refused == {}
    assert not rewriting.is_quantized
    check_same(content, rewriting.rewritten(rewriting.names).content)


def test_partial_convolutions_take_the_widest_part_first_and_end_with_the_activation() -> None:
    net = Net()
    rewriting, content = rewriting_of(net, summed(net))
    assert rewriting.names == ("concatenation_3",)
    after = rewriting.rewritten(rewriting.names).content
    assert kinds(after) == ["conv_2d"] * 4 + ["add"] + ["conv_2d"] * 2 + ["add"]
    subgraph = schema.ModelT.InitFromPackedBuf(after, 0).subgraphs[0]
    read = [subgraph.tensors[operator.inputs[0]].shape[3] for operator in subgraph.operators]
    assert read == [4, 24, 4, 16, 8, 4, 16, 8]
    activations = [operator.builtinOptions.fusedActivationFunction for operator in subgraph.operators]
    assert activations == [RELU, 0, RELU, 0, 0, RELU, 0, RELU]
    # Nothing of what was replaced is left in the file.
    touched = {i for o in subgraph.operators for i in (*o.inputs, *o.outputs)}
    assert touched == set(range(len(subgraph.tensors)))
    assert len(after) < len(content) + 2500
    # A part of 24 channels and its sum; a part of 16 with two sums is as much. Before: twice 56 channels.
    wide = PIXELS * 4
    assert (rewriting.peak_bytes(()), rewriting.peak_bytes(rewriting.names)) == (112 * wide, 32 * wide)
    assert arena_bytes(after) < 0.6 * arena_bytes(memory_ordered(content))


def test_tflite_adds_up_in_the_buffer_of_a_part_but_not_in_that_of_an_output() -> None:
    """It is why sums cost no buffer of their own; a release of TFLite that changes it changes the peaks above."""
    net = Net()
    rewriting, _ = rewriting_of(net, summed(net))
    after = rewriting.rewritten(rewriting.names).content
    subgraph, spans = schema.ModelT.InitFromPackedBuf(after, 0).subgraphs[0], _spans(after)
    first, last = subgraph.operators[4], subgraph.operators[7]
    assert spans[first.outputs[0]] in [spans[index] for index in first.inputs]
    assert spans[last.outputs[0]] not in [spans[index] for index in last.inputs]


def test_only_what_the_least_peak_requires_is_chosen() -> None:
    net = Net()
    narrow = net.conv(net.concat(*net.branches(4, 4)), 4)
    wide = net.conv(net.concat(*net.branches(32, 32)), 4)
    rewriting, _ = rewriting_of(net, net.concat(narrow, wide))
    assert fewest(rewriting.names, rewriting.peak_bytes) == ["concatenation_6"]


def test_what_somebody_wants_whole_stays_whole() -> None:
    net = Net()
    joined = net.concat(*net.branches(8, 8))
    assert rewriting_of(net, net.conv(joined, 4), joined)[0].names == ()
    net = Net()
    [half, other] = net.branches(8, 8)
    joined = net.concat(half, other)
    tall = net.tensor((1, 24, 12, 8), net.type, scale=0)
    rows = net.operator(
        Op.CONCATENATION, [half, other], [tall], Options.ConcatenationOptions, schema.ConcatenationOptionsT(axis=1)
    )[0]
    soft = net.operator(
        Op.SOFTMAX, [joined], [net.made(16)], Options.SoftmaxOptions, schema.SoftmaxOptionsT(beta=1.0), version=1
    )[0]
    assert rewriting_of(net, net.conv(rows, 4), net.conv(joined, 4), soft)[0].names == ()


def test_int8_depthwise_convolutions_are_exact_and_int8_sums_refused() -> None:
    net = Net(Type.INT8)
    rewriting, content = rewriting_of(net, depthwise(net))
    assert rewriting.is_quantized
    assert rewriting.refused == {}
    assert len(rewriting.names) == 1
    check_same(content, rewriting.rewritten(rewriting.names).content, Type.INT8, tolerance=0)
    net = Net(Type.INT8)
    rewriting, _ = rewriting_of(net, summed(net))
    assert rewriting.names == ()
    assert rewriting.refused == {
        "concatenation_3": "a convolution reads it, exact sums of int8 in parts need int32, and TFLite has no "
        "convolution from int8 to int32"
    }
    net = Net(Type.INT8)
    rewriting, _ = rewriting_of(net, net.depthwise(net.concat(*net.branches(8, 8), scale=0.1)))
    assert list(rewriting.refused.values()) == [
        "its inputs have other scales than its output, so that it changes their values"
    ]


def test_int8_filters_keep_their_own_scales() -> None:
    net = Net(Type.INT8)
    out = depthwise(net)
    filters, bias = list(net.operators[-1].inputs)[1:]
    scales = np.linspace(0.005, 0.02, 48).astype(np.float32)
    net.tensors[filters].quantization = schema.QuantizationParametersT(
        scale=scales, zeroPoint=np.zeros(48, np.int64), quantizedDimension=3
    )
    net.tensors[bias].quantization = schema.QuantizationParametersT(
        scale=scales * 0.05, zeroPoint=np.zeros(48, np.int64)
    )
    rewriting, content = rewriting_of(net, out)
    check_same(content, rewriting.rewritten(rewriting.names).content, Type.INT8, tolerance=0)


def test_other_files_are_refused() -> None:
    with pytest.raises(OptionError, match=r"TFLite rewrites \.tflite files, and net is onnx"):
        TfliteRewriting(Model("net", "onnx", b""))


def test_the_command_rewrites_the_file_and_its_bundle_runs(tmp_path: Path, capfd, monkeypatch) -> None:
    net = Net()
    content = net.file(summed(net))
    (tmp_path / "net.tflite").write_bytes(content)
    (tmp_path / "desk.toml").write_text(
        'name = "a desk"\n[[device]]\nname = "tpu0"\nbackend = "edgetpu"\ntarget = "cpu"\n'
    )
    bundle = tmp_path / "net.tar"
    arguments = ("--platform", tmp_path / "desk.toml", "-o", bundle, "--memory-rewrite", "--json")
    outcome = run_command(capfd, monkeypatch, "compile", tmp_path / "net.tflite", *arguments)
    assert outcome.code == 0, outcome.err
    found = outcome.json["rewriting"]
    assert (found["operators"], found["device"], found["left_out"]) == (["concatenation_3"], "tpu0", {})
    assert found["arena_bytes"][1] < found["arena_bytes"][0]
    assert found["difference"] <= found["tolerance"]
    with open_bundle(bundle) as opened:
        assert opened.rewriting is not None
        assert opened.rewriting.operators == ("concatenation_3",)
        names = opened.graph.operator_names
        runner = opened.compiled.stage(names, opened.platform.devices[0])
        frame, made = runner.inputs[0].buffer(), runner.outputs[0].buffer()
        frame[...] = np.random.default_rng(1).standard_normal(frame.shape)
        runner.run([frame], [made])
        [expected] = outputs_of(content, Type.FLOAT32, xnnpack=False).values()
        assert np.abs(made - expected).max() <= 1e-5 * np.abs(expected).max()
