"""What numpy computes of Relay's operators: the table that `fold.py` folds constants by. Next: `fold.py`.

name -> function of (the call's attributes, the type of its result, the values of its arguments), giving the value or
None.  The type gives the result's shape, so operators that move no data are all one reshape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tvm
from tvm import relay

from tvm_pipeline_tvm.numpy_rules import COMMON, NUMPY_DTYPES, Array, Rule, arithmetic, floating, ints


class ResultType(NamedTuple):
    """The type of a call's result: static shape and a dtype numpy has."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, ty: Any) -> ResultType | None:
        if not isinstance(ty, relay.TensorType) or ty.dtype not in NUMPY_DTYPES:
            return None
        if not all(isinstance(dim, tvm.tir.IntImm) for dim in ty.shape):
            return None
        return cls(tuple(int(dim) for dim in ty.shape), ty.dtype)


# The first three are folded by the type of the argument, constant or not; the last wraps constants once devices are
# planned, and Relay sees through it.
FOLDED_BY_TYPE = {"shape_of", "vm.shape_of", "ndarray_size", "on_device"}


def _divides(floating: Callable[..., Any] | None, whole: Callable[..., Any]) -> Rule:
    """Return a rule for a division: `floating` for floats (None leaves them to Relay), `whole` for integers."""

    def rule(attrs: Any, out: ResultType, a: Array, b: Array) -> Array | None:
        if out.dtype.startswith("float"):
            return None if floating is None else np.asarray(floating(a, b))
        if not np.all(b) or out.dtype == "bool":
            return None
        return np.asarray(whole(a, b))

    return rule


def _truncated(a: Array, b: Array) -> Array:
    """Divide integers towards zero, as C does: the remainder has the sign of `a`."""
    return (a - np.fmod(a, b)) // b


def _reduced(function: Callable[..., Any], *, floats: bool) -> Rule:
    """Return a rule for a reduction; without `floats` these are Relay's, whose order of summing rounds otherwise."""

    def rule(attrs: Any, out: ResultType, x: Array) -> Array | None:
        if attrs.exclude or (out.dtype.startswith("float") and not floats) or not x.size:
            return None
        axes = None if attrs.axis is None else tuple(ints(attrs.axis))
        return np.reshape(function(x, axis=axes), out.shape).astype(out.dtype)

    return rule


def _arange(attrs: Any, out: ResultType, start: Array, stop: Array, step: Array) -> Array | None:
    if not out.dtype.startswith("int") or not step:
        return None
    return np.arange(int(start), int(stop), int(step)).astype(out.dtype)


def _gather(attrs: Any, out: ResultType, x: Array, indices: Array) -> Array | None:
    axis = int(attrs.axis)
    if indices.size and (indices.min() < 0 or indices.max() >= x.shape[axis]):
        return None
    return np.take_along_axis(x, indices, axis)


def _reshape(attrs: Any, out: ResultType, x: Array, *like: Array) -> Array:
    return x.reshape(out.shape)


def _transpose(attrs: Any, out: ResultType, x: Array) -> Array:
    return np.transpose(x, None if attrs.axes is None else ints(attrs.axes))


def _round(x: Array) -> Array:
    whole = np.trunc(x)  # halves away from zero, as LLVM's round; np.round takes them to even
    return np.where(np.abs(x - whole) >= 0.5, whole + np.sign(x), whole)


def _clip(attrs: Any, out: ResultType, x: Array) -> Array | None:
    low, high = attrs.a_min, attrs.a_max
    if not out.dtype.startswith("float"):
        low, high = max(low, np.iinfo(out.dtype).min), min(high, np.iinfo(out.dtype).max)
    return np.asarray(np.clip(x, x.dtype.type(low), x.dtype.type(high)))


def _take(attrs: Any, out: ResultType, x: Array, indices: Array) -> Array | None:
    if attrs.batch_dims or attrs.mode not in ("clip", "wrap"):
        return None
    axis = None if attrs.axis is None else int(attrs.axis)
    return np.asarray(np.take(x, indices, axis=axis, mode=str(attrs.mode)))  # type: ignore[call-overload]


def _strided_slice(attrs: Any, out: ResultType, x: Array) -> Array | None:
    begin, end, strides = map(ints, (attrs.begin, attrs.end, attrs.strides or []))
    axes = range(len(begin)) if attrs.axes is None else ints(attrs.axes)
    if attrs.slice_mode != "end" or len(begin) != len(end) or any(stride < 0 for stride in strides):
        return None
    strides += [1] * (len(begin) - len(strides))
    window = [slice(None)] * x.ndim
    for axis, *bounds in zip(axes, begin, end, strides, strict=True):
        window[axis] = slice(*bounds)
    return x[tuple(window)]


