"""Simplify a Relax module before it is laid out: constants folded, batch norms part of the convolutions before them.

    conv2d(x, w) -> batch_norm(gamma, beta, mean, variance)[0] -> relu
    ->  conv2d(x, w * s) -> add(b: (1, C, 1, 1)) -> relu,    s = gamma / sqrt(variance + epsilon), b = beta - mean * s

TVM's FoldConstant compiles each operator that it folds, which takes seconds; numpy computes the same at once. TVM's
DecomposeOpsForInference leaves four operators of a norm whose convolution is not before it; here it is one multiply
and one add. Next: `scale_folding.py`, which moves factors into weights, and `pad_channels.py`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvm_pipeline_tvm.numpy_rules import ints
from tvm_pipeline_tvm.relax.dataflow import Constant, constant_of
from tvm_pipeline_tvm.relax.numpy_table import MOST_BYTES, TABLE, ResultType, constant, static_shape
from tvm_pipeline_tvm.relax.rule_rewriting import Rewriter, Rule, rewritten
from tvm_pipeline_tvm.relax.scale_folding import SCALES


def simplified(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module that computes the same with fewer operators.

    What changes of a plain function (one block of dataflow):

        an operator of constants                    its value
        batch_norm(x)[0]                            x * s + b
        dropout(x)[0]                               x
        x - c, x / c, c + x                         x + -c, x * (1 / c), x + c      of floats
        (x + c) + d, (x * c) * d, (x + c) * d       x + (c + d), x * (c * d), x * d + c * d
        conv(x, w) * s, matmul(x, w) * s            conv(x, w * s), matmul(x, w * s)
        conv(x * s, w)                              conv(x, w * s); of x + b also, where nothing is padded
        a constant (C, 1, 1) beside 4-D             (1, C, 1, 1)
        conv(pad(x, 0), w)                          conv(x, w) that pads rows and columns itself
        adaptive_avg_pool2d(x, 1)                   mean(x) of rows and columns
        power(x, 2)                                 multiply(x, x)
        reshape, permute_dims that change nothing   none

    Sums and products of constants are rounded once more than those of the graph, as by every compiler that folds.
    """
    return rewritten(mod, _rules)


def _rules(name: str) -> tuple[Rule, ...]:
    if name == "tuple":
        return (_field,)
    return (_folded, *_RULES.get(name.removeprefix("relax."), ()))


def _folded(rewriter: Rewriter, call: Any) -> Any:
    """An operator of constants becomes its value."""
    rule = TABLE.get(call.op.name.removeprefix("relax.")) if isinstance(call.op, tvm.ir.Op) else None
    if rule is None or not all(map(_is_constant, call.args)):
        return None
    call = rewriter.typed(call)
    types = list(call.ty.fields) if isinstance(call.ty, relax.TupleType) else [call.ty]
    outs = [ResultType.of(ty) for ty in types]
    if None in outs or sum(math.prod(out.shape) for out in outs if out) * 8 > MOST_BYTES:
        return None
    with np.errstate(all="ignore"):
        value = rule(call, outs[0], *map(_value, call.args))
    values = value if isinstance(value, tuple) else (value,)
    if len(values) != len(outs) or any(
        array is None or (array.shape, str(array.dtype)) != out for array, out in zip(values, outs, strict=True)
    ):
        return None
    constants = [constant(array) for array in values if array is not None]
    return relax.Tuple(constants) if isinstance(call.ty, relax.TupleType) else constants[0]


def _is_constant(expr: Any) -> bool:
    if isinstance(expr, relax.Tuple):
        return all(map(_is_constant, expr.fields))
    return isinstance(expr, (Constant, relax.ShapeExpr, tvm.tirx.IntImm, tvm.tirx.FloatImm))


def _value(expr: Any) -> Any:
    if isinstance(expr, relax.Tuple):
        return [_value(field) for field in expr.fields]
    return constant_of(expr)


def _field(rewriter: Rewriter, item: Any) -> Any:
    """A field of what is no tuple at run time: of a norm for inference, of a dropout, of values that are known."""
    if isinstance(item.tuple_value, relax.Tuple):
        return item.tuple_value.fields[item.index]
    source = rewriter.source(item.tuple_value)
    if isinstance(source, relax.Tuple):
        return source.fields[item.index]
    call = rewriter.made_by(item.tuple_value, "relax.nn.dropout", "relax.nn.batch_norm")
    if call is None:
        return None
    if call.op.name == "relax.nn.dropout":
        return call.args[0] if item.index == 0 else None
    return _norm(rewriter, call) if item.index == 0 else None


def _norm(rewriter: Rewriter, call: Any) -> Any:
    """A batch norm of known statistics becomes one multiply and one add."""
    attrs, values = call.attrs, [constant_of(argument) for argument in call.args[1:]]
    shape = static_shape(call.args[0].ty)
    if attrs.training or shape is None or any(value is None for value in values):
        return None
    gamma, beta, mean, variance = (value.astype("float64") for value in values if value is not None)
    scale = (gamma if attrs.scale else 1.0) / np.sqrt(variance + float(attrs.epsilon))
    shift = (beta if attrs.center else 0.0) - mean * scale
    axis, dtype = int(attrs.axis) % len(shape), str(call.args[0].ty.dtype)
    extents = [-1 if index == axis else 1 for index in range(len(shape))]
    factor, summand = (constant(value.astype(dtype).reshape(extents)) for value in (scale, shift))
    return relax.op.add(rewriter.emit(relax.op.multiply(call.args[0], factor)), summand)


