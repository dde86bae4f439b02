"""A transposed convolution in blocked layout, as one convolution for each phase of its stride.

A stride of 2 spreads the input over every second row and column of the output. To write the zeros between them and to
multiply those, too, is for nothing in 3 of 4 products. Row `y` of the output reads only the kernel rows `r` for which
`y + padding - r` is a multiple of the stride, and columns likewise. So each *phase*, `y % stride` and `x % stride`, is
a convolution of the input itself with every stride-th row and column of the kernel.

    for chunks of blocks, rows of the output:                                   in parallel
      for tiles of columns of the input, phases of columns:
        for input blocks, kernel rows and columns of the phase, channels of a block:       the reduction
          for columns, blocks of the tile:                     unrolled, one multiply-add of vectors each
        store to a row of the nearest cache
      for blocks of the chunk, columns: what follows: bias, activation; store

The order of the sums is that of Relay's schedule. It serves one group and a dilation of 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import s_tir, te, tirx, topi
from tvm.s_tir.schedule import SBlockRV

from tvm_pipeline_kernels.relax.schedules import conv2d
from tvm_pipeline_kernels.relax.schedules.cores import Cores
from tvm_pipeline_kernels.relax.schedules.epilogue import PAD, RULE, in_registers, output, padding, shape_of
from tvm_pipeline_kernels.relax.schedules.stored_weights import widened
from tvm_pipeline_kernels.tiles import Phases, register_tile

NAME = "conv2d_transpose"


class _Axis(Phases):
    """Rows or columns, with what is multiplied in the terms of this IR."""

    @property
    def steps(self) -> int:
        """The rows of the output in a phase, at most."""
        return math.ceil(self.written / self.stride)

    def position(self, step: Any, phase: Any, tap: Any) -> Any:
        """Return which position of the padded input is multiplied; it grows with `tap`."""
        skipped, begun = divmod(self.padding, self.stride)
        # (phase + padding) // stride without a division: TVM 0.27 makes (x + 1) % 3 // 3 of (x % 3 + 1) // 3
        skipped += tirx.Select(phase + begun >= self.stride, 1, 0) if begun else 0
        return step + skipped + tap + self.before - (self.taps - 1)

    def weight(self, phase: Any, tap: Any) -> Any:
        """Return by which row of the kernel; it may lie behind the last where the stride does not divide them."""
        return tirx.floormod(phase + self.padding, self.stride) + self.stride * (self.taps - 1 - tap)

    @property
    def after(self) -> int:
        """The zeros that are read behind the input."""
        last = self.steps - 1 + (self.stride - 1 + self.padding) // self.stride + self.before
        return max(0, last + 1 - self.before - self.read)


def packed(weights: np.ndarray, in_block: int, block: int) -> np.ndarray:
    """Return the kernel (blocks, input blocks, rows, columns, input channels of a block, channels of a block).

    Args:
        weights: (input channels, channels, kernel rows, kernel columns).
        in_block, block: channels in a block of the input and of the output.
    """
    return conv2d.packed(weights.transpose(1, 0, 2, 3), in_block, block)


def compute(
    data: te.Tensor,
    kernel: te.Tensor,
    strides: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
) -> te.Tensor:
    """Return the transposed convolution (n, blocks, height, width, channels of a block).

    Args:
        data: (n, input blocks, height, width, input channels of a block).
        kernel: that of `packed`.
        strides: of rows and columns.
        padding: top, left, bottom, right: what is cut from the output.
        output_padding: further rows and columns of the output.
    """
    n, in_blocks, *extents, in_block = (int(extent) for extent in data.shape)
    blocks, _, *window, _, block = (int(extent) for extent in kernel.shape)
    rows, columns = (
        _Axis(extent, taps, (extent - 1) * stride - before - after + taps + more, stride, before)
        for extent, taps, stride, before, after, more in zip(
            extents, window, strides, padding[:2], padding[2:], output_padding, strict=True
        )
    )
    before, after = (0, 0, rows.before, columns.before, 0), (0, 0, rows.after, columns.after, 0)
    padded = topi.nn.pad(data, before, after, name=PAD) if any(before + after) else data
    chunk, tap_row, tap_column, term = axes = [
        te.reduce_axis((0, extent), name)
        for extent, name in (
            (in_blocks, "in_chunk"),
            (rows.taps, "tap_row"),
            (columns.taps, "tap_column"),
            (in_block, "term"),
        )
    ]

    def sums(image: Any, out: Any, y: Any, row_phase: Any, x: Any, column_phase: Any, channel: Any) -> Any:
        weight = rows.weight(row_phase, tap_row), columns.weight(column_phase, tap_column)
        at = rows.position(y, row_phase, tap_row), columns.position(x, column_phase, tap_column)
        product = padded(image, chunk, *at, term) * widened(kernel(out, chunk, *weight, term, channel))
        inside = [
            at < axis.kernel for at, axis in zip(weight, (rows, columns), strict=True) if axis.kernel % axis.stride
        ]
        if inside:
            product = tirx.if_then_else(tirx.all(*inside), product, tirx.const(0, data.dtype))
        return te.sum(product, axis=axes)

    shape = (n, blocks, rows.steps, rows.stride, columns.steps, columns.stride, block)
    by_phases = te.compute(shape, sums, name="by_phases")

    def in_turns(image: Any, out: Any, y: Any, x: Any, channel: Any) -> Any:
        row = tirx.floordiv(y, rows.stride), tirx.floormod(y, rows.stride)
        column = tirx.floordiv(x, columns.stride), tirx.floormod(x, columns.stride)
        return by_phases(image, out, *row, *column, channel)

    return te.compute((n, blocks, rows.written, columns.written, block), in_turns, name=NAME, attrs={RULE: NAME})


def schedule(s: s_tir.Schedule, anchor: SBlockRV, cores: Cores) -> None:
    """Schedule a convolution of `compute` and what is fused to it."""
    (sums,) = s.get_producers(anchor)
    _, blocks, _, row_phases, width, column_phases, block = shape_of(s, sums)
    kernel = [int(extent) for extent in s.get(sums).reads[1].source.shape]
    phase_bytes = 4 * math.prod(kernel[1:]) // (row_phases * column_phases)
    tile = register_tile(blocks, -(-block // cores.lanes), 1, width, cores.registers, phase_bytes)
    pad = padding(s, sums)
    if pad is not None:
        n, chunk, row, _, channel = s.get_loops(pad)
        s.vectorize(channel)
        s.parallel(s.fuse(n, chunk, row))
    last = output(s, anchor, cores) if s.get_consumers(anchor) else anchor
    if last is not anchor:
        s.compute_inline(anchor)
    by_phases = s.cache_write(sums, 0, "local")

    n, chunk, row, column, channel = s.get_loops(last)
    chunk_outer, chunk = s.split(chunk, [None, tile.chunks])
    row, row_phase = s.split(row, [None, row_phases])
    _, phase = s.split(column, [None, column_phases])
    s.reorder(n, chunk_outer, row, row_phase, chunk)
    s.parallel(s.fuse(n, chunk_outer, row))
    in_registers(s, phase, channel)

    s.compute_at(by_phases, row_phase, preserve_unit_loops=True)
    chunk, _, _, column, phase, channel = s.get_loops(by_phases)[-6:]
    column_outer, column = s.split(column, [None, tile.columns])
    s.reorder(column_outer, phase, chunk, column, channel)
    if width % tile.columns:
        s.annotate(column_outer, "pragma_loop_partition_hint", True)
    in_registers(s, chunk, column, channel)

    s.compute_at(sums, phase, preserve_unit_loops=True)
    *_, chunk, _, _, column, _, channel, in_chunk, tap_row, tap_column, term = s.get_loops(sums)
    s.reorder(in_chunk, tap_row, tap_column, term, column, chunk, channel)
    in_registers(s, column, chunk, channel)
    in_registers(s, *s.get_loops(s.decompose_reduction(sums, in_chunk))[-3:])
