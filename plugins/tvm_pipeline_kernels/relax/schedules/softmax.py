"""Softmax and log_softmax, a row at a time: what lies on it stays in the first cache.

    for rows:                                             in parallel
      the largest number of the row
      for columns: the exponential function, stored       in vectors
      the sum of what was stored
      for columns: divide; what follows; store            in vectors

Along the last axis sums and maxima are those of each lane of a vector, and the lanes come together at the end: the sum
is another one than that of the row's order, and closer to the exact one. Along another axis a row is a tile of vectors
that lie side by side, and sums have the row's order.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, te, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvm_pipeline_kernels.elementary import exp
from tvm_pipeline_kernels.relax.schedules.cores import Cores
from tvm_pipeline_kernels.relax.schedules.epilogue import RULE, blocks_of, shape_of

NAME = "softmax"
STAGES = ("lanes_highest", "highest", "exponentials", "lanes_total", "total")
COLUMNS = 64  # of a tile along another axis than the last


def compute_softmax(data: te.Tensor, axis: int, lanes: int) -> te.Tensor:
    """Return e^x over the sum of e^x along an axis, for float32; vectors have `lanes` numbers."""
    exponentials, _, total = _stages(data, axis, lanes)
    return te.compute(
        data.shape,
        lambda *at: exponentials[at] / total[_without(at, axis)],
        name=NAME,
        attrs={RULE: NAME},
    )


def compute_log_softmax(data: te.Tensor, axis: int, lanes: int) -> te.Tensor:
    """Return x minus the logarithm of the sum of e^x along an axis, for float32; vectors have `lanes` numbers."""
    _, highest, total = _stages(data, axis, lanes)
    return te.compute(
        data.shape,
        lambda *at: data[at] - highest[_without(at, axis)] - tirx.log(total[_without(at, axis)]),
        name=NAME,
        attrs={RULE: NAME},
    )


def _without(at: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
    axis %= len(at)
    return at[:axis] + at[axis + 1 :]


def _with(at: tuple[Any, ...], axis: int, place: Any) -> tuple[Any, ...]:
    axis %= len(at) + 1
    return (*at[:axis], place, *at[axis:])


def _stages(data: te.Tensor, axis: int, lanes: int) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    """Return e to the power of what each number is below the highest, the highest numbers, and the sums."""
    columns = int(data.shape[axis])
    rest = _without(tuple(data.shape), axis)
    is_last = axis % len(data.shape) == len(data.shape) - 1
    lanes = min(lanes, columns)
    column = te.reduce_axis((0, columns), "column")
    if is_last:
        vector, lane = te.reduce_axis((0, -(-columns // lanes)), "vector"), te.reduce_axis((0, lanes), "lane")
        # The last vector may overlap the one before.
        lanes_highest = te.compute(
            (*rest, lanes),
            lambda *at: te.max(data(*at[:-1], tirx.min(vector * lanes, columns - lanes) + at[-1]), axis=[vector]),
            name="lanes_highest",
        )
        highest = te.compute(rest, lambda *at: te.max(lanes_highest(*at, lane), axis=[lane]), name="highest")
    else:
        highest = te.compute(rest, lambda *at: te.max(data[_with(at, axis, column)], axis=[column]), name="highest")
    exponentials = te.compute(data.shape, lambda *at: exp(data[at] - highest[_without(at, axis)]), name="exponentials")
    if is_last:
        whole = columns // lanes
        left = columns % lanes
        vector, place = te.reduce_axis((0, whole), "vector"), te.reduce_axis((0, left + lanes), "place")
        lanes_total = te.compute(
            (*rest, lanes),
            lambda *at: te.sum(exponentials(*at[:-1], vector * lanes + at[-1]), axis=[vector]),
            name="lanes_total",
        )
        total = te.compute(
            rest,
            lambda *at: te.sum(
                tirx.if_then_else(
                    place < left, exponentials(*at, columns - left + place), lanes_total(*at, place - left)
                )
                if left
                else lanes_total(*at, place),
                axis=[place],
            ),
            name="total",
        )
    else:
        total = te.compute(rest, lambda *at: te.sum(exponentials[_with(at, axis, column)], axis=[column]), name="total")
    return exponentials, highest, total


def schedule(s: s_tir.Schedule, anchor: SBlockRV, cores: Cores) -> None:
    """Schedule a softmax of this module and what is fused to it."""
    blocks = {s.get(block).name_hint: block for block in blocks_of(s)}
    names = list(blocks)
    place = names.index(s.get(anchor).name_hint)
    stages = {name: blocks[name] for name in names[:place] if name in STAGES}
    for name in names[:place]:
        if name not in stages:
            s.compute_inline(blocks[name])
    for name in names[place:-1]:
        s.compute_inline(blocks[name])
    last = blocks[names[-1]]

    loops = s.get_loops(last)
    is_last = "lanes_total" in stages
    if is_last:
        row, inner = loops[:-1], loops[-1:]
    else:
        shape, rest = (shape_of(s, stages[name]) for name in ("exponentials", "total"))
        axis = next(axis for axis in range(len(shape)) if shape[axis + 1 :] == rest[axis:])
        outer, columns = s.split(loops[-1], [None, _tile(int(s.get(loops[-1]).extent), cores.lanes)])
        inner = [loops[axis], columns]
        row = [*loops[:axis], *loops[axis + 1 : -1], outer]
        s.reorder(*row, *inner)
    place = s.fuse(*row) if row else s.add_unit_loop(inner[0])
    s.parallel(place)
    for name in reversed(stages):
        stage = stages[name]
        s.compute_at(stage, place, preserve_unit_loops=True)
        s.set_scope(stage, 0, "local")
        loops = s.get_loops(stage)[1:]
        if name == "exponentials":
            _in_vectors(s, loops[-1], cores)
            continue
        term, has_vectors = loops[-1], name.startswith("lanes") or not is_last
        if has_vectors:
            s.reorder(term, loops[-2])
            _in_vectors(s, loops[-2], cores)
        start = s.decompose_reduction(stage, term)
        if has_vectors:
            _in_vectors(s, s.get_loops(start)[-1], cores)
        else:
            s.unroll(term)
    _in_vectors(s, inner[-1], cores)


def _in_vectors(s: s_tir.Schedule, loop: LoopRV, cores: Cores) -> None:
    """Let a loop be one over vectors; LLVM makes them where they do not divide it."""
    extent = int(s.get(loop).extent)
    if extent % cores.lanes == 0:
        _, loop = s.split(loop, [None, cores.lanes])
    if extent % cores.lanes == 0 or extent < cores.lanes:
        s.vectorize(loop)


def _tile(extent: int, lanes: int) -> int:
    """Return how many columns are a row: a divisor, of whole vectors where there is one."""
    tiles = [tile for tile in range(1, min(extent, COLUMNS) + 1) if extent % tile == 0]
    return max([tile for tile in tiles if tile % lanes == 0] or tiles)
