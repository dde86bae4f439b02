"""Small networks as ONNX models, which every backend with TVM compiles in a second or two.

They have what makes cutting hard: branches, operators of several outputs, reshapes that run nothing, outputs that are
read inside, several inputs. `networks.py` has the same ones in Relay.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper, shape_inference

from tvm_pipeline.core.model import Model
from tvm_pipeline.frontends import onnx


class Net:
    """The nodes and the seeded weights of a network."""

    def __init__(self) -> None:
        self._draw = np.random.default_rng(0)
        self._nodes: list[Any] = []
        self._constants: list[Any] = []
        self._inputs: list[Any] = []

    def input(self, name: str, *shape: int) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name

    def const(self, values: Any, dtype: str = "float32") -> str:
        name = f"w{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        """Return weights so large that values neither vanish nor explode."""
        return self.const(self._draw.standard_normal(shape) * np.sqrt(2 / max(np.prod(shape[1:]), 1)))

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self.ops(kind, 1, *inputs, **attributes)[0]

    def ops(self, kind: str, outputs: int, *inputs: str, **attributes: Any) -> list[str]:
        names = [f"{kind.lower()}{len(self._nodes)}_{index}" for index in range(outputs)]
        self._nodes.append(helper.make_node(kind, inputs, names, names[0], **attributes))
        return names

    def conv(self, x: str, read: int, channels: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> str:
        """Return a convolution of the same extent, its bias and its ReLU."""
        weights = self.weight(channels, read // groups, kernel, kernel), self.weight(channels)
        pads, strides = [kernel // 2] * 4, [stride, stride]
        return self.op("Relu", self.op("Conv", x, *weights, pads=pads, strides=strides, group=groups))

    def dense(self, x: str, read: int, units: int) -> str:
        return self.op("Gemm", x, self.weight(units, read), transB=1)

    def reshape(self, x: str, *shape: int) -> str:
        return self.op("Reshape", x, self.const(shape, "int64"))

    def model(self, name: str, *outputs: str) -> Model:
        """Return the network as `load` would read it from a file."""
        named = [helper.make_empty_tensor_value_info(output) for output in outputs]
        graph = helper.make_graph(self._nodes, name, self._inputs, named, self._constants)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        made = shape_inference.infer_shapes(made, strict_mode=True)
        checker.check_model(made)
        return onnx.read(name, Path(f"{name}.onnx"), made.SerializeToString(), {}, {})


def branching(net: Net) -> list[str]:
    """Return two branches joined by a concatenation, a residual addition, and a flattening before the last product."""
    stem = net.conv(net.input("data", 1, 3, 16, 16), 3, 16)
    joined = net.op("Concat", net.conv(stem, 16, 8, 1), net.conv(stem, 16, 8), axis=1)
    x = net.op("Add", net.conv(joined, 16, 16), stem)
    x = net.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = net.op("AveragePool", net.conv(x, 16, 32), kernel_shape=[2, 2], strides=[2, 2])
    return [net.dense(net.op("Flatten", x), 512, 10)]


def splitting(net: Net) -> list[str]:
    """Return an operator of three outputs; their readers are far apart, and one output is read twice."""
    x = net.conv(net.input("data", 1, 3, 16, 16), 3, 24)
    first, second, third = net.ops("Split", 3, x, axis=1)
    a = net.conv(first, 8, 8)
    b = net.conv(net.op("Sigmoid", second), 8, 8)
    c = net.op("MaxPool", third, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    x = net.conv(net.op("Concat", a, b, c, axis=1), 24, 16)
    x = net.op("Concat", x, third, axis=1)
    return [net.op("ReduceMean", net.conv(x, 24, 8), axes=[2, 3], keepdims=0)]


def two_in_two_out(net: Net) -> list[str]:
    """Return two inputs of different shapes; the first output is read inside as well."""
    picture, vector = net.input("data", 1, 3, 16, 16), net.input("vector", 1, 12)
    x = net.conv(picture, 3, 16)
    y = net.op("Tanh", net.dense(vector, 12, 16))
    gated = net.op("Mul", x, net.reshape(y, 1, 16, 1, 1))
    first = net.op("Sigmoid", net.conv(gated, 16, 8))
    x = net.conv(net.op("Concat", first, gated, axis=1), 24, 16)
    second = net.dense(net.reshape(net.op("GlobalAveragePool", x), 1, 16), 16, 5)
    return [first, net.op("Add", second, net.dense(y, 16, 5))]


def shapes(net: Net) -> list[str]:
    """Return reshapes that run nothing, and an output that is also read under another shape inside."""
    x = net.conv(net.input("data", 1, 3, 8, 8), 3, 8)
    flat = net.reshape(x, 1, 512)
    scores = net.op("Softmax", net.op("Mul", net.dense(flat, 512, 16), net.const(0.3)), axis=1)
    square = net.reshape(scores, 1, 1, 4, 4)
    inside = net.conv(square, 1, 4)
    turned = net.op("Transpose", net.reshape(inside, 4, 16), perm=[1, 0])
    return [net.reshape(scores, 4, 4), net.op("Softmax", turned, axis=1), net.op("Add", inside, square)]


def mobile(net: Net) -> list[str]:
    """Return depthwise, grouped and transposed convolutions, and a resize."""
    x = net.conv(net.input("data", 1, 3, 16, 16), 3, 16, stride=2)
    x = net.conv(x, 16, 16, groups=16)
    skip = x = net.conv(x, 16, 32, 1)
    x = net.conv(x, 32, 32, stride=2, groups=4)
    x = net.op("ConvTranspose", x, net.weight(32, 16, 2, 2), strides=[2, 2])
    x = net.conv(net.op("Concat", net.op("Relu", x), skip, axis=1), 48, 8, 1)
    sizes = net.const([1, 8, 12, 12], "int64")
    modes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return [net.conv(net.op("Resize", x, "", "", sizes, **modes), 8, 4)]


def int8(net: Net) -> list[str]:
    """Return convolutions of quantized tensors with a residual addition, as pairs of QuantizeLinear and Dequantize-."""
    scale, zero = net.const(0.05), net.const(0, "int8")

    def rounded(x: str) -> str:
        return net.op("DequantizeLinear", net.op("QuantizeLinear", x, scale, zero), scale, zero)

    def conv(x: str, read: int) -> str:
        weights = net.const(np.random.default_rng(read).integers(-50, 50, (16, read, 3, 3)), "int8")
        scales = net.const(0.0025), zero
        weights = net.op("DequantizeLinear", weights, *scales)
        return rounded(net.op("Relu", net.op("Conv", x, weights, net.weight(16), pads=[1, 1, 1, 1])))

    stem = conv(rounded(net.input("data", 1, 3, 12, 12)), 3)
    x = rounded(net.op("Add", conv(conv(stem, 16), 16), stem))
    return [net.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])]


NETWORKS: dict[str, Callable[[Net], list[str]]] = {
    network.__name__: network for network in (branching, splitting, two_in_two_out, shapes, mobile, int8)
}


def onnx_network(name: str) -> Model:
    """Return one of NETWORKS."""
    net = Net()
    return net.model(name, *NETWORKS[name](net))
