"""Tiles of convolutions on CUDA devices: what fits, and what is chosen."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_pipeline_kernels.gpu_tiles import MOST_SHARED_BYTES, best_tile, gpu_of, resident_blocks, tiles

EXTENTS = {
    "groups": st.integers(1, 32),
    "outputs": st.integers(1, 2048),
    "pixels": st.integers(1, 112 * 112),
    "terms": st.integers(1, 4608),
}


@given(**EXTENTS, number=st.sampled_from([53, 72, 75, 80, 87, 90]))
def test_a_tile_fits_the_device_and_all_threads_have_equal_work(
    groups: int, outputs: int, pixels: int, terms: int, number: int
) -> None:
    tile = best_tile(groups, outputs, pixels, terms, gpu_of(number))
    assert tile.rows % tile.thread_rows == tile.columns % tile.thread_columns == 0
    assert tile.rows * tile.depth % tile.threads == tile.columns * tile.depth % tile.threads == 0
    assert 64 <= tile.threads <= 256
    assert tile.shared_bytes <= MOST_SHARED_BYTES
    assert resident_blocks(tile.threads, tile.registers, tile.shared_bytes, gpu_of(number)) >= 1


@given(**EXTENTS)
def test_there_is_a_tile_for_every_convolution(groups: int, outputs: int, pixels: int, terms: int) -> None:
    assert any(tiles(outputs, pixels, terms, gpu_of(87)))


def test_large_convolutions_have_many_sums_a_thread_and_small_ones_fill_the_device() -> None:
    orin = gpu_of(87)
    large, small = best_tile(1, 256, 56 * 56, 256 * 9, orin), best_tile(1, 512, 7 * 7, 512 * 9, orin)
    assert large.thread_rows * large.thread_columns >= 32
    assert ceil(512 / small.rows) * ceil(49 / small.columns) >= 2 * orin.processors


@pytest.mark.parametrize(
    ("number", "threads", "registers", "shared_bytes", "blocks"),
    [
        (80, 256, 32, 0, 8),  # 2048 threads
        (80, 256, 64, 0, 4),  # 65536 registers
        (80, 128, 32, 40 * 1024, 4),  # 164 KB of shared memory, of which 1 KB of each block is the system's
        (80, 128, 32, 41 * 1024, 3),
        (75, 128, 32, 32 * 1024, 2),  # 64 KB, all for blocks
        (80, 32, 16, 0, 32),  # 32 blocks
        (87, 1024, 32, 0, 1),  # 1536 threads
        (87, 256, 40, 0, 6),
        (87, 1024, 128, 0, 0),  # does not run
        (75, 32, 16, 0, 16),
    ],
)
def test_resident_blocks_are_those_of_nvidias_calculator(
    number: int, threads: int, registers: int, shared_bytes: int, blocks: int
) -> None:
    assert resident_blocks(threads, registers, shared_bytes, gpu_of(number)) == blocks


def test_an_unknown_architecture_is_taken_as_the_one_before_it() -> None:
    assert gpu_of(88) == gpu_of(87)
    assert gpu_of(20) == gpu_of(53)
