"""Images in blocked layout: convolutions and what is between them work on NCHW{b}c, as vectors want it.

    conv2d(x: (1, 3, 224, 224), w) -> add(b: (1, 64, 1, 1)) -> relu -> max_pool2d -> softmax
    ->  conv2d (call_tir) -> add(b: (1, 4, 1, 1, 16)) -> relu -> max_pool2d (call_tir) -> layout_transform -> softmax

A convolution, a pooling and a concatenation of channels become calls of functions of `schedules/`. What works
element by element between them takes blocked tensors as it takes others. Everything else gets the plain layout back.
TVM's ConvertLayout does less: it leaves depthwise and grouped convolutions and channels that 16 does not divide plain,
and LegalizeOps refuses what it makes.

A block is the one of `tiles.channel_block`, which depends on nothing but the tensor. The layout of a result stands in
the attribute LAYOUT of the function that computes it; a function without it keeps the layout of what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx, topi

from tvm_pipeline_kernels import winograd
from tvm_pipeline_kernels.choices import (
    CONV2D,
    DEPTHWISE,
    Choice,
    Choices,
    Workload,
    is_winograd,
    winograd_by_rule,
    workload_of,
)
from tvm_pipeline_kernels.relax.schedules import (
    concatenate,
    conv2d,
    conv2d_int8,
    conv2d_transpose,
    conv2d_winograd,
    depthwise,
    depthwise_int8,
    group_conv2d,
    pooling,
)
from tvm_pipeline_kernels.relax.schedules.choice import attributes
from tvm_pipeline_kernels.relax.schedules.cores import Cores
from tvm_pipeline_kernels.relax.schedules.stored_weights import stored
from tvm_pipeline_kernels.tiles import byte_block, channel_block
from tvm_pipeline_kernels.winograd import Winograd, first_within
from tvm_pipeline_tvm.relax.dataflow import LAYOUT, constant_of, name_of, plain_main, shape_of
from tvm_pipeline_tvm.relax.numpy_table import constant

OPAQUE = 8  # the pattern of what FuseOps leaves alone
_BYTES = ("uint8", "int8")
READ_PLAIN = 4  # a convolution reads an image of so few channels as it comes

_UNARY = frozenset(
    f"relax.{name}"
    for name in (
        *("nn.relu", "nn.relu6", "nn.leakyrelu", "nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.softplus", "clip"),
        *("sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "abs", "negative", "square", "erf", "floor", "ceil"),
        *("round", "sign", "astype"),
    )
)
_BINARY = frozenset(
    f"relax.{name}"
    for name in (
        *("add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "greater", "less", "greater_equal"),
        *("less_equal", "equal", "not_equal"),
    )
)


@tvm.transform.module_pass(opt_level=0, name="BlockedLayout")
class BlockedLayout:
    """The pass: `main`, one block of dataflow in plain layout -> the same in blocked layout where that is faster.

    Args:
        cores: whose vectors the blocks are to fill.
        tolerance: the error that Winograd's algorithm may have in a layer, over its largest output; 0 forbids it.
        choices: of tuning, for convolutions.
        storage: of the weights of convolutions; see `stored_weights.py`.
    """

    def __init__(
        self,
        cores: Cores,
        tolerance: float = 0.0,
        choices: Choices = MappingProxyType({}),
        storage: str = "float32",
    ) -> None:
        self._cores, self._tolerance, self._choices, self._storage = cores, tolerance, choices, storage

    def transform_module(self, mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
        return _Rewriting(mod, self._cores, self._tolerance, self._choices, self._storage).finished()


class _Rewriting:
    """Writes `main` anew; `forms` has each value under the layouts in which it is at hand."""

    def __init__(self, mod: tvm.IRModule, cores: Cores, tolerance: float, choices: Choices, storage: str) -> None:
        self._main, self._lanes = mod["main"], cores.lanes
        self._cores, self._tolerance, self._choices, self._storage = cores, tolerance, choices, storage
        others = {symbol: function for symbol, function in mod.functions.items() if not function.same_as(self._main)}
        self._builder = relax.BlockBuilder(tvm.IRModule(others, attrs=mod.attrs))
        self._forms: dict[Any, dict[str, Any]] = {}
        self._made: dict[Any, Any] = {}  # the call that made each value
        self._rules: dict[str, Callable[[Any], tuple[Any, str] | None]] = {
            "relax.nn.conv2d": self._any_convolution,
            "relax.nn.pad": self._padding,
            **dict.fromkeys(("relax.quantize", "relax.dequantize"), self._rounding),
            "relax.nn.conv2d_transpose": self._transposed_convolution,
            "relax.nn.max_pool2d": self._pooling,
            "relax.nn.avg_pool2d": self._pooling,
            "relax.mean": self._mean,
            "relax.image.resize2d": self._resizing,
            "relax.concat": self._concatenation,
            **dict.fromkeys(_UNARY, self._elementwise),
            **dict.fromkeys(_BINARY, self._elementwise),
        }

    def finished(self) -> tvm.IRModule:
        bindings, result = plain_main(self._main)
        params = [relax.Var(param.name, param.ty) for param in self._main.params]
        self._forms = {old: {"": new} for old, new in zip(self._main.params, params, strict=True)}
        builder = self._builder
        with builder.function("main", params, attrs=dict(self._main.attrs)):
            with builder.dataflow():
                for binding in bindings:
                    self._bind(binding)
                outputs = self._plain_expr(result)
                output = builder.emit_output(outputs)
            builder.emit_func_output(output)
        made = builder.get()
        return relax.transform.DeadCodeElimination()(made)

    def _bind(self, binding: Any) -> None:
        value = self._made[binding.var] = binding.value
        rule = self._rules.get(name_of(value))
        made = rule(value) if rule else None
        if made is None:
            made = self._builder.emit(self._plain_expr(value), binding.var.name), ""
        self._forms[binding.var] = {made[1]: made[0]}

    def _plain_expr(self, expr: Any) -> Any:
        """Return an expression over plain tensors."""
        if isinstance(expr, relax.Var):
            return self._plain(expr)
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._plain_expr(field) for field in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            return relax.TupleGetItem(self._plain_expr(expr.tuple_value), expr.index)
        if isinstance(expr, tvm.ir.Call):
            return relax.Call(expr.op, [self._plain_expr(arg) for arg in expr.args], expr.attrs, expr.ty_args)
        return expr

    # ------------------------------------------------------------------------------------------ changes of layout

    def _plain(self, value: Any) -> Any:
        forms = self._forms[value]
        if "" not in forms:
            layout, blocked = next(iter(forms.items()))
            forms[""] = self._emit_transform(blocked, layout, "")
        return forms[""]

    def _blocked(self, value: Any, block: int) -> Any:
        """Return a tensor (n, C, H, W) in blocks of so many channels."""
        forms, layout = self._forms[value], _layout(block)
        if layout not in forms:
            forms[layout] = self._emit_transform(self._plain(value), "", layout)
        return forms[layout]

    def _emit_transform(self, value: Any, source: str, target: str) -> Any:
        """Emit a change between the plain layout and a blocked one; of an image of one pixel only the shape changes."""
        shape = shape_of(value)
        if source:
            n, chunks, height, width, block = shape
            new: tuple[int, ...] = (n, chunks * block, height, width)
        else:
            n, channels, height, width = shape
            block = _block(target)
            new = (n, channels // block, height, width, block)
        if height * width == 1:
            return self._builder.emit(relax.op.reshape(value, new))
        return self._emit(_transform, value, source, target, name="layout_transform", layout=target)

    def _emit(self, compute: Callable[..., Any], *arguments: Any, name: str, layout: str, **options: Any) -> Any:
        call = self._builder.call_te(
            compute, *arguments, primfunc_name_hint=name, primfunc_attrs={LAYOUT: layout}, **options
        )
        return self._builder.emit(call)

    def _current(self, value: Any) -> str:
        """Return a blocked layout in which a value is at hand; empty where there is none."""
        return next((layout for layout in self._forms.get(value, {}) if layout), "")

    # ------------------------------------------------------------------------------------------ anchors

    def _any_convolution(self, call: Any) -> tuple[Any, str] | None:
        types = call.args[0].ty.dtype, call.args[1].ty.dtype, call.ty.dtype
        return self._byte_convolution(call) if types == ("uint8", "int8", "int32") else self._convolution(call)

    def _byte_convolution(self, call: Any) -> tuple[Any, str] | None:
        """A convolution of `integer_layers`, whose padding is an operator before it."""
        data, weights, attrs = call.args[0], constant_of(call.args[1]), call.attrs
        layouts = str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout)
        if weights is None or layouts != ("NCHW", "OIHW", "NCHW") or any(map(int, attrs.padding)):
            return None
        outputs, channels, groups = len(weights), shape_of(data)[1], int(attrs.groups)
        is_depthwise = groups == channels == outputs > 1
        block = byte_block(outputs if is_depthwise else outputs // groups, self._lanes)
        options: dict[str, Any] = {name: tuple(map(int, attrs[name])) for name in ("strides", "dilation")}
        if not block or (not is_depthwise and groups > 1 and channels // groups % conv2d_int8.FOUR):
            return None
        if is_depthwise:
            inner, padding, fill = self._padded(data)
            at_once = depthwise_int8.columns_at_once(self._cores, options["dilation"][1])
            packed = depthwise_int8.packed(weights, block, at_once)
            options |= {"columns": weights.shape[3], "padding": padding, "fill": fill}
            return self._anchor(depthwise_int8, self._blocked(inner, block), packed, block, "conv2d", options)
        if channels % conv2d_int8.FOUR:
            given, inner = self._plain(data), conv2d_int8.FOUR
        else:
            inner = _block(self._current(data))
            if not inner or inner % conv2d_int8.FOUR or channels // groups % inner:
                inner = byte_block(channels // groups, self._lanes)
            given = self._blocked(data, inner)
        options["groups"] = groups
        if self._cores.signed:
            options["added"] = constant(conv2d_int8.added(weights, block))
        return self._anchor(conv2d_int8, given, conv2d_int8.packed(weights, inner, block), block, "conv2d", options)

    def _padded(self, data: Any) -> tuple[Any, tuple[int, ...], int]:
        """Return what a tensor is a padding of, how much (top, left, bottom, right) and with what."""
        call = self._made.get(data)
        if call is not None and name_of(call) == "relax.nn.pad" and (found := _window(call)):
            return call.args[0], found[0], int(found[1])
        return data, (0, 0, 0, 0), 0

    def _padding(self, call: Any) -> tuple[Any, str] | None:
        """A padding of rows and columns by a constant."""
        data = call.args[0]
        layout, found = self._current(data), _window(call)
        if not layout or not found:
            return None
        (top, left, bottom, right), value = found
        before, after = (0, 0, top, left, 0), (0, 0, bottom, right, 0)
        options = {"pad_before": before, "pad_after": after, "pad_value": tirx.const(value, data.ty.dtype)}
        # FuseOps would put the padding, with its condition for each number, into the tiles of a convolution before it.
        attrs = {LAYOUT: layout, "op_pattern": OPAQUE}
        call = self._builder.call_te(
            topi.nn.pad, self._forms[data][layout], primfunc_name_hint="pad", primfunc_attrs=attrs, **options
        )
        return self._builder.emit(call), layout

    def _convolution(self, call: Any) -> tuple[Any, str] | None:
        data, weights = call.args[0], constant_of(call.args[1])
        attrs = call.attrs
        plain = (str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout)) == ("NCHW", "OIHW", "NCHW")
        if weights is None or weights.dtype != np.float32 or not plain or call.ty.dtype != "float32":
            return None
        groups, channels = int(attrs.groups), shape_of(data)[1]
        outputs = len(weights)
        strides, padding, dilation = (
            tuple(map(int, field)) for field in (attrs.strides, attrs.padding, attrs.dilation)
        )
        block = channel_block(outputs, self._lanes)
        options: dict[str, Any] = {"strides": strides, "padding": padding, "dilation": dilation}
        if groups not in (1, channels) or (groups > 1 and channels != outputs):
            return self._grouped(call, weights, groups, options)
        template = CONV2D if groups == 1 else DEPTHWISE
        workload = workload_of(template, shape_of(data), weights.shape, strides, padding, dilation)
        choice = self._choices.get(workload)
        options["tuned"] = attributes(workload, None if is_winograd(choice) else choice)
        if groups > 1:
            given = self._blocked(data, block)
            return self._anchor(depthwise, given, depthwise.packed(weights, block), block, "conv2d", options)
        if not self._current(data) and channels <= READ_PLAIN:
            given, inner = self._plain(data), 1
            options["tuned"] = {}  # its tile is one of few
        else:
            inner = _block(self._current(data)) or channel_block(channels, self._lanes)
            given = self._blocked(data, inner)
        form = self._winograd(weights, workload, choice) if {inner, block} <= {self._lanes, 8} else None
        if form:
            packed = winograd.packed(weights, form.winograd, inner, block)
            options = {"padding": padding, "form": form, "tuned": options["tuned"]}
            return self._anchor(conv2d_winograd, given, packed, block, "conv2d", options)
        packed = conv2d.packed(weights, inner, block)
        return self._anchor(conv2d, given, packed, block, "conv2d", options)

    def _winograd(self, weights: np.ndarray, workload: Workload, choice: Choice | None) -> Winograd | None:
        """Return how Winograd's algorithm computes a convolution; None where it does not pay, or errs."""
        forms = [choice] if choice else winograd_by_rule(workload, self._cores)
        return first_within([Winograd(*form) for form in forms if is_winograd(form)], weights, self._tolerance)

    def _anchor(
        self, rule: Any, data: Any, packed: np.ndarray, block: int, name: str, options: dict[str, Any]
    ) -> tuple[Any, str]:
        layout = _layout(block)
        kernel = constant(stored(packed, self._storage))
        return self._emit(rule.compute, data, kernel, name=name, layout=layout, **options), layout

    def _grouped(self, call: Any, weights: np.ndarray, groups: int, options: dict[str, Any]) -> tuple[Any, str]:
        data, lanes = call.args[0], self._lanes
        channels, outputs = shape_of(data)[1], len(weights)
        options = {**options, "groups": groups, "lanes": lanes}
        if group_conv2d.layout(channels, outputs, groups, lanes) == "NCHW":
            kernel, given = constant(stored(weights, self._storage)), self._plain(data)
            return self._emit(group_conv2d.compute, given, kernel, name="conv2d", layout="", **options), ""
        given = self._blocked(data, channel_block(channels, lanes))
        packed = group_conv2d.packed(weights, groups, lanes)
        return self._anchor(group_conv2d, given, packed, channel_block(outputs, lanes), "conv2d", options)

    def _transposed_convolution(self, call: Any) -> tuple[Any, str] | None:
        attrs, weights = call.attrs, constant_of(call.args[1])
        plain = (str(attrs.data_layout), str(attrs.kernel_layout), int(attrs.groups)) == ("NCHW", "IOHW", 1)
        dilation = tuple(map(int, attrs.dilation))
        if weights is None or weights.dtype != np.float32 or not plain or dilation != (1, 1):
            return None
        inputs, outputs = weights.shape[:2]
        data, block = call.args[0], channel_block(outputs, self._lanes)
        inner = _block(self._current(data)) or channel_block(inputs, self._lanes)
        options = {name: tuple(map(int, attrs[name])) for name in ("strides", "padding", "output_padding")}
        packed = conv2d_transpose.packed(weights, inner, block)
        return self._anchor(conv2d_transpose, self._blocked(data, inner), packed, block, "conv2d_transpose", options)

    def _pooling(self, call: Any) -> tuple[Any, str] | None:
        data, attrs = call.args[0], call.attrs
        layout = self._current(data)
        is_largest = name_of(call) == "relax.nn.max_pool2d"
        if not layout or str(attrs.layout) != "NCHW" or call.ty.dtype not in ("float32", *is_largest * _BYTES):
            return None
        options: dict[str, Any] = {name: tuple(map(int, attrs[name])) for name in ("strides", "padding", "dilation")}
        options["window"] = tuple(map(int, attrs.pool_size))
        options["ceil_mode"] = bool(attrs.ceil_mode)
        compute, name = pooling.compute_max, "max_pool2d"
        if not is_largest:
            compute, name = pooling.compute_avg, "avg_pool2d"
            options["count_include_pad"] = bool(attrs.count_include_pad)
        return self._emit(compute, self._forms[data][layout], name=name, layout=layout, **options), layout

    def _mean(self, call: Any) -> tuple[Any, str] | None:
        """The mean over an image."""
        data = call.args[0]
        layout = self._current(data)
        axes = tuple(int(axis) % 4 for axis in call.attrs.axis or ())
        if not layout or sorted(axes) != [2, 3] or call.ty.dtype != "float32":
            return None
        made = self._emit(pooling.compute_mean, self._forms[data][layout], name="mean", layout=layout)
        if call.attrs.keepdims:
            return made, layout
        return self._reshaped(made, shape_of(call)), ""

    def _resizing(self, call: Any) -> tuple[Any, str] | None:
        """A resize of images, which moves whole vectors of channels."""
        data, attrs = call.args[0], call.attrs
        layout = self._current(data)
        if not layout or str(attrs.layout) != "NCHW" or call.ty.dtype != "float32":
            return None
        made = self._emit(_resized, self._forms[data][layout], shape_of(call), attrs, name="resize2d", layout=layout)
        return made, layout

    def _concatenation(self, call: Any) -> tuple[Any, str] | None:
        fields = call.args[0].fields if isinstance(call.args[0], relax.Tuple) else ()
        layouts = [self._current(field) for field in fields]
        if len(fields) < 2 or not all(layouts) or len(call.ty.shape) != 4 or int(call.attrs.axis) % 4 != 1:
            return None
        channels = shape_of(call)[1]
        block = _block(layouts[0])
        if len(set(layouts)) > 1:  # else whole blocks move
            block = byte_block(channels, self._lanes) if call.ty.dtype in _BYTES else 0
            block = block or channel_block(channels, self._lanes)
        inputs = [self._forms[field][layout] for field, layout in zip(fields, layouts, strict=True)]
        layout = _layout(block)
        return self._emit(concatenate.compute, inputs, block=block, name="concatenate", layout=layout), layout

    def _reshaped(self, value: Any, shape: Sequence[int]) -> Any:
        return value if shape_of(value) == tuple(shape) else self._builder.emit(relax.op.reshape(value, shape))

    def _elementwise(self, call: Any) -> tuple[Any, str] | None:
        """What works element by element on a blocked tensor, and on tensors that are repeated to its shape."""
        layout = next((self._current(arg) for arg in call.args if self._is_full(arg, call) and self._current(arg)), "")
        if not layout or len(call.ty.shape) != 4:
            return None
        block, arguments = _block(layout), []
        for arg in call.args:
            blocked = self._repeated(arg, block, shape_of(call)[1])
            if blocked is None:
                return None
            arguments.append(blocked)
        made = relax.Call(call.op, arguments, call.attrs, call.ty_args)
        return self._builder.emit(made), layout

    def _rounding(self, call: Any) -> tuple[Any, str] | None:
        """A quantize or dequantize by one scale. Scales by channel lie along an axis that blocks do not have."""
        scale, zero = call.args[1:3]
        return self._elementwise(call) if all(np.prod(shape_of(each)) == 1 for each in (scale, zero)) else None

    def _is_full(self, arg: Any, call: Any) -> bool:
        return isinstance(arg, relax.Var) and shape_of(arg) == shape_of(call)

    def _repeated(self, arg: Any, block: int, channels: int) -> Any | None:
        """Return an argument as one of an operator on blocked tensors; None where that cannot be."""
        if not isinstance(arg.ty, relax.TensorType):
            return arg  # a bound of clip
        shape = shape_of(arg)
        if int(np.prod(shape)) == 1:
            value = constant_of(arg)
            if value is None or not shape:  # LegalizeOps writes a number without axes into the loops, for all targets
                return arg if value is not None else None
            return constant(value.reshape((1, 1, 1, 1, 1)))
        shape = (1,) * (4 - len(shape)) + shape
        value = constant_of(arg)
        if value is not None:
            value = value.reshape(shape)
            if shape[1] == 1:
                return constant(value[..., None])
            return constant(_blocked_array(value, block))
        if shape_of(arg) != shape or shape[1] != channels:
            return None
        return self._blocked(arg, block)


