"""Factors and summands that are known move into the weights of convolutions and products of matrices beside them.

Each is a rule of `simplify.py`: of one call whose arguments are written already. A factor moves towards the
convolution before it, past a summand; one in front of a convolution moves into it. Next: `rule_rewriting.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tvm
from tvm import relax

from tvm_pipeline_tvm.numpy_rules import Array, ints
from tvm_pipeline_tvm.relax.dataflow import constant_of
from tvm_pipeline_tvm.relax.numpy_table import constant, static_shape
from tvm_pipeline_tvm.relax.rule_rewriting import Rewriter, Rule

_PLAIN_LAYOUTS = {  # data, weights: with the outputs first, or of a transposed convolution with the inputs first
    "relax.nn.conv1d": ("NCW", "OIW"),
    "relax.nn.conv2d": ("NCHW", "OIHW"),
    "relax.nn.conv3d": ("NCDHW", "OIDHW"),
    "relax.nn.conv1d_transpose": ("NCW", "IOW"),
    "relax.nn.conv2d_transpose": ("NCHW", "IOHW"),
    "relax.nn.conv3d_transpose": ("NCDHW", "IODHW"),
}


class _Convolution(NamedTuple):
    """A convolution of plain layout and known weights."""

    call: Any
    weights: Array
    groups: int
    transposed: bool

    @property
    def outputs(self) -> int:
        return self.weights.shape[1] * self.groups if self.transposed else self.weights.shape[0]

    @property
    def inputs(self) -> int:
        return self.weights.shape[0] if self.transposed else self.weights.shape[1] * self.groups

    def grouped(self) -> Array:
        """Return the weights as (groups, outputs of a group, inputs of a group, kernel)."""
        if self.transposed:
            return np.swapaxes(self.weights.reshape(self.groups, -1, *self.weights.shape[1:]), 1, 2)
        return self.weights.reshape(self.groups, -1, *self.weights.shape[1:])

    def with_weights(self, data: Any, grouped: Array) -> Any:
        """Return the convolution of other data, and of weights as `grouped` has them."""
        if self.transposed:
            grouped = np.swapaxes(grouped, 1, 2)
        weights = grouped.reshape(self.weights.shape).astype(self.weights.dtype)
        return relax.Call(self.call.op, [data, constant(weights)], self.call.attrs)


def _convolution(call: Any) -> _Convolution | None:
    layouts = (
        _PLAIN_LAYOUTS.get(call.op.name) if isinstance(call, tvm.ir.Call) and isinstance(call.op, tvm.ir.Op) else None
    )
    weights = constant_of(call.args[1]) if layouts else None
    if (
        layouts is None
        or weights is None
        or weights.dtype.kind != "f"
        or call.attrs.out_dtype not in (None, "", str(weights.dtype))
    ):
        return None
    attrs = call.attrs
    if (str(attrs.data_layout), str(attrs.kernel_layout)) != layouts or str(attrs.out_layout) not in ("", layouts[0]):
        return None
    return _Convolution(call, weights, int(attrs.groups), call.op.name.endswith("_transpose"))


def _per_channel(value: Array, rank: int, channels: int) -> Array | None:
    """Return a constant as one number a channel, axis 1 of `rank`; None where it is more than that."""
    if value.size == 1:
        return np.full(channels, value.item(), value.dtype) if value.ndim <= rank else None
    shape = (1,) * (rank - value.ndim) + value.shape
    return value.reshape(-1) if shape == (1, channels, *(1,) * (rank - 2)) else None


def _merged(rewriter: Rewriter, call: Any) -> Any:
    """(x + c) + d -> x + (c + d), and the same of products; (x + c) * d -> x * d + c * d."""
    data, value = call.args[0], constant_of(call.args[1])
    inner = rewriter.made_by(data, "relax.add", "relax.multiply")
    if value is None or value.dtype.kind != "f" or inner is None or not rewriter.is_read_once(data):
        return None
    first = constant_of(inner.args[1])
    shape = static_shape(inner.args[0].ty)
    if first is None or shape is None or shape != static_shape(data.ty):
        return None
    if np.broadcast_shapes(shape, value.shape) != shape:
        return None
    if np.broadcast_shapes(first.shape, value.shape) not in (first.shape, value.shape):
        return None
    kinds = inner.op.name, call.op.name
    if kinds == ("relax.add", "relax.add"):
        return _finite(lambda both: relax.op.add(inner.args[0], both), first + value)
    if kinds == ("relax.multiply", "relax.multiply"):
        return _finite(lambda both: relax.op.multiply(inner.args[0], both), first * value)
    if kinds == ("relax.add", "relax.multiply"):
        return _finite(
            lambda both: relax.op.add(rewriter.emit(relax.op.multiply(inner.args[0], call.args[1])), both),
            first * value,
        )
    return None


def _finite(make: Any, value: Array) -> Any:
    return make(constant(value)) if np.all(np.isfinite(value)) else None


def _into_weights(rewriter: Rewriter, call: Any) -> Any:
    """conv(x, w) * s -> conv(x, w * s), where nothing else reads the convolution."""
    data, value = call.args[0], constant_of(call.args[1])
    if value is None or not rewriter.is_read_once(data):
        return None
    source = rewriter.source(data)
    found = _convolution(source)
    if found is not None:
        scale = _per_channel(value, found.weights.ndim, found.outputs)
        if scale is None:
            return None
        grouped = found.grouped()
        scale = scale.reshape(found.groups, -1, *(1,) * (grouped.ndim - 2))
        return found.with_weights(source.args[0], grouped * scale)
    product = rewriter.made_by(data, "relax.matmul")
    weights = constant_of(product.args[1]) if product is not None else None
    if weights is None or weights.ndim != 2 or weights.dtype.kind != "f":
        return None
    if value.size != 1 and value.shape != (*(1,) * (value.ndim - 1), weights.shape[1]):
        return None
    if value.ndim > len(data.ty.shape):
        return None
    scaled = weights * value.reshape(-1)
    return relax.Call(product.op, [product.args[0], constant(scaled.astype(weights.dtype))], product.attrs)


def _from_before(rewriter: Rewriter, call: Any) -> Any:
    """conv(x * s, w) -> conv(x, w * s); conv(x + b, w) -> conv(x, w) + sum(w * b), where nothing is padded."""
    data = call.args[0]
    inner = rewriter.made_by(data, "relax.multiply", "relax.add")
    if inner is None or not rewriter.is_read_once(data):
        return None
    found, value = _convolution(call), constant_of(inner.args[1])
    if found is None or value is None or static_shape(inner.args[0].ty) != static_shape(data.ty):
        return None
    numbers = _per_channel(value, found.weights.ndim, found.inputs)
    if numbers is None:
        return None
    grouped = found.grouped()
    each = numbers.reshape(found.groups, 1, -1, *(1,) * (grouped.ndim - 3))
    if inner.op.name == "relax.multiply":
        return found.with_weights(inner.args[0], grouped * each)
    if found.transposed or any(ints(call.attrs.padding)):
        return None
    summand = (grouped.astype("float64") * each).sum(axis=tuple(range(2, grouped.ndim)))
    shape = (1, -1, *(1,) * (found.weights.ndim - 2))
    bias = summand.reshape(shape).astype(found.weights.dtype)
    return relax.op.add(rewriter.emit(relax.Call(call.op, [inner.args[0], call.args[1]], call.attrs)), constant(bias))


SCALES: dict[str, tuple[Rule, ...]] = {
    "add": (_merged,),
    "multiply": (_merged, _into_weights),
    **{name.removeprefix("relax."): (_from_before,) for name in _PLAIN_LAYOUTS},
}
