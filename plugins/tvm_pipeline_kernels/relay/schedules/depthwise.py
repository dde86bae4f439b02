"""A depthwise convolution in blocked layout: each channel of its own, few products for each number that is read.

    for blocks, bands of rows:                        in parallel
      pad the rows that the band reads                stays in the nearest cache
      for rows, tiles of columns:
        for kernel rows and columns:                  unrolled
          for columns of the tile:                    unrolled, one multiply-add of vectors each
        what follows: bias, activation; store

Memory bounds it, not arithmetic. TOPI's pads the whole tensor first, which writes and reads all of it once more; here a
band of rows is padded where it is used. The order of the sums is TOPI's, and so is every bit.
"""

from __future__ import annotations

from typing import Any

from tvm import te

from tvm_pipeline_kernels.choices import DEPTHWISE
from tvm_pipeline_kernels.relay.schedules.choice_context import chosen
from tvm_pipeline_kernels.relay.schedules.conv2d import applies
from tvm_pipeline_kernels.tiles import Band, band_rule

MOST_UNROLLED = 512  # multiply-adds in a row: beyond, the code leaves the cache of instructions


def in_bands(s: te.Schedule, output: te.Tensor, band: Band) -> tuple[Any, Any]:
    """Let `output` be stored by bands, in parallel; return the loop of bands, and that of tiles of columns in one."""
    n, block, row, column, channel = s[output].op.axis
    row_outer, row = s[output].split(row, factor=band.rows)
    column_outer, column = s[output].split(column, factor=band.columns)
    s[output].reorder(n, block, row_outer, row, column_outer, column, channel)
    s[output].vectorize(channel)
    s[output].unroll(column)
    bands = s[output].fuse(n, block, row_outer)
    s[output].parallel(bands)
    return bands, column_outer


def schedule(
    s: te.Schedule, config: Any, data: te.Tensor, kernel: te.Tensor, convolution: te.Tensor, output: te.Tensor
) -> bool:
    """Schedule a depthwise convolution and what is fused to it; return whether it was ours to schedule.

    Config and tensors are as in `conv2d.schedule`, but for the kernel: (blocks, 1, height, width, 1, channels of a
    block).
    """
    if not applies(convolution, output):
        return False
    _, _, height, width, _ = (int(extent) for extent in convolution.shape)
    choice = chosen(config, DEPTHWISE)
    band = Band(*choice) if choice else band_rule(height, width)
    sums = s.cache_write(convolution, "global")

    bands, column_outer = in_bands(s, output, band)
    if isinstance(data.op, te.ComputeOp) and "pad" in data.op.tag:
        s[data].compute_at(s[output], bands)
        s[data].vectorize(s[data].op.axis[-1])

    if convolution.op != output.op:
        s[convolution].compute_at(s[output], column_outer)
        _, _, _, column, channel = s[convolution].op.axis
        s[convolution].vectorize(channel)
        s[convolution].unroll(column)
    s[sums].compute_at(s[output], column_outer)

    n, block, row, column, channel = s[sums].op.axis
    kernel_row, kernel_column = s[sums].op.reduce_axis
    s[sums].reorder(n, block, kernel_row, kernel_column, row, column, channel)
    s[sums].vectorize(channel)
    s[sums].unroll(column)
    if int(kernel.shape[2]) * int(kernel.shape[3]) * band.columns <= MOST_UNROLLED:
        s[sums].unroll(kernel_row)
        s[sums].unroll(kernel_column)
    return True
