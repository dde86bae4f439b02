"""Quantised convolutions and dense layers in integers: importers give them in float32, between dequantize and quantize.

    quantize(relu(conv2d(dequantize(x: uint8, sx, zx), w * sw) + b), sy, zy)
    ->  sums = conv2d(pad(x, zx), w: int8): int32  +  (b / (sx * sw) - zx * sum(w))
        clip(round(sums * (sx * sw / sy)) + zy)

The sums are exact, and one multiplication in float32 requantises, as XNNPACK does it: values are those of the float
layer, but for roundings between two steps. Every target gets these operators, so that libraries of several targets
align; `tvm_pipeline_kernels` has fast kernels of them.

What multiplies bytes takes activations without a sign. So activations of int8 are stored 128 higher, as uint8, and
what only moves them moves them so:

    max_pool2d(x: int8)  ->  int8(max_pool2d(uint8(x + 128)) - 128)

Between two layers nothing of the two changes is left.

What stands between layers and only moves floats moves bytes instead, and a concatenation requantises those of its parts
that have another scale or zero. All bits stay, since each number is rounded once either way:

    quantize(max_pool2d(dequantize(x, s, z)), s, z)                   ->  max_pool2d(x)
    quantize(concat(dequantize(x, s, z), dequantize(y, t, v)), s, z)  ->  concat(x, quantize(dequantize(y, t, v), s, z))

The weights were folded to float32 when the model was simplified. They are integers times a scale of each channel, and
`integers_of` finds both again: each product of an int8 and its scale is one float32, so nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tvm
from tvm import relax

from tvm_pipeline_tvm.numpy_rules import ints
from tvm_pipeline_tvm.relax.dataflow import constant_of, fields, shape_of
from tvm_pipeline_tvm.relax.numpy_table import constant
from tvm_pipeline_tvm.relax.rule_rewriting import Rewriter, Rule, rewritten

MOST = 128  # the largest int8, without its sign
LANES = 4  # channels: layers of other numbers of them stay in float32
NEAR = 1e-4  # of an integer: float32 has rounded the product of an int8 and a scale once
BIAS_STEPS = 1 << 20  # of a channel without weights
SCALES = 1e-35, 1e35  # between them a byte that is dequantised and quantised is the same byte
_RANGE = {"int8": (-128, 127), "uint8": (0, 255)}

Floats = npt.NDArray[np.float32]


class _Scale(NamedTuple):
    """What quantize and dequantize multiply by, and add: numbers for the whole tensor."""

    scale: float
    zero: int


class _Layer(NamedTuple):
    """A float layer between two roundings.

    Attributes:
        data: the integers that it reads.
        weights: OIHW.
        bias: of each output channel.
        low, high: what the activation keeps, in float32.
    """

    data: Any
    given: _Scale
    weights: Floats
    bias: Floats
    low: float
    high: float
    options: dict[str, Any]


def integer_layers(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a simplified module whose quantised layers are computed in integers."""
    return rewritten(mod, _rules)


def _rules(name: str) -> tuple[Rule, ...]:
    return _RULES.get(name.removeprefix("relax."), ())


def _needless(rewriter: Rewriter, call: Any) -> Any:
    """A clip of bytes that keeps all of them."""
    data, low, high = call.args
    least, most = _RANGE.get(str(data.ty.dtype), (0, -1))
    return data if low.value <= least <= most <= high.value else None


def _quantised(rewriter: Rewriter, call: Any) -> Any:
    """A layer that ends in quantize."""
    made, dtype = _scale(call), str(call.attrs.out_dtype)
    layer = _layer(rewriter, call.args[0]) if made and dtype in _RANGE else None
    found = integers_of(layer.weights) if layer else None
    if made is None or layer is None or found is None:
        return _without_floats(rewriter, call, made) if made and dtype in _RANGE else None
    weights, scales = found
    emit = rewriter.emit
    data = _stored(rewriter, layer.data)
    zero, up = layer.given.zero + _shift_of(layer.data), MOST if dtype == "int8" else 0
    top, left, bottom, right = layer.options.pop("padding")
    if top or left or bottom or right:
        around = [0, 0, 0, 0, top, bottom, left, right]
        data = emit(relax.op.nn.pad(data, around, pad_value=float(zero)))
    empty = ~weights.any(axis=(1, 2, 3))
    least = np.abs(layer.bias[empty]) / (layer.given.scale * BIAS_STEPS)
    scales[empty] = np.where(least > 0, least, 1.0).astype("float32")
    steps = np.float32(layer.given.scale) * scales
    offset = np.rint(layer.bias / steps.astype("float64")) - zero * weights.sum(axis=(1, 2, 3), dtype="int64")
    reach = np.abs(weights.astype("int64")).sum(axis=(1, 2, 3)) * 2 * MOST  # of the sums
    if (np.abs(offset) + reach).max() >= 1 << 31:
        return None
    sums = emit(relax.op.nn.conv2d(data, constant(weights), out_dtype="int32", **layer.options))
    sums = emit(relax.op.add(sums, constant(offset.astype("int32").reshape(1, -1, 1, 1))))
    factor = (steps / np.float32(made.scale)).astype("float32").reshape(1, -1, 1, 1)
    value = emit(relax.op.multiply(emit(relax.op.astype(sums, "float32")), constant(factor)))
    value = emit(relax.op.add(emit(relax.op.round(value)), relax.const(float(made.zero + up), "float32")))
    low, high = _RANGE[dtype]
    low = max(low, _step(layer.low, made)) if layer.low > -np.inf else low
    high = min(high, _step(layer.high, made)) if layer.high < np.inf else high
    result = relax.op.astype(emit(relax.op.clip(value, low + up, high + up)), "uint8")
    shape = tuple(map(int, rewriter.typed(call).ty.shape))
    if len(shape) != 4:
        result = relax.op.reshape(emit(result), shape)
    return _signed(rewriter, emit(result)) if up else result


