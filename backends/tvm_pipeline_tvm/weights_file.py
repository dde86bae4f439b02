"""Weights as a plain file of arrays, which every process that loads a library maps instead of reading.

    weights.bin    | array 0 | zeros up to a multiple of ALIGNMENT | array 1 | ... | ALIGNMENT zeros |

The mapping is private: the system gives all processes that map a file the same pages of memory, and a process that
wrote into a weight would get a page of its own. So a library's weights are in memory once, however many processes run
its stages, and only those that something reads. What is where stands in another file of the library.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tvm_pipeline.memory.arena import ALIGNMENT
from tvm_pipeline_tvm.kernels import tensor_bytes

WEIGHTS = "weights.bin"  # of a library

Bytes = npt.NDArray[np.uint8]


class Weight(msgspec.Struct, frozen=True):
    """Where an array lies in the file: its first byte, its shape and the name of its type."""

    start: int
    shape: tuple[int, ...]
    dtype: str


def write_weights(file: Path, arrays: Iterable[tuple[tuple[int, ...], str, memoryview]]) -> list[Weight]:
    """Write arrays, each given as shape, type and bytes, one behind the other; return where each lies."""
    found = []
    with file.open("wb") as out:
        for shape, dtype, content in arrays:
            out.write(bytes(-out.tell() % ALIGNMENT))
            found.append(Weight(out.tell(), shape, dtype))
            out.write(content)
        out.write(bytes(ALIGNMENT))  # an empty file cannot be mapped
    return found


def mapped(file: Path) -> Bytes:
    """Return the bytes of a file as memory that is shared with all that map it; raise OSError or ValueError."""
    return np.memmap(file, np.uint8, "c")


def part_of(raw: Bytes, weight: Weight) -> Bytes:
    """Return the bytes of a weight; raise ValueError where they are not within the file, or not aligned."""
    size = tensor_bytes(weight.shape, weight.dtype)
    if weight.start % ALIGNMENT or min(weight.start, size) < 0 or weight.start + size > len(raw):
        raise ValueError(f"a weight of {size} bytes at byte {weight.start} of {len(raw)} is not in the file of weights")
    return np.asarray(raw[weight.start : weight.start + size])
