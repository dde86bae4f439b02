"""The types of ONNX's tensors, and numpy's names of them. Next: `core/number_types.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_pipeline.core.number_types import NARROW, packed, packed_bits
from tvm_pipeline.errors import ModelError

_SHORTER = {"float8_e8m0fnu": "FLOAT8E8M0", "float4_e2m1fn": "FLOAT4E2M1"}
_NAMES = {
    "FLOAT": "float32",
    "FLOAT16": "float16",
    "DOUBLE": "float64",
    "BOOL": "bool",
    **{f"{sign}INT{bits}": f"{sign.lower()}int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)},
    **{_SHORTER.get(name, name.upper().replace("_", "")): name for name in NARROW},
}
_KINDS = {name: kind for kind, name in _NAMES.items()}


def numpy_name(kind: int) -> str:
    """Return numpy's name of a type of ONNX; empty where it is none of numbers, or complex.

    Examples:
        >>> numpy_name(1), numpy_name(16), numpy_name(8)
        ('float32', 'bfloat16', '')
    """
    from onnx import TensorProto

    known = TensorProto.DataType.values()
    return _NAMES.get(TensorProto.DataType.Name(kind), "") if kind in known else ""


def onnx_type(name: str) -> int:
    """Return the type of ONNX that numpy calls so; raise ModelError where the installed onnx is too old for it."""
    from onnx import TensorProto

    try:
        return int(TensorProto.DataType.Value(_KINDS[name]))
    except (KeyError, ValueError):
        raise ModelError(f"the package onnx has no tensors of {name}: run `pip install -U onnx`") from None


def constant(array: npt.NDArray[Any], name: str) -> Any:
    """Return an array as an initializer of a file; raise ModelError where the installed onnx lacks its type."""
    from onnx import TensorProto, numpy_helper

    dtype = array.dtype.name
    if dtype not in NARROW:
        return numpy_helper.from_array(array, name)
    content = packed(array) if packed_bits(dtype) else np.ascontiguousarray(array).reshape(-1)
    bits = content.view(np.uint16 if content.itemsize == 2 else np.uint8).tolist()
    return TensorProto(name=name, data_type=onnx_type(dtype), dims=array.shape, int32_data=bits)