# ------------------------------------------------------------------------------------------ bytes without a sign


def _shift_of(data: Any) -> int:
    """Return what is added to bytes when they are stored."""
    return MOST if str(data.ty.dtype) == "int8" else 0


def _signed(rewriter: Rewriter, stored: Any) -> Any:
    """Return int8 of bytes that are stored 128 higher."""
    wide = rewriter.emit(relax.op.astype(stored, "int32"))
    return relax.op.astype(rewriter.emit(relax.op.add(wide, relax.const(-MOST, "int32"))), "int8")


def _stored(rewriter: Rewriter, data: Any) -> Any:
    """Return bytes as they are stored."""
    if str(data.ty.dtype) == "uint8":
        return data
    known = _known(rewriter, data)
    if known is not None:
        return known
    wide = rewriter.emit(relax.op.astype(data, "int32"))
    return rewriter.emit(relax.op.astype(rewriter.emit(relax.op.add(wide, relax.const(MOST, "int32"))), "uint8"))


def _without_floats(rewriter: Rewriter, call: Any, made: _Scale) -> Any:
    """A quantize of floats that are only moved: the bytes moved. Another to int8: one to bytes stored 128 higher."""
    dtype = str(call.attrs.out_dtype)
    if dtype == "uint8":
        return _moved_bytes(rewriter, call.args[0], made)
    data, scale, _ = call.args
    zero = relax.const(made.zero + MOST, "int32")
    return _signed(rewriter, rewriter.emit(relax.op.quantize(data, scale, zero, int(call.attrs.axis), "uint8")))


def _known(rewriter: Rewriter, data: Any) -> Any:
    """Return what `_signed` was given; None of other tensors."""
    last = rewriter.made_by(data, "relax.astype")
    addition = rewriter.made_by(last.args[0], "relax.add") if last is not None and data.ty.dtype == "int8" else None
    if addition is None:
        return None
    first, number = rewriter.made_by(addition.args[0], "relax.astype"), constant_of(addition.args[1])
    if first is None or number is None or number.size != 1 or int(number.reshape(())) != -MOST:
        return None
    return first.args[0] if str(first.args[0].ty.dtype) == "uint8" else None


def _moved(rewriter: Rewriter, call: Any) -> Any:
    """What moves bytes: they stay as they are stored."""
    stored = _known(rewriter, call.args[0])
    if stored is None or _computes(call):
        return None
    if call.op.name == "relax.nn.pad":
        if str(call.attrs.pad_mode) != "constant":
            return None
        made = relax.op.nn.pad(stored, ints(call.attrs.pad_width), pad_value=float(call.attrs.pad_value) + MOST)
    else:
        made = relax.Call(call.op, [stored, *call.args[1:]], call.attrs)
    return _signed(rewriter, rewriter.emit(made))


def _field(rewriter: Rewriter, item: Any) -> Any:
    """A part of a split of bytes that are stored so."""
    found = _sliced(rewriter, item)
    stored = _known(rewriter, found[0]) if found else None
    return _signed(rewriter, rewriter.emit(found[1](stored))) if found and stored is not None else None


def _joined(rewriter: Rewriter, call: Any) -> Any:
    """A concatenation of bytes that are all stored so."""
    parts = call.args[0].fields if isinstance(call.args[0], relax.Tuple) else ()
    stored = [_known(rewriter, part) for part in parts]
    if not stored or any(each is None for each in stored):
        return None
    return _signed(rewriter, rewriter.emit(relax.op.concat(stored, int(call.attrs.axis))))


