"""Weights in 16 bits, which take half of the memory: a kernel widens a weight to float32 where it reads it.

float16 is stored as such, and vectors of it become float32 by one instruction. The bits of a bfloat16 are the upper
half of a float32's. They are stored as uint16, so that TVM's own passes of bfloat16 do nothing, and widened by a shift.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import tirx

from tvm_pipeline.errors import ModelError

NAN = 0x7FC0  # of bfloat16


def stored(weights: np.ndarray, storage: str) -> np.ndarray:
    """Return weights of float32 as a kernel reads them: as they are, as float16, or as the bits of bfloat16.

    Weights of integers stay as they are. Numbers are rounded to the nearest, and to the even one of two as near.

    Args:
        storage: float32, float16 or bfloat16.

    Raises:
        ModelError: a number is larger than all of the type.

    Examples:
        >>> [hex(bits) for bits in stored(np.array([1.0, -2.0, 1.00390625], "float32"), "bfloat16")]
        ['0x3f80', '0xc000', '0x3f80']
    """
    if storage == "float32" or weights.dtype != np.float32:
        return weights
    if storage == "float16":
        with np.errstate(over="ignore"):
            made = weights.astype("float16")
        is_infinite = np.isinf(made)
    else:
        bits = np.ascontiguousarray(weights, "float32").view("uint32")
        even = (bits >> 16) & 1
        made = np.where(np.isnan(weights), NAN, (bits + (0x7FFF + even)) >> 16).astype("uint16")
        is_infinite = made & 0x7FFF == 0x7F80
    if np.any(is_infinite & np.isfinite(weights)):
        largest = np.abs(weights[np.isfinite(weights)]).max()
        other = "bfloat16 or float32" if storage == "float16" else "float32"
        raise ModelError(f"a weight of {largest:g} is larger than every {storage}; store `weights` in {other}")
    return made


def widened(weight: Any) -> Any:
    """Return a weight, or a vector of weights, as `stored` left them, in float32; what is float32 stays as it is."""
    data_type = tvm.DataType(str(weight.ty.dtype))
    lanes = f"x{data_type.lanes}" if data_type.lanes > 1 else ""
    if data_type.bits != 16:
        return weight
    if str(data_type).startswith("float16"):
        return tirx.Cast(f"float32{lanes}", weight)
    return tirx.reinterpret(f"float32{lanes}", tirx.Cast(f"uint32{lanes}", weight) << 16)
