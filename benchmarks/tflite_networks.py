"""Operator graphs of `memory_networks.py` as float .tflite of random weights; `memory_real.py` makes Relay of them."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tvm_pipeline.core.graph import Operator, OperatorGraph

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.edgetpu

from tests.edgetpu.networks import Op, Options, Type, Writer, schema

_RELU = schema.ActivationFunctionType.RELU


def tflite_file(graph: OperatorGraph) -> bytes:
    """Return the graph as a .tflite of seeded weights; SystemExit for a kind that it does not know."""
    writer, draw, made = Writer(), np.random.default_rng(0), {}

    def tensor(shape: tuple[int, ...], values: Any = None) -> int:
        return writer.tensor(shape, Type.FLOAT32, scale=0, data=values)

    for given in graph.inputs:
        made[given.name] = tensor((1, *given.shape))
    for operator in graph.operators:
        reads, shape = [made[name] for name in operator.inputs], (1, *operator.outputs[0].shape)
        stride = math.ceil(writer.shape(reads[0])[1] / shape[1])
        if operator.param_bytes:
            channels = writer.shape(reads[0])[3]
            weights = _weights(operator, channels, shape[3], draw)
            reads = [reads[0], tensor(weights.shape, weights), tensor((shape[3],), np.zeros(shape[3], np.float32))]
        code, kind, options = _options(operator, stride)
        if operator.kind == "add" and len(reads) > 2:  # ADD takes two
            while len(reads) > 2:
                reads = [*writer.operator(code, reads[:2], [tensor(shape)], kind, options, 1), *reads[2:]]
        [made[operator.outputs[0].name]] = writer.operator(code, reads, [tensor(shape)], kind, options, 1)
    return writer.content([made[tensor.name] for tensor in graph.inputs], [made[name] for name in graph.outputs])


def _weights(operator: Operator, channels: int, filters: int, draw: np.random.Generator) -> Any:
    """Return a filter OHWI, or 1HWO where each channel has filters of its own, scaled so that values stay as large."""
    depthwise = operator.kind.startswith("depthwise")
    kernel = math.isqrt(operator.param_bytes // (4 * filters * (1 if depthwise else channels)))
    shape = (1, kernel, kernel, filters) if depthwise else (filters, kernel, kernel, channels)
    scale = math.sqrt(2 / (kernel * kernel * (1 if depthwise else channels)))
    return (draw.standard_normal(shape) * scale).astype(np.float32)


def _options(operator: Operator, stride: int) -> tuple[int, int, Any]:
    steps = {"strideW": stride, "strideH": stride, "padding": schema.Padding.SAME}
    pool = schema.Pool2DOptionsT(**steps, filterWidth=3, filterHeight=3)
    first, _, after = operator.kind.partition("+")
    activation = {"fusedActivationFunction": _RELU if after == "relu" else 0}
    match first:
        case "conv2d":
            return Op.CONV_2D, Options.Conv2DOptions, schema.Conv2DOptionsT(**steps, **activation)
        case "depthwise_conv2d":
            depthwise = schema.DepthwiseConv2DOptionsT(**steps, **activation, depthMultiplier=1)
            return Op.DEPTHWISE_CONV_2D, Options.DepthwiseConv2DOptions, depthwise
        case "relu":
            return Op.RELU, 0, None
        case "add":
            return Op.ADD, Options.AddOptions, schema.AddOptionsT()
        case "concat":
            return Op.CONCATENATION, Options.ConcatenationOptions, schema.ConcatenationOptionsT(axis=3)
        case "max_pool":
            return Op.MAX_POOL_2D, Options.Pool2DOptions, pool
        case "avg_pool":
            return Op.AVERAGE_POOL_2D, Options.Pool2DOptions, pool
    raise SystemExit(f"operator {operator.name} is of kind {operator.kind}, which tflite_networks.py cannot build")
