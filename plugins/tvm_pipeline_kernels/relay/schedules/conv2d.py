"""A convolution in blocked layout as loops over register tiles.

    for chunks of blocks, tiles of rows:                       in parallel
      for tiles of columns:
        for input blocks, kernel rows, kernel columns, channels of a block:       the reduction
          for rows, columns, blocks of the tile:               unrolled, one multiply-add of vectors each
        for blocks, rows, columns of the tile:                 what follows: bias, addition, activation
          store

Unlike TOPI's, a tile takes several blocks of output channels and several rows, and it need not divide the image. The
order of the reduction is TOPI's, so every bit of the result is, too, where the blocks of the input are the same: TOPI
never makes them larger than those of the output. In the innermost loops the blocks come last: then one broadcast of
the input serves them all before the next is loaded. The other way round LLVM loads all broadcasts first and spills the
sums.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import te
from tvm.autotvm.task.space import SplitEntity
from tvm.target.x86 import get_simd_32bit_lanes
from tvm.topi.utils import get_const_tuple

from tvm_pipeline_kernels.choices import CONV2D
from tvm_pipeline_kernels.relay.schedules import lowering
from tvm_pipeline_kernels.relay.schedules.choice_context import chosen, current_cores
from tvm_pipeline_kernels.tiles import Tile, byte_block, channel_block, register_tile


def set_channel_blocks(config: Any, workload: Any) -> None:
    """Set the channels in a block of the input and of the output, by one rule for both."""
    lanes = get_simd_32bit_lanes()
    for name, channels in (("tile_ic", int(workload.in_filter)), ("tile_oc", int(workload.out_filter))):
        of_bytes = byte_block(channels, lanes) if workload.in_dtype == "uint8" else 0
        block = of_bytes or channel_block(channels, lanes)
        config[name] = SplitEntity([channels // block, block])


def applies(convolution: te.Tensor, output: te.Tensor) -> bool:
    """Return whether our schedules serve: float32, of a known shape, and stored in the blocks that are computed."""
    shapes = [get_const_tuple(tensor.shape) for tensor in (convolution, output)]
    is_known = all(isinstance(extent, int) for extent in shapes[0])
    return convolution.dtype == output.dtype == "float32" and is_known and shapes[0] == shapes[1]


def in_tiles(s: te.Schedule, data: te.Tensor, output: te.Tensor, tile: Tile) -> Any:
    """Let `output` be stored by tiles, in parallel, and `data` be padded in a pass before; return the loop of tiles."""
    if isinstance(data.op, te.ComputeOp) and "pad" in data.op.tag:
        n, chunk, row, _, channel = s[data].op.axis
        s[data].vectorize(channel)
        s[data].parallel(s[data].fuse(n, chunk, row))
    n, chunk, row, column, channel = s[output].op.axis
    chunk_outer, chunk = s[output].split(chunk, factor=tile.chunks)
    row_outer, row = s[output].split(row, factor=tile.rows)
    column_outer, column = s[output].split(column, factor=tile.columns)
    s[output].reorder(n, chunk_outer, row_outer, column_outer, chunk, row, column, channel)
    s[output].vectorize(channel)
    for axis in (chunk, row, column):
        s[output].unroll(axis)
    s[output].parallel(s[output].fuse(n, chunk_outer, row_outer))
    return column_outer


def schedule(
    s: te.Schedule, config: Any, data: te.Tensor, kernel: te.Tensor, convolution: te.Tensor, output: te.Tensor
) -> bool:
    """Schedule a convolution and what is fused to it; return whether it was ours to schedule.

    Args:
        config: TOPI's, which has the tile where tuning chose one.
        data: (n, blocks, height, width, channels of a block), or that padded.
        kernel: (blocks, input blocks, height, width, input channels of a block, channels of a block).
        convolution: (n, blocks, height, width, channels of a block).
        output: what the last of the fused operators gives.
    """
    if not applies(convolution, output):
        return False
    _, blocks, height, width, block = (int(extent) for extent in convolution.shape)
    choice = chosen(config, CONV2D)
    if choice:
        tile = Tile(*choice)
    else:
        block_bytes = 4 * math.prod(get_const_tuple(kernel.shape)[1:])
        cores = current_cores()
        tile = register_tile(blocks, -(-block // cores.lanes), height, width, cores.registers, block_bytes)
    sums = s.cache_write(convolution, "global")

    column_outer = in_tiles(s, data, output, tile)

    if convolution.op != output.op:
        s[convolution].compute_at(s[output], column_outer)
        _, chunk, row, column, channel = s[convolution].op.axis
        s[convolution].vectorize(channel)
        for axis in (chunk, row, column):
            s[convolution].unroll(axis)
    s[sums].compute_at(s[output], column_outer)

    n, chunk, row, column, channel = s[sums].op.axis
    term, kernel_row, kernel_column = s[sums].op.reduce_axis
    term_outer, term = s[sums].split(term, factor=int(data.shape[4]))
    s[sums].reorder(n, term_outer, kernel_row, kernel_column, term, row, column, chunk, channel)
    s[sums].vectorize(channel)
    for axis in (row, column, chunk):
        s[sums].unroll(axis)
    lowering.mark(s, sums, term, kernel, tile.chunks, -(-height // tile.rows))
    return True
