"""Operator graphs as Relay networks with random weights; kinds, shapes and parameter bytes give the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from networks import as_model

from tvm_pipeline.core.graph import Operator, OperatorGraph
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import GraphError

import tvm  # isort: skip
from tvm import relay  # isort: skip

PROFILES = Path(__file__).parents[1] / "profiles"
DENSENET = PROFILES / "keras/DenseNet121.json"
SWIFTNET = PROFILES / "swiftnet"


def relay_network(graph: OperatorGraph) -> Model:
    """Return a graph of Keras, of TFLite or of `memory_networks.py` as a network in float32.

    Raises:
        GraphError: it has operators of a kind that is not known here, or of a size that no convolution has.
    """
    return _Network(graph).model()


def profile_network(path: Path) -> Model:
    """Return the network of an operator graph in `profiles/`."""
    return relay_network(read_graph(path))


class _Network:
    def __init__(self, graph: OperatorGraph) -> None:
        self._graph, self._draw = graph, np.random.default_rng(0)
        self._shapes = {tensor.name: _image(tensor.shape) for tensor in graph.tensors.values()}
        self._params: dict[str, Any] = {}

    def model(self) -> Model:
        made = {tensor.name: relay.var(tensor.name, shape=_nchw(_image(tensor.shape))) for tensor in self._graph.inputs}
        for operator in self._graph.operators:
            name = operator.outputs[0].name
            if operator.inputs:
                made[name] = self._made(operator, [made[read] for read in operator.inputs])
            else:
                made[name] = relay.var(name, shape=_nchw(self._shapes[name]))
        body = relay.Tuple([made[name] for name in self._graph.outputs])
        mod = tvm.IRModule.from_expr(relay.Function(relay.analysis.free_vars(body), body))
        return as_model(self._graph.name.replace(" ", "_"), relay.transform.InferType()(mod), self._params)

    def _made(self, operator: Operator, reads: Sequence[Any]) -> Any:
        kind, *after = operator.kind.lower().replace("_", "").split("+")
        x = self._computed(operator, kind, reads)
        return relay.nn.relu(x) if "relu" in after else x

    def _computed(self, operator: Operator, kind: str, reads: Sequence[Any]) -> Any:
        x, read, made = reads[0], self._shapes[operator.inputs[0]], self._shapes[operator.outputs[0].name]
        match kind:
            case "conv2d" | "depthwiseconv2d":
                return self._convolution(operator, x, read, made, read[-1] if kind == "depthwiseconv2d" else 1)
            case "dense" | "fullyconnected":
                return relay.nn.dense(relay.nn.batch_flatten(x), self._weights(made[-1], math.prod(read)))
            case "batchnormalization":
                scaled = relay.multiply(x, relay.abs(self._weights(made[-1], 1, 1)))
                return relay.add(scaled, self._weights(made[-1], 1, 1))
            case "relu" | "activation":
                return relay.nn.relu(x)
            case "softmax":
                return relay.nn.softmax(x)
            case "add":
                return reduce(relay.add, reads)
            case "mean" if len(reads) > 1:
                return relay.multiply(reduce(relay.add, reads), relay.const(1 / len(reads)))
            case "mean" | "globalaveragepooling2d":
                return relay.nn.global_avg_pool2d(x)
            case "concat" | "concatenate" | "concatenation":
                return relay.concatenate(reads, axis=1)
            case "maxpool" | "maxpool2d" | "maxpooling2d":
                return relay.nn.max_pool2d(x, **_window(read, made))
            case "avgpool" | "averagepool2d" | "averagepooling2d":
                return relay.nn.avg_pool2d(x, **_window(read, made))
            case "zeropadding2d":
                more = made[0] - read[0]
                return relay.nn.pad(x, ((0, 0), (0, 0), (more // 2, more - more // 2), (more // 2, more - more // 2)))
            case "slice":
                return relay.strided_slice(x, [1, 1], list(read[:2]), [1, 1], axes=[2, 3])
            case "split" | "inputlayer" | "reshape" | "squeeze":
                return x
        raise GraphError(f"{self._graph.name}: operator {operator.name} is of kind {operator.kind}, unknown here")

    def _convolution(self, operator: Operator, x: Any, read: Sequence[int], made: Sequence[int], groups: int) -> Any:
        channels, filters = read[-1] // groups, made[-1]
        kernel = _kernel(operator, channels * filters, filters)
        strides = [_stride(read[axis], made[axis]) for axis in (0, 1)]
        pads = [max((made[axis] - 1) * strides[axis] + kernel - read[axis], 0) for axis in (0, 1)]
        return relay.nn.conv2d(
            x,
            self._weights(filters, channels, kernel, kernel),
            channels=filters,
            kernel_size=(kernel, kernel),
            strides=strides,
            padding=(pads[0] // 2, pads[1] // 2, pads[0] - pads[0] // 2, pads[1] - pads[1] // 2),
            groups=groups,
        )

    def _weights(self, *shape: int) -> Any:
        name = f"w{len(self._params)}"
        values = self._draw.standard_normal(shape) * math.sqrt(2 / math.prod(shape[1:]))
        self._params[name] = tvm.nd.array(values.astype("float32"))
        return relay.var(name, shape=shape)


def _kernel(operator: Operator, weights: int, filters: int) -> int:
    """Return the side of a kernel from its bytes: of int8 or float32, with or without a bias of four bytes."""
    for side in range(1, 12):
        sizes = [side * side * weights * width for width in (1, 4)]
        if operator.param_bytes in (*sizes, *(size + 4 * filters for size in sizes)):
            return side
    raise GraphError(
        f"operator {operator.name} has {operator.param_bytes} bytes of weights, which no square kernel has"
    )


def _image(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of one image without its batch: (height, width, channels), or (units,)."""
    return tuple(shape[1:]) if len(shape) in (2, 4) else tuple(shape)


def _nchw(shape: Sequence[int]) -> tuple[int, ...]:
    return (1, shape[2], shape[0], shape[1]) if len(shape) == 3 else (1, *shape)


def _window(read: Sequence[int], made: Sequence[int]) -> dict[str, Any]:
    stride = _stride(read[0], made[0])
    pad = max((made[0] - 1) * stride + 3 - read[0], 0)
    before, after = pad // 2, pad - pad // 2
    return {"pool_size": (3, 3), "strides": (stride, stride), "padding": (before, before, after, after)}


def _stride(read: int, made: int) -> int:
    return max(round(read / made), 1)
