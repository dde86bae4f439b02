"""Quantised operators as the operators that compute them, with less between two convolutions.

TVM lowers them itself, while it builds. It is done here first, for x86, since some of what it leaves behind are passes
over memory of their own:

    pad(x, zero point) -> qnn.conv2d  ->  conv2d(padding=...)          the kernel of the convolution pads, with zeros
    conv2d - constant + bias          ->  conv2d + constant

The values stay the same: sums of int32 wrap around.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import relay
from tvm.target.codegen import target_has_features

from tvm_pipeline_tvm.relay.kernel_walkers import outer_expressions

SHIFT = 128  # from int8 to uint8
_FOLD = relay.transform.FoldConstant()  # which the contexts of `fold.py` do in numpy


def lowered_int8(mod: tvm.IRModule, target: Any, params: Mapping[str, Any] | None = None) -> tvm.IRModule:
    """Return a module without quantised operators for x86; others, and modules without them, as they are."""
    wanted = tvm.target.Target(target) if isinstance(target, str) else target
    if wanted.kind.name != "llvm" or not target_has_features("sse4.2", wanted) or not _has_quantised(mod):
        return mod
    main = relay.build_module.bind_params_by_name(mod["main"], dict(params or {}))
    passes = tvm.transform.Sequential(
        [
            relay.transform.InferType(),
            relay.qnn.transform.Legalize(),
            relay.qnn.transform.CanonicalizeOps(),
            relay.transform.InferType(),
            _FOLD,
            tvm.transform.module_pass(_with_less_between, opt_level=0),
            relay.transform.InferType(),
            relay.transform.FoldExplicitPadding(),
            relay.transform.InferType(),
            relay.transform.Legalize(),
            relay.transform.InferType(),
            _FOLD,
        ]
    )
    with wanted:
        return passes(tvm.IRModule.from_expr(main))


def _has_quantised(mod: tvm.IRModule) -> bool:
    return any(
        isinstance(expr, relay.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name.startswith("qnn.")
        for expr in outer_expressions(mod["main"].body)
    )


def _with_less_between(mod: tvm.IRModule, _: Any) -> tvm.IRModule:
    rewriting, main = _Rewriting(), mod["main"]
    new: dict[relay.Expr, relay.Expr] = {}
    for expr in outer_expressions(main.body):
        new[expr] = rewriting.rewritten(expr, new)
    return tvm.IRModule.from_expr(relay.Function(main.params, new[main.body], None, main.type_params, main.attrs))


class _Rewriting:
    """Writes expressions anew; it remembers, by the new ones of int8, what they were made of."""

    def __init__(self) -> None:
        self._rounded: dict[relay.Expr, relay.Expr] = {}  # the same in int32
        self._stored: dict[relay.Expr, relay.Expr] = {}  # the same in uint8, shifted
        self._padded: dict[relay.Expr, relay.Expr] = {}  # what was padded

    def rewritten(self, expr: relay.Expr, new: Mapping[relay.Expr, relay.Expr]) -> relay.Expr:
        """Return an expression whose arguments are replaced as `new` has them."""
        if isinstance(expr, relay.Tuple):
            return relay.Tuple([new[field] for field in expr.fields], expr.span)
        if isinstance(expr, relay.TupleGetItem):
            return relay.TupleGetItem(new[expr.tuple_value], expr.index, expr.span)
        if not isinstance(expr, relay.Call):
            return expr
        arguments = [new[argument] for argument in expr.args]
        rules = {
            "add": self._add,
            "cast": self._cast,
            "clip": self._clip,
            "layout_transform": self._layout_transform,
            "nn.dense": _convolution_of_a_pixel,
        }
        rule = rules.get(expr.op.name) if isinstance(expr.op, tvm.ir.Op) else None
        replaced = rule(expr, arguments) if rule else None
        if replaced is None:
            replaced = relay.Call(expr.op, arguments, expr.attrs, expr.type_args, expr.span)
        if _is_call(expr, "nn.pad") and _dtype(expr) == "int8" and str(expr.attrs.pad_mode) == "constant":
            self._padded[replaced] = arguments[0]
        return replaced

    def _add(self, call: relay.Call, arguments: Sequence[relay.Expr]) -> relay.Expr | None:
        """Add two constants first."""
        sums, more = arguments
        if _dtype(call) != "int32" or not _is_call(sums, "subtract") or not isinstance(more, relay.Constant):
            return None
        value, less = sums.args
        keeps_shape = _is_call(call.args[0], "subtract") and tvm.ir.structural_equal(
            call.args[0].args[0].checked_type, call.checked_type
        )
        return (
            relay.add(value, relay.subtract(more, less)) if isinstance(less, relay.Constant) and keeps_shape else None
        )

    def _cast(self, call: relay.Call, arguments: Sequence[relay.Expr]) -> relay.Expr | None:
        """Store bytes as convolutions read them, and pad them shifted."""
        (value,), dtype = arguments, str(call.attrs.dtype)
        if dtype == "int8" and _dtype(call.args[0]) == "int32":
            return self._signed(value)
        signed = _what_is_shifted(value)
        if dtype != "uint8" or signed is None:
            return None
        if signed in self._padded:
            inner = self._padded[signed]
            fill = relay.const(int(signed.args[1].data.numpy()) + SHIFT, "uint8")
            return relay.Call(signed.op, [self._stored.get(inner, _shifted(inner)), fill], signed.attrs)
        return self._stored.get(signed)

    def _clip(self, call: relay.Call, arguments: Sequence[relay.Expr]) -> relay.Expr | None:
        """Clip before the cast to int8, where nothing wraps around."""
        rounded = self._rounded.get(arguments[0])
        if rounded is None or not _is_call(rounded, "clip"):
            return None
        low, high = rounded.attrs.a_min, rounded.attrs.a_max
        if low < -SHIFT or high >= SHIFT:
            return None
        return self._signed(relay.clip(rounded.args[0], max(low, call.attrs.a_min), min(high, call.attrs.a_max)))

    def _layout_transform(self, call: relay.Call, arguments: Sequence[relay.Expr]) -> relay.Expr | None:
        """Compute bytes in the order in which they are read, and move them as they are stored."""
        stored = self._stored.get(arguments[0])
        if stored is None:
            return None
        moved = relay.Call(call.op, [relay.annotation.stop_fusion(stored)], call.attrs)
        signed = _without_shift(moved)
        self._stored[signed] = moved
        return signed

    def _signed(self, value: relay.Expr) -> relay.Expr:
        stored = relay.cast(relay.add(value, relay.const(SHIFT)), "uint8")
        signed = _without_shift(stored)
        self._rounded[signed], self._stored[signed] = value, stored
        return signed


def _convolution_of_a_pixel(call: relay.Call, arguments: Sequence[relay.Expr]) -> relay.Expr | None:
    """Multiply a vector and a matrix as a convolution of one pixel does, whose loops are the faster ones."""
    (rows, terms), (outputs, _) = (each.checked_type.concrete_shape for each in call.args)
    if rows != 1 or [_dtype(each) for each in (*call.args, call)] != ["uint8", "int8", "int32"]:
        return None
    pixel = relay.reshape(arguments[0], (1, terms, 1, 1))
    kernel = relay.reshape(arguments[1], (outputs, terms, 1, 1))
    sums = relay.nn.conv2d(pixel, kernel, channels=outputs, kernel_size=(1, 1), out_dtype="int32")
    return relay.reshape(sums, (1, outputs))


def _is_call(expr: relay.Expr, name: str) -> bool:
    return isinstance(expr, relay.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name == name


def _dtype(expr: relay.Expr) -> str:
    return str(getattr(expr.checked_type, "dtype", ""))


def _shifted(signed: relay.Expr) -> relay.Expr:
    return relay.cast(relay.add(relay.cast(signed, "int32"), relay.const(SHIFT)), "uint8")


def _without_shift(stored: relay.Expr) -> relay.Expr:
    return relay.cast(relay.subtract(relay.cast(stored, "int32"), relay.const(SHIFT)), "int8")


def _what_is_shifted(value: relay.Expr) -> relay.Expr | None:
    """Return what `_shifted` was given, but for its last cast; None where it was not."""
    if (
        not _is_call(value, "add")
        or not _is_call(value.args[0], "cast")
        or not isinstance(value.args[1], relay.Constant)
    ):
        return None
    shift = value.args[1].data.numpy()
    return value.args[0].args[0] if shift.size == 1 and int(shift.flat[0]) == SHIFT else None
