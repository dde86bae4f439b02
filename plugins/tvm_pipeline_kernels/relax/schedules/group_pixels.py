"""A grouped convolution of plain images whose channels of a group fill no blocks: vectors run along the pixels.

    for images, groups, bands of rows:                  in parallel
      copy the pixels of the group, padded              only where they are not read in a row, a vector at a time
      for tiles of output channels:
        for tiles of vectors:
          for blocks of input channels, kernel rows, kernel columns, channels:       the reduction
            for vectors, channels of the tile:          unrolled, one multiply-add of vectors each
        for channels of the tile, pixels: what follows: bias, activation; store

The pixels of a padded image lie in a row, `pitch` numbers to a row of the image. So a kernel's row and column are one
distance for all pixels, and vectors cross the ends of rows; what they compute there is not stored. With a stride each
of its phases is such an image: pixel (y, x) lies in phase (y % stride, x % stride) at (y // stride, x // stride).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import s_tir, te, tirx
from tvm.s_tir.schedule import SBlockRV

from tvm_pipeline_kernels.relax.schedules.cores import Cores
from tvm_pipeline_kernels.relax.schedules.epilogue import PAD, RULE, output, shape_of
from tvm_pipeline_kernels.relax.schedules.stored_weights import widened
from tvm_pipeline_kernels.tiles import channel_block, pixel_band, register_tile, stored_pixels


def compute(
    data: te.Tensor,
    kernel: te.Tensor,
    groups: int,
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    lanes: int,
    rule: str,
) -> te.Tensor:
    """Return the convolution (n, channels, height, width).

    Args:
        data: (n, input channels, height, width).
        kernel: (channels, input channels of a group, kernel rows, kernel columns).
        groups: of input channels, and of channels.
        strides, dilation: of rows and columns.
        padding: top, left, bottom, right.
        lanes: pixels in a vector.
        rule: the annotation of the main block.
    """
    top, left, bottom, right = padding
    n, read, *extents = (int(extent) for extent in data.shape)
    channels, depth, rows, columns = (int(extent) for extent in kernel.shape)
    each = channels // groups
    padded = extents[0] + top + bottom, extents[1] + left + right
    height, width = (
        (padded[axis] - dilation[axis] * (window - 1) - 1) // strides[axis] + 1
        for axis, window in enumerate((rows, columns))
    )
    pitch = math.ceil(padded[1] / strides[1])
    vectors = math.ceil(((height - 1) * pitch + width) / lanes)
    is_copied = [*strides, *padding, rows, columns] != [1, 1, 0, 0, 0, 0, 1, 1] or height * width % lanes
    pixels = data
    if is_copied:
        last = (
            vectors * lanes
            - 1
            + dilation[0] * (rows - 1) // strides[0] * pitch
            + dilation[1] * (columns - 1) // strides[1]
        )

        def copied(image: Any, channel: Any, phase: Any, y: Any, x: Any) -> Any:
            row, column = y * strides[0] + phase // strides[1] - top, x * strides[1] + phase % strides[1] - left
            inside = tirx.all(row >= 0, row < extents[0], column >= 0, column < extents[1])
            return tirx.if_then_else(inside, data[image, channel, row, column], tirx.const(0, data.dtype))

        pixels = te.compute((n, read, strides[0] * strides[1], math.ceil((last + 1) / pitch), pitch), copied, name=PAD)
    term = te.reduce_axis((0, depth), "term")
    row, column = te.reduce_axis((0, rows), "kernel_row"), te.reduce_axis((0, columns), "kernel_column")

    def sums(image: Any, out: Any, vector: Any, lane: Any) -> Any:
        y, x = row * dilation[0], column * dilation[1]
        pixel = vector * lanes + lane + y // strides[0] * pitch + x // strides[1]
        channel = tirx.floordiv(out, each) * depth + term
        phase = (y % strides[0] * strides[1] + x % strides[1],) if is_copied else ()
        value = pixels(image, channel, *phase, tirx.floordiv(pixel, pitch), tirx.floormod(pixel, pitch))
        return te.sum(value * widened(kernel(out, term, row, column)), axis=[term, row, column])

    by_pixels = te.compute((n, channels, vectors, lanes), sums, name="by_pixels")

    def in_rows(image: Any, out: Any, y: Any, x: Any) -> Any:
        pixel = y * pitch + x
        return by_pixels[image, out, tirx.floordiv(pixel, lanes), tirx.floormod(pixel, lanes)]

    return te.compute((n, channels, height, width), in_rows, name=rule, attrs={RULE: rule})


def schedule(s: s_tir.Schedule, anchor: SBlockRV, cores: Cores) -> None:
    """Schedule a convolution of `compute` and what is fused to it."""
    (by_pixels,) = s.get_producers(anchor)
    copies = s.get_producers(by_pixels)
    _, channels, height, width = shape_of(s, anchor)
    *_, vectors, lanes = shape_of(s, by_pixels)
    kernel = s.get(by_pixels).reads[1].source
    _, depth, kernel_rows, kernel_columns = (int(extent) for extent in kernel.shape)
    groups = int(s.get(by_pixels).reads[0].source.shape[1]) // depth
    each = channels // groups
    band = height if copies else pixel_band(height, width, lanes)
    if not copies:
        vectors = band * width // lanes
    tile = register_tile(each, 1, 1, vectors, cores.registers, 4 * depth * kernel_rows * kernel_columns)
    last = output(s, anchor, cores) if s.get_consumers(anchor) else anchor

    image, channel, row, column = s.get_loops(last)
    group, channel = s.split(channel, [None, each])
    channel_outer, channel = s.split(channel, [None, tile.chunks])
    row_outer, row = s.split(row, [None, band])
    s.reorder(image, group, row_outer, channel_outer, channel, row, column)
    task = s.fuse(image, group, row_outer)
    s.parallel(task)
    if last is not anchor:
        s.compute_inline(anchor)
    s.compute_at(by_pixels, channel_outer, preserve_unit_loops=True)
    if copies:
        s.compute_at(copies[0], task, preserve_unit_loops=True)
    is_in_a_row = not copies or shape_of(s, copies[0])[-1] == width
    stored = s.fuse(row, column) if is_in_a_row else column
    _, stored = s.split(stored, [None, stored_pixels(band * width if is_in_a_row else width, lanes)])
    s.vectorize(stored)

    *_, channel, vector, lane, term, kernel_row, kernel_column = s.get_loops(by_pixels)
    vector_outer, vector = s.split(vector, [None, tile.columns])
    if vectors % tile.columns:
        s.annotate(vector_outer, "pragma_loop_partition_hint", True)
    term_outer, term = s.split(term, [None, channel_block(depth, channel_block(each, cores.lanes))])
    s.reorder(vector_outer, term_outer, kernel_row, kernel_column, term, vector, channel, lane)
    s.vectorize(lane)
    for loop in (vector, channel):
        s.unroll(loop)
    *_, channel, vector, lane = s.get_loops(s.decompose_reduction(by_pixels, term_outer))
    s.vectorize(lane)
    for loop in (vector, channel):
        s.unroll(loop)
