"""What numpy computes of Relax operators: the table that `simplify.py` folds constants by. Next: `simplify.py`.

name -> function of (the call, the type of its result, the values of its arguments), giving the value, a tuple of
values, or None where numpy's result may be another than TVM's. An argument that is no tensor is None in the values:
a rule reads it from the call. The type gives the result's shape, so operators that move no data are all one reshape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tvm
from tvm import relax, tirx

from tvm_pipeline_tvm.numpy_rules import COMMON, NUMPY_DTYPES, Array, Rule, Value, arithmetic, floating, ints

MOST_BYTES = 1 << 28  # of a value that is made of a smaller one, such as a weight of zeros


class ResultType(NamedTuple):
    """The type of a tensor: static shape and a dtype that numpy has."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, ty: Any) -> ResultType | None:
        """Return the type of a tensor; None where its shape is open or numpy has no such dtype.

        Examples:
            >>> ResultType.of(relax.TensorType((2, 3), "float32"))
            ResultType(shape=(2, 3), dtype='float32')
        """
        shape = static_shape(ty)
        if shape is None or ty.dtype is None or str(ty.dtype) not in NUMPY_DTYPES:
            return None
        return cls(shape, str(ty.dtype))


def static_shape(ty: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor's type; None where it is no tensor, or an extent is not a number."""
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    extents = ty.shape.values
    return tuple(int(e) for e in extents) if all(isinstance(e, tirx.IntImm) for e in extents) else None


def _whole(function: Callable[..., Any]) -> Rule:
    """Return a rule for a division of integers."""

    def rule(call: Any, out: ResultType, a: Array, b: Array) -> Value:
        return np.asarray(function(a, b)) if np.all(b) or out.dtype.startswith("float") else None

    return rule


def _reduced(function: Callable[..., Any]) -> Rule:
    def rule(call: Any, out: ResultType, x: Array) -> Value:
        axes = None if call.attrs.axis is None else tuple(ints(call.attrs.axis))
        return np.reshape(function(x, axis=axes), out.shape).astype(out.dtype) if x.size else None

    return rule


def _reshape(call: Any, out: ResultType, x: Array, *shape: Any) -> Value:
    return x.reshape(out.shape)


def _transpose(call: Any, out: ResultType, x: Array) -> Value:
    return np.transpose(x, None if call.attrs.axes is None else ints(call.attrs.axes))


def _clip(call: Any, out: ResultType, x: Array, *bounds: Any) -> Value:
    low, high = (bound.value for bound in call.args[1:])
    return np.asarray(np.clip(x, x.dtype.type(low), x.dtype.type(high)))


def _take(call: Any, out: ResultType, x: Array, indices: Array | None) -> Value:
    if indices is None:  # one number, which is no tensor
        return None
    axis = None if call.attrs.axis is None else int(call.attrs.axis)
    extent = x.size if axis is None else x.shape[axis]
    if indices.size and (indices.min() < -extent or indices.max() >= extent):
        return None
    return np.asarray(np.take(x, indices, axis=axis))


def _strided_slice(call: Any, out: ResultType, x: Array, *bounds: Any) -> Value:
    fields = [[extent.value for extent in bound.fields] for bound in call.args[1:]]
    axes, begins, ends = fields[:3]
    strides = fields[3] if len(fields) > 3 else [1] * len(axes)
    window = [slice(None)] * x.ndim
    for axis, begin, end, stride in zip(axes, begins, ends, strides, strict=True):
        if stride < 0:
            return None
        window[axis] = slice(begin, end, stride)
    return x[tuple(window)]


def _pad(call: Any, out: ResultType, x: Array) -> Value:
    if str(call.attrs.pad_mode) != "constant":
        return None
    widths = np.reshape(ints(call.attrs.pad_width), (x.ndim, 2))
    return np.pad(x, widths.tolist(), constant_values=float(call.attrs.pad_value))


def _split(call: Any, out: ResultType, x: Array) -> Value:
    places = call.attrs.indices_or_sections
    axis = int(call.attrs.axis)
    if isinstance(places, (int, tirx.IntImm)):
        size = -(-x.shape[axis] // int(places))  # as TVM splits: the last piece may be smaller
        return tuple(np.split(x, range(size, x.shape[axis], size), axis))
    return tuple(np.split(x, ints(places), axis))


def _full(call: Any, out: ResultType, shape: Any, fill: Array) -> Value:
    return None if fill is None else np.full(out.shape, fill, out.dtype)


def _arange(call: Any, out: ResultType, *bounds: Any) -> Value:
    start, stop, step = (bound.value for bound in call.args)
    return np.arange(start, stop, step).astype(out.dtype) if "int" in out.dtype and step else None


def _repeat(call: Any, out: ResultType, x: Array) -> Value:
    return np.repeat(x, int(call.attrs.repeats), None if call.attrs.axis is None else int(call.attrs.axis))


def _quantize(call: Any, out: ResultType, x: Array, scale: Array, zero: Array) -> Value:
    if "int" not in out.dtype:
        return None
    scale, zero = _along(x, scale, call.attrs.axis), _along(x, zero, call.attrs.axis)
    limits = np.iinfo(out.dtype)
    return np.clip(np.rint(x / scale) + zero.astype("float32"), limits.min, limits.max).astype(out.dtype)


def _dequantize(call: Any, out: ResultType, x: Array, scale: Array, zero: Array) -> Value:
    scale, zero = _along(x, scale, call.attrs.axis), _along(x, zero, call.attrs.axis)
    return ((x.astype("int32") - zero.astype("int32")) * scale.astype("float32")).astype(out.dtype)


def _along(x: Array, parameter: Array, axis: int) -> Array:
    """Return a parameter of quantisation so that it is broadcast along its axis."""
    if parameter.size == 1:
        return parameter.reshape(())
    return parameter.reshape([-1 if index == int(axis) % x.ndim else 1 for index in range(x.ndim)])


def constant(array: Array) -> Any:
    """Return an array as a constant of its own type; `relax.const` would make int32 of int64, float32 of float64."""
    return relax.const(tvm.runtime.tensor(np.ascontiguousarray(array).reshape(array.shape)))


TABLE: dict[str, Rule] = {
    **COMMON,
    "divide": floating(np.divide),
    "floor_divide": _whole(np.floor_divide),
    "floor_mod": _whole(np.mod),
    "mod": _whole(np.fmod),
    "sign": arithmetic(np.sign),
    "square": arithmetic(np.square),
    "log": floating(np.log),
    "tanh": floating(np.tanh),
    "sin": floating(np.sin),
    "cos": floating(np.cos),
    "sigmoid": floating(lambda x: 1 / (1 + np.exp(-x))),
    "round": floating(np.rint),
    "trunc": floating(np.trunc),
    "clip": _clip,
    "astype": lambda call, out, x: x.astype(out.dtype),
    "sum": _reduced(np.sum),
    "mean": _reduced(np.mean),
    "prod": _reduced(np.prod),
    "max": _reduced(np.max),
    "min": _reduced(np.min),
    "reshape": _reshape,
    "flatten": _reshape,
    "expand_dims": _reshape,
    "squeeze": _reshape,
    "nn.batch_flatten": _reshape,
    "broadcast_to": lambda call, out, x, shape: np.broadcast_to(x, out.shape),
    "permute_dims": _transpose,
    "concat": lambda call, out, fields: np.concatenate(fields, int(call.attrs.axis or 0)),
    "stack": lambda call, out, fields: np.stack(fields, int(call.attrs.axis or 0)),
    "split": _split,
    "strided_slice": _strided_slice,
    "take": _take,
    "tile": lambda call, out, x: np.tile(x, ints(call.attrs.repeats)),
    "repeat": _repeat,
    "nn.pad": _pad,
    "full": _full,
    "full_like": lambda call, out, like, fill: np.full(out.shape, fill, out.dtype),
    "zeros": lambda call, out, shape: np.zeros(out.shape, out.dtype),
    "ones": lambda call, out, shape: np.ones(out.shape, out.dtype),
    "arange": _arange,
    "quantize": _quantize,
    "dequantize": _dequantize,
}
