"""Small networks on whole numbers, whose every value numpy computes as well: what `tvm-pipeline check` runs on devices.

All weights are -1, 0 or 1, and all values stay between -128 and 127. So float32 and int8 hold them without rounding, in
whatever order a device adds, and all devices must give the same bits. Of `onnx` models tensors are NCHW and float32, of
`tflite` models NHWC and int8 with a scale of 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from tvm_pipeline.backends.contract import Array
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline.frontends import onnx, tflite

FORMATS = ("onnx", "tflite")
LARGEST = 3  # of the values of an input


class Layer(NamedTuple):
    """One operator: `conv` of 3 x 3 or 1 x 1 pixels, `add`, or `pool`, the largest value of `extent` x `extent` pixels.

    A convolution keeps the height and the width, a pool divides them. `channels` are those that a convolution gives.
    """

    name: str
    kind: Literal["conv", "add", "pool"]
    reads: tuple[str, ...]
    extent: int = 1
    channels: int = 0


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
            values[layer.name] = _computed(layer, [values[name] for name in layer.reads])
        return values["y"]

    def written(self, format: str) -> Model:
        """Return the network as a file of one of FORMATS; raise ModelError where the packages for that are missing."""
        path = Path(f"{self.name}.{format}")
        try:
            if format == "onnx":
                return onnx.read(self.name, path, _onnx_file(self), {}, {})
            return tflite.read(self.name, path, _tflite_file(self), {})
        except ImportError as error:
            extra = "relay" if format == "onnx" else "edgetpu"
            raise ModelError(f"{path} cannot be made: {error}; run `pip install 'tvm-pipeline[{extra}]'`") from error


def as_input(frame: Array, format: str) -> Array:
    """Return a frame as a model of this format takes it."""
    return frame.transpose(0, 3, 1, 2).astype("float32") if format == "onnx" else frame.astype("int8")


def as_numbers(output: Array, format: str) -> Array:
    """Return an output of a model of this format as `Network.expected` gives it."""
    return output.transpose(0, 2, 3, 1) if format == "onnx" else output


def _weights(layer: Layer, read: int) -> Array:
    """Return the weights of a convolution (outputs, height, width, inputs); two or three of an output are not 0."""
    draw = np.random.default_rng(sum(layer.name.encode()))
    weights = np.zeros((layer.channels, layer.extent * layer.extent * read), np.int64)
    count = 3 if layer.reads == ("x",) else 2
    for row in weights:
        row[draw.choice(len(row), count, replace=False)] = draw.choice((-1, 1), count)
    return weights.reshape(layer.channels, layer.extent, layer.extent, read)


def _computed(layer: Layer, inputs: Sequence[Array]) -> Array:
    if layer.kind == "add":
        return inputs[0] + inputs[1]
    [x], extent = inputs, layer.extent
    if layer.kind == "pool":
        _, height, width, channels = x.shape
        pooled: Array = x.reshape(1, height // extent, extent, width // extent, extent, channels).max((2, 4))
        return pooled
    around = np.pad(x, ((0, 0), (extent // 2,) * 2, (extent // 2,) * 2, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(around, (extent, extent), (1, 2))
    summed: Array = np.einsum("nhwcij,oijc->nhwo", windows, _weights(layer, x.shape[3]))
    return summed


def _shapes(network: Network) -> Mapping[str, tuple[int, int, int, int]]:
    values = {"x": np.zeros(network.shape, np.int64)}
    for layer in network.layers:
        values[layer.name] = _computed(layer, [values[name] for name in layer.reads])
    return {name: value.shape for name, value in values.items()}


def _onnx_file(network: Network) -> bytes:
    from onnx import TensorProto, helper, numpy_helper

    shapes, nodes, weights = _shapes(network), [], []
    for layer in network.layers:
        reads = list(layer.reads)
        options: dict[str, Any] = {}
        if layer.kind == "conv":
            values = _weights(layer, shapes[reads[0]][3]).transpose(0, 3, 1, 2).astype("float32")
            weights.append(numpy_helper.from_array(values, f"{layer.name}.w"))
            reads.append(f"{layer.name}.w")
            options = {"pads": [layer.extent // 2] * 4}
        elif layer.kind == "pool":
            options = {"kernel_shape": [layer.extent] * 2, "strides": [layer.extent] * 2}
        kind = {"conv": "Conv", "add": "Add", "pool": "MaxPool"}[layer.kind]
        nodes.append(helper.make_node(kind, reads, [layer.name], layer.name, **options))

    def tensor(name: str) -> Any:
        batch, height, width, channels = shapes[name]
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, channels, height, width])

    graph = helper.make_graph(nodes, network.name, [tensor("x")], [tensor("y")], weights)
    opset = [helper.make_opsetid("", 13)]
    content: bytes = helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()
    return content


def _tflite_file(network: Network) -> bytes:
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    buffers, tensors, operators = [schema.BufferT()], [], []
    indices: dict[str, int] = {}

    def tensor(name: str, shape: Sequence[int], values: Array | None = None, type_: str = "INT8") -> int:
        buffers.append(schema.BufferT(None if values is None else np.frombuffer(values.tobytes(), np.uint8)))
        scale = schema.QuantizationParametersT(scale=[1.0], zeroPoint=[0])
        kind = getattr(schema.TensorType, type_)
        tensors.append(schema.TensorT(list(shape), kind, len(buffers) - 1, name, scale))
        return indices.setdefault(name, len(tensors) - 1)

    shapes, kinds = _shapes(network), ("conv", "add", "pool")
    tensor("x", network.shape)
    for layer in network.layers:
        reads = [indices[name] for name in layer.reads]
        tensor(layer.name, shapes[layer.name])
        options: Any = schema.AddOptionsT()
        if layer.kind == "conv":
            values = _weights(layer, shapes[layer.reads[0]][3]).astype("int8")
            bias = np.zeros(layer.channels, "int32")
            reads.append(tensor(f"{layer.name}.w", values.shape, values))
            reads.append(tensor(f"{layer.name}.b", bias.shape, bias, "INT32"))
            options = schema.Conv2DOptionsT(strideW=1, strideH=1)
        elif layer.kind == "pool":
            extent = layer.extent
            options = schema.Pool2DOptionsT(strideW=extent, strideH=extent, filterWidth=extent, filterHeight=extent)
        of = getattr(schema.BuiltinOptions, type(options).__name__.removesuffix("T"))
        code = kinds.index(layer.kind)
        operators.append(schema.OperatorT(code, reads, [indices[layer.name]], of, options))
    numbers = [getattr(schema.BuiltinOperator, name) for name in ("CONV_2D", "ADD", "MAX_POOL_2D")]
    codes = [
        schema.OperatorCodeT(number, None, version, number) for number, version in zip(numbers, (3, 2, 2), strict=True)
    ]
    graph = schema.SubGraphT(tensors, [indices["x"]], [indices["y"]], operators, network.name)
    builder = flatbuffers.Builder(1024)
    builder.Finish(schema.ModelT(3, codes, [graph], network.name, buffers).Pack(builder), b"TFL3")
    return bytes(builder.Output())


OPERATOR = Network("operator", (1, 16, 16, 4), (Layer("y", "conv", ("x",), 3, 8),))
UNCHANGED = Network("unchanged", (1, 64, 64, 8), (Layer("y", "pool", ("x",), 1),))
BRANCHES = Network(
    "branches",
    (1, 16, 16, 4),
    (
        Layer("a", "conv", ("x",), 3, 8),
        Layer("b", "conv", ("a",), 1, 8),
        Layer("c", "conv", ("a",), 3, 8),
        Layer("d", "add", ("b", "c")),
        Layer("e", "pool", ("d",), 2),
        Layer("y", "conv", ("e",), 3, 4),
    ),
)
