"""A convolution of uint8 by int8 in blocked layout, by register tiles: Relay's schedule of the same name, in S-TIR.

    for chunks of blocks, tiles of rows:                       in parallel
      for tiles of columns:
        for input blocks, kernel rows, kernel columns, fours of channels:         the reduction
          for rows, columns, blocks of the tile:               unrolled, four products of bytes a lane each
        for blocks, rows, columns of the tile:                 what follows: offset, requantisation
          store

Sums are int32, and exact in any order. VNNI of x86 and dot products of aarch64 add up four products of bytes a lane at
once. A dot product takes data with a sign, so 128 is taken off before, and 128 times the weights is added behind.
Without such an instruction bytes are widened to words, of which x86 adds up products by two. Other processors add one
product of words a lane, by an instruction that LLVM knows, such as `smlal` of aarch64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import s_tir, te, tirx
from tvm.script import tirx as T  # noqa: N812 - its name in every script of TVM

from tvm_pipeline_kernels.relax.schedules.conv2d import in_tiles, pad_in_parallel
from tvm_pipeline_kernels.relax.schedules.cores import Cores
from tvm_pipeline_kernels.relax.schedules.epilogue import RULE, in_registers, output, shape_of
from tvm_pipeline_kernels.tiles import Tile, tiles

NAME = "conv2d_int8"
SHIFT = 128  # a dot product takes data that are so much less, with a sign
FOUR = 4  # channels that are multiplied at a time
BESIDE = 4  # registers that a product needs beside the sums; that of VNNI needs none
_ADD_PAIRS = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}


def packed(weights: np.ndarray, in_block: int, block: int) -> np.ndarray:
    """Return the kernel (blocks, input blocks, rows, columns, fours of a block, channels of a block, 4).

    Args:
        weights: (channels, input channels, kernel rows, kernel columns); zeros fill up the input channels.
        in_block, block: channels in a block of the input and of the output.
    """
    channels, read, *window = weights.shape
    filled = np.pad(weights, ((0, 0), (0, -read % in_block), (0, 0), (0, 0)))
    parted = filled.reshape(channels // block, block, -1, in_block // FOUR, FOUR, *window)
    return np.ascontiguousarray(parted.transpose(0, 2, 5, 6, 3, 1, 4))


def added(weights: np.ndarray, block: int) -> np.ndarray:
    """Return what is added to sums of data with a sign, (blocks, channels of a block), of weights as for `packed`."""
    return SHIFT * weights.sum(axis=(1, 2, 3), dtype="int32").reshape(-1, block)


def compute(
    data: te.Tensor,
    kernel: te.Tensor,
    strides: Sequence[int],
    dilation: Sequence[int],
    added: te.Tensor | None = None,
    groups: int = 1,
) -> te.Tensor:
    """Return a convolution of blocks of channels, without padding: (n, blocks, height, width, channels of a block).

    Args:
        data: (n, input blocks, height, width, input channels of a block), or a plain image (n, channels, height,
            width), whose channels are filled up with zeros.
        kernel: as `packed` has it.
        strides, dilation: of rows and of columns.
        added: for cores whose instruction takes data with a sign.
        groups: of channels, each of whole blocks; the kernel has the input blocks of one.
    """
    (row_stride, column_stride), (row_step, column_step) = (map(int, numbers) for numbers in (strides, dilation))
    blocks, in_blocks, kernel_rows, kernel_columns, fours, block, _ = (int(extent) for extent in kernel.shape)
    n, channels, height, width, *_ = (int(extent) for extent in data.shape)
    read, shift = data, 0 if added is None else SHIFT
    if len(data.shape) == 4:
        read = te.compute(
            (n, in_blocks, height, width, fours * FOUR),
            lambda b, chunk, y, x, c: tirx.if_then_else(
                chunk * fours * FOUR + c < channels, data(b, chunk * fours * FOUR + c, y, x), tirx.const(0, "uint8")
            ),
            name="pad",
        )
    axes = [
        te.reduce_axis((0, extent), name)
        for extent, name in zip(
            (in_blocks, kernel_rows, kernel_columns, fours, FOUR),
            ("ic", "kernel_row", "kernel_column", "four", "term"),
            strict=True,
        )
    ]
    chunk, row, column, four, term = axes
    group_blocks = blocks // groups
    sums = te.compute(
        (
            n,
            blocks,
            (height - row_step * (kernel_rows - 1) - 1) // row_stride + 1,
            (width - column_step * (kernel_columns - 1) - 1) // column_stride + 1,
            block,
        ),
        lambda b, o, y, x, c: te.sum(
            (
                read(
                    *(b, chunk if groups == 1 else o // group_blocks * in_blocks + chunk),
                    *(y * row_stride + row * row_step, x * column_stride + column * column_step),
                    four * FOUR + term,
                ).astype("int32")
                - shift
            )
            * kernel(o, chunk, row, column, four, c, term).astype("int32"),
            axis=axes,
        ),
        name=NAME,
        attrs={RULE: NAME},
    )
    if added is None:
        return sums
    return te.compute(sums.shape, lambda b, o, y, x, c: sums(b, o, y, x, c) + added(o, c), name="add")


def schedule(s: s_tir.Schedule, anchor: s_tir.schedule.SBlockRV, cores: Cores) -> None:
    """Schedule a convolution of `compute` and what is fused to it."""
    _, blocks, height, width, block = shape_of(s, anchor)
    kernel = next(region.source for region in s.get(anchor).reads if len(region.source.shape) == 7)
    block_bytes = math.prod(int(extent) for extent in kernel.shape[1:])
    lanes = min(cores.lanes, block)
    has_vnni = cores.bytes_at_once == FOUR and not cores.signed
    registers = cores.registers - (0 if has_vnni else BESIDE)
    tile = _tile(blocks, -(-block // lanes), height, width, registers, block_bytes)
    pad_in_parallel(s, anchor)
    last = output(s, anchor, cores)
    column_outer, stored = in_tiles(s, last, tile)

    s.compute_at(anchor, column_outer, preserve_unit_loops=True)
    *_, chunk, row, column, channel, in_chunk, kernel_row, kernel_column, four, term = s.get_loops(anchor)
    vector, lane = s.split(channel, [None, lanes])
    s.reorder(in_chunk, kernel_row, kernel_column, four, row, column, chunk, vector, lane, term)
    for loop in (four, row, column, chunk, vector):
        s.unroll(loop)
    in_registers(s, *s.get_loops(s.decompose_reduction(anchor, in_chunk))[-5:])
    in_registers(s, *stored)
    s.set_scope(anchor, 0, "local")
    s.tensorize(lane, _products(lanes, cores.bytes_at_once, SHIFT if cores.signed else 0))


def _tile(chunks: int, vectors: int, height: int, width: int, registers: int, block_bytes: int) -> Tile:
    """Return the best tile that divides the image: TVM puts no intrinsic under a condition."""
    found = tiles(chunks, vectors, height, width, registers, block_bytes)
    return min(each for each in found if height % each[1].rows == width % each[1].columns == 0)[1]


@functools.cache
def _products(lanes: int, at_once: int, shift: int) -> str:
    """Return the name of TVM's intrinsic that adds four products of bytes to each lane, of the same data."""
    vector, four = tirx.Ramp(0, 1, lanes), tirx.Ramp(0, 1, FOUR)
    words = f"int16x{2 * lanes}"

    def total(sums: Any, data: Any, kernel: Any) -> Any:
        bytes_ = tirx.reinterpret("int32", data[four])
        weights = kernel.vload([0, 0], f"int8x{FOUR * lanes}")
        if at_once == FOUR:
            numbers = tirx.reinterpret(f"int8x{FOUR * lanes}", tirx.Broadcast(bytes_, lanes))
            if shift:  # the first bit of a byte without a sign becomes the sign of what is 128 less
                numbers = numbers ^ tirx.const(-shift, f"int8x{FOUR * lanes}")
                return _llvm("llvm.aarch64.neon.sdot.v4i32.v16i8", lanes, sums[vector], numbers, weights)
            return add_fours(sums[vector], numbers, weights, lanes)
        if at_once == 1:
            return _add_each(sums[vector], data[four].astype(f"int16x{FOUR}"), weights, lanes)
        # The first and third of the four, then the second and fourth: the low and the high byte of each word.
        numbers = tirx.reinterpret(f"u{words}", tirx.Broadcast(bytes_, lanes))
        weights, eight = tirx.reinterpret(words, weights), tirx.const(8, words)
        low = (numbers & tirx.const(0xFF, f"u{words}")).astype(words), (weights << eight) >> eight
        high = (numbers >> tirx.const(8, f"u{words}")).astype(words), weights >> eight
        return add_pairs(add_pairs(sums[vector], *low, lanes), *high, lanes)

    @T.prim_func(s_tir=True)
    def loops(data_at: T.handle, kernel_at: T.handle, sums_at: T.handle) -> None:
        data = T.match_buffer(data_at, (FOUR,), "uint8", offset_factor=1)
        kernel = T.match_buffer(kernel_at, (lanes, FOUR), "int8", offset_factor=1)
        sums = T.match_buffer(sums_at, (lanes,), "int32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(sums[0:lanes], data[0:FOUR], kernel[0:lanes, 0:FOUR])
            T.writes(sums[0:lanes])
            for i in T.serial(lanes):
                for k in T.serial(FOUR):
                    with T.sblock("update"):
                        lane, term = T.axis.remap("SR", [i, k])
                        sums[lane] = sums[lane] + (T.Cast("int32", data[term]) - shift) * T.Cast(
                            "int32", kernel[lane, term]
                        )

    @T.prim_func(s_tir=True)
    def vectors(data_at: T.handle, kernel_at: T.handle, sums_at: T.handle) -> None:
        data = T.match_buffer(data_at, (FOUR,), "uint8", offset_factor=1)
        kernel = T.match_buffer(kernel_at, (lanes, FOUR), "int8", offset_factor=1)
        sums = T.match_buffer(sums_at, (lanes,), "int32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(sums[0:lanes], data[0:FOUR], kernel[0:lanes, 0:FOUR])
            T.writes(sums[0:lanes])
            sums[vector] = total(sums, data, kernel)

    name = f"tvm_pipeline.bytes_{lanes}_{at_once}_{shift}"
    s_tir.TensorIntrin.register(name, loops, vectors, override=True)
    return name


def add_fours(sums: Any, data: Any, kernel: Any, lanes: int) -> Any:
    """Add to each lane of sums four products of bytes, those of data without a sign, by VNNI."""
    return _llvm(f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", lanes, sums, data, kernel)


def add_pairs(sums: Any, data: Any, kernel: Any, lanes: int) -> Any:
    """Add to each lane of sums two products of int16."""
    return sums + _llvm(_ADD_PAIRS[lanes], lanes, data, kernel)


def _add_each(sums: Any, numbers: Any, weights: Any, lanes: int) -> Any:
    """Add to each lane of sums four products of int16, as LLVM finds instructions for them.

    Args:
        numbers: four words, for all lanes.
        weights: four bytes of each lane.
    """
    for first in range(0, FOUR, 2):  # two terms are a vector of words
        order = [lane * FOUR + term for term in (first, first + 1) for lane in range(lanes)]
        terms = tirx.Shuffle([weights], order).astype(f"int16x{2 * lanes}")
        for term in range(2):
            number = tirx.Broadcast(tirx.Shuffle([numbers], [first + term]), lanes)
            weight = tirx.Shuffle([terms], list(range(term * lanes, (term + 1) * lanes)))
            sums = sums + number.astype(f"int32x{lanes}") * weight.astype(f"int32x{lanes}")
    return sums


def _llvm(name: str, lanes: int, *operands: Any) -> Any:
    return tirx.call_llvm_pure_intrin(f"int32x{lanes}", name, *operands)