def parts(attrs: Any, x: Array) -> list[Array]:
    """Return what `split` gives: equal parts, or those between indices."""
    at = attrs.indices_or_sections
    return np.split(x, int(at) if isinstance(at, (int, tvm.tir.IntImm)) else ints(at), axis=int(attrs.axis))


def _pad(attrs: Any, out: ResultType, x: Array, fill: Array) -> Array | None:
    if attrs.pad_mode != "constant":
        return None
    return np.pad(x, [ints(width) for width in attrs.pad_width], constant_values=fill.item())


def _layout_transform(attrs: Any, out: ResultType, x: Array) -> Array | None:
    """Blocked layouts: OIHW8i16o splits axis I as (I, 8i) and O as (O, 16o), pieces stored in that order."""
    source, target = _axes_of(attrs.src_layout), _axes_of(attrs.dst_layout)
    logical = sorted({axis for axis, _ in source})
    if logical != sorted({axis for axis, _ in target}):
        return None
    # To the plain tensor: bring the pieces of each axis together, outermost first, and merge them.
    grouped = _grouped(source, logical)
    dims = [math.prod(x.shape[i] for i in grouped if source[i][0] == axis) for axis in logical]
    plain = x.transpose(grouped).reshape(dims)
    # And from it: split each axis, then write the pieces in the target's order.
    sizes: list[int] = []
    for axis, dim in zip(logical, dims, strict=True):
        factors = [factor for name, factor in target if name == axis]
        block = math.prod(factors[1:])
        if factors[0] or dim % block:  # a layout without its outer axis, or one that needs padding
            return None
        sizes += [dim // block, *factors[1:]]
    return np.transpose(plain.reshape(sizes), np.argsort(_grouped(target, logical)))


def _axes_of(layout: str) -> list[tuple[str, int]]:
    """OI4i -> [("O", 0), ("I", 0), ("I", 4)]; 0 marks the outer piece, whose size the tensor decides."""
    return [(name.upper(), int(factor or 0)) for factor, name in re.findall(r"(\d*)([A-Za-z])", str(layout))]


def _grouped(layout: list[tuple[str, int]], axes: list[str]) -> list[int]:
    """The positions in `layout` of the pieces of the first axis, then of the second, and so on."""
    return [i for axis in axes for i, (name, _) in enumerate(layout) if name == axis]


TABLE: dict[str, Rule] = {
    **COMMON,
    "left_shift": arithmetic(np.left_shift),
    "right_shift": arithmetic(np.right_shift),
    "divide": _divides(np.divide, _truncated),
    "trunc_divide": _divides(None, _truncated),
    "floor_divide": _divides(None, np.floor_divide),
    "mod": _divides(None, np.fmod),
    "trunc_mod": _divides(None, np.fmod),
    "floor_mod": _divides(None, np.mod),
    "copy": lambda attrs, out, x: x,
    "arange": _arange,
    "gather": _gather,
    "round": floating(_round),
    "clip": _clip,
    "cast": lambda attrs, out, x: x.astype(out.dtype),
    "cast_like": lambda attrs, out, x, like: x.astype(out.dtype),
    "sum": _reduced(np.sum, floats=False),
    "prod": _reduced(np.prod, floats=False),
    "max": _reduced(np.max, floats=True),
    "min": _reduced(np.min, floats=True),
    "all": _reduced(np.all, floats=False),
    "any": _reduced(np.any, floats=False),
    "reshape": _reshape,
    "reshape_like": _reshape,
    "expand_dims": _reshape,
    "squeeze": _reshape,
    "broadcast_to": lambda attrs, out, x: np.broadcast_to(x, out.shape),
    "full": lambda attrs, out, x: np.full(out.shape, x, out.dtype),
    "full_like": lambda attrs, out, like, x: np.full(out.shape, x, out.dtype),
    "transpose": _transpose,
    "layout_transform": _layout_transform,
    "stack": lambda attrs, out, fields: np.stack(fields, axis=int(attrs.axis)),
    "concatenate": lambda attrs, out, fields: np.concatenate(fields, axis=int(attrs.axis)),
    "strided_slice": _strided_slice,
    "nn.pad": _pad,
    "take": _take,
    "tile": lambda attrs, out, x: np.tile(x, ints(attrs.reps)),
    "repeat": lambda attrs, out, x: np.repeat(x, int(attrs.repeats), axis=int(attrs.axis)),
}
