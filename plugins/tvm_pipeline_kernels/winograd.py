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

Values differ from those of a direct convolution, since other numbers are rounded: TOLERANCE says by how much.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tvm_pipeline_kernels.tiles import tiles

KERNEL = 3
SIZES = (4, 2)  # m
# How far an output may be from that of a direct convolution in float64, as a part of the largest output.
# Measured up to 1024 channels, where direct convolutions in float32 are off by 4e-6.
TOLERANCE = {2: 2e-6, 4: 1e-5}
LEAST_COLUMNS = 14  # tiles of the image in a band: fewer wait for weights
NEAR_BYTES = 1_000_000  # of weights that a near cache keeps from one band to the next
MOST_BYTES = 4_000_000  # of transformed tiles in a band, before and after the multiplication
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
) -> Iterator[Winograd]:
    """Yield what is worth measuring, the most promising first; nothing where channels do not fill whole vectors.

    Args:
        height, width: of the output.
        registers: the vector registers of a core, of `lanes` float32 each.
    """
    if input_channels % lanes or channels % lanes:
        return
    block_bytes = 4 * input_channels * lanes  # of a point of the transformed weights
    for size in SIZES:
        across = -(-width // size)
        rows = _band(-(-height // size), across, 4 * (size + 2) ** 2, input_channels, channels)
        best: dict[int, tuple[float, int]] = {}
        for cycles, (chunks, _, columns) in tiles(channels // lanes, 1, 1, rows * across, registers, block_bytes):
            best[chunks] = min(best.get(chunks, (cycles, columns)), (cycles, columns))
        for chunks, (_, columns) in sorted(best.items(), key=lambda item: item[1])[:MOST_FORMS]:
            yield Winograd(size, chunks, rows, columns)


def _band(down: int, across: int, point_bytes: int, input_channels: int, channels: int) -> int:
    """Return the rows of tiles of a band: few where weights stay near, else as many as memory allows."""
    least = min(down, -(-LEAST_COLUMNS // across))
    if point_bytes * input_channels * channels <= NEAR_BYTES:
        return least
    most = min(down, max(least, MOST_BYTES // (point_bytes * across * (input_channels + channels))))
    return -(-down // -(-down // most))  # bands alike


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


def kernel_matrix(size: int) -> npt.NDArray[np.float64]:
    """Return G: (m + 2) x 3."""
    if size == 2:
        return np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    points = [(_SMALL, _LARGE), (-_SMALL, _LARGE), (_LARGE, _SMALL), (-_LARGE, _SMALL)]
    rows = [np.array([1, x, x * x]) / (2 * x * x * (x * x - other * other)) for x, other in points]
    return np.array([[1, 0, 0], *rows, [0, 0, 1]])
