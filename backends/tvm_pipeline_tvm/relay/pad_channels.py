"""Pad convolutions and dense layers whose outputs fill vectors badly, such as the 1000 classes of a classifier.

A block of the layout has as many channels as divide their number, at most 16. 1000 channels make 100 blocks of 10, and
each takes a vector of 16. Padded with zeros to 1008 they make 63. What follows channel by channel (bias, activation,
pooling) is computed for the padding, too, and then the padding is cut off.

    conv2d(x, w: (1000, C, 1, 1)) -> relu -> global_avg_pool2d
    ->  conv2d(x, w: (1008, C, 1, 1)) -> relu -> global_avg_pool2d -> strided_slice to 1000

The block is 16 whatever the target is, so that all libraries of a platform have the same operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relay

from tvm_pipeline_tvm.padded_channels import padded_channels, with_zeros
from tvm_pipeline_tvm.relay.kernel_walkers import outer_expressions, rebuilt

_POOLS = frozenset(("nn.global_avg_pool2d", "nn.global_max_pool2d", "nn.avg_pool2d", "nn.max_pool2d"))
_UNARY = frozenset(("nn.relu", "clip", "sigmoid", "tanh", "nn.leaky_relu", *_POOLS))
_WITH_CONSTANT = frozenset(("nn.bias_add", "add", "multiply"))


def pad_channels(mod: tvm.IRModule, params: Mapping[str, Any] | None = None) -> tvm.IRModule:
    """Return a module of the same results; `params` are its weights, by the names of parameters of `main`."""
    main, padding = mod["main"], _Padding(params or {})
    new: dict[relay.Expr, relay.Expr] = {}
    for expr in outer_expressions(main.body):
        new[expr] = padding.rewritten(expr, new)
    if not padding.slices:
        return mod
    function = relay.Function(main.params, new[main.body], None, main.type_params, main.attrs)
    return relay.transform.InferType()(tvm.IRModule.from_expr(function))


class _Padding:
    """Writes expressions anew; `slices` are those behind padded convolutions, with the channels that they leave."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._params = params
        self.slices: dict[relay.Expr, int] = {}

    def rewritten(self, expr: relay.Expr, new: Mapping[relay.Expr, relay.Expr]) -> relay.Expr:
        """Return an expression whose arguments are replaced as `new` has them."""
        padded = None
        if isinstance(expr, relay.Call):
            padded = self._call(expr, [new[argument] for argument in expr.args])
        return rebuilt(expr, new) if padded is None else padded

    def _call(self, call: relay.Call, arguments: Sequence[relay.Expr]) -> relay.Expr | None:
        """Return the call as a padded one with a slice behind; None where that is not possible."""
        name = call.op.name if isinstance(call.op, tvm.ir.Op) else ""
        if name == "nn.conv2d":
            return self._convolution(call, arguments)
        if name == "nn.dense":
            return self._dense(call, arguments)
        channels = self.slices.get(arguments[0]) if arguments else None
        if channels is None:
            return None
        padded = arguments[0].args[0]
        if name in _UNARY and (name not in _POOLS or str(call.attrs.layout) == "NCHW"):
            return self._sliced(relay.Call(call.op, [padded], call.attrs), channels)
        constant = self._padded_constant(call.args[1], channels, name) if name in _WITH_CONSTANT else None
        if constant is None:
            return None
        return self._sliced(relay.Call(call.op, [padded, constant], call.attrs), channels)

    def _convolution(self, call: relay.Call, arguments: Sequence[relay.Expr]) -> relay.Expr | None:
        attrs, weights = call.attrs, self._constant(call.args[1])
        is_plain = attrs.groups == 1 and str(attrs.data_layout) == "NCHW" and str(attrs.kernel_layout) == "OIHW"
        if weights is None or weights.dtype != np.float32 or not is_plain:
            return None
        channels, padded = len(weights), padded_channels(len(weights))
        if padded == channels:
            return None
        options = {name: attrs[name] for name in attrs.keys()} | {"channels": padded}  # noqa: SIM118 - no mapping
        wide = relay.nn.conv2d(arguments[0], relay.const(with_zeros(weights, padded)), **options)
        return self._sliced(wide, channels)

    def _dense(self, call: relay.Call, arguments: Sequence[relay.Expr]) -> relay.Expr | None:
        """Return a dense layer of several rows; that of one row waits for its weights, and gains nothing."""
        weights = self._constant(call.args[1])
        if weights is None or weights.dtype != np.float32 or int(call.args[0].checked_type.shape[0]) == 1:
            return None
        outputs, padded = len(weights), padded_channels(len(weights))
        if padded == outputs:
            return None
        wide = relay.nn.dense(arguments[0], relay.const(with_zeros(weights, padded)), padded, call.attrs.out_dtype)
        return self._sliced(wide, outputs)

    def _sliced(self, padded: relay.Expr, channels: int) -> relay.Expr:
        sliced = relay.strided_slice(padded, [0], [channels], axes=[1])
        self.slices[sliced] = channels
        return sliced

    def _padded_constant(self, expr: relay.Expr, channels: int, name: str) -> relay.Expr | None:
        """Return a constant with zeros for the padding; None where it is none, or is not one number a channel."""
        value = self._constant(expr)
        if value is None:
            return None
        if value.size == 1 and name != "nn.bias_add":
            return expr
        shape = (channels,) if name == "nn.bias_add" else (channels, 1, 1)
        if value.shape not in (shape, (1, *shape)):
            return None
        wide = with_zeros(value.reshape(channels), padded_channels(channels))
        return relay.const(wide.reshape([extent if extent == 1 else len(wide) for extent in value.shape]))

    def _constant(self, expr: relay.Expr) -> Any:
        if isinstance(expr, relay.Constant):
            return expr.data.numpy()
        if isinstance(expr, relay.Var) and expr.name_hint in self._params:
            return self._params[expr.name_hint].numpy()
        return None
