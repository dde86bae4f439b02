"""Pooling in blocked layout, in one pass over memory.

    for images, blocks and rows:                      in parallel
      for tiles of columns:
        for rows and columns of the window:           unrolled
          for columns of the tile:                    unrolled, one addition or maximum of vectors each
        what follows, as the division by the count of an average; store

The sum or the largest of a window stays in a register until it is stored. TOPI's stores each step, divides sums in a
second pass, one number at a time, and finds the row and column of each term by a division. Padding is read as zeros, or
the least number, where it is met: to copy the padded rows first costs more than the conditions.

Global pooling is one long sum for each channel:

    for blocks, by four:                              in parallel
      for rows, columns of the input:                 the reduction
        for blocks of the four:                       unrolled, one addition of vectors each
      what follows; store

Four sums are in flight, because each addition waits for the one before it. The order of the sums is TOPI's in both, and
so is every bit.
"""

from __future__ import annotations

from tvm import te
from tvm.topi.utils import get_const_tuple

from tvm_pipeline_kernels.relay.schedules.anchor import anchors
from tvm_pipeline_kernels.relay.schedules.conv2d import applies

BLOCKS = 4  # that global pooling sums up at a time
COLUMNS = 4  # of a tile of maxima, which read some numbers for two windows
MOST_UNROLLED = 32  # terms of a window


def schedule(outs: list[te.Tensor], layout: str = "") -> te.Schedule | None:
    """Schedule a pooling and what is fused to it; None where it is not ours to schedule.

    It is ours in blocked layout (n, blocks, height, width, channels of a block): windows, and what follows the pooling
    of all.
    """
    s, found = anchors(outs, lambda tag: tag.startswith(("pool_", "adaptive_pool_")))
    if len(found) != 1:
        return None
    (pool,), output = found, outs[0]
    is_blocked = len(pool.shape) == 5 and len(pool.op.reduce_axis) == 2
    if not is_blocked or not applies(pool, output):
        return None
    if not pool.op.tag.startswith("adaptive_pool_"):
        _schedule_windows(s, pool, output)
    elif get_const_tuple(pool.shape)[2:4] == (1, 1) and pool.op != output.op:
        _schedule_global(s, pool, output)
    else:
        return None
    return s


def _schedule_windows(s: te.Schedule, pool: te.Tensor, output: te.Tensor) -> None:
    (data,) = pool.op.input_tensors
    if isinstance(data.op, te.ComputeOp):  # the padding
        s[data].compute_inline()
    columns = COLUMNS if pool.op.tag == "pool_max" else 1
    found = s.cache_write(pool, "global") if pool.op == output.op else pool
    n, block, row, column, channel = s[output].op.axis
    column_outer, column = s[output].split(column, factor=columns)
    s[output].parallel(s[output].fuse(n, block, row))
    s[output].vectorize(channel)
    s[output].unroll(column)
    s[found].compute_at(s[output], column_outer)

    n, block, row, column, channel = s[found].op.axis
    window = s[found].op.reduce_axis
    s[found].reorder(n, block, row, *window, column, channel)
    s[found].vectorize(channel)
    s[found].unroll(column)
    if int(window[0].dom.extent) * int(window[1].dom.extent) <= MOST_UNROLLED:
        for axis in window:
            s[found].unroll(axis)


def _schedule_global(s: te.Schedule, pool: te.Tensor, output: te.Tensor) -> None:
    n, block, row, column, channel = s[output].op.axis
    block_outer, block = s[output].split(block, factor=BLOCKS)
    s[output].reorder(n, block_outer, row, column, block, channel)
    blocks = s[output].fuse(n, block_outer)
    s[output].parallel(blocks)
    s[output].vectorize(channel)
    s[output].unroll(block)
    s[pool].compute_at(s[output], blocks)

    n, block, row, column, channel = s[pool].op.axis
    s[pool].reorder(n, row, column, *s[pool].op.reduce_axis, block, channel)
    s[pool].vectorize(channel)
    s[pool].unroll(block)