def _float(rewriter: Rewriter, call: Any) -> Any:
    """A dequantize of bytes that are stored so."""
    stored, given = _known(rewriter, call.args[0]), _scale(call)
    if stored is None or given is None:
        return None
    zero = relax.const(given.zero + MOST, "int32")
    return relax.op.dequantize(stored, call.args[1], zero, int(call.attrs.axis), str(call.attrs.out_dtype))


# ------------------------------------------------------------------------------------------ floats that are only moved

_MOVES = ("expand_dims", "image.resize2d", "nn.max_pool2d", "permute_dims", "reshape", "squeeze", "strided_slice")


def _computes(call: Any) -> bool:
    """Return whether one of these operators makes new numbers."""
    return call.op.name == "relax.image.resize2d" and str(call.attrs.method) != "nearest_neighbor"


def _moved_bytes(rewriter: Rewriter, value: Any, made: _Scale) -> Any:
    """Return what quantize makes of a float tensor, as bytes are stored; None where these are not only moved."""
    concat = rewriter.made_by(value, "relax.concat")
    if concat is not None and isinstance(concat.args[0], relax.Tuple):
        parts = [_part(rewriter, part, made) for part in concat.args[0].fields]
        return None if any(part is None for part in parts) else relax.op.concat(parts, concat.attrs.axis)
    call = rewriter.made_by(value, "relax.dequantize")
    if call is not None:
        given, integers = _scale(call), call.args[0]
        if given is None or str(integers.ty.dtype) not in _RANGE or str(value.ty.dtype) != "float32":
            return None
        return _stored(rewriter, integers) if _Scale(given.scale, given.zero + _shift_of(integers)) == made else None
    move = _move(rewriter, value)
    integers = _moved_bytes(rewriter, move[0], made) if move is not None else None
    return move[1](rewriter.emit(integers)) if move is not None and integers is not None else None


def _part(rewriter: Rewriter, part: Any, made: _Scale) -> Any:
    """Return a part of a concatenation, as bytes are stored, requantised if need be; None of what was never bytes."""
    integers = _moved_bytes(rewriter, part, made)
    if integers is None:
        if _dequantized(rewriter, part) is None:
            return None
        scale, zero = relax.const(made.scale, "float32"), relax.const(made.zero, "int32")
        integers = relax.op.quantize(part, scale, zero, 0, "uint8")
    return rewriter.emit(integers)


def _move(rewriter: Rewriter, value: Any) -> tuple[Any, Callable[[Any], Any]] | None:
    """Return what a tensor is moved from, and the same move of another tensor; None of a tensor that is computed."""
    source = rewriter.source(value)
    if isinstance(source, relax.TupleGetItem):
        return _sliced(rewriter, source)
    call = rewriter.made_by(value, *(f"relax.{name}" for name in _MOVES))
    if call is None or _computes(call):
        return None
    return call.args[0], lambda other: relax.Call(call.op, [other, *call.args[1:]], call.attrs)


def _sliced(rewriter: Rewriter, item: Any) -> tuple[Any, Callable[[Any], Any]] | None:
    """Return what a field of a split is of, and the slice that has the same numbers of another tensor."""
    split = rewriter.made_by(item.tuple_value, "relax.split")
    if split is None:
        return None
    axis, field = int(split.attrs.axis), item.index
    extents = [shape_of(relax.Var("part", type_))[axis] for type_ in fields(split.ty)[: field + 1]]
    begin, end = sum(extents[:field]), sum(extents)
    return split.args[0], lambda other: relax.op.strided_slice(other, [axis], [begin], [end])


_RULES: dict[str, tuple[Rule, ...]] = {
    "quantize": (_quantised,),
    "dequantize": (_float,),
    "clip": (_needless,),
    "concat": (_joined,),
    "tuple": (_field,),
    **dict.fromkeys(("nn.pad", *_MOVES), (_moved,)),
}

# ------------------------------------------------------------------------------------------ what a layer is


def _step(value: float, made: _Scale) -> int:
    return round(value / made.scale) + made.zero


def _scale(call: Any) -> _Scale | None:
    """Return the numbers of quantize or dequantize; None of scales by channel, or beyond SCALES."""
    scale, zero = map(constant_of, call.args[1:3])
    if scale is None or zero is None or scale.size != 1 or zero.size != 1:
        return None
    if not SCALES[0] < scale.reshape(()) < SCALES[1]:
        return None
    return _Scale(float(scale.reshape(())), int(zero.reshape(())))