def _constant_behind(rewriter: Rewriter, call: Any) -> Any:
    """add(c, x) -> add(x, c), so that rules need to look at one side."""
    left, right = call.args
    if isinstance(left, Constant) and not isinstance(right, Constant):
        return relax.Call(call.op, [right, left], call.attrs)
    return None


def _difference(rewriter: Rewriter, call: Any) -> Any:
    value = constant_of(call.args[1])
    if value is None or value.dtype.kind != "f":
        return None
    return relax.op.add(call.args[0], constant(-value))


def _quotient(rewriter: Rewriter, call: Any) -> Any:
    value = constant_of(call.args[1])
    if value is None or value.dtype.kind != "f":
        return None
    with np.errstate(all="ignore"):
        inverse = (1 / value.astype("float64")).astype(value.dtype)
    return relax.op.multiply(call.args[0], constant(inverse)) if np.all(np.isfinite(inverse)) else None


def _full_rank(rewriter: Rewriter, call: Any) -> Any:
    """(C, 1, 1) -> (1, C, 1, 1) beside an image."""
    shapes = [static_shape(argument.ty) for argument in call.args]
    if any(shape is None for shape in shapes) or max(len(shape or ()) for shape in shapes) != 4:
        return None
    arguments = []
    for argument, shape in zip(call.args, shapes, strict=True):
        value = constant_of(argument) if shape and len(shape) < 4 else None
        arguments.append(argument if value is None else constant(value.reshape((1,) * (4 - value.ndim) + value.shape)))
    if all(new.same_as(old) for new, old in zip(arguments, call.args, strict=True)):
        return None
    return relax.Call(call.op, arguments, call.attrs)


def _power(rewriter: Rewriter, call: Any) -> Any:
    value = constant_of(call.args[1])
    if value is None or value.size != 1 or value.item() != 2 or static_shape(call.args[0].ty) is None:
        return None
    return relax.op.multiply(call.args[0], call.args[0]) if value.ndim <= len(call.args[0].ty.shape) else None


def _own_padding(rewriter: Rewriter, call: Any) -> Any:
    """A convolution of an image that zeros were put around, as TensorFlow's "same" with a stride."""
    pad, attrs = rewriter.made_by(call.args[0], "relax.nn.pad"), call.attrs
    if pad is None or str(attrs.data_layout) != "NCHW" or str(pad.attrs.pad_mode) != "constant":
        return None
    widths = ints(pad.attrs.pad_width)  # before and behind each axis
    if any(widths[:4]) or float(pad.attrs.pad_value) or len(attrs.padding) != 4:
        return None
    padding = [own + around for own, around in zip(ints(attrs.padding), [*widths[4::2], *widths[5::2]], strict=True)]
    return relax.op.nn.conv2d(
        pad.args[0],
        call.args[1],
        ints(attrs.strides),
        padding,
        ints(attrs.dilation),
        int(attrs.groups),
        kernel_layout=str(attrs.kernel_layout),
        out_dtype=attrs.out_dtype,
    )


def _global_average(rewriter: Rewriter, call: Any) -> Any:
    attrs = call.attrs
    layout = str(attrs.layout)
    if layout not in ("NCHW", "NHWC") or attrs.output_size is None or set(ints(attrs.output_size)) != {1}:
        return None
    if attrs.out_layout and str(attrs.out_layout) != layout:
        return None
    return relax.op.mean(call.args[0], [layout.index("H"), layout.index("W")], keepdims=True)


def _same_shape(rewriter: Rewriter, call: Any) -> Any:
    """A reshape to the shape that is there already, or behind another."""
    source = call.args[0]
    shape, target = static_shape(source.ty), static_shape(rewriter.typed(call).ty)
    if shape is not None and shape == target:
        return source
    before = rewriter.made_by(source, "relax.reshape")
    if before is None or target is None:
        return None
    return relax.op.reshape(before.args[0], target)


def _known_shape(rewriter: Rewriter, call: Any) -> Any:
    shape = static_shape(call.args[0].ty)
    return None if shape is None else relax.ShapeExpr(shape)


def _known_extents(rewriter: Rewriter, call: Any) -> Any:
    shape = rewriter.source(call.args[0]) or call.args[0]
    if not isinstance(shape, relax.ShapeExpr) or not _is_constant(shape):
        return None
    return constant(np.array(ints(shape.values), "int64"))


def _same_axes(rewriter: Rewriter, call: Any) -> Any:
    axes = call.attrs.axes
    return call.args[0] if axes is not None and ints(axes) == list(range(len(axes))) else None


_RULES: dict[str, tuple[Rule, ...]] = {
    "add": (_constant_behind, _full_rank, *SCALES["add"]),
    "multiply": (_constant_behind, _full_rank, *SCALES["multiply"]),
    "subtract": (_difference, _full_rank),
    "divide": (_quotient, _full_rank),
    "maximum": (_constant_behind, _full_rank),
    "minimum": (_constant_behind, _full_rank),
    "power": (_power,),
    "nn.adaptive_avg_pool2d": (_global_average,),
    "reshape": (_same_shape,),
    "permute_dims": (_same_axes,),
    "shape_of": (_known_shape,),
    "shape_to_tensor": (_known_extents,),
    **{name: rules for name, rules in SCALES.items() if name not in ("add", "multiply")},
    "nn.conv2d": (_own_padding, *SCALES["nn.conv2d"]),
}
