"""A convolution of uint8 by int8 in blocked layout, as loops over register tiles.

    for chunks of blocks, tiles of rows:                       in parallel
      for tiles of columns:
        for input blocks, kernel rows, kernel columns, fours of channels:         the reduction
          for rows, columns, blocks of the tile:               unrolled, four products of bytes a lane each
        for rows, columns, blocks of the tile:                 what follows: requantisation, addition
          store

The loops are those of `conv2d.py`. A lane of a sum is an int32, and the intrinsic of `int8.py` adds four products to it
at a time: one instruction with VNNI, four without. Sums of integers are exact in any order.

Channels stand in blocks of 16, or of 8 where 16 does not divide their number: 24 channels are 3 blocks, and need no
padding, which would keep what follows out of this kernel.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import autotvm, te
from tvm.autotvm.task.space import OtherOptionEntity, SplitEntity
from tvm.target.x86 import get_simd_32bit_lanes
from tvm.topi.generic.conv2d import conv2d_alter_int8_common
from tvm.topi.utils import get_const_tuple

from tvm_pipeline_kernels.relay.schedules.choice_context import current_cores
from tvm_pipeline_kernels.relay.schedules.conv2d import in_tiles
from tvm_pipeline_kernels.tiles import byte_block, register_tile
from tvm_pipeline_tvm.relay.int8 import dot_product, has_vnni

BLOCKS = (16, 8)  # channels of a block
FOUR = 4  # channels that one instruction multiplies
FOR_PAIRS = 4  # registers that multiplications by pairs need beside
LEAST_OF_A_PIXEL = 64  # channels of a picture of one pixel: fewer are cheap


def legalized(
    data: Any, data_tensor: Any, kernel: Any, kernel_tensor: Any, output_tensor: Any, attrs: Any, dtype: str, *_: int
) -> Any:
    """Return a convolution in Relay as `conv2d_alter_int8_common` does, but with less padding."""
    layout = str(attrs["data_layout"])
    extent = {axis: int(output_tensor.shape[layout.index(axis)]) for axis in "CHW"}
    # What follows a pixel is cheap, even as a kernel of its own.
    is_large_pixel = extent["H"] == extent["W"] == 1 and extent["C"] >= LEAST_OF_A_PIXEL
    length = BLOCKS[1] if extent["C"] % BLOCKS[1] == 0 and not is_large_pixel else BLOCKS[0]
    return conv2d_alter_int8_common(data, data_tensor, kernel, kernel_tensor, output_tensor, attrs, dtype, FOUR, length)


def set_channel_blocks(config: Any, data: te.Tensor, kernel: te.Tensor, *_: Any, **__: Any) -> None:
    """Set the channels in a block of the input and of the output of a convolution in NCHW."""
    outputs, inputs = get_const_tuple(kernel.shape)[:2]
    for name, channels in (("tile_ic", inputs), ("tile_oc", outputs)):
        block = byte_block(channels, get_simd_32bit_lanes())
        config[name] = SplitEntity([channels // block, block])
    # TOPI's schedule asks for these where ours does not apply.
    config["tile_ow"] = SplitEntity([-1, 1])
    config["tile_oh"] = OtherOptionEntity(1)
    config["unroll_kw"] = OtherOptionEntity(False)


def settle_blocks(
    data: te.Tensor, kernel: te.Tensor, strides: Any, padding: Any, dilation: Any, out_dtype: str
) -> None:
    """Set the channel blocks of a convolution in NCHW before TOPI looks for them: it knows blocks of 16 alone."""
    arguments = [data, kernel, strides, padding, dilation, "NCHW", "NCHW", out_dtype]
    workload = autotvm.task.args_to_workload(arguments, "conv2d_NCHWc_int8.x86")
    config = autotvm.task.DispatchContext.current.query(tvm.target.Target.current(), workload)
    if config.is_fallback:
        set_channel_blocks(config, data, kernel)


def applies(convolution: te.Tensor, output: te.Tensor) -> bool:
    """Return whether ours serves: a known shape, stored in the blocks that are computed."""
    shapes = [get_const_tuple(tensor.shape) for tensor in (convolution, output)]
    return all(isinstance(extent, int) for extent in shapes[0]) and shapes[0] == shapes[1] and len(shapes[0]) == 5


def schedule(
    s: te.Schedule, config: Any, data: te.Tensor, kernel: te.Tensor, convolution: te.Tensor, output: te.Tensor
) -> bool:
    """Schedule a convolution and what is fused to it; return whether it was ours to schedule.

    Args:
        config: TOPI's, not used.
        data: (n, blocks, height, width, channels of a block), or that padded.
        kernel: (blocks, input blocks, height, width, fours, channels of a block, 4).
        convolution: (n, blocks, height, width, channels of a block).
        output: what the last of the fused operators gives.
    """
    if not applies(convolution, output):
        return False
    _, blocks, height, width, block = (int(extent) for extent in convolution.shape)
    lanes = min(get_simd_32bit_lanes(), block)
    registers = current_cores().registers - (0 if has_vnni(lanes) else FOR_PAIRS)
    block_bytes = math.prod(int(extent) for extent in kernel.shape[1:])
    tile = register_tile(blocks, block // lanes, height, width, registers, block_bytes)
    sums = s.cache_write(convolution, "global")
    if convolution.op != output.op:
        s[convolution].compute_inline()
    column_outer = in_tiles(s, data, output, tile)

    s[sums].compute_at(s[output], column_outer)
    n, chunk, row, column, channel = s[sums].op.axis
    vector, lane = s[sums].split(channel, factor=lanes)
    kernel_row, kernel_column, term_outer, term, four = s[sums].op.reduce_axis
    s[sums].reorder(n, term_outer, kernel_row, kernel_column, term, row, column, chunk, vector, lane, four)
    for axis in (term, row, column, chunk, vector):
        s[sums].unroll(axis)
    s[sums].tensorize(lane, dot_product(lanes))
    return True
