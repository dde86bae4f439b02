"""Ports and their buffers: how a tensor lies in host memory where it enters or leaves a stage.

Next: `contract.py`, whose stages read and write such buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_pipeline.core.graph import OperatorGraph, Tensor
from tvm_pipeline.core.number_types import NARROW, dtype_of, is_float

Array = npt.NDArray[Any]
ALIGNMENT = 64  # bytes; compiled kernels load whole vectors
PAGE = 4096  # bytes; a device that computes in the host's memory takes whole pages
_ENDS = {"int4": 8, "uint4": 16, "int2": 2, "uint2": 4}  # of noise: behind the largest number


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor as a stage requires it: the physical shape and the layout (empty for the logical one)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str = ""

    @classmethod
    def of(cls, tensor: Tensor) -> Port:
        """Return the port of a tensor that lies in its logical order."""
        return cls(tensor.name, tensor.shape, tensor.dtype)

    def buffer(self) -> Array:
        """Return a new array for this port, aligned as compiled kernels and devices require."""
        return aligned_empty(self.shape, self.dtype)


def aligned_empty(shape: Sequence[int], dtype: str | np.dtype[Any]) -> Array:
    """Return an uninitialised C-contiguous array whose data begins at a multiple of 64 bytes.

    An array of a page or more begins at a page and shares its last one with no other array.
    """
    item = dtype_of(dtype)
    size = math.prod(shape) * item.itemsize
    alignment = PAGE if size >= PAGE else ALIGNMENT
    raw = np.empty(size + -size % alignment + alignment, np.uint8)
    array: Array = np.ndarray(shape, item, raw, -raw.ctypes.data % alignment)
    return array


def bytes_as(array: Array, begin: int, shape: Sequence[int], dtype: str) -> Array:
    """Return a tensor that lies in a C-contiguous array, from byte `begin` on.

    >>> bytes_as(np.arange(6, dtype="int32"), 8, (2, 1), "int32").tolist()
    [[2], [3]]
    """
    item = dtype_of(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * item.itemsize
    return array.reshape(-1).view(np.uint8)[begin : begin + size].view(item).reshape(shape)


def noise(port: Port) -> Array:
    """Return input for measuring: seeded noise, since kernels treat zeros and denormal numbers specially."""
    array = port.buffer()
    draw = np.random.default_rng(0)
    if is_float(port.dtype):
        drawn = draw.standard_normal(array.shape)
        array[...] = np.abs(drawn) if port.dtype == "float8_e8m0fnu" else drawn  # it has no sign
    else:
        array[...] = draw.integers(0, _ENDS.get(port.dtype, 100), array.shape)
    return array


def frame_of_noise(graph: OperatorGraph) -> dict[str, Array]:
    """Return input of a whole model for measuring, by the names of its inputs; see `noise`."""
    return {tensor.name: noise(Port.of(tensor)) for tensor in graph.inputs}


def frames_of_noise(graph: OperatorGraph, count: int) -> list[dict[str, Array]]:
    """Return frames that differ: `frame_of_noise`, and the same turned by one element more for each."""
    frame = frame_of_noise(graph)
    return [{name: np.roll(array, number) for name, array in frame.items()} for number in range(count)]


def input_for_timing(graph: OperatorGraph, port: Port) -> Array:
    """Return input of a stage for measuring: noise, but zeros for integers that the model computes.

    Those may be indices, and a kernel that reads beyond a tensor may end all work of a GPU.
    """
    array = noise(port)
    if graph.edges.writer.get(port.name) is not None and not is_float(port.dtype):
        array.fill(0)
    return array


def narrow_fault(tensors: Iterable[Tensor], what: str) -> str:
    """Return which tensor has a type that only ml_dtypes gives numpy, and what to do; empty where none has.

    Args:
        what: is not given such tensors, for the message.
    """
    for tensor in tensors:
        if tensor.dtype in NARROW:
            return (
                f"tensor {tensor.name} is {tensor.dtype}, and {what} is given float16, float32, float64, bool and "
                "integers of 8 bits and more; run it on onnxruntime"
            )
    return ""
