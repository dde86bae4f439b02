"""A depthwise convolution in blocked layout: each channel of its own, few products for each number that is read.

    for blocks, bands of rows:                        in parallel
      pad the rows that the band reads                stays in the nearest cache
      for rows, tiles of columns:
        for kernel rows and columns:                  unrolled
          for columns of the tile:                    unrolled, one multiply-add of vectors each
        what follows: bias, activation; store

Memory bounds it, not arithmetic, so a band of rows is padded where it is used. The order of the sums is that of Relay's
schedule. A convolution of single channels with several outputs each is a grouped one: `group_conv2d.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np
from tvm import s_tir, te, topi
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvm_pipeline_kernels.relax.schedules.choice import Attributes, chosen
from tvm_pipeline_kernels.relax.schedules.cores import Cores
from tvm_pipeline_kernels.relax.schedules.epilogue import RULE, output, padding, shape_of
from tvm_pipeline_kernels.relax.schedules.stored_weights import widened
from tvm_pipeline_kernels.tiles import Band, band_rule

NAME = "depthwise"
MOST_UNROLLED = 512  # multiply-adds in a row: beyond, the code leaves the cache of instructions


def packed(weights: np.ndarray, block: int) -> np.ndarray:
    """Return the kernel (blocks, rows, columns, channels of a block) of weights (channels, 1, rows, columns)."""
    channels, _, *window = weights.shape
    return np.ascontiguousarray(weights.reshape(channels // block, block, *window).transpose(0, 2, 3, 1))


def compute(
    data: te.Tensor,
    kernel: te.Tensor,
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    tuned: Attributes = MappingProxyType({}),
) -> te.Tensor:
    """Return the convolution of each channel by itself: (n, blocks, height, width, channels of a block).

    Args:
        data: (n, blocks, height, width, channels of a block).
        kernel: (blocks, kernel rows, kernel columns, channels of a block).
        strides, dilation: of rows and columns.
        padding: top, left, bottom, right.
        tuned: see `choice.attributes`.
    """
    top, left, bottom, right = padding
    n, blocks, height, width, block = data.shape
    _, rows, columns, _ = kernel.shape
    padded = topi.nn.pad(data, (0, 0, top, left, 0), (0, 0, bottom, right, 0), name="pad") if any(padding) else data
    row, column = te.reduce_axis((0, rows), "kernel_row"), te.reduce_axis((0, columns), "kernel_column")
    shape = (
        n,
        blocks,
        (height + top + bottom - dilation[0] * (rows - 1) - 1) // strides[0] + 1,
        (width + left + right - dilation[1] * (columns - 1) - 1) // strides[1] + 1,
        block,
    )
    return te.compute(
        shape,
        lambda image, chunk, y, x, channel: te.sum(
            padded[image, chunk, y * strides[0] + row * dilation[0], x * strides[1] + column * dilation[1], channel]
            * widened(kernel(chunk, row, column, channel)),
            axis=[row, column],
        ),
        name=NAME,
        attrs={RULE: NAME, **tuned},
    )


def schedule(s: s_tir.Schedule, anchor: s_tir.schedule.SBlockRV, cores: Cores) -> None:
    """Schedule a convolution of `compute` and what is fused to it."""
    _, _, height, width, _ = shape_of(s, anchor)
    _, kernel_rows, kernel_columns, _ = (int(extent) for extent in s.get(anchor).reads[1].source.shape)
    band = chosen(s, anchor, Band) or band_rule(height, width)
    pad = padding(s, anchor)
    last = output(s, anchor, cores)

    bands, column_outer = in_bands(s, last, band)
    if width % band.columns:
        s.annotate(column_outer, "pragma_loop_partition_hint", True)

    s.compute_at(anchor, column_outer, preserve_unit_loops=True)
    *_, row, column, channel, kernel_row, kernel_column = s.get_loops(anchor)
    s.reorder(kernel_row, kernel_column, row, column, channel)
    s.vectorize(channel)
    s.unroll(column)
    *_, column, channel = s.get_loops(s.decompose_reduction(anchor, kernel_row))
    s.vectorize(channel)
    s.unroll(column)
    s.set_scope(anchor, 0, "local")
    if kernel_rows * kernel_columns * band.columns <= MOST_UNROLLED:
        s.unroll(kernel_row)
        s.unroll(kernel_column)
    if pad is not None:
        s.compute_at(pad, bands, preserve_unit_loops=True)
        s.vectorize(s.get_loops(pad)[-1])


def in_bands(s: s_tir.Schedule, last: SBlockRV, band: Band) -> tuple[LoopRV, LoopRV]:
    """Let a block of five loops be stored by bands of rows, in parallel; return the loops of bands and column tiles."""
    n, block, row, column, channel = s.get_loops(last)
    row_outer, row = s.split(row, [None, band.rows])
    column_outer, column = s.split(column, [None, band.columns])
    s.reorder(n, block, row_outer, row, column_outer, column, channel)
    bands = s.fuse(n, block, row_outer)
    s.parallel(bands)
    s.vectorize(channel)
    s.unroll(column)
    return bands, column_outer
