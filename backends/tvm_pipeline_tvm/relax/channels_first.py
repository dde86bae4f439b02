"""Store pictures channels first (NCHW), as all fast convolutions here read them; .tflite has channels last.

    conv2d(x: NHWC, w: HWIO)  ->  permute_dims(conv2d(permute_dims(x), w: OIHW))

Each change of axes moves on behind the operators that read it, until it meets its inverse. Those of inputs and outputs
remain. Next: `rule_rewriting.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvm_pipeline_tvm.numpy_rules import ints
from tvm_pipeline_tvm.relax.dataflow import constant_of
from tvm_pipeline_tvm.relax.numpy_table import constant
from tvm_pipeline_tvm.relax.rule_rewriting import Rewriter, Rule, rewritten

_FIRST, _LAST = [0, 3, 1, 2], [0, 2, 3, 1]  # from NHWC to NCHW, and back

Axes = list[int]


def channels_first(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module of the same results whose convolutions, pools and resizes read NCHW."""
    mod = rewritten(mod, lambda name: _RULES.get(name.removeprefix("relax."), ()))
    return relax.transform.EliminateCommonSubexpr()(mod)  # two convolutions may read one picture


def _convolution(make: Callable[..., Any], kernel_layout: str) -> Rule:
    def rule(rewriter: Rewriter, call: Any) -> Any:
        attrs = call.attrs
        if str(attrs.data_layout) != "NHWC" or str(attrs.out_layout) not in ("", "NHWC"):
            return None
        padding = {"output_padding": attrs.output_padding} if make is relax.op.nn.conv2d_transpose else {}
        axes = [str(attrs.kernel_layout).index(axis) for axis in kernel_layout]
        made = make(
            rewriter.emit(relax.op.permute_dims(call.args[0], _FIRST)),
            rewriter.emit(relax.op.permute_dims(call.args[1], axes)),
            strides=attrs.strides,
            padding=attrs.padding,
            dilation=attrs.dilation,
            groups=int(attrs.groups),
            data_layout="NCHW",
            kernel_layout=kernel_layout,
            out_dtype=attrs.out_dtype or None,
            **padding,
        )
        return relax.op.permute_dims(rewriter.emit(made), _LAST)

    return rule


def _pool(make: Callable[..., Any]) -> Rule:
    def rule(rewriter: Rewriter, call: Any) -> Any:
        attrs = call.attrs
        if str(attrs.layout) != "NHWC" or str(attrs.out_layout) not in ("", "NHWC"):
            return None
        pooled = make(
            rewriter.emit(relax.op.permute_dims(call.args[0], _FIRST)),
            attrs.pool_size,
            attrs.strides,
            attrs.padding,
            attrs.dilation,
            bool(attrs.ceil_mode),
            bool(attrs.count_include_pad),
        )
        return relax.op.permute_dims(rewriter.emit(pooled), _LAST)

    return rule


def _resize(rewriter: Rewriter, call: Any) -> Any:
    attrs = call.attrs
    if str(attrs.layout) != "NHWC":
        return None
    resized = relax.op.image.resize2d(
        rewriter.emit(relax.op.permute_dims(call.args[0], _FIRST)),
        call.args[1],
        layout="NCHW",
        method=attrs.method,
        coordinate_transformation_mode=attrs.coordinate_transformation_mode,
        rounding_method=attrs.rounding_method,
        cubic_alpha=attrs.cubic_alpha,
        cubic_exclude=attrs.cubic_exclude,
        extrapolation_value=attrs.extrapolation_value,
        out_dtype=attrs.out_dtype or None,
    )
    return relax.op.permute_dims(rewriter.emit(resized), _LAST)


def _permuted(rewriter: Rewriter, expr: Any) -> tuple[Any, Axes] | None:
    """Return what permute_dims made a tensor of, and its axes; None where it did not, or has fewer than 4 axes."""
    call = rewriter.made_by(expr, "relax.permute_dims")
    if call is None or call.attrs.axes is None or len(call.attrs.axes) != 4:
        return None
    return call.args[0], ints(call.attrs.axes)


def _two(rewriter: Rewriter, call: Any) -> Any:
    """permute_dims(permute_dims(x)) -> permute_dims(x), or x."""
    before = _permuted(rewriter, call.args[0])
    if before is None or call.attrs.axes is None:
        return None
    source, axes = before
    both = [axes[axis] for axis in ints(call.attrs.axes)]
    return source if both == sorted(both) else relax.op.permute_dims(source, both)


