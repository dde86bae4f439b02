"""What the shapes of an operator tell of its work: its kind, multiply-accumulates and bytes.

Next: `profiling/layer_times.py` and `device_costs.py`, which predict the operator's seconds from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from tvm_pipeline.core.graph import Operator, Tensor

LANES = 16  # numbers of float32 in the widest vector of CPUs; kernels compute whole vectors of channels

_POOLS = ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool")
_WHOLE_POOLS = ("global_avg_pool", "global_max_pool", "mean", "sum", "max", "min")
_COPIES = ("concatenate", "transpose", "strided_slice", "split", "layout_transform", "pad", "take", "stack", "tile")


class OperatorWork(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The work of one operator.

    Attributes:
        kind: operators of one kind are taken to run at one speed, such as `conv2d 1x1` or `elementwise`.
        dtype: of the first output.
        multiplies: whether its time is mostly that of products with weights, and else that of moving numbers.
        macs: multiply-accumulates of its main operation, without what is fused behind it.
        lost_macs: those that kernels compute beside them where output channels do not fill vectors of LANES.
        input_bytes, output_bytes, param_bytes: bytes that it reads and writes.
    """

    kind: str
    dtype: str
    multiplies: bool
    macs: int
    lost_macs: int
    input_bytes: int
    output_bytes: int
    param_bytes: int

    @property
    def key(self) -> str:
        """The operators that are taken to run at one speed, such as `conv2d 1x1 float32`."""
        return f"{self.kind} {self.dtype}"

    @property
    def moved_bytes(self) -> int:
        """All bytes that it reads and writes."""
        return self.input_bytes + self.output_bytes + self.param_bytes


def operator_work(operator: Operator, tensors: Mapping[str, Tensor]) -> OperatorWork:
    """Return the work of an operator, whatever the layout of its tensors.

    Args:
        tensors: of its graph, by name.

    Examples:
        >>> image, features = Tensor("image", (1, 32, 8, 8)), Tensor("features", (1, 24, 8, 8))
        >>> conv = Operator("conv", "conv2d+relu", ("image",), (features,), param_bytes=27744, macs=443904)
        >>> work = operator_work(conv, {"image": image})
        >>> work.kind, work.macs, work.lost_macs
        ('conv2d kxk', 442368, 147456)
    """
    parts = operator.kind.split("+")
    main = next((part for part in parts if _multiplies(part)), None) or next(
        (part for part in parts if not _is_elementwise(part)), "elementwise"
    )
    inputs = [tensors[name] for name in operator.inputs]
    written = sum(math.prod(tensor.shape) for tensor in operator.outputs)
    macs = operator.macs
    if len(parts) > 1:  # each of the others counts one for each element of the output
        macs = max(0, macs - (len(parts) - 1) * written)
    kind, lost = main, 0
    if _multiplies(main) and inputs and operator.outputs and written:
        kind, lost = _product(main, operator, inputs[0], macs, written)
    elif main.startswith(_COPIES):
        kind = "copy"
    return OperatorWork(
        kind,
        operator.outputs[0].dtype if operator.outputs else "",
        _multiplies(main),
        macs,
        lost,
        sum(tensor.bytes for tensor in inputs),
        operator.output_bytes,
        operator.param_bytes,
    )


def _multiplies(part: str) -> bool:
    return part.startswith(("conv", "dense", "batch_matmul")) and part != "concatenate"


def _is_elementwise(part: str) -> bool:
    """Return whether it does little more than to read and to write each number."""
    return part in (
        *("add", "subtract", "multiply", "maximum", "minimum", "relu", "clip", "bias_add", "negative", "abs"),
        *("leaky_relu", "prelu", "cast", "where", "copy", "expand_dims", "squeeze", "reshape", "batch_flatten"),
    )


def _product(main: str, operator: Operator, read: Tensor, macs: int, written: int) -> tuple[str, int]:
    """Return the kind of a convolution or matrix product, and the multiply-accumulates that its vectors waste."""
    inner = max(1, round(macs / written))  # products that are added up for an element of the output
    result = operator.outputs[0]
    axis = _channel_axis(result, inner, operator.param_bytes)
    channels = result.shape[axis]
    lost = written // max(channels, 1) * (-channels % LANES) * inner
    if not main.startswith("conv2d") or "transpose" in main or len(read.shape) != len(result.shape):
        return main, lost
    channels_read = read.shape[axis]
    if inner % channels_read == 0:
        return f"{main} {'1x1' if inner == channels_read else 'kxk'}", lost
    # Every channel is computed by itself, so that no vector of channels is filled up with others.
    return (
        (f"{main} depthwise", 0)
        if channels == channels_read and math.isqrt(inner) ** 2 == inner
        else (
            f"{main} grouped",
            lost,
        )
    )


def _channel_axis(result: Tensor, inner: int, param_bytes: int) -> int:
    """Return the axis of the channels: 1, or the last one where so many weights fit better."""
    if len(result.shape) < 3:
        return -1
    weights = param_bytes / max(1, result.bytes // max(1, math.prod(result.shape)))
    return min((1, -1), key=lambda axis: abs(math.log(max(weights, 1) / max(1, inner * result.shape[axis]))))
