"""Register tiles: how much of a convolution one pass over the weights computes. Free of TVM.

A convolution in blocked layout (NCHW16c) is a sum of products: each output vector adds up weight vectors, each times
one number of the input. Its inner loop computes a *register tile*: the vectors of `chunks` channel blocks at `rows` x
`columns` positions. Their sums stay in registers while the whole reduction (input channels, kernel rows and columns)
runs by:

    for each term of the reduction:
        load `chunks` vectors of weights                   chunks registers
        for each of rows x columns positions:
            broadcast one number of the input              1 register, or none: AVX-512 broadcasts from memory
            add its product with each weight vector        chunks * rows * columns registers

Four things bound the speed of that loop, and the best tile balances them:

1. *Registers.* All sums, the weights and one broadcast must fit, or the compiler spills sums to memory. A core has 32
   vector registers with AVX-512 and on aarch64, and 16 with AVX2. On aarch64 a tile leaves four of them free, since no
   multiply-add reads memory: LLVM loads inputs ahead, and spilled sums of fuller tiles. A product of vectors then took
   2.0 to 2.4 instructions, and takes 1.5 to 1.7.
2. *Latency.* A sum depends on the one before it. With two multiply-add units of 4 to 5 cycles each, fewer than about
   10 independent sums leave units idle.
3. *Loads.* The loop loads `chunks` weights and `rows * columns` inputs for `chunks * rows * columns` products. Weights
   cost more, since each is a vector of its own from a farther cache. All of a tile should fit into half of that cache:
   the weights of the next blocks are fetched meanwhile (`lowering.py`).
4. *Streams.* Each row of each channel block is stored at a place of its own, a page or more from the next in a large
   image. Where the reduction is short, as in a 1x1 convolution of 16 channels, stores to 27 such places took 1.5 times
   as long as to 3; two columns at 12 places, at 64 channels, 1.6 times as long as four at 4.

At the edge of the image only a part of a tile is computed. What lies outside is skipped, at little cost for rows.

The costs below fit about 500 tiles of 35 convolutions, measured with AVX-512 and AVX2 on a core of Zen 5 with 1 MiB of
second cache, with weights out of the caches: the tile of the least estimate took 2.5 % longer than the fastest in the
mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

ARM_REGISTERS = 28
SUMS_TO_HIDE_LATENCY = 10  # 2 units, each with a latency of 4 to 5 cycles
CYCLES_PER_WEIGHT, CYCLES_PER_INPUT = 0.2, 0.25  # what a load costs beside a product, in products
CYCLES_PER_STREAM = 0.15  # what a place costs that is read and stored to
NEAR_BYTES = 450_000  # of the weights of a tile
BEYOND_NEAR = 1.08  # the cost of more
ROW_EDGE, COLUMN_EDGE = 0.05, 0.5  # the powers of what lies outside
PARTIAL = 1.02  # the cost of the conditions of columns that may lie outside
MOST_STREAMS, MOST_COLUMNS = 16, 28

# Of depthwise convolutions:
BAND_ROWS = (14, 8, 16, 9, 7, 6)  # the rule takes the first that divides the height
BAND_COLUMNS = 8  # as many sums hide the latency of an addition
MOST_BAND_ROWS, MOST_BAND_COLUMNS = 28, 14
CYCLES_TO_PAD = 0.3  # what a row of padding costs beside one that is computed

# Of products of matrices:
BLOCKS = (4, 8, 16, 32)  # columns that are packed together, up to two vectors

# Of grouped convolutions on plain images, whose vectors lie along the pixels:
LEAST_VECTORS = 6  # of a band
MOST_STORED = 64  # pixels at once, of which LLVM makes vectors


class Cores(NamedTuple):
    """What cores have.

    Attributes:
        lanes: float32 numbers in a vector.
        registers: of vectors, that a tile may fill.
        bytes_at_once: products of bytes that one instruction adds up in each lane: 4 with VNNI and with dot products of
            aarch64, 2 (as words) with other x86, else 1 (as words).
        signed: whether that instruction takes data with a sign.
    """

    lanes: int
    registers: int
    bytes_at_once: int = 1
    signed: bool = False


class Tile(NamedTuple):
    """A register tile: channel blocks, rows and columns of the output."""

    chunks: int
    rows: int
    columns: int


def register_tile(chunks: int, vectors: int, height: int, width: int, registers: int, block_bytes: int) -> Tile:
    """Return the tile with the least estimated cycles for each output.

    Args:
        chunks: the channel blocks of the output.
        vectors: the vectors in a channel block.
        height, width: of the output.
        registers: the vector registers of a core.
        block_bytes: of the weights of a channel block.
    """
    return min(tiles(chunks, vectors, height, width, registers, block_bytes))[1]


def tiles(
    chunks: int, vectors: int, height: int, width: int, registers: int, block_bytes: int
) -> Iterator[tuple[float, Tile]]:
    """Yield tiles that fit into the registers, each with its estimate of cycles for each output, in any unit."""
    for blocks in (1, 2, 3, 4):
        if chunks % blocks:
            continue
        for rows in range(1, min(height, MOST_STREAMS // blocks) + 1):
            for columns in range(1, min(width, MOST_COLUMNS) + 1):
                weights, sums = blocks * vectors, blocks * vectors * rows * columns
                # Beside these stands a number of the input. With one vector of weights, full registers were no gain.
                if sums + weights + (2 if weights == 1 else 1) <= registers:
                    loads = CYCLES_PER_WEIGHT * weights + CYCLES_PER_INPUT * rows * columns
                    streams = CYCLES_PER_STREAM * blocks * vectors * rows
                    cycles = max(1.0, SUMS_TO_HIDE_LATENCY / sums) * (1 + (loads + streams) / sums)
                    cycles *= _computed(height, rows) ** ROW_EDGE * _computed(width, columns) ** COLUMN_EDGE
                    if width % columns:
                        cycles *= PARTIAL
                    if blocks * block_bytes > NEAR_BYTES:
                        cycles *= BEYOND_NEAR
                    yield cycles, Tile(blocks, rows, columns)


class Band(NamedTuple):
    """What a depthwise convolution computes of a channel block: rows that are padded at once, columns of a tile."""

    rows: int
    columns: int


def band_rule(height: int, width: int) -> Band:
    """Return the band that is taken without measurement; `height` and `width` are those of the output."""
    rows = next((rows for rows in BAND_ROWS if height % rows == 0), min(height, BAND_ROWS[0]))
    return Band(rows, 7 if width % 7 == 0 else -(-width // -(-width // BAND_COLUMNS)))


def bands(height: int, width: int, registers: int) -> Iterator[tuple[float, Band]]:
    """Yield bands whose sums fit into the registers, each with a rough estimate of cycles for each output."""
    for rows in range(1, min(height, MOST_BAND_ROWS) + 1):
        for columns in range(1, min(width, MOST_BAND_COLUMNS, registers - 3) + 1):
            cycles = math.sqrt(_computed(height, rows) * _computed(width, columns)) * max(1.0, BAND_COLUMNS / columns)
            yield cycles * (1 + CYCLES_TO_PAD * 2 / rows), Band(rows, columns)


class MatrixTile(NamedTuple):
    """A register tile of a product of matrices."""

    rows: int
    columns: int


def dense_tile(rows: int, outputs: int, lanes: int, registers: int) -> MatrixTile | None:
    """Return the tile that divides the product and has the least estimated cycles; None where no block divides it."""
    divide = (
        (cycles, tile)
        for cycles, tile in matrix_tiles(rows, lanes, registers)
        if rows % tile.rows == outputs % tile.columns == 0
    )
    return min(divide, default=(0.0, None))[1]


def matrix_tile(rows: int, columns: int, lanes: int, registers: int) -> MatrixTile:
    """Return the tile of the least estimated cycles; what it computes beyond the product is thrown away."""
    return min(
        (cycles * _computed(rows, tile.rows) * _computed(columns, tile.columns), tile)
        for cycles, tile in matrix_tiles(rows, lanes, registers)
        if tile.columns >= lanes
    )[1]


def matrix_tiles(rows: int, lanes: int, registers: int) -> Iterator[tuple[float, MatrixTile]]:
    """Yield tiles that fit into the registers, each with its estimate of cycles for each number of the product."""
    for block in BLOCKS:
        vectors = max(1, block // lanes)
        for step in range(1, min(rows, registers) + 1):
            sums = step * vectors
            if block <= 2 * lanes and sums + vectors + 1 < registers:
                loads = CYCLES_PER_WEIGHT * vectors + CYCLES_PER_INPUT * step
                cycles = max(1.0, SUMS_TO_HIDE_LATENCY / sums) * (1 + loads / sums) * lanes * vectors / block
                yield cycles, MatrixTile(step, block)


def pixel_band(height: int, width: int, lanes: int) -> int:
    """Return the fewest rows whose pixels fill vectors and are enough of them; all rows where no band does."""
    fits = (band for band in range(1, height) if height % band == 0 and band * width % lanes == 0)
    return next((band for band in fits if band * width >= LEAST_VECTORS * lanes), height)


def stored_pixels(pixels: int, lanes: int) -> int:
    """Return how many pixels are stored at once: a divisor, of full vectors if there is one."""
    divisors = [number for number in range(1, MOST_STORED + 1) if pixels % number == 0]
    return max(divisors, key=lambda number: (number % lanes == 0, number))


class Phases(NamedTuple):
    """Rows or columns of a transposed convolution, whose outputs fall into as many phases as the stride has steps.

    Attributes:
        read, kernel, written: the extents of the input, the kernel and the output.
        padding: before; what is cut from the output.
    """

    read: int
    kernel: int
    written: int
    stride: int
    padding: int

    @property
    def taps(self) -> int:
        """The kernel rows that one row of the output reads, at most."""
        return math.ceil(self.kernel / self.stride)

    @property
    def before(self) -> int:
        """The zeros that are read before the input."""
        return max(0, self.taps - 1 - self.padding // self.stride)


def _computed(extent: int, step: int) -> float:
    """Return what whole tiles would compute, over what there is."""
    return math.ceil(extent / step) * step / extent


def channel_block(channels: int, lanes: int) -> int:
    """Return the channels of one block of a layout: as many as a vector has lanes, or 8, or the largest divisor below.

    It depends on nothing but the tensor, so that no tensor changes its layout between two convolutions. Vectors of 9 to
    15 numbers are loaded and stored in parts: convolutions of 24, 40 or 72 channels took 1.2 to 1.5 times as long in
    them as in vectors of 8. In vectors of 4, those of 12 to 44 channels took 1.2 to 1.8 times as long as in them.
    """
    divisors = [block for block in range(min(lanes, channels), 0, -1) if channels % block == 0]
    return 8 if 8 in divisors and divisors[0] < lanes else divisors[0]


def byte_block(channels: int, lanes: int) -> int:
    """Return the channels of one block of bytes; 0 where none divides them.

    The sums of a block, int32 each, are a vector or half of one, since half is still better than padding. Instructions
    multiply 4 channels at a time.
    """
    return next((block for block in (16, 8, 4) if block <= max(8, lanes) and channels % block == 0), 0)
