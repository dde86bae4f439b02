"""Pad convolutions whose output channels fill vectors badly, such as the 1000 classes of a classifier.

A block of the layout has as many channels as divide their number, at most 16. 1000 channels make 100 blocks of 10, and
each takes a vector of 16. Padded with zeros to 1008 they make 63. What follows channel by channel (bias, activation,
pooling) is computed for the padding, too, and then the padding is cut off.

    conv2d(x, w: (1000, C, 1, 1)) -> relu -> mean of rows and columns
    ->  conv2d(x, w: (1008, C, 1, 1)) -> relu -> mean of rows and columns -> strided_slice to 1000

`padded_channels` says which convolutions, whatever the target is, so that all libraries of a platform have the
same operators.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvm_pipeline_tvm.numpy_rules import ints
from tvm_pipeline_tvm.padded_channels import padded_channels, with_zeros
from tvm_pipeline_tvm.relax.dataflow import constant_of
from tvm_pipeline_tvm.relax.numpy_table import constant, static_shape
from tvm_pipeline_tvm.relax.rule_rewriting import Rewriter, Rule, rewritten

_POOLS = frozenset(f"relax.nn.{name}" for name in ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"))
_UNARY = frozenset(f"relax.{name}" for name in ("nn.relu", "nn.leakyrelu", "nn.silu", "clip", "sigmoid", "tanh"))
_BINARY = frozenset(("relax.add", "relax.multiply"))


def pad_channels(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module of the same results: a simplified one, whose weights are constants."""
    return rewritten(mod, _Padding().rules)


class _Padding:
    """Rules that look for tensors with padded channels, each behind a slice that cuts them off."""

    def __init__(self) -> None:
        self._wide: dict[Any, int] = {}  # the channels that are no padding

    def rules(self, name: str) -> tuple[Rule, ...]:
        if name == "relax.nn.conv2d":
            return (self._convolution,)
        if name in _BINARY:
            return (self._binary,)
        return (self._unary,) if name in _UNARY or name in _POOLS or name == "relax.mean" else ()

    def _convolution(self, rewriter: Rewriter, call: Any) -> Any:
        attrs, weights = call.attrs, constant_of(call.args[1])
        is_plain = int(attrs.groups) == 1 and str(attrs.data_layout) == "NCHW" and str(attrs.kernel_layout) == "OIHW"
        if weights is None or weights.dtype != np.float32 or not is_plain or str(attrs.out_layout) not in ("", "NCHW"):
            return None
        channels, padded = len(weights), padded_channels(len(weights))
        if padded == channels:
            return None
        return self._sliced(rewriter, call.op, [call.args[0], constant(with_zeros(weights, padded))], call, channels)

    def _unary(self, rewriter: Rewriter, call: Any) -> Any:
        name, wide = call.op.name, self._padded(rewriter, call.args[0])
        if wide is None or (name in _POOLS and str(call.attrs.layout) != "NCHW"):
            return None
        if name == "relax.mean" and not (
            call.attrs.keepdims and call.attrs.axis is not None and sorted(ints(call.attrs.axis)) == [2, 3]
        ):
            return None
        return self._sliced(rewriter, call.op, [wide, *call.args[1:]], call, self._wide[wide])

    def _binary(self, rewriter: Rewriter, call: Any) -> Any:
        left, right = (self._padded(rewriter, argument) for argument in call.args)
        if left is None:
            return None
        channels = self._wide[left]
        if right is None:
            value = constant_of(call.args[1])
            if value is None or value.shape not in ((1, channels, 1, 1), (1, 1, 1, 1), ()):
                return None
            padded = int(left.ty.shape[1])
            right = call.args[1] if value.size == 1 else constant(with_zeros(value[0], padded)[None])
        elif static_shape(left.ty) != static_shape(right.ty) or self._wide[right] != channels:
            return None
        return self._sliced(rewriter, call.op, [left, right], call, channels)

    def _padded(self, rewriter: Rewriter, data: Any) -> Any:
        """Return the tensor that a slice cuts padding off; None of every other tensor."""
        cut = rewriter.made_by(data, "relax.strided_slice")
        return cut.args[0] if cut is not None and cut.args[0] in self._wide else None

    def _sliced(self, rewriter: Rewriter, op: Any, arguments: list[Any], call: Any, channels: int) -> Any:
        wide = rewriter.emit(relax.Call(op, arguments, call.attrs))
        self._wide[wide] = channels
        return relax.op.strided_slice(wide, [1], [0], [channels])
