"""Nodes of ONNX that TVM 0.27 imports wrongly or not at all, as nodes that it imports rightly.

Each function takes a node and what is known of its inputs, and gives the nodes that stand for it, or none where TVM
imports it as it is. New tensors have names below the node's first output. What TVM gets wrong:

    Conv, pools     auto_pad becomes a kernel of its own, and wrong where the window is smaller than the stride
    ConvTranspose   output_shape, which it ignores
    IsInf           of one sign
    MaxPool, ...    ceil_mode where the last window would begin in the padding
    Slice           attributes, before opset 10
    Softmax, ...    all axes behind the first are one, before opset 13
    Add, Mul, ...   `broadcast` and `axis`, before opset 7; PRelu's slopes

Next: `onnx_importer.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import helper

from tvm_pipeline_tvm.relax.onnx_site import NodeSite, Rewrite


def _changed(site: NodeSite, **attributes: Any) -> Any:
    """Return the node with other attributes; None takes one out."""
    merged = {name: value for name, value in (site.attributes | attributes).items() if value is not None}
    return helper.make_node(site.node.op_type, site.node.input, site.node.output, site.node.name, **merged)


def _padded_convolution(site: NodeSite) -> list[Any] | None:
    """Conv(auto_pad=SAME_UPPER) -> Conv(pads)."""
    attributes = site.attributes
    if attributes.get("auto_pad", "NOTSET") == "NOTSET":
        return None
    extents = site.look(site.node.input[0]).shape[2:]
    kernel = attributes.get("kernel_shape") or site.look(site.node.input[1]).shape[2:]
    return [_changed(site, auto_pad=None, pads=_same_pads(attributes, extents, kernel))]


def _transposed(site: NodeSite) -> list[Any] | None:
    """ConvTranspose(output_shape) -> ConvTranspose(pads)."""
    attributes, node = site.attributes, site.node
    if "output_shape" not in attributes:
        return None
    extents = site.look(node.input[0]).shape[2:]
    kernel = attributes.get("kernel_shape") or site.look(node.input[1]).shape[2:]
    ones, zeros = [1] * len(extents), [0] * len(extents)
    strides, dilations = attributes.get("strides") or ones, attributes.get("dilations") or ones
    extra = list(attributes.get("output_padding") or zeros)
    before, behind = [], []
    for axis, wanted in enumerate(attributes["output_shape"][-len(extents) :]):
        window = (kernel[axis] - 1) * dilations[axis] + 1
        total = strides[axis] * (extents[axis] - 1) + extra[axis] + window - wanted
        if total < 0:  # rows behind all that the kernel reaches
            extra[axis], total = extra[axis] - total, 0
        more = total - total // 2
        before.append(total // 2 if attributes.get("auto_pad") == "SAME_UPPER" else more)
        behind.append(total - before[-1])
    return [_changed(site, auto_pad=None, output_shape=None, output_padding=extra, pads=before + behind)]


def _infinite(site: NodeSite) -> list[Any] | None:
    """IsInf(x, detect_negative=0) -> x == inf."""
    attributes, node = site.attributes, site.node
    both = attributes.get("detect_positive", 1), attributes.get("detect_negative", 1)
    if all(both):
        return None
    wanted = np.inf if both[0] else -np.inf if both[1] else np.nan
    dtype = site.look(node.input[0]).dtype
    equal = helper.make_node("Equal", [node.input[0], site.name("infinity")], node.output, node.name)
    return [site.constant("infinity", np.array(wanted, dtype)), equal]


def _same_pads(attributes: dict[str, Any], extents: Sequence[int], kernel: Sequence[int]) -> list[int]:
    """Return the padding that auto_pad stands for: all that is before, then all that is behind."""
    ones = [1] * len(extents)
    strides, dilations = attributes.get("strides") or ones, attributes.get("dilations") or ones
    before, behind = [], []
    for extent, size, stride, dilation in zip(extents, kernel, strides, dilations, strict=True):
        window = (size - 1) * dilation + 1
        total = max((-(-extent // stride) - 1) * stride + window - extent, 0)
        total = 0 if attributes["auto_pad"] == "VALID" else total
        less, more = total // 2, total - total // 2
        before.append(more if attributes["auto_pad"] == "SAME_LOWER" else less)
        behind.append(less if attributes["auto_pad"] == "SAME_LOWER" else more)
    return before + behind


def _pool(site: NodeSite) -> list[Any] | None:
    """MaxPool(auto_pad, ceil_mode) -> MaxPool(pads): more padding behind gives the last window its place."""
    attributes = site.attributes
    extents = site.look(site.node.input[0]).shape[2:]
    kernel, count = attributes["kernel_shape"], len(extents)
    automatic = attributes.get("auto_pad", "NOTSET") != "NOTSET"
    pads = _same_pads(attributes, extents, kernel) if automatic else list(attributes.get("pads") or [0] * 2 * count)
    rounds_up = bool(attributes.get("ceil_mode")) and not automatic
    for axis in range(count) if rounds_up else ():
        stride = (attributes.get("strides") or [1] * count)[axis]
        window = (kernel[axis] - 1) * (attributes.get("dilations") or [1] * count)[axis] + 1
        padded = extents[axis] + pads[axis] + pads[count + axis]
        outputs = -(-(padded - window) // stride) + 1
        if (outputs - 1) * stride >= extents[axis] + pads[axis]:  # the last window would begin in the padding behind
            outputs -= 1
        more = (outputs - 1) * stride + window - padded
        if more > 0 and attributes.get("count_include_pad"):
            return None  # what ceil_mode adds is not counted, and padding is
        pads[count + axis] += more
    if not automatic and not rounds_up:
        return None
    if min(pads) < 0:
        return None
    return [_changed(site, auto_pad=None, ceil_mode=None, pads=pads)]


def _slice(site: NodeSite) -> list[Any] | None:
    """Slice(x, axes=[1], starts=[0], ends=[2]) -> Slice(x, [0], [2], [1])."""
    attributes = site.attributes
    if "starts" not in attributes:
        return None
    axes = attributes.get("axes") or list(range(len(attributes["starts"])))
    values = {"starts": attributes["starts"], "ends": attributes["ends"], "axes": axes}
    constants = [site.constant(name, np.array(value, "int64")) for name, value in values.items()]
    inputs = [site.node.input[0], *(constant.output[0] for constant in constants)]
    return [*constants, helper.make_node("Slice", inputs, site.node.output, site.node.name)]


def _softmax(site: NodeSite) -> list[Any] | None:
    """Softmax(x: (n, c, h, w), axis=1) -> reshape to (n, c*h*w), Softmax of the last axis, reshape back."""
    if site.opset >= 13:
        return None
    shape, node = site.look(site.node.input[0]).shape, site.node
    axis = int(site.attributes.get("axis", 1)) % max(len(shape), 1)
    if math.prod(shape[axis + 1 :]) == 1:
        return [_changed(site, axis=axis)]
    flat, back = [math.prod(shape[:axis]), math.prod(shape[axis:])], list(shape)
    return [
        site.constant("flat", np.array(flat, "int64")),
        helper.make_node("Reshape", [node.input[0], site.name("flat")], [site.name("x")]),
        helper.make_node(node.op_type, [site.name("x")], [site.name("y")], node.name, axis=1),
        site.constant("back", np.array(back, "int64")),
        helper.make_node("Reshape", [site.name("y"), site.name("back")], node.output),
    ]


def _broadcast(site: NodeSite) -> list[Any] | None:
    """Add(x: (1, 8, 4, 4), b: (8,), axis=1, broadcast=1) -> b as (8, 1, 1)."""
    attributes, node = site.attributes, site.node
    if site.opset >= 7 or not attributes.get("broadcast") or "axis" not in attributes:
        return None
    left, right = site.look(node.input[0]).shape, site.look(node.input[1]).shape
    shape = [*right, *(1,) * (len(left) - int(attributes["axis"]) % len(left) - len(right))]
    return [
        site.constant("shape", np.array(shape, "int64")),
        helper.make_node("Reshape", [node.input[1], site.name("shape")], [site.name("b")]),
        helper.make_node(node.op_type, [node.input[0], site.name("b")], node.output, node.name),
    ]


def _slopes(site: NodeSite) -> list[Any] | None:
    """PRelu(x: (1, 8, 4, 4), slope: (8,)) of before opset 7 -> slope as (8, 1, 1)."""
    node, extents = site.node, site.look(site.node.input[0]).shape[2:]
    if site.opset >= 7 or len(site.look(node.input[1]).shape) != 1 or site.look(node.input[1]).shape[0] == 1:
        return None
    return [
        site.constant("shape", np.array([-1, *(1 for _ in extents)], "int64")),
        helper.make_node("Reshape", [node.input[1], site.name("shape")], [site.name("slopes")]),
        helper.make_node("PRelu", [node.input[0], site.name("slopes")], node.output, node.name),
    ]


def _celu(site: NodeSite) -> list[Any]:
    """Celu(x) -> max(x, 0) + alpha * (exp(min(x, 0) / alpha) - 1)."""
    node, dtype = site.node, site.look(site.node.input[0]).dtype
    names = {name: site.name(name) for name in ("alpha", "zero", "one", "below", "part", "exp", "less", "scaled")}
    values = {"alpha": float(site.attributes.get("alpha", 1.0)), "zero": 0.0, "one": 1.0}
    return [
        *(site.constant(name, np.array(value, dtype)) for name, value in values.items()),
        helper.make_node("Min", [node.input[0], names["zero"]], [names["below"]]),
        helper.make_node("Div", [names["below"], names["alpha"]], [names["part"]]),
        helper.make_node("Exp", [names["part"]], [names["exp"]]),
        helper.make_node("Sub", [names["exp"], names["one"]], [names["less"]]),
        helper.make_node("Mul", [names["less"], names["alpha"]], [names["scaled"]]),
        helper.make_node("Max", [node.input[0], names["zero"]], [site.name("above")]),
        helper.make_node("Add", [site.name("above"), names["scaled"]], node.output, node.name),
    ]


def _swish(site: NodeSite) -> list[Any] | None:
    """Swish(x) -> x * sigmoid(alpha * x)."""
    node, alpha = site.node, float(site.attributes.get("alpha", 1.0))
    dtype = site.look(node.input[0]).dtype
    return [
        site.constant("alpha", np.array(alpha, dtype)),
        helper.make_node("Mul", [node.input[0], site.name("alpha")], [site.name("x")]),
        helper.make_node("Sigmoid", [site.name("x")], [site.name("y")]),
        helper.make_node("Mul", [node.input[0], site.name("y")], node.output, node.name),
    ]


def _refuse_deviations(site: NodeSite) -> list[Any] | None:
    """What TVM would compute otherwise, and without a word, is refused."""
    kind, attributes = site.node.op_type, site.attributes
    if kind == "SpaceToDepth" and attributes.get("mode", "DCR") != "DCR":
        raise ValueError("TVM has it in the mode DCR alone; export the model with that")
    if kind == "RoiAlign" and attributes.get("mode", "avg") != "avg":
        raise ValueError("TVM has it with the mode avg alone")
    if kind == "SequenceInsert" and (site.value(2) or 0) < 0:
        raise ValueError("TVM counts its position otherwise from the back")
    if kind == "TopK" and site.look(site.node.input[0]).dtype == "uint64":
        raise ValueError("TVM sorts no uint64")
    if kind == "BitShift" and site.look(site.node.input[0]).dtype.startswith("int"):
        raise ValueError("TVM shifts signed numbers otherwise, where they are shifted by all their bits")
    if kind == "Mod" and not attributes.get("fmod") and site.look(site.node.input[0]).dtype.startswith("float"):
        raise ValueError("TVM has no remainder of floats with the sign of the divisor; export the model with fmod=1")
    if kind == "LayerNormalization" and any(site.node.output[1:]):
        raise ValueError("TVM does not give out its mean and deviation; export the model for inference")
    if kind == "RMSNormalization" and int(attributes.get("axis", -1)) % len(site.look(site.node.input[0]).shape) == 0:
        raise ValueError("TVM has it with a first axis that is not normalised alone; export the model with one")
    return None


REWRITES: dict[str, Rewrite] = {
    "Conv": _padded_convolution,
    "ConvTranspose": _transposed,
    "IsInf": _infinite,
    "AveragePool": _pool,
    "MaxPool": _pool,
    "LpPool": _pool,
    "Slice": _slice,
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _softmax),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow", "Less", "Greater", "Equal", "And", "Or", "Xor"), _broadcast),
    **dict.fromkeys(("BitShift", "LayerNormalization", "Mod", "RMSNormalization", "RoiAlign"), _refuse_deviations),
    **dict.fromkeys(("SequenceInsert", "SpaceToDepth", "TopK"), _refuse_deviations),
    "PRelu": _slopes,
    "Celu": _celu,
    "Swish": _swish,
}
