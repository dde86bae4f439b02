"""Winograd's convolution F(m, 3): m x m outputs of a 3x3 kernel from (m + 2)^2 products instead of 9 m^2. Free of TVM.

An image is cut into tiles of (m + 2) x (m + 2) inputs, which overlap by two rows and columns. Each tile `d` and each
3 x 3 kernel `g` is transformed, the two are multiplied number by number and added up over the channels, and the sum is
transformed back into m x m outputs (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016):

    Y = A^T [ sum over channels of (G g G^T) * (B^T d B) ] A

This is polynomial multiplication: a tile is evaluated at m + 1 points and at infinity. F(2, 3) takes 0 and +-1, and
needs 16 products where a direct convolution needs 36; F(4, 3) needs 36 for 144. Its points are 0, +-sqrt(1/2) and
+-sqrt(2). With the customary 0, +-1, +-2 the transforms cost the same, but they multiply numbers by up to 8, and the
result is 2 to 5 times as far off.

In blocked layout, the multiplication is a matrix product for each of the (m + 2)^2 points, over tiles and channels. Its
register tiles are those of `tiles.py`: vectors of `chunks` channel blocks for `columns` tiles of the image.

Values differ from those of a direct convolution, since other numbers are rounded. `rounding_error` says by how much for
the weights of a layer, and `winograd_rule` where the algorithm pays. Its costs are in products of vectors; they fit
300 forms of 33 convolutions on one core of a Xeon, for AVX-512 and AVX2, with weights out of the caches. What it takes
was 1.75 times (AVX-512) and 1.97 times (AVX2) as fast as direct convolutions in the mean, 2 and 4 % slower than the
fastest form, and never slower than the direct one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tvm_pipeline_kernels.tiles import channel_block, tiles

KERNEL = 3
SIZES = (4, 2)  # m
CYCLES_PER_BYTE = 0.4  # of weights, which come from memory
CYCLES_TO_TRANSFORM = {4: (34, 18), 2: (20, 7)}  # a vector of a point, of the input and of the output
WORTHWHILE = 1.05  # times as fast by the estimate
SAMPLE_TILES, SAMPLE_CHANNELS = 8, 64  # of a layer's output, to estimate its error
LEAST_COLUMNS = 14  # tiles of the image in a band: fewer wait for weights
NEAR_BYTES = 1_000_000  # of weights that a near cache keeps from one band to the next
MOST_BYTES = 16_000_000  # of transformed tiles in a band, before and after the multiplication: a far cache's
LEAST_BANDS = 4  # which threads share, where there is more than one
MOST_FORMS = 2  # of each m

_SMALL, _LARGE = math.sqrt(0.5), math.sqrt(2)  # the points of F(4, 3) beside 0: their product is 1


class Winograd(NamedTuple):
    """How a convolution is computed.

    Attributes:
        winograd: m, 2 or 4.
        chunks: channel blocks of a register tile.
        rows: rows of tiles that are transformed and multiplied at once; all of them are the whole image.
        columns: tiles of the image in a register tile.
    """

    winograd: int
    chunks: int
    rows: int
    columns: int


def winograd_forms(
    input_channels: int, channels: int, lanes: int, height: int, width: int, registers: int
) -> Iterator[tuple[float, Winograd]]:
    """Yield what is worth measuring, each with its estimated cycles; nothing where `has_blocks` says no.

    Args:
        height, width: of the output.
        registers: the vector registers of a core, of `lanes` float32 each.
    """
    if not has_blocks(input_channels, channels, lanes):
        return
    block = channel_block(channels, lanes)
    block_bytes = 4 * input_channels * block  # of a point of the transformed weights
    for size in SIZES:
        across = -(-width // size)
        rows = _band(-(-height // size), across, 4 * (size + 2) ** 2, input_channels, channels)
        best: dict[int, tuple[float, int]] = {}
        for cycles, (chunks, _, columns) in tiles(channels // block, 1, 1, rows * across, registers, block_bytes):
            best[chunks] = min(best.get(chunks, (cycles, columns)), (cycles, columns))
        for chunks, (cycles, columns) in sorted(best.items(), key=lambda item: item[1])[:MOST_FORMS]:
            form = Winograd(size, chunks, rows, columns)
            yield _cycles(form, cycles, input_channels, channels, lanes, height, width), form


def winograd_rule(
    input_channels: int, channels: int, lanes: int, height: int, width: int, registers: int
) -> list[Winograd]:
    """Return the forms that are estimated to be faster than a direct convolution, the fastest first.

    Args are those of `winograd_forms`.
    """
    block = channel_block(channels, lanes)
    block_bytes = 4 * KERNEL**2 * input_channels * block
    cycles = min(tiles(channels // block, 1, height, width, registers, block_bytes), default=(0.0, None))[0]
    products = KERNEL**2 * input_channels * channels / block
    direct = products * (height * width * cycles + 4 * block * CYCLES_PER_BYTE)
    forms = winograd_forms(input_channels, channels, lanes, height, width, registers)
    return [form for estimate, form in sorted(forms) if estimate * WORTHWHILE < direct]


def has_blocks(input_channels: int, channels: int, lanes: int) -> bool:
    """Return whether the channels of a layer fill vectors, or halves of those of AVX-512."""
    return all(channel_block(each, lanes) in (lanes, 8) for each in (input_channels, channels))


def first_within(forms: Sequence[Winograd], weights: npt.NDArray[np.float32], tolerance: float) -> Winograd | None:
    """Return the first form whose error with these weights is within the tolerance; None where there is none."""
    errors: dict[int, float] = {}
    for form in forms if tolerance else ():
        if form.winograd not in errors:
            errors[form.winograd] = rounding_error(weights, form.winograd)
        if errors[form.winograd] <= tolerance:
            return form
    return None


def rounding_error(weights: npt.NDArray[np.float32], size: int) -> float:
    """Return the largest error of F(size, 3) with the weights of a layer, over the largest output, in float32.

    It is measured in numpy, on tiles of noise that went through a ReLU, against a direct convolution in float64.

    Args:
        weights: (channels, input channels, 3, 3).
    """
    weights = weights[:: -(-len(weights) // SAMPLE_CHANNELS)]
    edge = size + KERNEL - 1
    noise = np.random.default_rng(0).standard_normal((edge, edge, weights.shape[1], SAMPLE_TILES))
    tile = np.maximum(noise, 0).astype("float32")
    exact = np.zeros((size, size, len(weights), SAMPLE_TILES))
    for row in range(KERNEL):
        for column in range(KERNEL):
            seen = tile[row : row + size, column : column + size].astype("float64")
            exact += weights[:, :, row, column].astype("float64") @ seen
    points = _squared(input_transform, tile, size).reshape(edge**2, -1, SAMPLE_TILES)
    products = (kernel_transform(weights, size) @ points).reshape(edge, edge, -1, SAMPLE_TILES)
    largest = np.abs(exact).max()
    return float(np.abs(_squared(output_transform, products, size) - exact).max() / largest) if largest else 0.0


def _squared(
    transform: Callable[[Sequence[Any], int], list[Any]], tile: npt.NDArray[np.float32], size: int
) -> npt.NDArray[np.float32]:
    """Transform the columns of a tile, (rows, columns, ..), and then its rows."""
    half = np.stack(transform(list(tile), size)).swapaxes(0, 1)
    return np.stack(transform(list(half), size)).swapaxes(0, 1)


def _cycles(
    form: Winograd, products: float, input_channels: int, channels: int, lanes: int, height: int, width: int
) -> float:
    """Return the estimate of a form, whose register tile takes so many cycles for a product."""
    size, _, rows, _ = form
    points, across, down = (size + KERNEL - 1) ** 2, -(-width // size), -(-height // size)
    down += -down % rows  # bands are whole
    into, out_of = CYCLES_TO_TRANSFORM[size]
    weight_bytes = 4 * points * input_channels * channels
    passes = down // rows if weight_bytes > NEAR_BYTES else 1  # over the weights
    block = channel_block(channels, lanes)
    transforms = input_channels / channel_block(input_channels, lanes) * into + channels / block * out_of
    each = input_channels * channels / block * products + transforms
    return points * down * across * each + passes * weight_bytes * CYCLES_PER_BYTE


def _band(down: int, across: int, point_bytes: int, input_channels: int, channels: int) -> int:
    """Return the rows of tiles of a band: few where weights stay near, else as many as memory allows."""
    least = min(down, -(-LEAST_COLUMNS // across))
    if point_bytes * input_channels * channels <= NEAR_BYTES:
        return least
    most = min(down, max(least, MOST_BYTES // (point_bytes * across * (input_channels + channels))))
    bands = -(-down // most)
    return -(-down // (bands if bands == 1 else max(bands, LEAST_BANDS)))  # bands alike


def input_transform(tile: Sequence[Any], size: int) -> list[Any]:
    """Return B^T d of a column `d` of m + 2 numbers, arrays or expressions."""
    d = tile
    if size == 2:
        return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]
    even_small, odd_small = d[4] - d[2] * 2.0, d[3] - d[1] * 2.0
    even_large, odd_large = d[4] - d[2] * 0.5, d[3] - d[1] * 0.5
    return [
        d[4] - d[2] * 2.5 + d[0],
        even_small + odd_small * _SMALL,
        even_small - odd_small * _SMALL,
        even_large + odd_large * _LARGE,
        even_large - odd_large * _LARGE,
        d[5] - d[3] * 2.5 + d[1],
    ]


def output_transform(products: Sequence[Any], size: int) -> list[Any]:
    """Return A^T p of a column `p` of m + 2 numbers, arrays or expressions: m of them."""
    p = products
    if size == 2:
        return [p[0] + p[1] + p[2], p[1] - p[2] - p[3]]
    small, small_odd, large, large_odd = p[1] + p[2], p[1] - p[2], p[3] + p[4], p[3] - p[4]
    return [
        p[0] + small + large,
        small_odd * _SMALL + large_odd * _LARGE,
        small * 0.5 + large * 2.0,
        small_odd * _SMALL**3 + large_odd * _LARGE**3 + p[5],
    ]


def packed(weights: npt.NDArray[np.float32], size: int, in_block: int, block: int) -> npt.NDArray[np.float32]:
    """Return transformed weights (points, blocks, input blocks, input channels of a block, channels of a block).

    Args:
        weights: (channels, input channels, 3, 3).
        size: m.
        in_block, block: channels in a block of the input and of the output.
    """
    points = kernel_transform(weights, size)
    _, outputs, inputs = points.shape
    blocked = points.reshape(-1, outputs // block, block, inputs // in_block, in_block).transpose(0, 1, 3, 4, 2)
    return np.ascontiguousarray(blocked)


def kernel_transform(weights: npt.NDArray[np.float32], size: int) -> npt.NDArray[np.float32]:
    """Return G g G^T of weights (channels, input channels, 3, 3) as (points, channels, input channels).

    It is computed in float64.
    """
    matrix = kernel_matrix(size)
    by_channel = (matrix @ kernel.astype("float64") @ matrix.T for kernel in weights)
    points = np.stack([each.reshape(len(each), -1).astype("float32") for each in by_channel])
    return np.ascontiguousarray(points.transpose(2, 0, 1))


def kernel_matrix(size: int) -> npt.NDArray[np.float64]:
    """Return G: (m + 2) x 3."""
    if size == 2:
        return np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    points = [(_SMALL, _LARGE), (-_SMALL, _LARGE), (_LARGE, _SMALL), (-_LARGE, _SMALL)]
    rows = [np.array([1, x, x * x]) / (2 * x * x * (x * x - other * other)) for x, other in points]
    return np.array([[1, 0, 0], *rows, [0, 0, 1]])
