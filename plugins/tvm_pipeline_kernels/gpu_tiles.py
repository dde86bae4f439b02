"""Tiles of convolutions on GPUs: what a block of threads and what one thread computes. Free of TVM.

A convolution is a product of two matrices for each group of channels: the weights, `outputs` x `terms`, times the
image, `terms` x `pixels`, where the terms are the input channels x kernel rows x kernel columns. A block of threads
computes `rows` outputs at `columns` pixels. It brings `depth` terms of both matrices into shared memory at a time, and
each of its threads adds up `thread_rows` x `thread_columns` sums in registers:

    for each `depth` terms:
        load rows * depth weights and depth * columns numbers of the image     all threads, into shared memory
        wait for each other
        for each of the terms:
            load thread_rows weights and thread_columns numbers                from shared memory into registers
            add their products to thread_rows * thread_columns sums
        wait for each other

No tile was ever measured on a GPU. The choice follows a model with published figures of the devices: blocks that are
on a multiprocessor at the same time hide each other's loads, and where there are few of them the loads are waited for.
Tuning measures others. A tile changes no value: each sum has the same terms in the same order, and zeros behind them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

WARP = 32
MOST_SHARED_BYTES = 48 * 1024  # what a block gets of every CUDA device without asking
FEWEST_THREADS = 64  # of a tile


class Gpu(NamedTuple):
    """One GPU: a CUDA device by its architecture, or an OpenCL device, of which only the limits of a block are known.

    Attributes:
        processors: multiprocessors; of the largest device where an architecture has several.
        threads: most threads on a multiprocessor.
        blocks: most blocks on a multiprocessor.
        registers: of 32 bits, on a multiprocessor.
        shared_bytes: shared memory of a multiprocessor.
        system_bytes: what the system takes of it for each block.
        block_threads: most threads that a tile gives a block.
        block_bytes: most shared memory of a block.
    """

    processors: int
    threads: int
    blocks: int
    registers: int = 65536
    shared_bytes: int = 64 * 1024
    system_bytes: int = 0
    block_threads: int = 256
    block_bytes: int = MOST_SHARED_BYTES


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; processors of Jetson Nano, TX2, Xavier,
# Orin and Thor, and of GTX 1080, V100, RTX 2080, A100, RTX 3080, RTX 4080 and H100.
_GPUS = {
    53: Gpu(1, 2048, 32),
    61: Gpu(20, 2048, 32, shared_bytes=96 * 1024),
    62: Gpu(2, 2048, 32),
    70: Gpu(80, 2048, 32, shared_bytes=96 * 1024),
    72: Gpu(8, 2048, 32, shared_bytes=96 * 1024),
    75: Gpu(46, 1024, 16),
    80: Gpu(108, 2048, 32, shared_bytes=164 * 1024, system_bytes=1024),
    86: Gpu(68, 1536, 16, shared_bytes=100 * 1024, system_bytes=1024),
    87: Gpu(16, 1536, 16, shared_bytes=164 * 1024, system_bytes=1024),
    89: Gpu(76, 1536, 24, shared_bytes=100 * 1024, system_bytes=1024),
    90: Gpu(132, 2048, 32, shared_bytes=228 * 1024, system_bytes=1024),
    110: Gpu(20, 1536, 24, shared_bytes=228 * 1024, system_bytes=1024),
}


def gpu_of(number: int) -> Gpu:
    """Return the device of an architecture, such as 87; of one that is not listed, the next older one."""
    return _GPUS[max((known for known in _GPUS if known <= number), default=min(_GPUS))]


def opencl_gpu(block_threads: int) -> Gpu:
    """Return a middling device with the limits of an OpenCL device; OpenCL tells no registers.

    Args:
        block_threads: most threads of a work-group.
    """
    # A work-group has 32 KB of local memory on each device of OpenCL's full profile (CL_DEVICE_LOCAL_MEM_SIZE).
    return Gpu(16, 1024, 16, block_threads=min(block_threads, 256), block_bytes=32 * 1024)


class Extents(NamedTuple):
    """The extents of a convolution's loops.

    Attributes:
        images: how many.
        groups: of channels.
        outputs: output channels of a group.
        pixels: rows and columns of the output, as many numbers as the image has dimensions.
        channels: input channels of a group.
        window: rows and columns of the kernel.
    """

    images: int
    groups: int
    outputs: int
    pixels: tuple[int, ...]
    channels: int
    window: tuple[int, ...]

    @property
    def columns(self) -> int:
        """Pixels of all output images."""
        return self.images * math.prod(self.pixels)

    @property
    def terms(self) -> int:
        """Terms of a sum."""
        return self.channels * math.prod(self.window)


class GpuTile(NamedTuple):
    """What a block of threads and what one thread computes; see the module."""

    rows: int
    columns: int
    depth: int
    thread_rows: int
    thread_columns: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.rows // self.thread_rows * (self.columns // self.thread_columns)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: both matrices, the weights with `SKEW` more in a row."""
        return 4 * self.depth * (self.rows + SKEW + self.columns)

    @property
    def registers(self) -> int:
        """Registers of a thread, about: its sums, what they are computed of, and 28 for addresses."""
        return self.thread_rows * self.thread_columns + 2 * (self.thread_rows + self.thread_columns) + 28


