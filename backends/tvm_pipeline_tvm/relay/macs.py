"""Names and work of Relay operators: equal for one operator in any layout."""

from __future__ import annotations

import math
import re
from typing import Any

from tvm import relay

_NAME = re.compile(r"^(?:nn\.|contrib\.|image\.|vision\.)?(?:contrib_)?(.*?)(?:_NCHWc|_NHWC|_int8|_packed?)?$")
_SAME_OPERATOR = {
    "depthwise_conv2d": "conv2d",
    "dense_pack": "dense",
    "matmul": "dense",  # what ARM makes of it
    "conv2d_winograd_without_weight_transform": "conv2d",
}


def short_name(op: str) -> str:
    """Return the operator without namespace and layout: conv2d for nn.contrib_conv2d_NCHWc."""
    match = _NAME.match(op)
    name = match.group(1) if match else op
    return _SAME_OPERATOR.get(name, name)


def elements(type_: Any) -> int:
    """Return the elements of a tensor type, or of all fields of a tuple type."""
    if isinstance(type_, relay.TupleType):
        return sum(elements(field) for field in type_.fields)
    return math.prod(int(extent) for extent in type_.shape)


def macs(call: relay.Call) -> int:
    """Return the multiply-accumulates of a call; one operation for each element where nothing is multiplied.

    A convolution costs, in any layout, output elements x weight elements / output channels; a transposed one
    input elements x weight elements / input channels; a matrix product output elements x inner extent; a
    pooling output elements x window; softmax three passes over its input.
    """
    name = short_name(call.op.name)
    result = elements(call.checked_type)
    types = [argument.checked_type for argument in call.args]
    if name in ("conv1d_transpose", "conv2d_transpose", "conv3d_transpose"):
        channels = _extent(types[0], call.attrs.data_layout, "C")
        return elements(types[0]) * elements(types[1]) // channels
    if "winograd" in call.op.name and call.attrs.kernel_size is not None:  # its weights are larger than they were
        inputs = _extent(types[0], call.attrs.data_layout, "C") // call.attrs.groups
        return result * inputs * math.prod(int(extent) for extent in call.attrs.kernel_size)
    if name in ("conv1d", "conv2d", "conv3d"):
        channels = _extent(call.checked_type, call.attrs.out_layout or call.attrs.data_layout, "C")
        return result * elements(types[1]) // channels
    if name in ("dense", "batch_matmul"):
        rows = result // int(call.checked_type.shape[-1])
        return result * elements(types[0]) // max(rows, 1)
    if name in ("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"):
        return result * math.prod(int(extent) for extent in call.attrs.pool_size)
    if name in ("softmax", "log_softmax", "fast_softmax"):
        return 3 * result
    if name in ("global_max_pool2d", "global_avg_pool2d", "adaptive_avg_pool2d", "mean", "sum", "max", "min"):
        return elements(types[0])
    return result


def _extent(type_: Any, layout: str, axis: str) -> int:
    """Return the whole extent of a logical axis, over its outer part and its blocks."""
    letters = [character for character in str(layout) if character.isalpha()]
    shape = [int(extent) for extent in type_.shape]
    return math.prod(n for n, letter in zip(shape, letters, strict=True) if letter.upper() == axis)
