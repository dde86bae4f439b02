"""Small networks on whole numbers, whose every value numpy computes as well: what `tvm-pipeline check` runs on devices.

All weights are -1, 0 or 1, and all values stay between -128 and 127. So float32 and int8 hold them without rounding, in
whatever order a device adds, and all devices must give the same bits. Of `onnx` models tensors are NCHW and float32, of
`tflite` models NHWC and int8 with a scale of 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tvm_pipeline.backends.contract import Array
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline.frontends import onnx, tflite

FORMATS = ("onnx", "tflite")
LARGEST = 2  # of the values of an input


class Layer(NamedTuple):
    """One operator: a convolution of `extent` x `extent` pixels where it reads one tensor, the sum of two otherwise."""

    name: str
    reads: tuple[str, ...]
    channels: int
    extent: int = 1


class Network(NamedTuple):
    """A network of one input `x` and one output `y`, the last layer; `shape` is that of `x` (NHWC)."""

    name: str
    shape: tuple[int, int, int, int]
    layers: tuple[Layer, ...]

    def frame(self, number: int) -> Array:
        """Return an input: whole numbers (int64, NHWC) that differ from those of other frames."""
        return np.random.default_rng(number).integers(0, LARGEST + 1, self.shape)

    def expected(self, frame: Array) -> Array:
        """Return what numpy makes of a frame: `y` (int64, NHWC)."""
        values = {"x": frame}
        for layer in self.layers:
            first, *second = (values[name] for name in layer.reads)
            values[layer.name] = first + second[0] if second else _convolved(first, self.weights(layer))
        return values["y"]

    def channels(self, tensor: str) -> int:
        return {"x": self.shape[3], **{layer.name: layer.channels for layer in self.layers}}[tensor]

    def weights(self, layer: Layer) -> Array:
        """Return the weights of a convolution (outputs, height, width, inputs); two or three of an output are not 0."""
        draw, read = np.random.default_rng(sum(layer.name.encode())), self.channels(layer.reads[0])
        weights = np.zeros((layer.channels, layer.extent * layer.extent * read), np.int64)
        count = 3 if layer.reads == ("x",) else 2
        for row in weights:
            row[draw.choice(len(row), count, replace=False)] = draw.choice((-1, 1), count)
        return weights.reshape(layer.channels, layer.extent, layer.extent, read)

    def written(self, format: str) -> Model:
        """Return the network as a file of one of FORMATS; raise ModelError where the packages for that are missing."""
        path = Path(f"{self.name}.{format}")
        try:
            if format == "onnx":
                return onnx.read(self.name, path, _onnx_file(self), {}, {})
            return tflite.read(self.name, path, _tflite_file(self), {})
        except ImportError as error:
            extra = "tvm" if format == "onnx" else "edgetpu"
            raise ModelError(f"{path} cannot be made: {error}; run `pip install 'tvm-pipeline[{extra}]'`") from error


def as_input(frame: Array, format: str) -> Array:
    """Return a frame as a model of this format takes it."""
    return frame.transpose(0, 3, 1, 2).astype("float32") if format == "onnx" else frame.astype("int8")


def as_numbers(output: Array, format: str) -> Array:
    """Return an output of a model of this format as `Network.expected` gives it."""
    return output.transpose(0, 2, 3, 1) if format == "onnx" else output


def _convolved(x: Array, weights: Array) -> Array:
    extent = weights.shape[1]
    around = np.pad(x, ((0, 0), (extent // 2,) * 2, (extent // 2,) * 2, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(around, (extent, extent), (1, 2))
    summed: Array = np.einsum("nhwcij,oijc->nhwo", windows, weights)
    return summed


def _onnx_file(network: Network) -> bytes:
    from onnx import TensorProto, ValueInfoProto, helper, numpy_helper

    def tensor(name: str) -> ValueInfoProto:
        batch, height, width, _ = network.shape
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, network.channels(name), height, width])

    nodes, weights = [], []
    for layer in network.layers:
        if len(layer.reads) == 2:
            nodes.append(helper.make_node("Add", layer.reads, [layer.name], layer.name))
            continue
        values = network.weights(layer).transpose(0, 3, 1, 2).astype("float32")
        weights.append(numpy_helper.from_array(values, f"{layer.name}.w"))
        reads, pads = [*layer.reads, f"{layer.name}.w"], [layer.extent // 2] * 4
        nodes.append(helper.make_node("Conv", reads, [layer.name], layer.name, pads=pads))
    graph = helper.make_graph(nodes, network.name, [tensor("x")], [tensor("y")], weights)
    content: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8
    ).SerializeToString()
    return content


def _tflite_file(network: Network) -> bytes:
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    kinds, options, types = schema.BuiltinOperator, schema.BuiltinOptions, schema.TensorType
    buffers, tensors, operators = [schema.BufferT()], [], []
    indices: dict[str, int] = {}

    def tensor(
        name: str, shape: Sequence[int], values: Array | None = None, type_: int = schema.TensorType.INT8
    ) -> int:
        buffers.append(schema.BufferT(None if values is None else np.frombuffer(values.tobytes(), np.uint8)))
        scale = schema.QuantizationParametersT(scale=[1.0], zeroPoint=[0])
        tensors.append(schema.TensorT(list(shape), type_, len(buffers) - 1, name, scale))
        return indices.setdefault(name, len(tensors) - 1)

    tensor("x", network.shape)
    for layer in network.layers:
        reads = [indices[name] for name in layer.reads]
        tensor(layer.name, (*network.shape[:3], layer.channels))
        if len(reads) == 1:
            values, bias = network.weights(layer).astype("int8"), np.zeros(layer.channels, "int32")
            reads.append(tensor(f"{layer.name}.w", values.shape, values))
            reads.append(tensor(f"{layer.name}.b", bias.shape, bias, types.INT32))
            how = 0, options.Conv2DOptions, schema.Conv2DOptionsT(strideW=1, strideH=1)
        else:
            how = 1, options.AddOptions, schema.AddOptionsT()
        operators.append(schema.OperatorT(how[0], reads, [indices[layer.name]], *how[1:]))
    codes = [schema.OperatorCodeT(kind, None, version, kind) for kind, version in ((kinds.CONV_2D, 3), (kinds.ADD, 2))]
    graph = schema.SubGraphT(tensors, [indices["x"]], [indices["y"]], operators, network.name)
    builder = flatbuffers.Builder(1024)
    builder.Finish(schema.ModelT(3, codes, [graph], network.name, buffers).Pack(builder), b"TFL3")
    return bytes(builder.Output())


CONVOLUTION = Network("convolution", (1, 16, 16, 4), (Layer("y", ("x",), 8, 3),))
ADDITION = Network("addition", (1, 64, 64, 8), (Layer("y", ("x", "x"), 8),))
BRANCHES = Network(
    "branches",
    (1, 16, 16, 4),
    (
        Layer("a", ("x",), 8, 3),
        Layer("b", ("a",), 8),
        Layer("c", ("a",), 8, 3),
        Layer("d", ("b", "c"), 8),
        Layer("e", ("d",), 4),
        Layer("y", ("e",), 4, 3),
    ),
)