def _window(pad: Any) -> tuple[tuple[int, int, int, int], float] | None:
    """Return what a padding adds (top, left, bottom, right) and its value; None if it adds more, or no constant."""
    around = tuple(map(int, pad.attrs.pad_width))
    if len(around) != 8 or any(around[:4]) or str(pad.attrs.pad_mode) != "constant":
        return None
    top, bottom, left, right = around[4:]
    return (top, left, bottom, right), float(pad.attrs.pad_value)


def _layout(block: int) -> str:
    return f"NCHW{block}c"


def _block(layout: str) -> int:
    """Return the channels of a block; 0 of the plain layout."""
    return int(layout[4:-1]) if layout else 0


def _blocked_array(array: np.ndarray, block: int) -> np.ndarray:
    n, channels, height, width = array.shape
    return array.reshape(n, channels // block, block, height, width).transpose(0, 1, 3, 4, 2)


def _resized(data: Any, shape: Sequence[int], attrs: Any) -> Any:
    """Return blocked images of another size: `shape` as plain ones, by the attributes of relax.image.resize2d.

    Where each pixel is repeated, its place is a quotient of integers. TOPI computes each in floating point.
    """
    _, _, height, width, block = (int(extent) for extent in data.shape)
    method, mode, rounding = (
        str(each) for each in (attrs.method, attrs.coordinate_transformation_mode, attrs.rounding_method)
    )
    down, across = shape[2] // height, shape[3] // width
    is_repeated = (height * down, width * across) == tuple(shape[2:]) and (
        (mode, rounding) == ("asymmetric", "floor") or (mode == "half_pixel" and rounding.startswith("round"))
    )
    if method == "nearest_neighbor" and is_repeated:
        return te.compute(
            (shape[0], shape[1] // block, *shape[2:], block),
            lambda n, chunk, row, column, channel: data[n, chunk, row // down, column // across, channel],
            name="resize",
            tag=topi.tag.INJECTIVE,
        )
    return topi.image.resize2d(
        data,
        [float(each) for each in attrs.roi],
        list(shape[2:]),
        _layout(block),
        method,
        mode,
        rounding,
        float(attrs.cubic_alpha),
        bool(attrs.cubic_exclude),
        float(attrs.extrapolation_value),
    )


def _transform(data: Any, source: str, target: str) -> Any:
    return topi.layout_transform(data, source or "NCHW", target or "NCHW")
