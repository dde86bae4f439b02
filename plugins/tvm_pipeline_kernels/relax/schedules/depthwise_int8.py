"""A depthwise convolution of uint8 by int8 in blocked layout: Relay's schedule of the same name, in S-TIR.

    for blocks, bands of rows:                        in parallel
      copy the rows that the band reads, padded to whole groups            stays in the nearest cache
      for rows, tiles of columns:
        for kernel rows, groups of kernel columns:    unrolled
          for columns of the tile:                    unrolled, the products of a group a lane each
        what follows: offset, requantisation; store

The instructions that multiply bytes add up neighbours, and the neighbours in blocked layout are channels, which are not
to be added. So a group of columns, 4 with VNNI and 2 without, is loaded at once, and a shuffle puts the columns of each
channel side by side. The kernel has zeros up to whole groups. Other processors, also those with dot products, multiply
one column at a time, as words, by vectors that LLVM finds instructions for; so do all where columns are dilated. Sums
are int32, and exact in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import s_tir, te, tirx
from tvm.script import tirx as T  # noqa: N812 - its name in every script of TVM

from tvm_pipeline_kernels.relax.schedules.conv2d_int8 import FOUR, add_fours, add_pairs
from tvm_pipeline_kernels.relax.schedules.cores import Cores
from tvm_pipeline_kernels.relax.schedules.depthwise import MOST_UNROLLED, in_bands
from tvm_pipeline_kernels.relax.schedules.epilogue import RULE, in_registers, output, padding, shape_of
from tvm_pipeline_kernels.tiles import Band

NAME = "depthwise_int8"
MOST_ROWS = 14  # of a band
MOST_COLUMNS = 14  # of a tile
LEAST_SUMS = 4  # of a tile: fewer wait for each other
BESIDE = 6  # registers that hold no sums


def columns_at_once(cores: Cores, step: int = 1) -> int:
    """Return the columns of a group, which are loaded at once, where columns are `step` apart."""
    return 1 if cores.signed or step > 1 else cores.bytes_at_once


def packed(weights: np.ndarray, block: int, at_once: int) -> np.ndarray:
    """Return the kernel (blocks, rows, groups, channels of a block, columns of a group).

    Args:
        weights: (channels, 1, rows, columns).
        block: channels of a block.
        at_once: columns of a group.
    """
    channels, _, rows, columns = weights.shape
    filled = np.pad(weights, ((0, 0), (0, 0), (0, 0), (0, -columns % at_once)))
    parted = filled.reshape(channels // block, block, rows, -1, at_once)
    return np.ascontiguousarray(parted.transpose(0, 2, 3, 1, 4))


def compute(
    data: te.Tensor,
    kernel: te.Tensor,
    strides: Sequence[int],
    dilation: Sequence[int],
    columns: int,
    padding: Sequence[int],
    fill: int,
) -> te.Tensor:
    """Return the convolution of each channel by itself: (n, blocks, height, width, channels of a block).

    Args:
        data: (n, blocks, height, width, channels of a block).
        kernel: as `packed` has it.
        strides, dilation: of rows and of columns.
        columns: of the kernel, without what fills it up.
        padding: top, left, bottom, right.
        fill: what is padded with.
    """
    n, blocks, read_rows, read_columns, block = (int(extent) for extent in data.shape)
    _, rows, groups, _, at_once = (int(extent) for extent in kernel.shape)
    (row_stride, column_stride), (row_step, column_step) = (map(int, numbers) for numbers in (strides, dilation))
    top, left, bottom, right = map(int, padding)
    height = (read_rows + top + bottom - row_step * (rows - 1) - 1) // row_stride + 1
    width = (read_columns + left + right - column_step * (columns - 1) - 1) // column_stride + 1

    reach = (width - 1) * column_stride + column_step * (groups * at_once - 1) + 1
    copy = te.compute(
        (n, blocks, (height - 1) * row_stride + row_step * (rows - 1) + 1, reach, block),
        lambda b, o, y, x, c: tirx.if_then_else(
            tirx.all(y >= top, y < top + read_rows, x >= left, x < left + read_columns),
            data(b, o, y - top, x - left, c),
            tirx.const(fill, "uint8"),
        ),
        name="pad",
    )
    row, group, column = (
        te.reduce_axis((0, extent), name)
        for extent, name in ((rows, "kernel_row"), (groups, "group"), (at_once, "kernel_column"))
    )
    return te.compute(
        (n, blocks, height, width, block),
        lambda b, o, y, x, c: te.sum(
            copy(
                *(b, o, y * row_stride + row * row_step),
                x * column_stride + (group * at_once + column) * column_step,
                c,
            ).astype("int32")
            * kernel(o, row, group, c, column).astype("int32"),
            axis=[row, group, column],
        ),
        name=NAME,
        attrs={RULE: NAME},
    )


def schedule(s: s_tir.Schedule, anchor: s_tir.schedule.SBlockRV, cores: Cores) -> None:
    """Schedule a convolution of `compute` and what is fused to it."""
    _, _, height, width, block = shape_of(s, anchor)
    kernel = s.get(anchor).reads[1].source
    rows, groups, at_once = (int(kernel.shape[axis]) for axis in (1, 2, 4))
    vectors = max(1, block // cores.lanes)
    lanes = block if at_once == 1 else block // vectors
    most = (cores.registers - BESIDE) // vectors
    columns = _divisor(width, min(most, MOST_COLUMNS))
    if columns < LEAST_SUMS:
        columns = _divisor(width, most)
    pad = padding(s, anchor)
    last = output(s, anchor, cores)

    bands, column_outer = in_bands(s, last, Band(_divisor(height, MOST_ROWS), columns))
    s.compute_at(anchor, column_outer, preserve_unit_loops=True)
    s.compute_at(pad, bands, preserve_unit_loops=True)
    s.vectorize(s.get_loops(pad)[-1])
    *_, row, column, channel, kernel_row, group, kernel_column = s.get_loops(anchor)
    vector, lane = s.split(channel, [None, lanes])
    s.reorder(kernel_row, group, row, column, vector, lane, kernel_column)
    s.unroll(column)
    s.unroll(vector)
    if at_once == 1:
        s.reorder(kernel_column, lane)
        s.vectorize(lane)
    in_registers(s, *s.get_loops(s.decompose_reduction(anchor, kernel_row))[-3:])
    s.set_scope(anchor, 0, "local")
    if rows * groups * columns * vectors <= MOST_UNROLLED:
        s.unroll(kernel_row)
        s.unroll(group)
    if at_once > 1:
        s.tensorize(lane, _products(lanes, at_once, block))


def _divisor(extent: int, most: int) -> int:
    """Return the largest divisor: TVM puts no intrinsic under a condition."""
    return max(each for each in range(1, most + 1) if extent % each == 0)


@functools.cache
def _products(lanes: int, at_once: int, block: int) -> str:
    """Return the name of TVM's intrinsic that adds a group of products to each lane.

    Rows of the data are `block` bytes apart.
    """
    vector = tirx.Ramp(0, 1, lanes)
    order = [column * lanes + lane for lane in range(lanes) for column in range(at_once)]

    def total(sums: Any, data: Any, kernel: Any) -> Any:
        if lanes == block:
            rows = [data.vload([0, 0], f"uint8x{at_once * lanes}")]
        else:
            rows = [data.vload([column, 0], f"uint8x{lanes}") for column in range(at_once)]
        numbers, weights = tirx.Shuffle(rows, order), kernel.vload([0, 0], f"int8x{at_once * lanes}")
        if at_once == FOUR:
            return add_fours(sums[vector], tirx.reinterpret(f"int8x{FOUR * lanes}", numbers), weights, lanes)
        words = f"int16x{2 * lanes}"
        return add_pairs(sums[vector], numbers.astype(words), weights.astype(words), lanes)

    @T.prim_func(s_tir=True)
    def loops(data_at: T.handle, kernel_at: T.handle, sums_at: T.handle) -> None:
        data = T.match_buffer(data_at, (at_once, lanes), "uint8", offset_factor=1, strides=[block, 1])
        kernel = T.match_buffer(kernel_at, (lanes, at_once), "int8", offset_factor=1)
        sums = T.match_buffer(sums_at, (lanes,), "int32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(sums[0:lanes], data[0:at_once, 0:lanes], kernel[0:lanes, 0:at_once])
            T.writes(sums[0:lanes])
            for i in T.serial(lanes):
                for k in T.serial(at_once):
                    with T.sblock("update"):
                        lane, column = T.axis.remap("SR", [i, k])
                        sums[lane] = sums[lane] + T.Cast("int32", data[column, lane]) * T.Cast(
                            "int32", kernel[lane, column]
                        )

    @T.prim_func(s_tir=True)
    def vectors(data_at: T.handle, kernel_at: T.handle, sums_at: T.handle) -> None:
        data = T.match_buffer(data_at, (at_once, lanes), "uint8", offset_factor=1, strides=[block, 1])
        kernel = T.match_buffer(kernel_at, (lanes, at_once), "int8", offset_factor=1)
        sums = T.match_buffer(sums_at, (lanes,), "int32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(sums[0:lanes], data[0:at_once, 0:lanes], kernel[0:lanes, 0:at_once])
            T.writes(sums[0:lanes])
            sums[vector] = total(sums, data, kernel)

    name = f"tvm_pipeline.group_{lanes}_{at_once}_{block}"
    s_tir.TensorIntrin.register(name, loops, vectors, override=True)
    return name
