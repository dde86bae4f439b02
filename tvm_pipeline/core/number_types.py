"""The types of numbers in tensors: numpy's, and the narrow ones that the package ml_dtypes gives it.

ml_dtypes is optional. Once it is imported, numpy knows its types by name; `number_type` imports it when it meets one.
In arrays a number of 4 or 2 bits takes a byte, and counts as one. ONNX files and engines pack such
numbers, the first one in the lowest bits (`packed`, `unpacked`). Next: `graph_limits.py`, which checks tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

# The bits of each type of ml_dtypes that a tensor may have.
NARROW = {
    "bfloat16": 16,
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 8),
    **dict.fromkeys(("float4_e2m1fn", "int4", "uint4"), 4),
    **dict.fromkeys(("int2", "uint2"), 2),
}


@lru_cache(maxsize=256)
def number_type(name: str) -> np.dtype[Any] | None:
    """Return numpy's type of this name; None where it has no such numbers, or ml_dtypes is missing or too old.

    Examples:
        >>> number_type("float16"), number_type("str"), number_type("no type")
        (dtype('float16'), None, None)
    """
    try:
        if name in NARROW:
            import ml_dtypes

            narrow: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
            return narrow
        found = np.dtype(name) if name.isalnum() else None
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
    return found if found is not None and found.kind in "biufc" else None


def type_fault(name: str) -> str:
    """Return why numpy has no numbers of this type, and what helps; empty where it has."""
    if number_type(name) is not None:
        return ""
    if name in NARROW:
        return f"{name}, which numpy knows where a recent ml_dtypes is installed: run `pip install -U ml_dtypes`"
    return f"{name[:80]}, which numpy does not know"


def dtype_of(name: str | np.dtype[Any]) -> np.dtype[Any]:
    """Return `np.dtype(name)`, of the types of ml_dtypes too; raise TypeError where numpy has no such type.

    Its `itemsize` is a byte for a number of 4 or 2 bits.
    """
    found = number_type(str(name))
    return np.dtype(name) if found is None else found


def is_float(name: str) -> bool:
    """Return whether a type has fractions: numpy itself takes most types of ml_dtypes for no numbers at all.

    Examples:
        >>> is_float("bfloat16"), is_float("float32"), is_float("int4"), is_float("complex64")
        (True, True, False, False)
    """
    return name.startswith(("float", "bfloat"))


def widened(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array of a type of ml_dtypes as float32 or int8, which hold all its numbers; others as they are."""
    name = array.dtype.name
    return array.astype(np.float32 if is_float(name) else np.int8) if name in NARROW else array


def packed_bits(name: str) -> int:
    """Return the bits of a number of a type that files and engines pack; 0 for other types."""
    bits = NARROW.get(name, 8)
    return bits if bits < 8 else 0


def packed(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the numbers of a type of fewer than 8 bits, packed: as ONNX has them in a file.

    The first number lies in the lowest bits of the first byte, and zeros fill the last one.
    """
    bits = packed_bits(array.dtype.name)
    numbers = np.ascontiguousarray(array).reshape(-1).view(np.uint8) & ((1 << bits) - 1)
    each = 8 // bits
    rows = np.zeros((-(-numbers.size // each), each), np.uint8)
    rows.reshape(-1)[: numbers.size] = numbers
    joined: npt.NDArray[np.uint8] = np.bitwise_or.reduce(rows << np.arange(0, 8, bits, dtype=np.uint8), axis=1)
    return joined


def unpacked(content: npt.NDArray[np.uint8], shape: Sequence[int], name: str) -> npt.NDArray[Any]:
    """Return numbers of fewer than 8 bits that `packed` made, as an array of their type."""
    bits = packed_bits(name)
    numbers = content[:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & ((1 << bits) - 1)
    numbers = numbers.reshape(-1)[: math.prod(shape)].reshape(shape)
    if name.startswith("int"):  # ml_dtypes has the sign in the upper bits of the byte, too
        sign = 1 << (bits - 1)
        numbers = (numbers ^ sign) - np.uint8(sign)
    return numbers.view(name)