def _layer(rewriter: Rewriter, value: Any) -> _Layer | None:
    """Return the layer that gives a float tensor which nothing else reads."""
    low, high, bias = -np.inf, np.inf, None

    def inner(*names: str) -> Any:
        return rewriter.made_by(value, *names) if rewriter.is_read_once(value) else None

    if (activation := inner("relax.nn.relu", "relax.clip")) is not None:
        if activation.op.name == "relax.nn.relu":
            low = 0.0
        else:
            low, high = (float(bound.value) for bound in activation.args[1:])
        value = activation.args[0]
    if (addition := inner("relax.add")) is not None:
        bias = constant_of(addition.args[1])
        if bias is None:
            return None
        value = addition.args[0]
    call = inner("relax.nn.conv2d", "relax.matmul")
    weights = constant_of(call.args[1]) if call is not None else None
    if call is None or weights is None or weights.dtype != np.float32:
        return None
    found = _convolution(rewriter, call) if call.op.name == "relax.nn.conv2d" else _product(rewriter, call, weights)
    if found is None:
        return None
    data, given, weights, options = found
    bias, count = np.zeros(1, "float32") if bias is None else bias, len(weights)
    by_channel = ((1, count, 1, 1), (count, 1, 1)) if call.op.name == "relax.nn.conv2d" else ((count,), (1, count))
    if bias.size != 1 and bias.shape not in by_channel:
        return None
    bias = np.broadcast_to(bias.reshape(-1), (count,)).astype("float32")
    return _Layer(data, given, weights, bias, low, high, options)


_Found = tuple[Any, _Scale, Floats, dict[str, Any]]


def _convolution(rewriter: Rewriter, call: Any) -> _Found | None:
    """A convolution in plain layout, of all channels, of each by itself, or of groups that 4 divides."""
    attrs, (data, kernel) = call.attrs, call.args
    weights, groups, channels = constant_of(kernel), int(attrs.groups), shape_of(data)[1]
    layouts = str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout)
    if weights is None or layouts != ("NCHW", "OIHW", "NCHW") or len(weights) % LANES:
        return None
    is_depthwise = groups == channels == len(weights)
    if groups > 1 and not is_depthwise and (channels // groups % LANES or len(weights) // groups % LANES):
        return None
    given = _dequantized(rewriter, data)
    if given is None:
        return None
    options = {name: ints(attrs[name]) for name in ("strides", "padding", "dilation")}
    return *given, weights, {**options, "groups": groups}


def _product(rewriter: Rewriter, call: Any, weights: Floats) -> _Found | None:
    """A vector times a matrix of weights: the convolution of one pixel."""
    data = call.args[0]
    if weights.ndim != 2 or shape_of(data) != (1, len(weights)) or weights.shape[1] % LANES or len(weights) % LANES:
        return None
    given = _dequantized(rewriter, data)
    if given is None:
        return None
    pixel = rewriter.emit(relax.op.reshape(given[0], (1, len(weights), 1, 1)))
    options = {"strides": [1, 1], "padding": [0] * 4, "dilation": [1, 1], "groups": 1}
    return pixel, given[1], np.ascontiguousarray(weights.T)[:, :, None, None], options


def _dequantized(rewriter: Rewriter, data: Any) -> tuple[Any, _Scale] | None:
    """Return the bytes that a float tensor was made of, moved as it was."""
    moves = []
    while (move := _move(rewriter, data)) is not None:
        data, moved = move
        moves.append(moved)
    call = rewriter.made_by(data, "relax.dequantize")
    given = _scale(call) if call is not None and str(call.args[0].ty.dtype) in _RANGE else None
    if given is None:
        return None
    integers = call.args[0]
    for moved in reversed(moves):
        integers = rewriter.emit(moved(integers))
    return integers, given


def integers_of(weights: Floats) -> tuple[npt.NDArray[np.int8], Floats] | None:
    """Return weights as integers, and the scale of each channel; None where they are none.

    The scale is the largest that makes integers of all weights of a channel, so integers without a common divisor.

    Args:
        weights: (channels, ..) in float32.

    Examples:
        >>> found = integers_of(np.array([[0.5, -1.5], [0.0, 0.0]], "float32"))
        >>> [each.tolist() for each in found]
        [[[1, -3], [0, 0]], [0.5, 1.0]]
    """
    flat = weights.reshape(len(weights), -1).astype("float64")
    largest = np.abs(flat).max(axis=1)
    scales = np.where(largest > 0, 0.0, 1.0)
    for most in range(1, MOST + 1):
        left = np.flatnonzero(scales == 0)
        if not len(left):
            break
        scale = largest[left] / most
        steps = flat[left] / scale[:, None]
        fits = np.abs(steps - np.rint(steps)).max(axis=1) < NEAR
        if most == MOST:
            fits &= steps.max(axis=1) < MOST - 0.5  # -128 alone
        scales[left[fits]] = scale[fits]
    if not scales.all():
        return None
    integers = np.rint(flat / scales[:, None]).astype("int8").reshape(weights.shape)
    return integers, scales.astype("float32")
