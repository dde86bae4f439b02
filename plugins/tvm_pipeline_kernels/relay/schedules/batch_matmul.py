"""Products of batches of matrices, as attention has them: columns are packed, and register tiles need not divide.

    for batches, blocks of columns: pack the block                                 in parallel
    for batches, tiles of rows:                                                    in parallel
      for blocks of columns:
        for terms:
          for rows of the tile, vectors of the block: a multiply-add               unrolled
      for rows of the tile, columns: what follows; store

The last tile repeats the last row, and the last block the last column; neither is stored. TOPI's tiles are powers of
two that divide the product, up to 8: single numbers for the 197 tokens of a vision transformer. TOPI adds 16 sums of
each 16th term, and here each sum has the order of the terms, so the bits differ.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import te
from tvm.topi.generic.injective import schedule_injective_from_existing
from tvm.topi.utils import get_const_tuple

from tvm_pipeline_kernels.relay.schedules.anchor import scheduled
from tvm_pipeline_kernels.relay.schedules.choice_context import current_cores
from tvm_pipeline_kernels.tiles import matrix_tile

TAG = "own_batch_matmul"


def compute(
    left: te.Tensor, right: te.Tensor, _shape: Any, out_dtype: str, transpose_left: bool, transpose_right: bool
) -> te.Tensor | None:
    """Return the products (batches, rows, columns); None where they are not ours to compute.

    Args:
        left: (batches, rows, terms), or (batches, terms, rows) where it is transposed.
        right: (batches, terms, columns), or (batches, columns, terms) where it is transposed.
    """
    shapes = [get_const_tuple(tensor.shape) for tensor in (left, right)]
    is_known = all(isinstance(extent, int) for shape in shapes for extent in shape)
    if not is_known or {left.dtype, right.dtype, out_dtype or left.dtype} != {"float32"}:
        return None
    (lefts, *of_left), (rights, *of_right) = shapes
    rows, terms = reversed(of_left) if transpose_left else of_left
    columns = of_right[0] if transpose_right else of_right[1]
    cores = current_cores()
    if columns < cores.lanes or rows == 1:
        return None
    tile = matrix_tile(rows, columns, cores.lanes, cores.registers)
    blocks, steps = -(-columns // tile.columns), -(-rows // tile.rows)

    def packed_column(batch: Any, block: Any, term: Any, column: Any) -> Any:
        at = tvm.te.min(block * tile.columns + column, columns - 1)
        return right[batch, at, term] if transpose_right else right[batch, term, at]

    packed = te.compute((rights, blocks, terms, tile.columns), packed_column, name="packed_columns")
    term = te.reduce_axis((0, terms), name="term")

    def product(batch: Any, step: Any, row: Any, column: Any) -> Any:
        at = tvm.te.min(step * tile.rows + row, rows - 1)
        number = left[_shared(batch, lefts), term, at] if transpose_left else left[_shared(batch, lefts), at, term]
        block, within = column // tile.columns, column % tile.columns
        return te.sum(number * packed[_shared(batch, rights), block, term, within], axis=term)

    shape = max(lefts, rights), steps, tile.rows, blocks * tile.columns
    tiles = te.compute(shape, product, name="tiles")
    return te.compute(
        (shape[0], rows, columns),
        lambda batch, row, column: tiles[batch, row // tile.rows, row % tile.rows, column],
        name="batch_matmul",
        tag=TAG,
    )


def _shared(batch: Any, batches: int) -> Any:
    """Return the batch of an operand, of which there may be one for all."""
    return 0 if batches == 1 else batch


def schedule(outs: list[te.Tensor]) -> te.Schedule | None:
    """Schedule what `compute` returned and what is fused to it; None where it is not among `outs`."""
    return scheduled(outs, TAG, _schedule)


def _schedule(s: te.Schedule, matmul: te.Tensor, output: te.Tensor) -> None:
    if get_const_tuple(output.shape) != get_const_tuple(matmul.shape):  # what follows changes the layout
        schedule_injective_from_existing(s, output)
        output = matmul
    elif matmul.op != output.op:
        s[matmul].compute_inline()
    (tiles,) = matmul.op.input_tensors
    packed = next(tensor for tensor in tiles.op.input_tensors if tensor.op.name == "packed_columns")
    sums = s.cache_write(tiles, "global")

    batch, row, _ = s[output].op.axis
    step, _ = s[output].split(row, factor=int(tiles.shape[2]))
    task = s[output].fuse(batch, step)
    s[output].parallel(task)

    s[tiles].compute_at(s[output], task)
    batch, step, row, column = s[tiles].op.axis
    block, column = s[tiles].split(column, factor=int(packed.shape[3]))
    s[tiles].reorder(batch, step, block, row, column)
    s[tiles].unroll(row)
    s[tiles].vectorize(column)

    s[sums].compute_at(s[tiles], block)
    batch, step, row, column = s[sums].op.axis
    (term,) = s[sums].op.reduce_axis
    s[sums].reorder(batch, step, term, row, column)
    s[sums].unroll(row)
    s[sums].vectorize(column)

    batch, block, *_ = s[packed].op.axis
    s[packed].parallel(s[packed].fuse(batch, block))
