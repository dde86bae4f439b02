"""Nodes of ONNX that TVM 0.27 imports wrongly or not at all, as nodes that it imports rightly.

Each function takes a node and what is known of its inputs, and gives the nodes that stand for it, or none where TVM
imports it as it is. New tensors have names below the node's first output. What TVM gets wrong:

    Conv, pools     auto_pad becomes a kernel of its own, and wrong where the window is smaller than the stride
    ConvTranspose   output_shape, which it ignores
    IsInf           of one sign
    MaxPool, ...    ceil_mode where the last window would begin in the padding
    Resize          of opset 10, with empty scales, with `axes`, and not in rows and columns alone
    Upsample        scales that are an input, and which pixel is nearest
    Slice           attributes, before opset 10
    Softmax, ...    all axes behind the first are one, before opset 13
    Add, Mul, ...   `broadcast` and `axis`, before opset 7

Next: `onnx_importer.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from onnx import helper, numpy_helper

from tvm_pipeline.tvm.relax.numpy_table import Array


class Known(NamedTuple):
    """What is known of a tensor: its shape, its dtype, and its value where it is a constant."""

    shape: tuple[int, ...]
    dtype: str
    value: Array | None


class Site(NamedTuple):
    """A node that is imported, and what surrounds it.

    Attributes:
        node: the node.
        opset: the version of the operators.
        look: gives what is known of a tensor by its name.
    """

    node: Any
    opset: int
    look: Callable[[str], Known]

    @property
    def attributes(self) -> dict[str, Any]:
        return attributes_of(self.node)

    def name(self, suffix: str) -> str:
        """Return the name of a tensor that only the new nodes have."""
        return f"{self.node.output[0]}/{suffix}"

    def constant(self, suffix: str, value: Any) -> Any:
        """Return a node that gives a constant its name."""
        tensor = numpy_helper.from_array(np.asarray(value))
        return helper.make_node("Constant", [], [self.name(suffix)], value=tensor)

    def value(self, index: int) -> Array | None:
        """Return an input that is a constant; None where it is left out, or is none."""
        name = self.input(index)
        return self.look(name).value if name else None

    def input(self, index: int) -> str:
        """Return the name of an input; empty where it is left out."""
        return str(self.node.input[index]) if index < len(self.node.input) else ""


def attributes_of(node: Any) -> dict[str, Any]:
    """Return the attributes of a node by name, text as str."""
    found = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in found.items()}


Rewrite = Callable[[Site], "list[Any] | None"]


def _changed(site: Site, **attributes: Any) -> Any:
    """Return the node with other attributes; None takes one out."""
    merged = {name: value for name, value in (site.attributes | attributes).items() if value is not None}
    return helper.make_node(site.node.op_type, site.node.input, site.node.output, site.node.name, **merged)


def _padded_convolution(site: Site) -> list[Any] | None:
    """Conv(auto_pad=SAME_UPPER) -> Conv(pads)."""
    attributes = site.attributes
    if attributes.get("auto_pad", "NOTSET") == "NOTSET":
        return None
    extents = site.look(site.node.input[0]).shape[2:]
    kernel = attributes.get("kernel_shape") or site.look(site.node.input[1]).shape[2:]
    return [_changed(site, auto_pad=None, pads=_same_pads(attributes, extents, kernel))]


def _transposed(site: Site) -> list[Any] | None:
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


def _infinite(site: Site) -> list[Any] | None:
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


def _pool(site: Site) -> list[Any] | None:
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


def _resize(site: Site) -> list[Any] | None:
    """Resize(x, roi, scales) -> Resize(x, "", "", sizes), as opset 18 has it."""
    node, attributes = site.node, site.attributes
    if attributes.get("antialias"):
        raise ValueError("TVM has no antialias; export the model without it")
    shape = site.look(node.input[0]).shape
    axes = attributes.get("axes") or list(range(len(shape)))
    if node.op_type == "Upsample" or site.opset < 11:
        attributes |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        scales = np.array(attributes.pop("scales")) if "scales" in attributes else site.value(1)
        sizes = None
        roi = ""
    else:
        scales, sizes, roi = site.value(2), site.value(3), site.input(1)
        if attributes.get("coordinate_transformation_mode") != "tf_crop_and_resize":
            roi = ""
    target = list(shape)
    if scales is not None and scales.size:
        for axis, scale in zip(axes, scales.tolist(), strict=True):
            target[axis] = math.floor(shape[axis] * np.float32(scale))
    elif sizes is not None and sizes.size:
        wanted = dict(zip(axes, sizes.tolist(), strict=True))
        policy = attributes.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            choose = min if policy == "not_larger" else max
            scale = choose(size / shape[axis] for axis, size in wanted.items())
            wanted = {axis: math.floor(scale * shape[axis] + 0.5) for axis in wanted}
        for axis, size in wanted.items():
            target[axis] = size
    else:
        raise ValueError("its scales and sizes are no constants; export the model with fixed shapes")
    if tuple(target) == shape and not roi:
        return [helper.make_node("Identity", [node.input[0]], node.output)]
    if tuple(target[:2]) != shape[:2]:
        raise ValueError(f"TVM resizes rows and columns alone, not {list(shape)} to {target}")
    for name in ("axes", "keep_aspect_ratio_policy", "antialias", "width_scale", "height_scale"):
        attributes.pop(name, None)
    inputs = [node.input[0], roi, "", site.name("sizes")]
    made = helper.make_node("Resize", inputs, node.output, node.name, **attributes)
    return [site.constant("sizes", np.array(target, "int64")), made]


def _slice(site: Site) -> list[Any] | None:
    """Slice(x, axes=[1], starts=[0], ends=[2]) -> Slice(x, [0], [2], [1])."""
    attributes = site.attributes
    if "starts" not in attributes:
        return None
    axes = attributes.get("axes") or list(range(len(attributes["starts"])))
    values = {"starts": attributes["starts"], "ends": attributes["ends"], "axes": axes}
    constants = [site.constant(name, np.array(value, "int64")) for name, value in values.items()]
    inputs = [site.node.input[0], *(constant.output[0] for constant in constants)]
    return [*constants, helper.make_node("Slice", inputs, site.node.output, site.node.name)]


def _softmax(site: Site) -> list[Any] | None:
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


def _broadcast(site: Site) -> list[Any] | None:
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


def _celu(site: Site) -> list[Any] | None:
    """Celu(x) -> max(0, x) + min(0, alpha * (exp(x / alpha) - 1))."""
    node, alpha = site.node, float(site.attributes.get("alpha", 1.0))
    dtype = site.look(node.input[0]).dtype
    return [
        site.constant("alpha", np.array(alpha, dtype)),
        helper.make_node("Div", [node.input[0], site.name("alpha")], [site.name("x")]),
        helper.make_node("Elu", [site.name("x")], [site.name("y")], alpha=1.0),
        helper.make_node("Mul", [site.name("y"), site.name("alpha")], node.output, node.name),
    ]


def _swish(site: Site) -> list[Any] | None:
    """Swish(x) -> x * sigmoid(alpha * x)."""
    node, alpha = site.node, float(site.attributes.get("alpha", 1.0))
    dtype = site.look(node.input[0]).dtype
    return [
        site.constant("alpha", np.array(alpha, dtype)),
        helper.make_node("Mul", [node.input[0], site.name("alpha")], [site.name("x")]),
        helper.make_node("Sigmoid", [site.name("x")], [site.name("y")]),
        helper.make_node("Mul", [node.input[0], site.name("y")], node.output, node.name),
    ]


REWRITES: dict[str, Rewrite] = {
    "Conv": _padded_convolution,
    "ConvTranspose": _transposed,
    "IsInf": _infinite,
    "AveragePool": _pool,
    "MaxPool": _pool,
    "LpPool": _pool,
    "Resize": _resize,
    "Upsample": _resize,
    "Slice": _slice,
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _softmax),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow", "Less", "Greater", "Equal", "And", "Or", "Xor"), _broadcast),
    "Celu": _celu,
    "Swish": _swish,
}
