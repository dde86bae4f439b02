"""A grouped convolution of 1x1: channels are mixed within their group only, so vectors run along the pixels.

The channels of a group seldom fill vectors: ShuffleNet has 34 of them. TOPI's vectors hold as many channels as divide
that number, 2 or 4. Pixels are many, whatever the channels are, and the output stays in NCHW, as Relay has it: what
mixes the groups afterwards moves whole images.

    for images, groups, bands of rows:                  in parallel
      copy the pixels of the group, up to full vectors  only where the pixels of an image do not fill them
      for tiles of output channels:
        for tiles of vectors:
          for blocks of input channels, channels:       the reduction
            for vectors, channels of the tile:          unrolled, one multiply-add of vectors each
        for channels of the tile, pixels: what follows: bias, activation; store

The order of the sums is TOPI's, and so is every bit. Other grouped convolutions stay TOPI's: to pad the few channels of
a group costs more than is gained.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import te, tir
from tvm.target.x86 import get_simd_32bit_lanes
from tvm.topi.nn.utils import get_pad_tuple
from tvm.topi.utils import get_const_tuple

from tvm_pipeline_kernels.relay.schedules.anchor import scheduled
from tvm_pipeline_kernels.relay.schedules.choice_context import current_cores
from tvm_pipeline_kernels.tiles import channel_block, pixel_band, register_tile, stored_pixels

TAG = "group_conv2d_by_pixels"


def compute(
    data: te.Tensor, kernel: te.Tensor, strides: Any, padding: Any, dilation: Any, groups: int, out_dtype: str
) -> te.Tensor | None:
    """Return the convolution (n, channels, height, width); None where it is not ours to compute.

    Args:
        data: (n, input channels, height, width).
        kernel: (channels, input channels of a group, 1, 1).
        strides, padding, dilation, groups, out_dtype: as of `nn.conv2d`.
    """
    shapes = get_const_tuple(data.shape), get_const_tuple(kernel.shape)
    is_known = all(isinstance(extent, int) for shape in shapes for extent in shape)
    if not is_known or not data.dtype == kernel.dtype == out_dtype == "float32":
        return None
    (n, read, height, width), (channels, depth, *window) = shapes
    if [*window, *map(int, strides)] != [1] * 4 or any(map(int, get_pad_tuple(padding, window))):
        return None
    lanes, each = get_simd_32bit_lanes(), channels // groups
    vectors = math.ceil(height * width / lanes)
    pixels = data
    if height * width % lanes:
        zero = tir.const(0.0, "float32")
        pixels = te.compute(
            (n, read, math.ceil(vectors * lanes / width), width),
            lambda image, channel, y, x: tir.if_then_else(y < height, data[image, channel, y, x], zero),
            name="pixels",
        )
    term = te.reduce_axis((0, depth), name="term")

    def sums(image: Any, out: Any, vector: Any, lane: Any) -> Any:
        pixel = vector * lanes + lane
        value = pixels[image, out // each * depth + term, pixel // width, pixel % width]
        return te.sum(value * kernel[out, term, 0, 0], axis=term)

    by_pixels = te.compute((n, channels, vectors, lanes), sums, name="by_pixels", attrs={"depth": depth, "each": each})

    def in_rows(image: Any, out: Any, y: Any, x: Any) -> Any:
        pixel = y * width + x
        return by_pixels[image, out, pixel // lanes, pixel % lanes]

    return te.compute((n, channels, height, width), in_rows, name="group_conv2d", tag=TAG)


def schedule(outs: list[te.Tensor]) -> te.Schedule | None:
    """Schedule what `compute` returned and what is fused to it; None where it is not among `outs`."""
    return scheduled(outs, TAG, _schedule)


def _schedule(s: te.Schedule, convolution: te.Tensor, output: te.Tensor) -> None:
    """Schedule the loops of `output`; what is fused may repeat the only pixel of an image."""
    (by_pixels,) = convolution.op.input_tensors
    pixels = by_pixels.op.input_tensors[0]
    depth, each = (int(by_pixels.op.attrs[name]) for name in ("depth", "each"))
    lanes = int(by_pixels.shape[3])
    height, width = get_const_tuple(output.shape)[2:]
    is_copied = isinstance(pixels.op, te.ComputeOp)
    band = height if is_copied else pixel_band(height, width, lanes)
    tile = register_tile(each, 1, 1, math.ceil(band * width / lanes), current_cores().registers, 4 * depth)

    image, channel, row, column = s[output].op.axis
    group, channel = s[output].split(channel, factor=each)
    channel_outer, channel = s[output].split(channel, factor=tile.chunks)
    row_outer, row = s[output].split(row, factor=band)
    s[output].reorder(image, group, row_outer, channel_outer, channel, row, column)
    task = s[output].fuse(image, group, row_outer)
    s[output].parallel(task)
    _, stored = s[output].split(s[output].fuse(row, column), factor=stored_pixels(band * width, lanes))
    s[output].vectorize(stored)
    if convolution.op != output.op:
        s[convolution].compute_inline()
    if is_copied:
        s[pixels].compute_at(s[output], task)

    s[by_pixels].compute_at(s[output], channel_outer)
    image, channel, vector, lane = s[by_pixels].op.axis
    (term,) = s[by_pixels].op.reduce_axis
    vector_outer, vector = s[by_pixels].split(vector, factor=tile.columns)
    term_outer, term = s[by_pixels].split(term, factor=channel_block(depth, channel_block(each, lanes)))
    s[by_pixels].reorder(image, vector_outer, term_outer, term, vector, channel, lane)
    s[by_pixels].vectorize(lane)
    for axis in (vector, channel):
        s[by_pixels].unroll(axis)
