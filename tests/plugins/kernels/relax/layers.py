"""One layer and what is fused to it: compiled by a rule, and in numpy."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import te, topi
from tvm.s_tir import Schedule
from tvm_ffi.libinfo import find_include_path

from tvm_pipeline_kernels.relax.schedules import lowering
from tvm_pipeline_kernels.relax.schedules.cores import cores_of
from tvm_pipeline_kernels.relax.schedules.epilogue import RULE, blocks_of

EPILOGUES = ("none", "bias, relu6", "residual", "sigmoid")


def blocked(image: np.ndarray, block: int) -> np.ndarray:
    """Return an image (n, channels, height, width) in blocks (n, channels / block, height, width, block)."""
    n, channels, *extents = image.shape
    return np.ascontiguousarray(np.moveaxis(image.reshape(n, channels // block, block, *extents), 2, -1))


def plain(image: np.ndarray) -> np.ndarray:
    """Return an image as (n, channels, height, width) that may be in blocks."""
    if image.ndim == 4:
        return image
    n, blocks, *extents, block = image.shape
    return np.moveaxis(image, -1, 2).reshape(n, blocks * block, *extents)


def with_epilogue(name: str, sums: Any, bias: Any, residual: Any) -> Any:
    """Return what follows a layer; tensors of TE, or arrays."""
    ops = topi if isinstance(sums, te.Tensor) else _Numpy
    if name == "bias, relu6":
        return ops.clip(ops.add(sums, bias), 0, 6)
    if name == "residual":
        return ops.maximum(ops.add(ops.add(sums, bias), residual), 0.0)
    return ops.multiply(sums, ops.sigmoid(sums)) if name == "sigmoid" else sums


class _Numpy:
    add, multiply, maximum, clip = np.add, np.multiply, np.maximum, np.clip

    @staticmethod
    def sigmoid(value: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-value))


def apart(
    rule: Any,
    layer: Callable[..., Any],
    arrays: Sequence[np.ndarray],
    sums: np.ndarray,
    epilogue: str,
    block: int,
    target: Any,
) -> float:
    """Return how far a layer is from the sums that it should make, both behind an epilogue of random tensors.

    Args:
        arrays: data and kernel; the other arguments are those of `kernel`.
    """
    rng = np.random.default_rng(1)
    bias = rng.standard_normal((1, sums.shape[1], 1, 1), dtype="float32")
    residual = rng.standard_normal(sums.shape, dtype="float32")
    found = compiled(rule, layer, (*arrays, bias, residual), epilogue, block, target)
    return float(np.abs(found - with_epilogue(epilogue, sums, bias, residual)).max())


def compiled(
    rule: Any, layer: Callable[..., Any], arrays: Sequence[np.ndarray], epilogue: str, block: int, target: Any
) -> np.ndarray:
    """Return what a layer gives in one kernel; the arguments are those of `kernel`."""
    library, read, result = kernel(rule, layer, arrays, epilogue, block, target)
    held = [tvm.runtime.tensor(array) for array in (*read, result)]
    library.jit()["main"](*held)
    return plain(held[-1].numpy())


def kernel(
    rule: Any, layer: Callable[..., Any], arrays: Sequence[np.ndarray], epilogue: str, block: int, target: Any
) -> tuple[Any, list[np.ndarray], np.ndarray]:
    """Return a layer as one kernel that its rule scheduled, what the kernel reads, and an array for what it writes.

    Args:
        rule: the module of the rule.
        layer: from tensors of TE to the output's.
        arrays: data, kernel, bias (1, channels, 1, 1), residual; bias and residual are brought into blocks here.
        block: channels in a block of the output; 0 where it has none.
    """
    *read, bias, residual = arrays
    read += [blocked(array, block) if block else array for array in (bias, residual)]
    tensors = [te.placeholder(array.shape, array.dtype.name) for array in read]
    output = with_epilogue(epilogue, layer(*tensors[:-2]), *tensors[-2:])
    s = Schedule(te.create_prim_func([*tensors, output]))
    (anchor,) = (found for found in blocks_of(s) if s.get(found).annotations.get(RULE) == rule.NAME)
    rule.schedule(s, anchor, cores_of(target))
    library = tvm.compile(s.mod, target=target, tir_pipeline=lowering.PIPELINE)
    return library, read, np.full([int(extent) for extent in output.shape], np.nan, "float32")


def program(folder: Path, library: Any, arrays: Sequence[np.ndarray]) -> tuple[str, bytes]:
    """Return a program for Linux on aarch64 that runs a kernel once, and what it reads: all tensors."""
    library.mod.write_to_file(str(folder / "kernel.o"), "o")
    code = [str(Path(__file__).parents[3] / "support/aarch64_kernel.c"), str(folder / "kernel.o")]
    options = ["-target", "aarch64-freestanding", "-nostdlib", "-O1", "-I", find_include_path()]
    made = str(folder / "kernel")
    subprocess.run([sys.executable, "-m", "ziglang", "cc", *options, *code, "-o", made], check=True)
    return made, b"".join(np.array([each.ndim, *each.shape]).tobytes() + each.tobytes() for each in arrays)


def convolution(
    data: np.ndarray,
    kernel: np.ndarray,
    groups: int = 1,
    strides: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0, 0, 0),
    dilation: Sequence[int] = (1, 1),
) -> np.ndarray:
    """Return a convolution in float64: data (n, channels, height, width), kernel (outputs, channels / groups, ..)."""
    top, left, bottom, right = padding
    data = np.pad(data.astype("float64"), ((0, 0), (0, 0), (top, bottom), (left, right)))
    windows = [(extent - 1) * step + 1 for extent, step in zip(kernel.shape[2:], dilation, strict=True)]
    seen = np.lib.stride_tricks.sliding_window_view(data, windows, (2, 3))
    seen = seen[:, :, :: strides[0], :: strides[1], :: dilation[0], :: dilation[1]]
    parts = zip(np.split(seen, groups, 1), np.split(kernel.astype("float64"), groups, 0), strict=True)
    return np.concatenate([np.einsum("nchwrs,ocrs->nohw", *part) for part in parts], 1)


def transposed(
    data: np.ndarray, kernel: np.ndarray, strides: Sequence[int], padding: Sequence[int], more: Sequence[int]
) -> np.ndarray:
    """Return a transposed convolution in float64: each number of the input times the kernel, added to the output.

    Args:
        data: (n, channels, height, width).
        kernel: (channels, outputs, kernel rows, kernel columns).
        padding: top, left, bottom, right: what is cut from the output.
        more: rows and columns of output padding.
    """
    n, _, height, width = data.shape
    _, outputs, rows, columns = kernel.shape
    extents = [(height - 1) * strides[0] + rows + more[0], (width - 1) * strides[1] + columns + more[1]]
    result = np.zeros((n, outputs, *extents))
    for y, x in itertools.product(range(height), range(width)):
        part = np.einsum("nc,cors->nors", data[:, :, y, x].astype("float64"), kernel)
        result[:, :, y * strides[0] :, x * strides[1] :][:, :, :rows, :columns] += part
    top, left, bottom, right = padding
    return result[:, :, top : extents[0] - bottom, left : extents[1] - right]