# A row of the weights in shared memory begins so many banks after the one before it: threads that store one column each
# would all meet in one bank.
SKEW = 4

_PER_THREAD = ((8, 8), (8, 4), (4, 8), (4, 4), (4, 2), (2, 4), (2, 2), (1, 4), (1, 2), (1, 1))
_THREADS = (FEWEST_THREADS, 128, 256)
_LATENCY = 600  # cycles from a load of device memory to its use, with the wait for all threads
_FUSED_PER_CYCLE = 128  # multiply-adds of a multiprocessor, by its four schedulers
_BUSY_WARPS = 8  # two for each scheduler: while one waits for shared memory, the other computes


def tiles(outputs: int, pixels: int, terms: int, gpu: Gpu) -> Iterator[GpuTile]:
    """Yield the tiles that may serve a convolution; there is one where blocks may have `FEWEST_THREADS`."""
    for per_thread in _PER_THREAD:
        for rows in (8, 16, 32, 64, 128):
            for columns in (16, 32, 64, 128):
                for depth in (8, 16, 32):
                    tile = GpuTile(rows, columns, depth, *per_thread)
                    if (
                        tile.threads in _THREADS
                        and tile.threads <= gpu.block_threads
                        and rows % per_thread[0] == columns % per_thread[1] == 0
                        and rows * depth % tile.threads == columns * depth % tile.threads == 0
                        and tile.shared_bytes <= gpu.block_bytes
                        and (rows < 2 * outputs or rows == 8)
                        and (columns < 2 * pixels or columns == 16)
                        and (depth < 2 * terms or depth == 8)
                    ):
                        yield tile


def ranked_tiles(groups: int, outputs: int, pixels: int, terms: int, gpu: Gpu) -> list[GpuTile]:
    """Return the tiles that may serve a convolution, that of `best_tile`, which has the same arguments, first."""
    able = tiles(outputs, pixels, terms, gpu)
    return sorted(able, key=lambda tile: cycles(tile, groups, outputs, pixels, terms, gpu))


def best_tile(groups: int, outputs: int, pixels: int, terms: int, gpu: Gpu) -> GpuTile:
    """Return the tile that should take the fewest cycles.

    Args:
        groups: of channels.
        outputs: output channels of a group.
        pixels: of all output images.
        terms: of a sum.

    Examples:
        >>> best_tile(1, 64, 56 * 56, 64 * 9, gpu_of(87)).threads
        128
    """
    return min(tiles(outputs, pixels, terms, gpu), key=lambda tile: cycles(tile, groups, outputs, pixels, terms, gpu))


def cycles(tile: GpuTile, groups: int, outputs: int, pixels: int, terms: int, gpu: Gpu) -> float:
    """Return about how many cycles a convolution takes.

    A step of a block is `depth` terms. The blocks of a multiprocessor take turns, so a step of all of them takes the
    sum of their work, or where that is longer, one block's work with the latency of its loads.
    """
    blocks = groups * math.ceil(outputs / tile.rows) * math.ceil(pixels / tile.columns)
    together = min(resident(tile, gpu), math.ceil(blocks / gpu.processors))
    # In units of one multiply-add of a thread. A load from shared memory takes the room of two for each four numbers;
    # a weight that is brought there that of 6, a number of the image, whose address takes divisions, that of 20.
    of_a_term = tile.thread_rows * tile.thread_columns + 2 * sum(math.ceil(n / 4) for n in tile[3:])
    brought = (6 * tile.rows + 20 * tile.columns) * tile.depth
    work = of_a_term * tile.depth * tile.threads + brought
    warps = tile.threads / WARP
    step = max(together * work / _per_cycle(together * warps), work / _per_cycle(warps) + _LATENCY)
    return math.ceil(blocks / (gpu.processors * together)) * math.ceil(terms / tile.depth) * step


def _per_cycle(warps: float) -> float:
    """Return how many multiply-adds a multiprocessor does in a cycle, with so many warps to take them from."""
    return _FUSED_PER_CYCLE * min(1.0, warps / _BUSY_WARPS)


def resident(tile: GpuTile, gpu: Gpu) -> int:
    """Return how many blocks of a tile a multiprocessor has at the same time, by all that limits them."""
    return max(1, resident_blocks(tile.threads, tile.registers, tile.shared_bytes, gpu))


def resident_blocks(threads: int, registers: int, shared_bytes: int, gpu: Gpu) -> int:
    """Return how many blocks fit on a multiprocessor: 0 where not even one does.

    NVIDIA's `cuda_occupancy.h`: registers are given to a warp in units of 256, and shared memory in units of 128 bytes
    with those of the system.

    Args:
        threads: of a block.
        registers: of a thread.
        shared_bytes: of a block.
    """
    warps = math.ceil(threads / WARP)
    of_a_warp = math.ceil(max(registers, 1) * WARP / 256) * 256
    of_a_block = math.ceil(max(shared_bytes + gpu.system_bytes, 1) / 128) * 128
    return min(
        gpu.threads // (warps * WARP),
        gpu.registers // (of_a_warp * warps),
        gpu.shared_bytes // of_a_block,
        gpu.blocks,
    )
