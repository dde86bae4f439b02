"""Products of matrices.

A matrix of weights is packed into blocks of columns, one vector wide, so that a product reads it once and in order:

    for chunks of blocks:                             in parallel
      for tiles of rows:
        for terms of the reduction:
          for rows and blocks of the tile:            unrolled, one multiply-add of vectors each
        what follows: bias, activation; store

One row alone is bound by memory: its tile has blocks enough that their sums do not wait for each other. Where vectors
do not divide the columns, the last block ends in zeros, and what follows is a pass of its own.

A product of activations, as in attention, has the same loops over a matrix that is not packed.

The order of the sums is that of the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import s_tir, te, tirx
from tvm.s_tir.schedule import SBlockRV

from tvm_pipeline_kernels.relax.schedules import plain
from tvm_pipeline_kernels.relax.schedules.cores import Cores
from tvm_pipeline_kernels.relax.schedules.epilogue import RULE, blocks_of, in_registers, shape_of
from tvm_pipeline_kernels.relax.schedules.stored_weights import widened
from tvm_pipeline_kernels.tiles import Tile, register_tile

NAME = "dense"
PANELS = "panels"  # a block that packs
MOST_BLOCKS = 8  # that one row is multiplied by at a time


def packed(weights: NDArray[Any], lanes: int) -> NDArray[Any]:
    """Return weights (terms, columns) in blocks (blocks, terms, columns of a block), the last filled up with zeros.

    A block of zeros follows where neither two nor three divide many blocks: a tile of one block takes 1.4 times as
    long.

    >>> packed(np.arange(6.0).reshape(2, 3), 2).tolist()
    [[[0.0, 1.0], [3.0, 4.0]], [[2.0, 0.0], [5.0, 0.0]]]
    """
    terms, columns = weights.shape
    block = min(lanes, columns)
    blocks = -(-columns // block)
    if blocks > MOST_BLOCKS and blocks % 2 and blocks % 3:
        blocks += 1
    filled = np.pad(weights, ((0, 0), (0, blocks * block - columns)))
    return np.ascontiguousarray(filled.reshape(terms, -1, block).transpose(1, 0, 2))


def compute_dense(data: te.Tensor, weights: te.Tensor, columns: int) -> te.Tensor:
    """Return data (rows, terms) times weights that `packed` returned, as (rows, columns)."""
    rows, terms = map(int, data.shape)
    blocks, _, block = map(int, weights.shape)
    return _product(
        (rows, columns),
        terms,
        blocks,
        block,
        lambda at, term: data[at[0], term],
        lambda _, *place: widened(weights(*place)),
    )


def compute_batch(left: te.Tensor, right: te.Tensor, lanes: int) -> te.Tensor:
    """Return left (batches, rows, terms) times right (batches, terms, columns); vectors have `lanes` numbers.

    Where vectors do not divide the columns, the matrix on the right is packed first.
    """
    batches, rows, terms = map(int, left.shape)
    columns = int(right.shape[2])
    block = min(lanes, columns)
    blocks = -(-columns // block)

    def number(n: Any, j: Any, term: Any, lane: Any) -> Any:
        return right[n, term, j * block + lane]

    numbers: Callable[..., Any] = number
    if columns % block:
        zero = tirx.const(0, right.dtype)
        numbers = te.compute(
            (batches, blocks, terms, block),
            lambda n, j, term, lane: tirx.if_then_else(j * block + lane < columns, number(n, j, term, lane), zero),
            name=PANELS,
        )
    return _product(
        (batches, rows, columns),
        terms,
        blocks,
        block,
        lambda at, term: left(*at, term),
        lambda n, *at: numbers(*n, *at),
    )


def _product(
    shape: Sequence[int], terms: int, blocks: int, block: int, left: Callable[..., Any], right: Callable[..., Any]
) -> te.Tensor:
    """Return a product of this shape; its sums are in blocks of columns.

    Args:
        left: gives a number of a batch and row, and a term.
        right: gives a number of a batch, a block, a term and a column of the block.
    """
    term = te.reduce_axis((0, terms), "term")
    sums = te.compute(
        (*shape[:-1], blocks, block),
        lambda *at: te.sum(left(at[:-2], term) * right(at[:-3], at[-2], term, at[-1]), axis=[term]),
        name=NAME,
        attrs={RULE: NAME},
    )
    return te.compute(
        shape, lambda *at: sums(*at[:-1], te.indexdiv(at[-1], block), te.indexmod(at[-1], block)), name="columns"
    )


def schedule(s: s_tir.Schedule, anchor: SBlockRV, cores: Cores) -> None:
    """Schedule a product of this module and what is fused to it."""
    *_, rows, blocks, block = shape_of(s, anchor)
    block_bytes = 4 * block * int(s.get(anchor).iter_vars[-1].dom.extent)
    if rows == 1:
        tile = Tile(next(count for count in range(MOST_BLOCKS, 0, -1) if blocks % count == 0), 1, 1)
    else:
        tile = register_tile(blocks, -(-block // cores.lanes), 1, rows, cores.registers, block_bytes)
    last = _inlined(s, anchor, cores)
    if shape_of(s, last)[-1] == blocks * block:
        stored = s.get_loops(last)
        *batch, row, column = stored
        chunk, inner, lane = s.split(column, [None, tile.chunks, block])
    else:
        plain.schedule_block(s, last, cores)
        s.cache_write(anchor, 0, "local")
        *batch, row, column, lane = s.get_loops(s.get_consumers(anchor)[0])
        chunk, inner = s.split(column, [None, tile.chunks])
    row, inner_row = s.split(row, [None, tile.columns])
    s.reorder(*batch, chunk, row, inner_row, inner, lane)
    place = s.fuse(*batch, chunk, row)
    s.parallel(place)
    s.compute_at(anchor, place, preserve_unit_loops=True)
    *_, row_of_sums, block_of_sums, lane_of_sums, term = s.get_loops(anchor)
    s.reorder(term, row_of_sums, block_of_sums, lane_of_sums)
    in_registers(s, row_of_sums, block_of_sums, lane_of_sums)
    in_registers(s, *s.get_loops(s.decompose_reduction(anchor, term))[-3:])
    in_registers(s, inner_row, inner, lane)
    s.set_scope(anchor, 0, "local")


def _inlined(s: s_tir.Schedule, anchor: SBlockRV, cores: Cores) -> SBlockRV:
    """Inline all blocks behind an anchor but the last; return that, which has the shape of the product."""
    name = s.get(anchor).name_hint
    blocks = blocks_of(s)
    behind = blocks[[s.get(block).name_hint for block in blocks].index(name) + 1 :]
    for block in behind[:-1]:
        s.compute_inline(block)
    for block in blocks[: len(blocks) - len(behind) - 1]:
        plain.schedule_block(s, block, cores)
    return behind[-1]
