"""A grouped convolution: channels are mixed within their group only. There are three forms.

*Groups of whole blocks* are dense convolutions of their own, as `conv2d.py` has them:

    for chunks of blocks, tiles of rows:                       in parallel
      for tiles of columns:
        for input blocks of the group, kernel rows, kernel columns, channels of a block:
          for rows, columns, blocks of the tile:               unrolled, one multiply-add of vectors each
        for blocks, rows, columns of the tile: what follows; store

*Blocks of whole groups*, as ResNeXt's 4 groups of 4 channels in a vector of 16: the number that a lane multiplies is
one of its own group, and one shuffle of a vector of the input brings these numbers to all lanes. Nothing is multiplied
for nothing, and images stay in blocks:

    for blocks, bands of rows:                                 in parallel
      pad the rows that the band reads                         stays in the nearest cache
      for rows, tiles of columns:
        for kernel rows, kernel columns:
          for columns of the tile, channels of a group:        unrolled, a shuffle and a multiply-add of vectors each
        what follows; store

*All others*, as ShuffleNet's groups of 34 channels, take plain images: `group_pixels.py`. `layout` says which form a
convolution has. Depthwise convolutions with several outputs for each channel are among the others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from tvm import s_tir, te, tirx, topi
from tvm.s_tir.schedule import SBlockRV
from tvm.script import tirx as T  # noqa: N812 - its name in every script of TVM

from tvm_pipeline_kernels.relax.schedules import group_pixels
from tvm_pipeline_kernels.relax.schedules.cores import Cores
from tvm_pipeline_kernels.relax.schedules.epilogue import PAD, RULE, in_registers, output, padding, shape_of
from tvm_pipeline_kernels.relax.schedules.stored_weights import widened
from tvm_pipeline_kernels.tiles import BAND_COLUMNS, band_rule, channel_block, register_tile

NAME = "group_conv2d"
LEAST_COLUMNS = 4  # of a tile of shuffles


def layout(channels: int, outputs: int, groups: int, lanes: int) -> Literal["blocks", "NCHW"]:
    """Return how images are stored for a grouped convolution, before and behind it.

    Args:
        channels, outputs: of the images, all groups together.
        groups: of both.
        lanes: float32 in a vector.

    Examples:
        >>> layout(128, 128, 32, 16)  # ResNeXt
        'blocks'
        >>> layout(136, 136, 4, 16)  # ShuffleNet
        'NCHW'
    """
    block, written = channel_block(channels, lanes), channel_block(outputs, lanes)
    depth, each = channels // groups, outputs // groups
    is_of_blocks = depth % block == 0 and each % written == 0
    return "blocks" if is_of_blocks or (1 < depth == each and block % depth == 0) else "NCHW"


def packed(weights: np.ndarray, groups: int, lanes: int) -> np.ndarray:
    """Return the kernel of a convolution in blocks.

    Args:
        weights: (outputs, channels of a group, kernel rows, kernel columns).

    Returns:
        (output blocks, input blocks of a group, kernel rows, kernel columns, terms, channels of a block); the terms
        are the channels of an input block, or those of a group where several are in a block.
    """
    outputs, depth, *window = weights.shape
    block, terms = channel_block(outputs, lanes), min(depth, channel_block(depth * groups, lanes))
    parted = weights.reshape(outputs // block, block, depth // terms, terms, *window)
    return np.ascontiguousarray(parted.transpose(0, 2, 4, 5, 3, 1))


def compute(
    data: te.Tensor,
    kernel: te.Tensor,
    groups: int,
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    lanes: int,
) -> te.Tensor:
    """Return the convolution, in the layout of `data`: that of `layout`.

    Args:
        data: (n, input blocks, height, width, channels of a block), or a plain image (n, channels, height, width).
        kernel: that of `packed`, or (outputs, channels of a group, kernel rows, kernel columns) for plain images.
        groups: of channels.
        strides, dilation: of rows and of columns.
        padding: top, left, bottom, right.
        lanes: float32 in a vector.
    """
    if len(data.shape) == 4:
        return group_pixels.compute(data, kernel, groups, strides, padding, dilation, lanes, NAME)
    top, left, bottom, right = padding
    n, _, height, width, in_block = (int(extent) for extent in data.shape)
    blocks, chunks, rows, columns, terms, block = (int(extent) for extent in kernel.shape)
    height = (height + top + bottom - dilation[0] * (rows - 1) - 1) // strides[0] + 1
    width = (width + left + right - dilation[1] * (columns - 1) - 1) // strides[1] + 1
    each = blocks * block // groups
    tile = 1 if terms == in_block else _columns(width)
    computed = -(-width // tile) * tile  # shuffles are of whole tiles
    right += (computed - width) * strides[1]
    pads = (0, 0, top, left, 0), (0, 0, bottom, right, 0)
    padded = topi.nn.pad(data, *pads, name=PAD) if top or left or bottom or right else data
    chunk, row, column, term = axes = [
        te.reduce_axis((0, extent), name)
        for extent, name in zip((chunks, rows, columns, terms), ("in_chunk", "row", "column", "term"), strict=True)
    ]

    def sums(image: Any, out: Any, y: Any, x: Any, channel: Any) -> Any:
        at = y * strides[0] + row * dilation[0], x * strides[1] + column * dilation[1]
        if terms == in_block:
            value = padded(image, tirx.floordiv(out * block, each) * chunks + chunk, *at, term)
        else:
            value = padded(image, out, *at, tirx.floordiv(channel, terms) * terms + term)
        return te.sum(value * widened(kernel(out, chunk, row, column, term, channel)), axis=axes)

    if computed == width:
        return te.compute((n, blocks, height, width, block), sums, name=NAME, attrs={RULE: NAME})
    whole = te.compute((n, blocks, height, computed, block), sums, name="whole_tiles")
    return te.compute((n, blocks, height, width, block), lambda *at: whole(*at), name=NAME, attrs={RULE: NAME})


def schedule(s: s_tir.Schedule, anchor: SBlockRV, cores: Cores) -> None:
    """Schedule a convolution of `compute` and what is fused to it."""
    if len(shape_of(s, anchor)) == 4:
        group_pixels.schedule(s, anchor, cores)
        return
    sums = anchor
    if len(s.get(anchor).reads) == 1:  # a cut from whole tiles
        (sums,) = s.get_producers(anchor)
    pad = padding(s, sums)
    last = output(s, anchor, cores) if s.get_consumers(anchor) or sums is anchor else anchor
    if sums is not anchor and last is not anchor:
        s.compute_inline(anchor)
    data, kernel = ([int(extent) for extent in read.source.shape] for read in s.get(sums).reads)
    if kernel[4] == data[4]:
        _schedule_blocks(s, pad, sums, last, kernel, cores)
    else:
        _schedule_shuffled(s, pad, sums, last, kernel[4])


def _schedule_blocks(
    s: s_tir.Schedule, pad: SBlockRV | None, sums: SBlockRV, last: SBlockRV, kernel: Sequence[int], cores: Cores
) -> None:
    """Schedule a convolution whose groups are of whole blocks."""
    _, blocks, height, width, block = shape_of(s, sums)
    groups = int(s.get(sums).reads[0].source.shape[1]) // kernel[1]
    block_bytes = 4 * math.prod(kernel[1:])
    tile = register_tile(blocks // groups, -(-block // cores.lanes), height, width, cores.registers, block_bytes)
    if pad is not None:
        n, chunk, row, _, channel = s.get_loops(pad)
        s.vectorize(channel)
        s.parallel(s.fuse(n, chunk, row))

    n, chunk, row, column, channel = s.get_loops(last)
    chunk_outer, chunk = s.split(chunk, [None, tile.chunks])
    row_outer, row = s.split(row, [None, tile.rows])
    column_outer, column = s.split(column, [None, tile.columns])
    s.reorder(n, chunk_outer, row_outer, column_outer, chunk, row, column, channel)
    if width % tile.columns:
        s.annotate(column_outer, "pragma_loop_partition_hint", True)
    s.parallel(s.fuse(n, chunk_outer, row_outer))
    s.compute_at(sums, column_outer, preserve_unit_loops=True)
    in_registers(s, chunk, row, column, channel)
    *_, chunk, row, column, channel, in_chunk, kernel_row, kernel_column, term = s.get_loops(sums)
    s.reorder(in_chunk, kernel_row, kernel_column, term, row, column, chunk, channel)
    in_registers(s, row, column, chunk, channel)
    in_registers(s, *s.get_loops(s.decompose_reduction(sums, in_chunk))[-4:])
    s.set_scope(sums, 0, "local")


def _schedule_shuffled(s: s_tir.Schedule, pad: SBlockRV | None, sums: SBlockRV, last: SBlockRV, terms: int) -> None:
    """Schedule a convolution whose blocks are of whole groups."""
    *_, height, width, block = shape_of(s, last)
    dtype = str(s.get(sums).reads[1].source.dtype)
    n, chunk, row, column, channel = s.get_loops(last)
    rows = band_rule(height, width).rows
    band, row = s.split(row, [None, rows if height % rows == 0 else height])  # shuffles are of whole bands
    column_outer, column = s.split(column, [None, _columns(width)])
    s.reorder(n, chunk, band, row, column_outer, column, channel)
    bands = s.fuse(n, chunk, band)
    s.parallel(bands)
    s.compute_at(sums, column_outer, preserve_unit_loops=True)
    in_registers(s, column, channel)
    if pad is not None:
        s.compute_at(pad, bands, preserve_unit_loops=True)
        s.vectorize(s.get_loops(pad)[-1])
    *_, row, column, channel, in_chunk, kernel_row, kernel_column, term = s.get_loops(sums)
    s.reorder(in_chunk, kernel_row, kernel_column, row, column, term, channel)
    s.unroll(kernel_column)
    s.unroll(column)
    in_registers(s, *s.get_loops(s.decompose_reduction(sums, in_chunk))[-2:])
    s.set_scope(sums, 0, "local")
    s.tensorize(term, _shuffled(block, terms, dtype))


def _columns(width: int) -> int:
    """Return the columns of a tile of shuffles: those of the least that is computed, and of the most at once."""
    choices = range(min(width, LEAST_COLUMNS), BAND_COLUMNS + 1)
    return min(choices, key=lambda columns: (-(-width // columns) * columns, -columns))


@functools.cache
def _shuffled(block: int, terms: int, dtype: str) -> str:
    """Return the name of TVM's intrinsic that adds up the products of a vector with the channels of its groups.

    for terms, channels of a block:   sums[channel] += data[channel // terms * terms + term] * kernel[term, channel]
    ->  for terms:                    sums += shuffle(data) * kernel[term]
    """
    lanes = tirx.Ramp(0, 1, block)

    def product(data: Any, kernel: Any, term: Any, channel: Any) -> Any:
        return data[channel // terms * terms + term] * widened(kernel[term, channel])

    def total(sums: Any, data: Any, kernel: Any) -> Any:
        value = sums[lanes]
        for term in range(terms):
            numbers = tirx.Shuffle([data[lanes]], [lane // terms * terms + term for lane in range(block)])
            value = value + numbers * widened(kernel[term, lanes])
        return value

    @T.prim_func(s_tir=True)
    def loops(data_at: T.handle, kernel_at: T.handle, sums_at: T.handle) -> None:
        data = T.match_buffer(data_at, (block,), offset_factor=1)
        kernel = T.match_buffer(kernel_at, (terms, block), dtype, offset_factor=1)
        sums = T.match_buffer(sums_at, (block,), offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(sums[0:block], data[0:block], kernel[0:terms, 0:block])
            T.writes(sums[0:block])
            for t in T.serial(terms):
                for c in T.serial(block):
                    with T.sblock("update"):
                        channel, term = T.axis.remap("SR", [c, t])
                        sums[channel] = sums[channel] + product(data, kernel, term, channel)

    @T.prim_func(s_tir=True)
    def vectors(data_at: T.handle, kernel_at: T.handle, sums_at: T.handle) -> None:
        data = T.match_buffer(data_at, (block,), offset_factor=1)
        kernel = T.match_buffer(kernel_at, (terms, block), dtype, offset_factor=1)
        sums = T.match_buffer(sums_at, (block,), offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(sums[0:block], data[0:block], kernel[0:terms, 0:block])
            T.writes(sums[0:block])
            sums[lanes] = total(sums, data, kernel)

    name = f"tvm_pipeline.shuffled_{block}_{terms}_{dtype}"
    s_tir.TensorIntrin.register(name, loops, vectors, override=True)
    return name