def _elementwise(rewriter: Rewriter, call: Any) -> Any:
    """An operator of one tensor, with numbers beside it, before the axes change."""
    data, *others = call.args
    if any(isinstance(other, relax.Var) or getattr(constant_of(other), "size", 1) != 1 for other in others):
        return None
    if (before := _permuted(rewriter, data)) is None:
        return None
    return relax.op.permute_dims(rewriter.emit(relax.Call(call.op, [before[0], *others], call.attrs)), before[1])


def _by_channel(rewriter: Rewriter, call: Any) -> Any:
    """prelu, which has a slope for each index of an axis."""
    if (before := _permuted(rewriter, call.args[0])) is None:
        return None
    source, axes = before
    made = relax.op.nn.prelu(source, call.args[1], axes[int(call.attrs.axis) % 4])
    return relax.op.permute_dims(rewriter.emit(made), axes)


def _of_two(rewriter: Rewriter, call: Any) -> Any:
    """An operator of two tensors, both with changed axes or one of them a constant, before the axes change."""
    found = [_permuted(rewriter, argument) for argument in call.args]
    axes = next((before[1] for before in found if before), None)
    if axes is None:
        return None
    arguments = []
    for argument, before in zip(call.args, found, strict=True):
        if before is not None and before[1] == axes:
            arguments.append(before[0])
            continue
        if (value := constant_of(argument)) is None:
            return None
        whole = value.reshape((1,) * (4 - value.ndim) + value.shape)
        arguments.append(argument if value.size == 1 else constant(np.transpose(whole, np.argsort(axes))))
    return relax.op.permute_dims(rewriter.emit(relax.Call(call.op, arguments, call.attrs)), axes)


def _concatenation(rewriter: Rewriter, call: Any) -> Any:
    if not isinstance(call.args[0], relax.Tuple):
        return None
    found = [_permuted(rewriter, field) for field in call.args[0].fields]
    if None in found or len({tuple(before[1]) for before in found if before}) != 1:
        return None
    sources, (axes, *_) = zip(*filter(None, found), strict=True)
    joined = relax.op.concat(list(sources), axes[int(call.attrs.axis) % 4])
    return relax.op.permute_dims(rewriter.emit(joined), axes)


def _reduction(make: Callable[..., Any]) -> Rule:
    def rule(rewriter: Rewriter, call: Any) -> Any:
        before = _permuted(rewriter, call.args[0])
        if before is None or call.attrs.axis is None:
            return None
        (source, axes), reduced = before, [axis % 4 for axis in ints(call.attrs.axis)]
        left = [axes[axis] for axis in range(4) if axis not in reduced]
        made = make(source, [axes[axis] for axis in reduced], bool(call.attrs.keepdims))
        if call.attrs.keepdims:
            return relax.op.permute_dims(rewriter.emit(made), axes)
        return made if left == sorted(left) else None

    return rule


def _padding(rewriter: Rewriter, call: Any) -> Any:
    if (before := _permuted(rewriter, call.args[0])) is None:
        return None
    source, axes = before
    around = np.array(ints(call.attrs.pad_width)).reshape(4, 2)[np.argsort(axes)]
    widths, attrs = around.reshape(-1).tolist(), call.attrs
    padded = relax.op.nn.pad(source, widths, pad_value=float(attrs.pad_value), pad_mode=str(attrs.pad_mode))
    return relax.op.permute_dims(rewriter.emit(padded), axes)


# Operators that compute each element by itself: of one tensor, and of two.
OF_ONE = (
    *("abs", "astype", "ceil", "clip", "dequantize", "erf", "exp", "floor", "hard_swish", "log", "negative"),
    *("nn.gelu", "nn.gelu_tanh", "nn.leakyrelu", "nn.relu", "nn.relu6", "nn.silu", "quantize", "round", "rsqrt"),
    *("sigmoid", "sqrt", "square", "tanh"),
)
OF_TWO = ("add", "divide", "maximum", "minimum", "multiply", "power", "subtract")

_RULES: dict[str, tuple[Rule, ...]] = {
    "nn.conv2d": (_convolution(relax.op.nn.conv2d, "OIHW"),),
    "nn.conv2d_transpose": (_convolution(relax.op.nn.conv2d_transpose, "IOHW"),),
    "nn.max_pool2d": (_pool(relax.op.nn.max_pool2d),),
    "nn.avg_pool2d": (_pool(relax.op.nn.avg_pool2d),),
    "image.resize2d": (_resize,),
    "permute_dims": (_two,),
    "concat": (_concatenation,),
    "nn.pad": (_padding,),
    "nn.prelu": (_by_channel,),
    **{name: (_reduction(getattr(relax.op, name)),) for name in ("mean", "max", "min", "sum")},
    **dict.fromkeys(OF_ONE, (_elementwise,)),
    **dict.fromkeys(OF_TWO, (_of_two,)),
}
