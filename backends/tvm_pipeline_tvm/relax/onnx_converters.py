"""Operators of ONNX that TVM 0.27 imports as functions of TIR, as operators of Relax, which passes know.

    Clip(x, 0, 6)        call_tir(maximum) -> call_tir(minimum)   here: clip(x, 0, 6)
    Pad(x, constant)     call_tir(pad)                            here: nn.pad
    Tile(x, [1, 2])      call_tir(tile)                           here: concat
    Gather(x, -1)        shape_of, where, take without a check    here: take
    Max(x, y)            max(stack(broadcast_to(x), ..))          here: maximum(x, y)

Each function takes the inputs as expressions, and returns an expression, or None where TVM's own converter shall do.
Next: `onnx_nodes.py`, which rewrites nodes before that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from onnx import helper
from tvm import relax

from tvm_pipeline_tvm.relax.dataflow import constant_of
from tvm_pipeline_tvm.relax.numpy_table import constant, static_shape
from tvm_pipeline_tvm.relax.onnx_site import NodeSite


def _clip(site: NodeSite, inputs: Sequence[Any]) -> Any:
    x, dtype = inputs[0], str(inputs[0].ty.dtype)
    bounds = [site.attributes.get("min"), site.attributes.get("max")] if site.opset < 11 else [None, None]
    for position in (1, 2):
        if len(inputs) > position and inputs[position] is not None:
            value = constant_of(inputs[position])
            bounds[position - 1] = inputs[position] if value is None else value.item()
    low, high = (None if isinstance(bound, float) and np.isnan(bound) else bound for bound in bounds)
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and dtype.startswith("float") and low <= high:
        return relax.op.clip(x, float(low), float(high))
    # Bounds in the order of ONNX: where they cross, the upper one wins.
    for bound, choose in ((low, relax.op.maximum), (high, relax.op.minimum)):
        if bound is not None:
            x = choose(x, relax.const(bound, dtype) if isinstance(bound, (int, float)) else bound)
    return x


def _pad(site: NodeSite, inputs: Sequence[Any]) -> Any:
    attributes, rank = site.attributes, len(inputs[0].ty.shape)
    pads, fill = attributes.get("pads") or attributes.get("paddings"), attributes.get("value", 0.0)
    axes = list(range(rank))
    if site.opset >= 11:
        given = [None if each is None else constant_of(each) for each in inputs[1:]]
        if any(each is not None and value is None for each, value in zip(inputs[1:], given, strict=True)):
            return None
        given += [None] * 3
        if given[0] is None:
            return None
        pads = given[0].tolist()
        fill = 0.0 if given[1] is None else given[1].item()
        axes = axes if given[2] is None else [int(axis) % rank for axis in given[2]]
    if str(attributes.get("mode", "constant")) != "constant" or pads is None or not np.isfinite(fill):
        return None
    widths = np.zeros((rank, 2), int)
    widths[axes] = np.reshape(pads, (2, -1)).T
    if widths.min() < 0 or not str(inputs[0].ty.dtype).startswith("float"):
        return None
    return relax.op.nn.pad(inputs[0], widths.ravel().tolist(), "constant", float(fill))


def _tile(site: NodeSite, inputs: Sequence[Any]) -> Any:
    """A concatenation for each axis: LLVM 22 makes wrong code for AVX-512 of the remainders that TVM's `tile` takes."""
    data, repeats = inputs[0], constant_of(inputs[1])
    if repeats is None:
        return None
    for axis, count in enumerate(repeats.tolist()):
        data = relax.op.concat([data] * count, axis) if count > 1 else data
    return data


def _cast(site: NodeSite, inputs: Sequence[Any]) -> Any:
    """A cast to the type that is there already is none."""
    wanted = helper.tensor_dtype_to_np_dtype(site.attributes["to"])
    return inputs[0] if str(inputs[0].ty.dtype) == str(wanted) else None


def _gather(site: NodeSite, inputs: Sequence[Any]) -> Any:
    """Indices from the end are counted from the front; what lies outside is no memory fault."""
    data, indices = inputs
    shape, axis = static_shape(data.ty), int(site.attributes.get("axis", 0))
    if shape is None:
        return None
    axis, value = axis % len(shape), constant_of(indices)
    extent = shape[axis]
    if value is None:
        dtype = str(indices.ty.dtype)
        counted = relax.op.add(indices, relax.const(extent, dtype))
        indices = relax.op.where(relax.op.less(indices, relax.const(0, dtype)), counted, indices)
    elif value.size and (value.min() < -extent or value.max() >= extent):
        raise ValueError(f"it takes {value.min()} to {value.max()} of {extent} along axis {axis}")
    else:
        indices = constant(np.where(value < 0, value + extent, value).astype(value.dtype))
    return relax.op.take(data, indices, axis, mode="clip")


def _power(site: NodeSite, inputs: Sequence[Any]) -> Any:
    """Both sides in the type of the base, and of whole numbers by way of float64."""
    base, exponent = inputs
    dtype = str(base.ty.dtype)
    inner = dtype if dtype.startswith("float") else "float64"
    if inner == dtype == str(exponent.ty.dtype):
        return None
    both = [each if str(each.ty.dtype) == inner else relax.op.astype(each, inner) for each in inputs]
    result = relax.op.power(*both)
    return result if inner == dtype else relax.op.astype(relax.op.round(result), dtype)


def _pairwise(choose: Callable[[Any, Any], Any]) -> Callable[[NodeSite, Sequence[Any]], Any]:
    """Return a converter that joins the inputs one after the other; where all are constants, TVM's own folds them."""

    def converter(site: NodeSite, inputs: Sequence[Any]) -> Any:
        known = [each for each in inputs if constant_of(each) is None]
        return reduce(choose, inputs) if known and len(inputs) > 1 else None

    return converter


CONVERTERS: dict[str, Callable[[NodeSite, Sequence[Any]], Any]] = {
    "Clip": _clip,
    "Pad": _pad,
    "Tile": _tile,
    "Cast": _cast,
    "Gather": _gather,
    "Pow": _power,
    "Max": _pairwise(relax.op.maximum),
    "Min": _pairwise(relax.op.minimum),
    "Sum": _pairwise(relax.op.add),
}
