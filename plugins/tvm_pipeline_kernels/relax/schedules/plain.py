"""The rule of whatever no other rule is for: elementwise operators, changes of layout, reductions, products.

What is computed on the way is computed where it is read, unless something expensive would be computed more often then.
Each pass over memory that remains has loops of its own:

    for the outer axes:                                   in parallel
      for the innermost axes:                             in vectors, or by LLVM where vectors do not divide them

Axes are fused as long as each tensor moves on by equal steps along them, or not at all. So an addition of tensors of
one shape is one long loop, and a bias of channels (n, c, 1, 1) has a loop over channels and one over an image.

A reduction keeps its sums in registers:

    for the outer axes, tiles of the innermost axis:      in parallel
      for what is reduced:
        for the innermost axis of the tile:               in vectors, or unrolled where they would be gathered
      store

The order of sums is that of the reduction, so values do not depend on the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from tvm import DataType, sym
from tvm.ir import Call, TensorLoad
from tvm.s_tir import SBlock, Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV, ScheduleError
from tvm.tirx import Buffer, BufferStore, IntImm
from tvm_ffi import structural_walk

from tvm_pipeline_kernels.relax.schedules.cores import Cores

SPATIAL, REDUCED = 0, 2  # kinds of an axis of a block
VECTORS = 4  # of sums that a reduction has in flight
PARTS = 8  # of a pass that cores share, at least
LEAST_PARALLEL = 1 << 14  # elements of a pass that cores share
TURNED = 16  # columns of a tile that is read along its rows
ROWS = 8  # of sums that are not in vectors
CHEAP = ("prim.if_then_else", "tirx.likely")  # calls that cost no more than what they choose


def schedule(s: Schedule, blocks: Sequence[SBlockRV], cores: Cores) -> bool:
    """Schedule blocks without an anchor; return False where none of their loops have a known form.

    Raises:
        ScheduleError: where TVM refuses a step.
    """
    passes = []
    for block in blocks:
        if _is_inlined(s, block, cores):
            try:
                s.compute_inline(block)
                continue
            except ScheduleError:  # what the function returns, or what is not computed element by element
                pass
        passes.append(block)
    are_scheduled = [schedule_block(s, block, cores) for block in passes]
    return any(are_scheduled)


def _is_inlined(s: Schedule, block: SBlockRV, cores: Cores) -> bool:
    """Return whether the elements of a block cost less where they are read than in memory."""
    node = s.get(block)
    consumers = [s.get(consumer) for consumer in s.get_consumers(block)]
    if not consumers or any(int(axis.iter_type) != SPATIAL for axis in node.iter_vars):
        return False
    if not _is_linear(node) and _is_vector(node, cores) and not all(_is_vector(each, cores) for each in consumers):
        return False  # as a resize of blocked images that becomes a plain one
    calls: list[str] = []

    structural_walk(node.body, (Call, lambda call: calls.append(getattr(call.op, "name", ""))))
    return set(calls) <= set(CHEAP) or sum(map(_steps, consumers)) <= _steps(node)


def _is_vector(node: SBlock, cores: Cores) -> bool:
    """Return whether the last axis of a block can be computed in vectors."""
    extents = [int(axis.dom.extent) for axis in node.iter_vars]
    return _lanes(_accesses(node), _last_wide(extents), cores) > 1


def _is_linear(node: SBlock) -> bool:
    return all(None not in access.steps for access in _accesses(node))


def _steps(node: SBlock) -> int:
    return math.prod(int(axis.dom.extent) for axis in node.iter_vars)


class Access(NamedTuple):
    """A tensor that a block stores or loads: by how many elements it moves along each axis; None: by unlike steps."""

    steps: tuple[int | None, ...]
    dtype: str


def _accesses(node: SBlock) -> list[Access]:
    """Return how a block stores and loads; what it stores comes first."""
    axes = [axis.var for axis in node.iter_vars]
    stores: list[Access] = []
    loads: list[Access] = []

    def access(tensor: Buffer, indices: Any) -> Access:
        position: Any = 0
        for index, extent in zip(indices, tensor.shape, strict=True):
            position = position * extent + index
        found = (sym.detect_linear_equation(position, [axis])[:1] for axis in axes)
        steps = (int(step[0]) if len(step) and isinstance(step[0], IntImm) else None for step in found)
        return Access(tuple(steps), str(tensor.dtype))

    structural_walk(
        node.body,
        [
            (BufferStore, lambda store: stores.append(access(store.buffer, store.indices))),
            (TensorLoad, lambda load: loads.append(access(load.source, load.indices))),
        ],
    )
    return stores + loads


def schedule_block(s: Schedule, block: SBlockRV, cores: Cores) -> bool:
    """Schedule one pass over memory; return whether its loops have a known form."""
    node = s.get(block)
    kinds = [int(axis.iter_type) for axis in node.iter_vars]
    extents = [int(axis.dom.extent) for axis in node.iter_vars]
    count = kinds.count(SPATIAL)
    accesses = _accesses(node)
    has_order = kinds == [SPATIAL] * count + [REDUCED] * (len(kinds) - count)
    if not count or not has_order or len(s.get_loops(block)) != len(kinds) or not accesses:
        return False
    if count == len(kinds):
        _schedule_elements(s, s.get_loops(block), extents, accesses, cores)
    else:
        _schedule_sums(s, block, extents[:count], accesses, cores)
    return True


def _schedule_elements(
    s: Schedule, loops: list[LoopRV], extents: list[int], accesses: list[Access], cores: Cores
) -> None:
    axis = _last_wide(extents)
    lanes = _lanes(accesses, axis, cores)
    fused: list[LoopRV] = []
    turned, first = None, 0
    for count in _groups(extents, accesses):
        fused.append(s.fuse(*loops[first : first + count]))
        first += count
        if first < len(extents) and _is_in_order(accesses, _last_wide(extents[:first])):
            turned = len(fused) - 1
    elements = math.prod(extents)
    if lanes == 1 and turned is not None:
        _schedule_turned(s, fused, turned, cores.lanes)
    elif lanes > 1 and int(s.get(fused[-1]).extent) % lanes == 0:  # else LLVM makes vectors and a rest
        rest, inner = s.split(fused[-1], [None, lanes])
        s.vectorize(inner)
        _in_parallel(s, [*fused[:-1], rest], elements)
    else:
        _in_parallel(s, fused[:-1], elements)


def _is_in_order(accesses: list[Access], axis: int) -> bool:
    """Return whether all that is loaded lies side by side along an axis, or does not change."""
    are_known = all(None not in access.steps and access.dtype != "bool" for access in accesses)
    return are_known and all(access.steps[axis] in (0, 1) for access in accesses[1:])


def _schedule_turned(s: Schedule, loops: list[LoopRV], turned: int, lanes: int) -> None:
    """Schedule what reads in another order than it stores: it loads vectors along one loop, and stores along the last.

    A tile of 16 x 16 numbers costs a load each and a store each of every vector, and no number is loaded alone.
    """
    elements = math.prod(int(s.get(loop).extent) for loop in loops)
    columns = _divisor(int(s.get(loops[-1]).extent), TURNED)
    rows = _divisor(int(s.get(loops[turned]).extent), lanes)
    *outer, last = loops
    outer[turned], vector = s.split(loops[turned], [None, rows])
    last, column = s.split(last, [None, columns])
    s.reorder(*outer, last, column, vector)
    s.unroll(column)
    s.vectorize(vector)
    _in_parallel(s, [*outer, last], elements)


def _schedule_sums(s: Schedule, block: SBlockRV, extents: list[int], accesses: list[Access], cores: Cores) -> None:
    """Schedule a reduction whose outputs have these extents."""
    loops = s.get_loops(block)
    if len(s.get(block).writes) > 1:  # as the largest number and its place
        s.parallel(s.fuse(*loops[: len(extents)]))
        return
    axis = _last_wide(extents)
    lanes = _divisor(extents[axis], _lanes(accesses, axis, cores))
    count = _divisor(extents[axis] // lanes, VECTORS if lanes > 1 else ROWS)

    s.cache_write(block, 0, "local")
    (stored,) = s.get_consumers(block)
    outer = s.get_loops(stored)
    outer[axis], *tile = s.split(outer[axis], [None, count, lanes])
    s.reorder(*outer, *tile)
    place = s.fuse(*outer)
    s.parallel(place)
    s.compute_at(block, place, preserve_unit_loops=True)

    loops = s.get_loops(block)
    reduced = loops[1 + len(extents) :]
    tile_of_sums = s.split(loops[1 + axis], [count, lanes])
    s.reorder(*reduced, *tile_of_sums)
    for vectors, vector in (tile, tile_of_sums):
        s.unroll(vectors)
        s.vectorize(vector)
    start = s.decompose_reduction(block, reduced[0])  # only now: TVM makes no vectors of sums that are decomposed
    vectors, vector = s.get_loops(start)[-2:]
    s.unroll(vectors)
    s.vectorize(vector)


def _in_parallel(s: Schedule, loops: list[LoopRV], elements: int) -> None:
    """Run in parallel as many of the outer loops, fused, as give each core enough to do of so many elements."""
    extents = [int(s.get(loop).extent) for loop in loops]
    count = next((n for n in range(len(loops)) if math.prod(extents[:n]) >= PARTS), len(loops))
    if math.prod(extents[:count]) > 1 and elements >= LEAST_PARALLEL:
        s.parallel(s.fuse(*loops[:count]))


def _groups(extents: Sequence[int], accesses: list[Access]) -> list[int]:
    """Return how many axes at a time, from the first to the last, can be one loop.

    >>> bias = Access((0, 1, 0, 0), "float32")
    >>> _groups([2, 8, 7, 7], [Access((392, 49, 7, 1), "float32"), bias])
    [1, 1, 2]
    """
    counts: list[int] = []
    last = None  # the axis before of more than one number
    for axis, extent in enumerate(extents):
        can_join = (
            extent == 1
            or last is None
            or all(_goes_on(access.steps[last], access.steps[axis], extent) for access in accesses)
        )
        if counts and can_join:
            counts[-1] += 1
        else:
            counts.append(1)
        if extent > 1:
            last = axis
    return counts


def _goes_on(outer: int | None, inner: int | None, extent: int) -> bool:
    """Return whether a step of an outer axis is that of an inner one from its last number of so many."""
    return inner is not None and outer == inner * extent


def _last_wide(extents: Sequence[int]) -> int:
    """Return the last axis of more than one number."""
    return max((axis for axis, extent in enumerate(extents) if extent > 1), default=len(extents) - 1)


def _lanes(accesses: list[Access], axis: int, cores: Cores) -> int:
    """Return the elements of a vector along an axis; 1 where some would be gathered, or are bits."""
    for access in accesses:
        if access.steps[axis] not in (0, 1) or access.dtype == "bool":
            return 1
    bits = max(DataType(access.dtype).bits for access in accesses)
    return max(1, cores.lanes * 32 // bits)


def _divisor(extent: int, most: int) -> int:
    """Return the largest divisor that is not above `most`."""
    return next(divisor for divisor in range(min(extent, most), 0, -1) if extent % divisor == 0)
