"""A depthwise convolution of uint8 by int8 in blocked layout.

    for blocks, bands of rows:                        in parallel
      pad the rows that the band reads                stays in the nearest cache
      for rows, tiles of columns:
        for kernel rows, groups of kernel columns:    unrolled
          for columns of the tile:                    unrolled, the products of a group a lane each
        what follows: requantisation; store

The instructions that multiply bytes add up neighbours, and the neighbours in blocked layout are channels, which are not
to be added. So a group of columns, 4 with VNNI and 2 without, is loaded at once, 64 bytes of one row, and a shuffle
puts the columns of each channel side by side. The kernel is padded with zeros to whole groups. Sums of integers are
exact in any order.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import te
from tvm.target.x86 import get_simd_32bit_lanes
from tvm.topi.nn.utils import get_pad_tuple
from tvm.topi.utils import get_const_tuple

from tvm_pipeline_kernels.relay.schedules.anchor import scheduled
from tvm_pipeline_kernels.relay.schedules.depthwise import in_bands
from tvm_pipeline_kernels.tiles import band_rule
from tvm_pipeline_tvm.relay.int8 import add_fours, add_pairs, has_vnni

TAG = "depthwise_int8"
MOST_UNROLLED = 512  # instructions in a row, as in `depthwise.py`


def compute(
    data: te.Tensor,
    kernel: te.Tensor,
    strides: Any,
    padding: Any,
    dilation: Any,
    layout: str,
    out_layout: str,
    out_dtype: str,
) -> te.Tensor | None:
    """Return the sums (n, blocks, height, width, channels of a block); None where they are not ours to compute.

    Args:
        data: (n, blocks, height, width, channels of a block).
        kernel: (blocks, 1, height, width, 1, channels of a block).
        strides, padding, dilation, layout, out_layout, out_dtype: as of `nn.contrib_depthwise_conv2d_nchwc`.
    """
    shape = get_const_tuple(data.shape)
    types = data.dtype, kernel.dtype, out_dtype
    is_ours = types == ("uint8", "int8", "int32") and len(shape) == 5 and tuple(dilation) == (1, 1)
    if not is_ours or not all(isinstance(extent, int) for extent in shape) or shape[4] not in (8, 16):
        return None
    n, blocks, read_rows, read_columns, block = shape
    _, _, rows, columns, _, kernel_block = get_const_tuple(kernel.shape)
    if kernel_block != block:
        return None
    row_stride, column_stride = strides if isinstance(strides, (tuple, list)) else get_const_tuple(strides)
    top, left, bottom, right = get_pad_tuple(padding, (rows, columns))
    height = (read_rows + top + bottom - rows) // row_stride + 1
    width = (read_columns + left + right - columns) // column_stride + 1
    group = 4 if has_vnni(min(get_simd_32bit_lanes(), block)) else 2
    groups = math.ceil(columns / group)

    def padded_value(image: Any, chunk: Any, row: Any, column: Any, channel: Any) -> Any:
        inside = te.all(row >= top, row < top + read_rows, column >= left, column < left + read_columns)
        value = data[image, chunk, row - top, column - left, channel]
        return tvm.tir.if_then_else(inside, value, tvm.tir.const(0, data.dtype))

    needed = (height - 1) * row_stride + rows, (width - 1) * column_stride + groups * group
    padded = te.compute((n, blocks, *needed, block), padded_value, name="padded")

    def tap(chunk: Any, row: Any, group_: Any, column: Any, channel: Any) -> Any:
        at = group_ * group + column
        value = kernel[chunk, 0, row, at, 0, channel]
        return tvm.tir.if_then_else(at < columns, value, tvm.tir.const(0, kernel.dtype))

    taps = te.compute((blocks, rows, groups, group, block), tap, name="taps")
    row, group_ = te.reduce_axis((0, rows), "row"), te.reduce_axis((0, groups), "group")
    column = te.reduce_axis((0, group), "column")
    return te.compute(
        (n, blocks, height, width, block),
        lambda image, chunk, y, x, channel: te.sum(
            padded[image, chunk, y * row_stride + row, x * column_stride + group_ * group + column, channel].astype(
                "int32"
            )
            * taps[chunk, row, group_, column, channel].astype("int32"),
            axis=[row, group_, column],
        ),
        name="depthwise",
        tag=TAG,
    )


def schedule(outs: list[te.Tensor]) -> te.Schedule | None:
    """Schedule what `compute` returned and what is fused to it; None where it is not among `outs`."""
    return scheduled([outs] if isinstance(outs, te.Tensor) else outs, TAG, _schedule)


def _schedule(s: te.Schedule, depthwise: te.Tensor, output: te.Tensor) -> None:
    padded, taps = depthwise.op.input_tensors
    _, _, height, width, block = (int(extent) for extent in depthwise.shape)
    _, rows, groups, group, _ = (int(extent) for extent in taps.shape)
    lanes = min(get_simd_32bit_lanes(), block)
    sums = s.cache_write(depthwise, "global")
    band = band_rule(height, width)
    if depthwise.op != output.op:
        s[depthwise].compute_inline()

    bands, column_outer = in_bands(s, output, band)
    for stage in (padded, taps):
        s[stage].compute_at(s[output], bands)
        s[stage].vectorize(s[stage].op.axis[-1])
    for axis in s[taps].op.axis[1:-1]:
        s[taps].unroll(axis)

    s[sums].compute_at(s[output], column_outer)
    n, chunk, row, column, channel = s[sums].op.axis
    kernel_row, kernel_group, four = s[sums].op.reduce_axis
    vector, lane = s[sums].split(channel, factor=lanes)
    s[sums].reorder(n, chunk, kernel_row, kernel_group, row, column, vector, lane, four)
    for axis in (column, vector):
        s[sums].unroll(axis)
    if rows * groups * band.columns * (block // lanes) <= MOST_UNROLLED:
        s[sums].unroll(kernel_row)
        s[sums].unroll(kernel_group)
    s[sums].tensorize(lane, _intrinsic(lanes, group, block))


def _intrinsic(lanes: int, group: int, block: int) -> te.TensorIntrin:
    """Return the tensor intrinsic ``out[i] += sum(data[k, i] * kernel[k, i] for k in range(group))``.

    `data` is uint8 and `kernel` int8, both of shape (group, lanes), with rows `block` apart; `out` is int32.
    """
    data = te.placeholder((group, lanes), "uint8", "data")
    kernel = te.placeholder((group, lanes), "int8", "kernel")
    k = te.reduce_axis((0, group), "k")
    out = te.compute(
        (lanes,), lambda i: te.sum(data[k, i].astype("int32") * kernel[k, i].astype("int32"), axis=k), name="out"
    )

    def side_by_side(buffer: Any) -> Any:
        """Load the rows, and put the numbers of each lane side by side."""
        if lanes == block:
            rows = [buffer.vload([0, 0], f"{buffer.dtype}x{group * lanes}")]
        else:
            rows = [buffer.vload([index, 0], f"{buffer.dtype}x{lanes}") for index in range(group)]
        order = [index * lanes + lane for lane in range(lanes) for index in range(group)]
        return tvm.tir.Shuffle(rows, order)

    def added_to(sums: Any, ins: Any) -> Any:
        both = [side_by_side(buffer) for buffer in ins]
        if group == 4:
            return add_fours(sums, *both)
        return add_pairs(sums, *(each.astype(f"int16x{2 * lanes}") for each in both))

    def code(ins: Any, outs: Any) -> tuple[tvm.tir.Stmt, tvm.tir.Stmt, tvm.tir.Stmt]:
        zeros = tvm.tir.const(0, f"int32x{lanes}")
        return (
            outs[0].vstore(0, added_to(zeros, ins)),
            outs[0].vstore(0, zeros),
            outs[0].vstore(0, added_to(outs[0].vload([0], f"int32x{lanes}"), ins)),
        )

    def buffer(tensor: te.Tensor) -> tvm.tir.Buffer:
        return tvm.tir.decl_buffer(tensor.shape, tensor.dtype, offset_factor=1, strides=[block, 1])

    return te.decl_tensor_intrin(
        out.op,
        code,
        binds={data: buffer(data), kernel: buffer(kernel)},
        default_buffer_params={"offset_factor": 1},
    )
