"""A convolution in blocked layout as loops over register tiles: Relay's schedule of the same name, in S-TIR.

for chunks of blocks, tiles of rows:                       in parallel
  for tiles of columns:
    for input blocks, kernel rows, kernel columns, channels of a block:       the reduction
      for rows, columns, blocks of the tile:               unrolled, one multiply-add of vectors each
    for blocks, rows, columns of the tile:                 what follows: bias, addition, activation
      store
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np
from tvm import s_tir, te, tirx

from tvm_pipeline_kernels.relax.schedules import lowering
from tvm_pipeline_kernels.relax.schedules.choice import Attributes, chosen
from tvm_pipeline_kernels.relax.schedules.cores import Cores
from tvm_pipeline_kernels.relax.schedules.epilogue import RULE, in_registers, output, padding, shape_of
from tvm_pipeline_kernels.relax.schedules.stored_weights import widened
from tvm_pipeline_kernels.tiles import SUMS_TO_HIDE_LATENCY, Tile, register_tile

NAME = "conv2d"


def packed(weights: np.ndarray, in_block: int, block: int) -> np.ndarray:
    """Return the kernel (blocks, input blocks, rows, columns, input channels of a block, channels of a block).

    Args:
        weights: (channels, input channels, kernel rows, kernel columns).
        in_block, block: channels in a block of the input and of the output.
    """
    channels, read, *window = weights.shape
    parted = weights.reshape(channels // block, block, read // in_block, in_block, *window)
    return np.ascontiguousarray(parted.transpose(0, 2, 4, 5, 3, 1))


def compute(
    data: te.Tensor,
    kernel: te.Tensor,
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    tuned: Attributes = MappingProxyType({}),
) -> te.Tensor:
    """Return a convolution of all channels in blocks: (n, blocks, height, width, channels of a block).

    Args:
        data: (n, input blocks, height, width, input channels of a block), or a plain image (n, channels, height,
            width), which is read as blocks of one channel.
        kernel: (blocks, input blocks, kernel rows, kernel columns, input channels of a block, channels of a block).
        strides, dilation: of rows and of columns.
        padding: top, left, bottom, right.
        tuned: see `choice.attributes`.
    """
    top, left, bottom, right = (int(extent) for extent in padding)
    (row_stride, column_stride), (row_step, column_step) = (map(int, each) for each in (strides, dilation))
    n, _, height, width, *_ = map(int, data.shape)
    blocks, in_blocks, kernel_rows, kernel_columns, in_block, block = map(int, kernel.shape)
    padded = data
    if top or left or bottom or right:
        padded = te.compute(
            (*data.shape[:2], height + top + bottom, width + left + right, *data.shape[4:]),
            lambda n, chunk, row, column, *channel: tirx.if_then_else(
                tirx.all(row >= top, row < top + height, column >= left, column < left + width),
                data(n, chunk, row - top, column - left, *channel),
                tirx.const(0, data.dtype),
            ),
            name="pad",
        )
    chunk, row, column, channel = (
        te.reduce_axis((0, extent), name)
        for extent, name in zip(
            (in_blocks, kernel_rows, kernel_columns, in_block),
            ("ic", "kernel_row", "kernel_column", "term"),
            strict=True,
        )
    )
    shape = (
        n,
        blocks,
        (height + top + bottom - row_step * (kernel_rows - 1) - 1) // row_stride + 1,
        (width + left + right - column_step * (kernel_columns - 1) - 1) // column_stride + 1,
        block,
    )
    inner = () if len(data.shape) == 4 else (channel,)
    return te.compute(
        shape,
        lambda n, o, y, x, c: te.sum(
            padded(n, chunk, y * row_stride + row * row_step, x * column_stride + column * column_step, *inner)
            * widened(kernel(o, chunk, row, column, channel, c)),
            axis=[chunk, row, column, channel],
        ),
        name=NAME,
        attrs={RULE: NAME, **tuned},
    )


def schedule(s: s_tir.Schedule, anchor: s_tir.schedule.SBlockRV, cores: Cores) -> None:
    """Schedule a convolution of `compute` and what is fused to it.

    LLVM unrolls the two innermost loops of a plain image, which has few channels. Neighbouring outputs share numbers of
    the input there, LLVM keeps these in registers, and sums no longer fit: 1.4 times as slow with AVX2. So a tile of a
    plain image is of one row, and the columns of the kernel, which such outputs share, are the outermost loop.
    """
    _, blocks, height, width, block = shape_of(s, anchor)
    data, kernel = (region.source for region in s.get(anchor).reads)
    is_plain = len(data.shape) == 4
    block_bytes = 4 * math.prod(map(int, kernel.shape[1:]))
    vectors = -(-block // cores.lanes)
    tile = chosen(s, anchor, Tile) or register_tile(
        blocks, vectors, 1 if is_plain else height, width, cores.registers, block_bytes
    )
    if kernel.dtype != data.dtype:
        tile = _widening_tile(tile, kernel, vectors, 1 if is_plain else height, width, cores)
    pad_in_parallel(s, anchor)
    last = output(s, anchor, cores)
    column_outer, stored = in_tiles(s, last, tile)
    if width % tile.columns:  # the last tile has code of its own, rather than a question at each column
        s.annotate(column_outer, "pragma_loop_partition_hint", True)

    s.compute_at(anchor, column_outer, preserve_unit_loops=True)
    *_, chunk, row, column, channel, in_chunk, kernel_row, kernel_column, term = s.get_loops(anchor)
    first = (kernel_column, kernel_row, in_chunk) if is_plain else (in_chunk, kernel_row, kernel_column)
    s.reorder(*first, term, row, column, chunk, channel)
    in_registers(s, row, column, chunk, channel)
    in_registers(s, *s.get_loops(s.decompose_reduction(anchor, first[0]))[-4:])
    in_registers(s, *stored)
    s.set_scope(anchor, 0, "local")
    reduction = in_chunk, kernel_row, kernel_column, term
    lowering.mark(s, s.get_loops(anchor)[0], reduction, kernel, tile.chunks, -(-height // tile.rows))


def _widening_tile(tile: Tile, kernel: tirx.Var, vectors: int, height: int, width: int, cores: Cores) -> Tile:
    """Return the tile for weights of 16 bits in the place of that for float32, which tuning may have chosen.

    The units of AVX-512 that multiply also widen weights, while a product takes its number of the input from memory at
    no cost. So a tile of one block, which widens one vector for all of its sums, is 1.09 times as fast. With AVX2 the
    two steps of bfloat16 need a register more for each weight: 1.04 to 1.1 times as fast. Other cores keep the tile.
    """
    blocks, *rest = map(int, kernel.shape)
    extents = vectors, height, width
    if cores.lanes == 16:
        alone = register_tile(1, *extents, cores.registers, 4 * math.prod(rest))
        return alone if alone.rows * alone.columns > SUMS_TO_HIDE_LATENCY else tile
    if cores.lanes == 8 and kernel.dtype == "uint16":
        return register_tile(blocks, *extents, cores.registers - 2, 4 * math.prod(rest))
    return tile


def in_tiles(
    s: s_tir.Schedule, last: s_tir.schedule.SBlockRV, tile: Tile
) -> tuple[s_tir.schedule.LoopRV, Sequence[s_tir.schedule.LoopRV]]:
    """Let a block of five loops be stored by tiles, in parallel; return the loop of column tiles, and those in it."""
    n, chunk, row, column, channel = s.get_loops(last)
    chunk_outer, chunk = s.split(chunk, [None, tile.chunks])
    row_outer, row = s.split(row, [None, tile.rows])
    column_outer, column = s.split(column, [None, tile.columns])
    s.reorder(n, chunk_outer, row_outer, column_outer, chunk, row, column, channel)
    s.parallel(s.fuse(n, chunk_outer, row_outer))
    return column_outer, (chunk, row, column, channel)


def pad_in_parallel(s: s_tir.Schedule, anchor: s_tir.schedule.SBlockRV) -> None:
    """Give the padding before an anchor, if there is one, parallel loops that come before all others."""
    pad = padding(s, anchor)
    if pad is None:
        return
    n, chunk, row, *_, innermost = s.get_loops(pad)
    if len(shape_of(s, pad)) == 5:
        s.vectorize(innermost)
    s.parallel(s.fuse(n, chunk, row))
