"""The figures that a graph may have: sums of those of a whole graph are exact in numpy's integers. See `graph.py`."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

MOST_OPERATORS = 200_000
MOST_FILE_BYTES = 64 << 20
MOST = 1 << 44  # bytes of a tensor, bytes of an operator's parameters, MACs of an operator


def tensor_fault(shape: tuple[int, ...], dtype: str) -> str:
    """Return what no tensor has; empty where it is one.

    Examples:
        >>> tensor_fault((1, 8), "float32"), tensor_fault((1, -8), "float32")
        ('', 'shape (1, -8)')
    """
    if any(extent < 0 for extent in shape):
        return f"shape {shape}"
    itemsize = _itemsize(dtype)
    if not itemsize:
        return f"dtype {dtype[:80]}, which numpy does not know"
    if math.prod(shape) * itemsize > MOST:
        return f"{math.prod(shape) * itemsize} bytes, and none has more than {MOST}"
    return ""


@lru_cache(maxsize=256)
def _itemsize(dtype: str) -> int:
    """Return the bytes of a number of this type; 0 where numpy has no such numbers."""
    try:
        found = np.dtype(dtype) if dtype.isalnum() else None
    except (TypeError, ValueError):
        return 0
    return found.itemsize if found is not None and found.kind in "biufc" else 0
