"""Layers in float64 by numpy: what the error of kernels in float32 is measured against. Free of TVM.

Relay and Relax evaluate a whole model so: layers of many products by the functions below, cheap operators by the rules
that fold constants, and what is left by TVM, an operator at a time. Next: `relay/reference.py`, `relax/reference.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tvm_pipeline.backends.closeness import difference
from tvm_pipeline.backends.ports import Port
from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.numpy_rules import Array

_log = logging.getLogger(__name__)


def widened(array: Array) -> Array:
    """Return floats as float64, and other numbers as they are."""
    return array.astype("float64") if array.dtype.kind == "f" else array


def convolution(
    data: Array, kernel: Array, strides: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Array:
    """Return a convolution of images: (n, channels, height, width).

    Args:
        data: (n, input channels, height, width).
        kernel: (channels, input channels of a group, kernel rows, kernel columns).
        strides, dilation: of rows and columns.
        padding: top, left, bottom, right.
    """
    top, left, bottom, right = padding
    data = np.pad(data, ((0, 0), (0, 0), (top, bottom), (left, right)))
    n, inputs, height, width = data.shape
    channels, group_inputs, rows, columns = kernel.shape
    out_height = (height - dilation[0] * (rows - 1) - 1) // strides[0] + 1
    out_width = (width - dilation[1] * (columns - 1) - 1) // strides[1] + 1
    made = np.zeros((n, groups, channels // groups, out_height * out_width))
    for row in range(rows):
        for column in range(columns):
            y, x = row * dilation[0], column * dilation[1]
            seen = data[:, :, y : y + out_height * strides[0] : strides[0], x : x + out_width * strides[1] : strides[1]]
            taps = kernel[:, :, row, column].reshape(groups, channels // groups, group_inputs)
            made += taps @ seen.reshape(n, groups, inputs // groups, -1)
    return made.reshape(n, channels, out_height, out_width)


def transposed_convolution(
    data: Array, kernel: Array, strides: Sequence[int], padding: Sequence[int], shape: Sequence[int]
) -> Array:
    """Return a transposed convolution, in one group and without dilation.

    Args:
        data: (n, input channels, height, width).
        kernel: (input channels, channels, kernel rows, kernel columns).
        padding: top, left, bottom, right; what is cut from the result.
        shape: of the result: (n, channels, height, width).
    """
    n, inputs, height, width = data.shape
    _, channels, rows, columns = kernel.shape
    below, beside = (
        max(extent * stride + size, out + before)
        for extent, stride, size, out, before in zip(
            (height, width), strides, (rows, columns), shape[2:], padding[:2], strict=True
        )
    )
    made = np.zeros((n, channels, below, beside))
    flat = data.reshape(n, inputs, height * width)
    for row in range(rows):
        for column in range(columns):
            part = (kernel[:, :, row, column].T @ flat).reshape(n, channels, height, width)
            made[
                :, :, row : row + height * strides[0] : strides[0], column : column + width * strides[1] : strides[1]
            ] += part
    return made[:, :, padding[0] : padding[0] + shape[2], padding[1] : padding[1] + shape[3]]


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + e^-x) without overflow."""
    return 0.5 * (np.tanh(0.5 * x) + 1.0)


def softmax(x: Array, axis: int) -> Array:
    """Return e^x over its sum along an axis."""
    powers = np.exp(x - x.max(axis=axis, keepdims=True))
    return np.asarray(powers / powers.sum(axis=axis, keepdims=True))


def next_tolerance(
    name: str,
    target: str,
    error_of: Callable[[], float],
    tolerance: float,
    allowed: float,
    direct_error: Callable[[], float] = lambda: 0.0,
) -> tuple[float, float | None]:
    """Measure a library, of which each layer was allowed an error.

    The tolerance is what other sums may add to the error of direct ones. That is small in most networks, and is only
    asked for where it may matter: a network that compares or divides nearly equal numbers magnifies any rounding.

    Args:
        direct_error: returns the error of a library with direct sums; without it the whole error is to be within the
            tolerance.

    Returns:
        The error that is measured, and what each layer is allowed in the next library: a tenth at first, and at last
        none. None where this library is within the tolerance.
    """
    try:
        error = measured_error(name, target, error_of)
    except ModelError as refusal:
        _log.info(f"{name} for {target} is compiled again, by direct sums: {refusal}")
        return np.inf, 0.0
    if error <= tolerance:
        return error, None
    direct = direct_error()
    if error <= tolerance + direct:
        _log.info(f"{name} for {target} is {error:.1e} of its largest output off, and {direct:.1e} by direct sums")
        return error, None
    _log.warning(
        f"{name} for {target} is compiled again: it is {error:.1e} of its largest output off, more than the tolerance "
        f"of {tolerance:g}"
    )
    return error, tolerance / 10 if allowed == tolerance else 0.0


def measured_error(name: str, target: str, error_of: Callable[[], float]) -> float:
    """Return the error of a library, measured in a thread that ends, with its threads of TVM; raise as `error_of`."""
    _log.info(f"comparing {name} for {target} with float64")
    with ThreadPoolExecutor(1) as thread:  # TVM's pool of threads for a thread that runs kernels ends with it
        return thread.submit(error_of).result()


def worst_error(found: Sequence[Array], expected: Sequence[Array]) -> float:
    """Return the largest difference of an output from the same in float64, over the largest value of that output.

    Outputs of integers (indices, classes) are left out. Where one is finite and the other not, the error is infinite.
    """
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        port = Port("", one.shape, str(one.dtype))
        if one.dtype.kind == "f":
            apart = difference((port, other), (port, one))
            error = apart.worst / apart.largest if apart.largest else np.inf
            worst = max(worst, error if apart.worst else 0.0)
    return worst
