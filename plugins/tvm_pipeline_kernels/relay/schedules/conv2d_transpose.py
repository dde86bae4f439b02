"""A transposed convolution as one convolution for each phase of its stride.

A stride of 2 spreads the input over every second row and column of the output. TOPI writes the zeros between them and
multiplies those, too: 3 of 4 products are for nothing. Row `y` of the output, however, reads only the kernel rows `t`
for which `y + padding - t` is a multiple of the stride, and columns likewise. So each *phase*, `y % stride` and
`x % stride`, is a convolution of the input itself with every stride-th row and column of the kernel.

    for rows y of the output, tiles of channels:                         in parallel
      for tiles of vectors along a row of the input:
        for blocks of input channels, kernel rows and columns of the phase, channels:       the reduction
          for vectors, channels and phases of the tile:                  unrolled, one multiply-add of vectors each
      for channels of the tile, columns, phases:                         the phases of a row take turns
        what follows: bias, activation; store

The output stays in NCHW, as Relay has it, so vectors run along a row and weights are broadcast: a tile of `channels`,
`phases` and `vectors` needs channels * phases * vectors registers for sums and channels * phases for weights, and
`tiles.py` chooses it. A row is stored when all its phases are known, in a loop that LLVM turns into shuffles. TOPI
adds the same products in the same order, and zeros, so every bit is its own.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import te, topi
from tvm.target.x86 import get_simd_32bit_lanes
from tvm.topi.nn.utils import get_pad_tuple
from tvm.topi.utils import get_const_tuple

from tvm_pipeline_kernels.relay.schedules.anchor import scheduled
from tvm_pipeline_kernels.relay.schedules.choice_context import current_cores
from tvm_pipeline_kernels.tiles import Phases, channel_block, register_tile

TAG = "conv2d_transpose_by_phases"


class _Axis(Phases):
    """Rows or columns, with what is multiplied in the terms of this IR."""

    def position(self, out: Any, tap: Any) -> Any:
        """Return which position of the padded input is multiplied; as in TOPI it grows with `tap`."""
        return (out + self.padding) // self.stride + tap + self.before - (self.taps - 1)

    def weight(self, out: Any, tap: Any) -> Any:
        """Return by which row of the kernel; it may lie behind the last where the stride does not divide them."""
        return (out + self.padding) % self.stride + self.stride * (self.taps - 1 - tap)

    def after(self, last: int) -> int:
        """Return the zeros that are read behind the input for outputs up to `last`."""
        return max(0, self.position(last, self.taps - 1) + 1 - self.before - self.read)


def _applies(data: te.Tensor, kernel: te.Tensor, strides: Any, out_dtype: str) -> bool:
    """Return whether ours serves: float32 of a known shape, and a tile of all phases that fits into the registers."""
    extents = [*get_const_tuple(data.shape), *get_const_tuple(kernel.shape)]
    is_known = all(isinstance(extent, int) for extent in extents)
    is_float = data.dtype == kernel.dtype == out_dtype == "float32"
    return is_known and is_float and 2 * int(strides[1]) + 1 < current_cores().registers


def compute(
    data: te.Tensor, kernel: te.Tensor, strides: Any, padding: Any, out_dtype: str, output_padding: Any
) -> te.Tensor | None:
    """Return the transposed convolution (n, channels, height, width); None where it is not ours to compute.

    Args:
        data: (n, input channels, height, width).
        kernel: (input channels, channels, height, width).
        strides, padding, out_dtype, output_padding: as of `nn.conv2d_transpose`.
    """
    if not _applies(data, kernel, strides, out_dtype):
        return None
    n, read, *extents = get_const_tuple(data.shape)
    _, channels, *kernels = get_const_tuple(kernel.shape)
    top, left, bottom, right = (int(pad) for pad in get_pad_tuple(padding, kernels))
    rows, columns = (
        _Axis(extent, taps, (extent - 1) * int(stride) - before - after + taps + int(more), int(stride), before)
        for extent, taps, stride, before, after, more in zip(
            extents, kernels, strides, (top, left), (bottom, right), output_padding, strict=True
        )
    )
    width = math.ceil(columns.written / columns.stride)  # of a phase
    lanes = min(get_simd_32bit_lanes(), 1 << (width.bit_length() - 1))
    vectors = math.ceil(width / lanes)
    before = [0, 0, rows.before, columns.before]
    after = [0, 0, rows.after(rows.written - 1), columns.after(vectors * lanes * columns.stride - 1)]
    padded = topi.nn.pad(data, before, after, name="padded") if any(before + after) else data

    channel = te.reduce_axis((0, read), name="channel")
    tap_row = te.reduce_axis((0, rows.taps), name="tap_row")
    tap_column = te.reduce_axis((0, columns.taps), name="tap_column")

    def sums(image: Any, out: Any, y: Any, phase: Any, vector: Any, lane: Any) -> Any:
        column = columns.position(phase, tap_column) + vector * lanes + lane
        weight = rows.weight(y, tap_row), columns.weight(phase, tap_column)
        inside = [
            at < axis.kernel for at, axis in zip(weight, (rows, columns), strict=True) if axis.kernel % axis.stride
        ]
        return te.sum(
            padded[image, channel, rows.position(y, tap_row), column] * kernel[channel, out, weight[0], weight[1]],
            axis=[channel, tap_row, tap_column],
            where=te.all(*inside) if inside else None,
        )

    by_phases = te.compute((n, channels, rows.written, columns.stride, vectors, lanes), sums, name="by_phases")

    def in_turns(image: Any, out: Any, y: Any, x: Any) -> Any:
        column = x // columns.stride
        return by_phases[image, out, y, x % columns.stride, column // lanes, column % lanes]

    extents = (n, channels, rows.written, columns.written)
    return te.compute(extents, in_turns, name="conv2d_transpose", tag=TAG)


def schedule(outs: list[te.Tensor]) -> te.Schedule | None:
    """Schedule what `compute` returned and what is fused to it; None where it is not among `outs`."""
    return scheduled(outs, TAG, _schedule)


def _schedule(s: te.Schedule, convolution: te.Tensor, output: te.Tensor) -> None:
    """Schedule the loops of `output`, of the same shape: Relay fuses nothing else to a convolution."""
    (by_phases,) = convolution.op.input_tensors
    data, kernel = by_phases.op.input_tensors
    _, channels, _, stride, vectors, _ = (int(extent) for extent in by_phases.shape)
    lanes = get_simd_32bit_lanes()
    channel_bytes = 4 * math.prod(get_const_tuple(kernel.shape)) // channels
    tile = register_tile(channels, stride, 1, vectors, current_cores().registers, channel_bytes)
    if isinstance(data.op, te.ComputeOp):
        s[data].parallel(s[data].fuse(*s[data].op.axis[:3]))
    sums = s.cache_write(by_phases, "global")

    image, channel, row, column = s[output].op.axis
    channel_outer, channel = s[output].split(channel, factor=tile.chunks)
    column, phase = s[output].split(column, factor=stride)
    s[output].reorder(image, row, channel_outer, channel, column, phase)
    s[output].unroll(phase)
    task = s[output].fuse(image, row, channel_outer)
    s[output].parallel(task)
    if convolution.op != output.op:
        s[convolution].compute_inline()

    s[by_phases].compute_at(s[output], task)
    image, channel, row, phase, vector, lane = s[by_phases].op.axis
    vector_outer, vector = s[by_phases].split(vector, factor=tile.columns)
    s[by_phases].reorder(image, row, vector_outer, vector, channel, phase, lane)
    s[by_phases].vectorize(lane)
    for axis in (vector, channel, phase):
        s[by_phases].unroll(axis)

    s[sums].compute_at(s[by_phases], vector_outer)
    image, channel, row, phase, vector, lane = s[sums].op.axis
    term, tap_row, tap_column = s[sums].op.reduce_axis
    term_outer, term = s[sums].split(term, factor=channel_block(int(kernel.shape[0]), channel_block(channels, lanes)))
    s[sums].reorder(image, row, term_outer, tap_row, tap_column, term, vector, channel, phase, lane)
    s[sums].vectorize(lane)
    for axis in (tap_column, vector, channel, phase):
        s[sums].unroll(axis)
