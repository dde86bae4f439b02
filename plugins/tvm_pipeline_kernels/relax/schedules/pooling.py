"""Pooling in blocked layout, in one pass over memory: Relay's schedule of the same name, in S-TIR.

    for images, blocks and rows:                      in parallel
      for tiles of columns:
        for rows and columns of the window:           unrolled
          for columns of the tile:                    unrolled, one addition or maximum of vectors each
        what follows, as the division by the count of an average; store

The sum or the largest of a window stays in registers until it is stored. Padding is skipped where it is met: once for a
row of the window, and in the first and the last tile of a row of the image for a column.

Global pooling is one long sum for each channel:

    for blocks, by four:                              in parallel
      for rows, columns of the input:                 the reduction
        for blocks of the four:                       unrolled, one addition of vectors each
      what follows; store

Four sums are in flight, because each addition waits for the one before it. The order of the sums is Relay's in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tvm import s_tir, te, tirx
from tvm.ir import Call
from tvm.s_tir.schedule import SBlockRV

from tvm_pipeline_kernels.relax.schedules.cores import Cores
from tvm_pipeline_kernels.relax.schedules.epilogue import RULE, in_registers, output, padding, shape_of

NAME = "pooling"
BLOCKS = 4  # that global pooling sums up at a time
COLUMNS = 4  # of a tile: neighbours read some numbers for two windows
MOST_UNROLLED = 32  # terms of a window


class _Windows(NamedTuple):
    """The windows of an image along one axis: `windows` of them, `terms` numbers each."""

    extent: int
    terms: int
    stride: int
    step: int
    before: int
    windows: int

    def place(self, window: Any, term: Any) -> Any:
        """Return which number of the image a term is; outside of it are those of padding."""
        return window * self.stride + term * self.step - self.before

    def may_leave(self) -> bool:
        """Return whether some term of some window lies in the padding."""
        return self.before > 0 or self.place(self.windows - 1, self.terms - 1) >= self.extent


def _windows(
    extents: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[_Windows, _Windows]:
    """Return the windows along rows and along columns; the arguments are those of Relax's pooling."""
    found = []
    for axis in (0, 1):
        extent, terms, stride, step = (int(values[axis]) for values in (extents, window, strides, dilation))
        before, after = int(padding[axis]), int(padding[axis + 2])
        room = extent + before + after - step * (terms - 1) - 1
        count = (-(-room // stride) if ceil_mode else room // stride) + 1
        found.append(_Windows(extent, terms, stride, step, before, count))
    return found[0], found[1]


def compute_max(
    data: te.Tensor,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> te.Tensor:
    """Return the largest number of each window of an image in blocks (n, blocks, height, width, channels of a block).

    Args:
        window, strides, dilation: of rows and of columns.
        padding: top, left, bottom, right.
        ceil_mode: whether a last window that is only partly in the padded image counts.
    """
    rows, columns = _windows(data.shape[2:4], window, strides, padding, dilation, ceil_mode)
    return _pooled(data, rows, columns, tirx.min_value(data.dtype), te.max)


def compute_avg(
    data: te.Tensor,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
    count_include_pad: bool = False,
) -> te.Tensor:
    """Return the mean of each window of an image in blocks; arguments as of `compute_max`.

    Args:
        count_include_pad: whether a sum is divided by all numbers of a window, or by those inside of the image.
    """
    rows, columns = _windows(data.shape[2:4], window, strides, padding, dilation, ceil_mode)
    sums = _pooled(data, rows, columns, tirx.const(0, data.dtype), te.sum)

    def mean(n: Any, chunk: Any, y: Any, x: Any, channel: Any) -> Any:
        counts = [
            tirx.const(windows.terms, "int32") if count_include_pad or not windows.may_leave() else _inside(windows, at)
            for windows, at in ((rows, y), (columns, x))
        ]
        return sums[n, chunk, y, x, channel] / tirx.Cast(data.dtype, counts[0] * counts[1])

    return te.compute(sums.shape, mean, name="mean")


def _inside(windows: _Windows, index: Any) -> Any:
    """Return how many terms of a window are inside of the image, one at least."""
    first = windows.place(index, 0)
    skipped = tirx.max(0, -first + windows.step - 1) // windows.step  # of padding before
    end = tirx.min(windows.terms, (windows.extent - first + windows.step - 1) // windows.step)
    return tirx.Cast("int32", tirx.max(end - skipped, 1))


def compute_mean(data: te.Tensor) -> te.Tensor:
    """Return the mean of each channel of an image in blocks, of shape (n, blocks, 1, 1, channels of a block)."""
    n, chunks, height, width, block = (int(extent) for extent in data.shape)
    row, column = te.reduce_axis((0, height), "row"), te.reduce_axis((0, width), "column")
    sums = te.compute(
        (n, chunks, 1, 1, block),
        lambda n, chunk, y, x, channel: te.sum(data[n, chunk, row, column, channel], axis=[row, column]),
        name=NAME,
        attrs={RULE: NAME},
    )
    scale = tirx.const(1 / (height * width), data.dtype)
    return te.compute(sums.shape, lambda *at: sums[at] * scale, name="mean")


def _pooled(data: te.Tensor, rows: _Windows, columns: _Windows, outside: Any, reduced: Callable[..., Any]) -> te.Tensor:
    """Return what windows are reduced to; `outside` is the number of padding, which changes no sum and no maximum."""
    row, column = te.reduce_axis((0, rows.terms), "row"), te.reduce_axis((0, columns.terms), "column")

    def number(n: Any, chunk: Any, y: Any, x: Any, channel: Any) -> Any:
        in_row, in_column = rows.place(y, row), columns.place(x, column)
        value = data[n, chunk, in_row, in_column, channel]
        for windows, place in ((columns, in_column), (rows, in_row)):
            if windows.may_leave():
                value = tirx.if_then_else(tirx.all(place >= 0, place < windows.extent), value, outside)
        return reduced(value, axis=[row, column])

    return te.compute(
        (data.shape[0], data.shape[1], rows.windows, columns.windows, data.shape[4]),
        number,
        name=NAME,
        attrs={RULE: NAME},
    )


def schedule(s: s_tir.Schedule, anchor: SBlockRV, cores: Cores) -> None:
    """Schedule a pooling of this module and what is fused to it."""
    *_, height, width, _ = shape_of(s, anchor)
    is_global = height == width == 1
    _skip_padding(s, anchor)
    padding(s, anchor)
    last = output(s, anchor, cores)
    n, chunk, row, column, channel = s.get_loops(last)
    if is_global:
        chunk, inner = s.split(chunk, [None, BLOCKS])
        s.reorder(n, chunk, row, column, inner, channel)
        place = outer = s.fuse(n, chunk)
    else:
        column, inner = s.split(column, [None, COLUMNS])
        outer, place = s.fuse(n, chunk, row), column
    s.parallel(outer)
    s.compute_at(anchor, place, preserve_unit_loops=True)

    loops = s.get_loops(anchor)
    terms = loops[-2:]
    first = len(loops) - 7
    tile, vector = loops[first + (1 if is_global else 3)], loops[first + 4]
    s.reorder(*terms, tile, vector)
    kernel = [int(s.get(loop).extent) for loop in terms]
    in_registers(s, tile, vector)
    if kernel[0] * kernel[1] <= MOST_UNROLLED:
        for loop in terms:
            s.unroll(loop)
    in_registers(s, *s.get_loops(s.decompose_reduction(anchor, terms[0]))[-2:])
    in_registers(s, inner, channel)
    s.set_scope(anchor, 0, "local")
    if not is_global:  # tiles at both ends of a row have code of their own, and those between ask nothing
        s.annotate(place, "pragma_loop_partition_hint", True)


def _skip_padding(s: s_tir.Schedule, anchor: SBlockRV) -> None:
    """Let terms in the padding be skipped, where the block adds the padding's number or compares with it.

    `sums = sums + if_then_else(inside, number, 0)` becomes `if inside: sums = sums + number`, and TVM takes a condition
    of rows out of the loops of columns.
    """
    block = s.get(anchor)
    store = block.body
    reduced, (sums, value) = type(store.value), (store.value.a, store.value.b)
    conditions = []
    while isinstance(value, Call) and value.op.name == "prim.if_then_else":
        condition, value, _ = value.args
        conditions.append(condition)
    body = tirx.BufferStore(store.buffer, reduced(sums, value), store.indices)
    for condition in reversed(conditions):
        body = tirx.IfThenElse(condition, body, None)
    skipping = s_tir.SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        body,
        block.init,
        block.alloc_buffers,
        block.match_buffers,
        block.annotations,
    )
    s.state.replace(s.get_sref(anchor), skipping, {block: skipping})
