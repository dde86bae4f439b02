"""Quantised operators of ONNX as float operators between DequantizeLinear and QuantizeLinear.

    QLinearConv(x, w, b)   ->  Conv(DequantizeLinear(x), DequantizeLinear(w), b * scale) -> QuantizeLinear
    ConvInteger(x, w)      ->  Conv(float(x) - zero, float(w) - zero) -> Cast to int32

Weights are constants, so they are float once imported, and what is computed is float32. Sums of int8 products beyond
2**24 are rounded, which changes them by less than one part in ten million.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from tvm_pipeline_tvm.relax.onnx_site import NodeSite, Rewrite

_SETTLED = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def _float(site: NodeSite, suffix: str, inputs: Sequence[str], axis: int = 0) -> Any:
    """Return a node that makes a float tensor of one, its scale and its zero point."""
    return helper.make_node("DequantizeLinear", [name for name in inputs if name], [site.name(suffix)], axis=axis)


def _quantised(site: NodeSite, suffix: str, scale: str, zero: str) -> Any:
    return helper.make_node("QuantizeLinear", [site.name(suffix), scale, zero], list(site.node.output), site.node.name)


def _convolution(site: NodeSite) -> list[Any]:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, *bias = site.node.input
    attributes = {name: value for name, value in site.attributes.items() if name in _SETTLED}
    nodes = [_float(site, "x", (x, x_scale, x_zero)), _float(site, "w", (w, w_scale, w_zero))]
    inputs = [site.name("x"), site.name("w")]
    if bias and bias[0]:
        nodes += [
            helper.make_node("Cast", [bias[0]], [site.name("b32")], to=TensorProto.FLOAT),
            helper.make_node("Mul", [x_scale, w_scale], [site.name("scale")]),
            helper.make_node("Mul", [site.name("b32"), site.name("scale")], [site.name("b")]),
        ]
        inputs.append(site.name("b"))
    nodes.append(helper.make_node("Conv", inputs, [site.name("y")], **attributes))
    return [*nodes, _quantised(site, "y", y_scale, y_zero)]


def _product(site: NodeSite) -> list[Any]:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = site.node.input
    last = len(site.look(b).shape) - 1  # a scale for each column
    casts = []
    if site.look(a_scale).dtype == "float16":  # sums in it would be rounded to other integers
        scales = {name: site.name(f"scale/{name}") for name in (a_scale, b_scale, y_scale)}
        casts = [helper.make_node("Cast", [name], [wide], to=TensorProto.FLOAT) for name, wide in scales.items()]
        a_scale, b_scale, y_scale = (scales[name] for name in (a_scale, b_scale, y_scale))
    return [
        *casts,
        _float(site, "a", (a, a_scale, a_zero)),
        _float(site, "b", (b, b_scale, b_zero), last),
        helper.make_node("MatMul", [site.name("a"), site.name("b")], [site.name("y")]),
        _quantised(site, "y", y_scale, y_zero),
    ]


def _integer(site: NodeSite) -> list[Any] | None:
    """ConvInteger and MatMulInteger: (x, w, zero of x, zero of w) -> int32."""
    kind = site.node.op_type.removesuffix("Integer")
    nodes = []
    for index, name in enumerate("xw"):
        cast = site.name(f"{name}/float")
        zero = site.input(2 + index)
        nodes.append(helper.make_node("Cast", [site.node.input[index]], [cast], to=TensorProto.FLOAT))
        shape = site.look(zero).shape if zero else ()
        if zero:
            nodes.append(helper.make_node("Cast", [zero], [site.name(f"{name}/zero")], to=TensorProto.FLOAT))
            zero = site.name(f"{name}/zero")
        if zero and len(shape) == 1 and shape[0] > 1:
            rank = len(site.look(site.node.input[index]).shape)
            # of a matrix, a zero point for each row on the left and for each column on the right
            first = kind == "Conv" or index == 0
            axis = 0 if kind == "Conv" else rank - 2 if first else rank - 1
            target = [-1 if each == axis else 1 for each in range(rank)]
            nodes.append(site.constant(f"{name}/shape", np.array(target, "int64")))
            nodes.append(helper.make_node("Reshape", [zero, site.name(f"{name}/shape")], [site.name(f"{name}/zeros")]))
            zero = site.name(f"{name}/zeros")
        if zero:
            nodes.append(helper.make_node("Sub", [cast, zero], [site.name(name)]))
        else:
            nodes.append(helper.make_node("Identity", [cast], [site.name(name)]))
    attributes = {name: value for name, value in site.attributes.items() if name in _SETTLED}
    nodes.append(helper.make_node(kind, [site.name("x"), site.name("w")], [site.name("y")], **attributes))
    nodes.append(
        helper.make_node("Cast", [site.name("y")], list(site.node.output), site.node.name, to=TensorProto.INT32)
    )
    return nodes


QUANTISED: dict[str, Rewrite] = {
    "QLinearConv": _convolution,
    "QLinearMatMul": _product,
    "ConvInteger": _integer,
    "MatMulInteger": _integer,
}
