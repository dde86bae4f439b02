"""Register tiles fit into the registers, and blocks divide their channels, whatever the convolution is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tvm_pipeline_kernels.tiles import byte_block, channel_block, register_tile

extents = st.integers(1, 400)


@given(
    st.integers(1, 200),
    st.sampled_from([1, 2]),
    extents,
    extents,
    st.sampled_from([16, 32]),
    st.sampled_from([64, 1 << 16, 1 << 20]),
)
def test_a_tile_fits_into_the_registers_and_the_output(
    chunks: int, vectors: int, height: int, width: int, registers: int, block_bytes: int
) -> None:
    tile = register_tile(chunks, vectors, height, width, registers, block_bytes)
    weights = tile.chunks * vectors
    assert weights * tile.rows * tile.columns + weights + 1 < registers
    assert chunks % tile.chunks == 0
    assert tile.rows <= height
    assert tile.columns <= width


@given(st.integers(1, 5000), st.sampled_from([4, 8, 16]))
def test_a_block_divides_the_channels(channels: int, lanes: int) -> None:
    block = channel_block(channels, lanes)
    assert channels % block == 0
    assert block <= lanes
    larger = [number for number in range(block + 1, min(lanes, channels) + 1) if channels % number == 0]
    assert not larger or (block == 8 and lanes not in larger)


@given(st.integers(1, 5000), st.sampled_from([4, 8, 16]))
def test_a_block_of_bytes_is_the_largest_that_divides_the_channels(channels: int, lanes: int) -> None:
    dividing = [block for block in (4, 8, 16) if channels % block == 0 and block <= max(8, lanes)]
    assert byte_block(channels, lanes) == max(dividing, default=0)


def test_weights_that_no_cache_keeps_are_read_in_fewer_blocks() -> None:
    """Twice the weights of a tile, its own and those fetched for the next, should fit into 1 MiB."""
    block_bytes = 147_456  # 256 input channels, 3x3
    assert register_tile(16, 1, 17, 17, 32, block_bytes).chunks * block_bytes < 1 << 19
    assert register_tile(16, 1, 17, 17, 32, 4096).chunks == 4


def test_tiles_hide_the_latency_of_additions_where_the_output_is_large_enough() -> None:
    for width in (7, 14, 17, 28, 35, 56, 71, 112, 149):  # primes as well: no divisor of the width is needed
        for registers in (16, 32):
            tile = register_tile(8, 1, width, width, registers, 36_864)
            assert tile.chunks * tile.rows * tile.columns >= 10, (width, tile)
