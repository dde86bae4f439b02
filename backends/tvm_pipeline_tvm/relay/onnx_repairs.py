"""What TVM 0.19's importer of ONNX gets wrong without a word, as it gets it right, or refused. Next: `importer.py`.

Reduce...       axes as an input: it takes the first alone
Gelu, LpPool    the approximation by tanh; negative numbers
Constant, Cast  value_ints and the like; saturate
DFT             an axis as an input
Resize          scales that lead to no whole number of rows, since it computes other scales from the sizes
RoiAlign, MaxUnpool, SequenceInsert, pools that round up: what `_refused` and `_pool` say
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper
from tvm import relay
from tvm.relay.frontend.common import infer_shape

from tvm_pipeline_tvm.numpy_rules import Array

Attributes = dict[str, Any]


def repaired(kind: str, inputs: Any, attributes: Attributes, opset: int) -> tuple[str, Any, Attributes, int]:
    """Return a node as the importer converts it rightly: its operator, inputs and attributes, and the opset.

    Raises:
        ValueError: the importer would give other numbers than ONNX asks for.
    """
    repair = _REPAIRS.get(kind)
    if repair:
        kind, opset = repair(kind, inputs, attributes, opset)
    return kind, inputs, attributes, opset


def _value(inputs: Any, index: int) -> Array | None:
    """Return an input that is a constant; None where there is none.

    Raises:
        ValueError: it depends on data.
    """
    if inputs[index] is None:
        return None
    if not isinstance(inputs[index], relay.Constant):
        raise ValueError("TVM needs constants for all its inputs but the first")
    value: Array = inputs[index].data.numpy()
    return value


def _reduce(kind: str, inputs: Any, attributes: Attributes, opset: int) -> tuple[str, int]:
    """ReduceSum(x, axes) -> ReduceSum(x, axes=...) of opset 11."""
    axes = _value(inputs, 1)
    del inputs[1:]
    keeps_all = attributes.pop("noop_with_empty_axes", 0)
    if axes is not None and axes.size:
        attributes["axes"] = axes.tolist()
    elif keeps_all and "axes" not in attributes:
        if kind not in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"):
            raise ValueError("TVM does not have it over no axis")
        attributes.pop("keepdims", None)
        return "Identity", opset
    return kind, min(opset, 11)


def _gelu(kind: str, inputs: Any, attributes: Attributes, opset: int) -> tuple[str, int]:
    """Gelu(approximate="tanh") -> FastGelu of onnxruntime."""
    return ("FastGelu" if attributes.pop("approximate", b"none") == b"tanh" else kind), opset


def _constant(kind: str, inputs: Any, attributes: Attributes, opset: int) -> tuple[str, int]:
    """Constant(value_ints=[1, 2]) -> Constant(value=tensor)."""
    types = {"value_int": "int64", "value_ints": "int64", "value_float": "float32", "value_floats": "float32"}
    for name in attributes.keys() & types:
        attributes["value"] = numpy_helper.from_array(np.array(attributes.pop(name), types[name]))
    return kind, opset


def _cast(kind: str, inputs: Any, attributes: Attributes, opset: int) -> tuple[str, int]:
    """Cast(saturate=1) -> Cast: it is of types that TVM has not."""
    attributes.pop("saturate", None)
    if attributes["to"] > TensorProto.BFLOAT16:
        raise ValueError(f"TVM has no {TensorProto.DataType.Name(attributes['to'])}")
    return kind, opset


def _transform(kind: str, inputs: Any, attributes: Attributes, opset: int) -> tuple[str, int]:
    """DFT(x, length, axis) -> DFT(x, length, axis=...)."""
    if opset >= 20:
        axis = _value(inputs, 2)
        attributes["axis"] = -2 if axis is None else int(axis)
        del inputs[2:]
    return kind, opset


def _pool(kind: str, inputs: Any, attributes: Attributes, opset: int) -> tuple[str, int]:
    extents = infer_shape(inputs[0])[2:]
    rounds_up = attributes.get("ceil_mode") and attributes.get("auto_pad", b"NOTSET") == b"NOTSET"
    ones, zeros = [1] * len(extents), [0] * 2 * len(extents)
    for axis, extent in enumerate(extents if rounds_up else ()):
        stride, dilation = (attributes.get(name, ones)[axis] for name in ("strides", "dilations"))
        before, behind = attributes.get("pads", zeros)[axis :: len(extents)]
        window = (attributes["kernel_shape"][axis] - 1) * dilation + 1
        last = -(-(extent + before + behind - window) // stride) * stride  # where the last window begins
        if last >= extent + before:
            raise ValueError("TVM keeps a window that begins in the padding (ceil_mode)")
        if last + window > extent + before + behind and (kind == "LpPool" or attributes.get("count_include_pad")):
            raise ValueError("TVM counts what the last window has beyond the padding (ceil_mode)")
    if "LpPool" in kind:
        inputs[0] = relay.abs(inputs[0])
    return kind, opset


def _sample(kind: str, inputs: Any, attributes: Attributes, opset: int) -> tuple[str, int]:
    """GridSample(mode="linear") -> GridSample(mode="bilinear"), as it was called before opset 20."""
    mode = attributes.get("mode", b"bilinear")
    attributes["mode"] = {b"linear": b"bilinear", b"cubic": b"bicubic"}.get(mode, mode)
    return kind, opset


def _resize(kind: str, inputs: Any, attributes: Attributes, opset: int) -> tuple[str, int]:
    shape = infer_shape(inputs[0])
    scales = inputs[1 if opset < 11 else 2]
    policy = attributes.get("keep_aspect_ratio_policy", b"stretch")
    if attributes.get("antialias") or policy != b"stretch" or len(attributes.get("axes", shape)) != len(shape):
        raise ValueError("TVM has no antialias, keeps no ratio of sides, and resizes no axes by number")
    if attributes.get("nearest_mode") == b"round_prefer_ceil" or b"symmetric" in _mode(attributes):
        raise ValueError("TVM rounds and places the rows otherwise (round_prefer_ceil, half_pixel_symmetric)")
    if isinstance(scales, relay.Constant) and scales.data.numpy().size == len(shape):
        rows = np.array(shape) * scales.data.numpy().astype("float64")
        if np.abs(rows - np.round(rows)).max() > 1e-3:
            raise ValueError("TVM resizes by scales that lead to whole numbers of rows alone")
    return kind, opset


def _mode(attributes: Attributes) -> bytes:
    mode: bytes = attributes.get("coordinate_transformation_mode", b"half_pixel")
    return mode.replace(b"asymmetric", b"")


def _refused(kind: str, inputs: Any, attributes: Attributes, opset: int) -> tuple[str, int]:
    usual = b"half_pixel" if opset >= 16 else b"output_half_pixel"
    if kind == "MaxUnpool" and inputs[2] is not None:
        raise ValueError("TVM reads its indices in another way where it has an output shape")
    if kind == "SequenceInsert" and len(inputs) > 2 and (_value(inputs, 2) or 0) < 0:
        raise ValueError("TVM counts its position otherwise from the back")
    if kind == "RoiAlign" and attributes.get("mode", b"avg") != b"avg":
        raise ValueError("TVM has it with the mode avg alone")
    if kind == "RoiAlign" and attributes.get("coordinate_transformation_mode", usual) == b"half_pixel":
        raise ValueError("TVM has it with the coordinates output_half_pixel alone")
    return kind, opset


_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
_REPAIRS: dict[str, Callable[[str, Any, Attributes, int], tuple[str, int]]] = {
    **{f"Reduce{name}": _reduce for name in _REDUCTIONS},
    **dict.fromkeys(("AveragePool", "MaxPool", "LpPool", "GlobalLpPool"), _pool),
    **dict.fromkeys(("MaxUnpool", "RoiAlign", "SequenceInsert"), _refused),
    "Cast": _cast,
    "Constant": _constant,
    "DFT": _transform,
    "Gelu": _gelu,
    "GridSample": _sample,
    "Resize": _resize,
}
