"""A dense layer in register tiles that fill vectors: `settle_tiles` replaces TOPI's default.

TOPI packs weights in blocks of the largest divisor of the outputs, up to two vectors: 30 for 360 outputs, of which LLVM
makes code for single numbers, 15 times as slow as vectors. It sums 8 rows of a block at once, which are more sums than
AVX2 has registers. Here a block is a power of two, and rows and block fit into the registers. The order of each sum is
TOPI's, and so are its bits.
"""

from __future__ import annotations

from typing import Any

from tvm.autotvm.task.space import SplitEntity

from tvm_pipeline_kernels.relay.schedules.choice_context import current_cores
from tvm_pipeline_kernels.tiles import dense_tile

FEW = 4  # tiles that one task computes at most, along each axis, where their number is even


def settle_tiles(config: Any, rows: Any, outputs: Any, terms: Any) -> bool:
    """Set the tiles of a dense layer (rows, terms) x (outputs, terms); return whether the layer was ours to settle."""
    if not all(isinstance(extent, int) for extent in (rows, outputs, terms)):
        return False
    cores = current_cores()
    tile = dense_tile(rows, outputs, cores.lanes, cores.registers)
    if tile is None:
        return False
    config["tile_y"] = _in_tasks(rows, tile.rows)
    config["tile_x"] = _in_tasks(outputs, tile.columns)
    config["tile_k"] = SplitEntity([terms, 1])
    config["tile_inner"] = SplitEntity([rows // tile.rows, tile.rows])
    return True


def _in_tasks(extent: int, step: int) -> SplitEntity:
    """Return the tiles of an axis in tasks, as TOPI has them."""
    tiles, each = extent // step, 1
    while tiles // each > FEW and tiles // each % 2 == 0:
        each *= 2
    return SplitEntity([tiles // each, each, step])
