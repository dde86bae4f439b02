"""The figures that a graph may have: sums of those of a whole graph are exact in numpy's integers. See `graph.py`."""

from __future__ import annotations

import math

from tvm_pipeline.core.number_types import dtype_of, type_fault

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
    if fault := type_fault(dtype):
        return f"dtype {fault}"
    size = math.prod(shape) * dtype_of(dtype).itemsize
    return f"{size} bytes, and none has more than {MOST}" if size > MOST else ""
