"""Schedules of convolutions for GPUs, of functions as TVM's LegalizeOps and FuseOps make them.

`as_product` serves convolutions with enough output channels in a group, dense or grouped, and transposed ones: the
convolution becomes the product of two matrices in tiles (`gpu_tiles.py`). Padding, and zeros between the pixels of a
transposed convolution, are made where the image is read, so the matrix of the image is nowhere but in shared memory.

`by_threads` serves the others, depthwise convolutions above all: a thread computes some neighbouring pixels of one
channel, and reads the image through the cache.

`by_elements` serves pools: a thread computes one element.

All take what is fused behind into the loop that stores the result, where it has the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvm_pipeline_kernels.gpu_tiles import SKEW, WARP, Extents, Gpu, GpuTile, best_tile

# With fewer output channels in a group, numbers of the image in shared memory would be used too seldom.
FEWEST_ROWS = 8
_MOST_UNROLLED = 512  # statements of a loop nest that are written out
_THREADS = 128


def convolution_of(s: s_tir.Schedule) -> tuple[SBlockRV, Extents] | None:
    """Return the block of the convolution in a function, and its extents; None where it has not one such block.

    A convolution has loops over images, output channels and the pixels of the output, and reduces over the input
    channels of a group and the window. It reads the image and then the kernel.
    """
    found = [block for block in s.get_child_blocks(s.get_sblock("root")) if _is_reduction(s, block)]
    if len(found) != 1:
        return None
    block = s.get(found[0])
    spatial = [int(i.dom.extent) for i in block.iter_vars if i.iter_type == tirx.IterVar.DataPar]
    reduced = [int(i.dom.extent) for i in block.iter_vars if i.iter_type == tirx.IterVar.CommReduce]
    if len(spatial) - 2 != len(reduced) - 1 or len(reduced) < 2 or len(block.reads) != 2 or len(block.writes) != 1:
        return None
    image = block.reads[0].source.shape
    if len(image) != len(spatial) or int(image[1]) % reduced[0] or not block.init:
        return None
    groups = int(image[1]) // reduced[0]
    if spatial[1] % groups:
        return None
    extents = Extents(spatial[0], groups, spatial[1] // groups, tuple(spatial[2:]), reduced[0], tuple(reduced[1:]))
    return found[0], extents


def as_product(s: s_tir.Schedule, anchor: SBlockRV, extents: Extents, gpu: Gpu, tile: GpuTile | None = None) -> None:
    """Schedule a convolution as a product of two matrices in tiles.

    Raises:
        ScheduleError: the block is no convolution of a form that is known.
    """
    tile = tile or best_tile(extents.groups, extents.outputs, extents.columns, extents.terms, gpu)
    _to_matrices(s, anchor, extents)
    s.pad_einsum(anchor, [1, tile.rows, tile.columns, tile.depth])

    group, row, column, term = s.get_loops(anchor)
    row_block, row_thread, row = s.split(row, [None, tile.rows // tile.thread_rows, tile.thread_rows])
    column_block, column_thread, column = s.split(
        column, [None, tile.columns // tile.thread_columns, tile.thread_columns]
    )
    step, term = s.split(term, [None, tile.depth])
    s.reorder(group, row_block, column_block, row_thread, column_thread, step, term, row, column)
    s.bind(s.fuse(group, row_block), "blockIdx.y")
    s.bind(column_block, "blockIdx.x")
    thread = s.fuse(row_thread, column_thread)
    s.bind(thread, "threadIdx.x")
    s.annotate(thread, "pragma_unroll_explicit", 0)

    sums = s.cache_write(anchor, 0, "local")
    s.reverse_compute_at(sums, thread, preserve_unit_loops=True)
    for index in (0, 1):
        _through_shared(s, anchor, index, step, term, tile, extents.terms)
    for loop in (term, row, column):
        s.unroll(loop)
    _take_in_consumers(s, sums, extents.groups * extents.outputs * extents.columns)
    for loop in s.get_loops(sums)[-2:]:
        s.unroll(loop)
    s.decompose_reduction(anchor, step)


def _to_matrices(s: s_tir.Schedule, anchor: SBlockRV, extents: Extents) -> None:
    """Make a convolution `sum[group, row, column] += image[group, term, column] * kernel[group, term, row]`."""
    images, _, outputs, pixels, channels, window = extents
    count = len(pixels)
    s.transform_block_layout(
        anchor, tirx.IndexMap.from_func(lambda n, f, *rest: [n, f // outputs, f % outputs, *rest], ndim=2 * count + 3)
    )
    sizes = (images, extents.groups, outputs, *pixels, channels, *window)
    of_group, of_row, of_column = (1,), (2,), (0, *range(3, 3 + count))
    of_term = tuple(range(3 + count, 4 + 2 * count))
    s.reindex(anchor, ("read", 0))
    s.reindex(anchor, ("read", 1))
    s.reindex(anchor, ("write", 0))
    matrices = (
        ("read", 0, (of_group, of_term, of_column)),
        ("read", 1, (of_group, of_term, of_row)),
        ("write", 0, (of_group, of_row, of_column)),
    )
    for side, index, axes in matrices:
        block = s.get(anchor)
        region = (block.reads if side == "read" else block.writes)[index].region
        loops = [i.var for i in block.iter_vars]
        places = [loops.index(extent.min) for extent in region if not isinstance(extent.min, tirx.IntImm)]
        if set(places) - {place for axis in axes for place in axis}:
            raise s_tir.ScheduleError(f"block {block.name_hint} is no convolution: {side} {index} has other loops")
        s.transform_layout(anchor, (side, index), _merged(places, axes, sizes, len(region)))
    everywhere = range(len(sizes))
    s.transform_block_layout(anchor, _merged(everywhere, (of_group, of_row, of_column, of_term), sizes, len(sizes)))


def _merged(places: Sequence[int], axes: Sequence[Sequence[int]], sizes: Sequence[int], ndim: int) -> tirx.IndexMap:
    """Return the map from indices to one for each of `axes`, which are numbered as `places` and have `sizes`."""

    def merged(*indices: tirx.Var) -> list[tirx.PrimExpr]:
        at = dict(zip(places, indices, strict=True))
        together = []
        for axis in axes:
            index = tirx.IntImm("int64", 0)
            for place in axis:
                if sizes[place] > 1:  # TVM takes a loop of one turn for a spatial one, which it fuses with no other
                    index = index * sizes[place] + at.get(place, 0)
            together.append(index)
        return together

    return tirx.IndexMap.from_func(merged, ndim=ndim)


def _through_shared(
    s: s_tir.Schedule, anchor: SBlockRV, index: int, step: object, term: object, tile: GpuTile, terms: int
) -> None:
    """Have all threads bring a tile of a matrix into shared memory, and each what it needs into registers."""
    own = s.cache_read(anchor, index, "local")
    s.compute_at(own, term, preserve_unit_loops=True)
    vectors, vector = s.split(s.get_loops(own)[-1], [None, 4 if tile[3 + (index == 0)] % 4 == 0 else 1])
    s.unroll(vectors)
    s.vectorize(vector)
    shared = s.cache_read(own, 0, "shared")
    s.compute_at(shared, step, preserve_unit_loops=True)
    group, depth, across = s.get_loops(shared)[-3:]
    together = 1
    if index == 1:  # the kernel lies in memory with its terms side by side
        s.reorder(across, depth)
        loop = s.fuse(group, across, depth)
        s.storage_align(shared, 0, axis=1, factor=8 * SKEW, offset=SKEW)
        of_a_thread = tile.rows * tile.depth // tile.threads
        together = next(n for n in (4, 2, 1) if terms % n == of_a_thread % n == 0)
    else:
        loop = s.fuse(group, depth, across)
    turns, thread, vector = s.split(loop, [None, tile.threads, together])
    s.unroll(turns)  # so that all numbers are under way before the first is stored
    s.bind(thread, "threadIdx.x")
    s.vectorize(vector)
    _inline_producers(s, shared)


def by_threads(s: s_tir.Schedule, anchor: SBlockRV, extents: Extents, gpu: Gpu) -> None:
    """Schedule a convolution whose threads compute some neighbouring pixels each.

    Raises:
        ScheduleError: the block is no convolution of a form that is known.
    """
    _inline_producers(s, anchor)
    size = extents.groups * extents.outputs * extents.columns
    rows, columns = pixels_of_a_thread(extents, size // (gpu.processors * gpu.threads))
    count = len(extents.pixels)
    loops = s.get_loops(anchor)
    spatial, reduced = loops[: 2 + count], loops[2 + count :]
    split = {count - 1: columns, **({count - 2: rows} if count > 1 else {})}
    outer, inner = list(spatial[:2]), []
    for place, loop in enumerate(spatial[2:]):
        wide, narrow = s.split(loop, [None, split.get(place, 1)])
        outer.append(wide)
        inner.append(narrow)
    s.reorder(*outer, *reduced, *inner)
    thread = _by_blocks_of_threads(s, outer, gpu)
    sums = s.cache_write(anchor, 0, "local")
    s.reverse_compute_at(sums, thread, preserve_unit_loops=True)
    if extents.terms * rows * columns <= _MOST_UNROLLED:
        for loop in reduced:
            s.unroll(loop)
    for loop in inner:
        s.unroll(loop)
    _take_in_consumers(s, sums, extents.groups * extents.outputs * extents.columns)
    s.decompose_reduction(anchor, reduced[0])


def window_of(s: s_tir.Schedule) -> SBlockRV | None:
    """Return the only block of a function that reduces, where that is a small window of one tensor, as of a pool."""
    found = [block for block in s.get_child_blocks(s.get_sblock("root")) if _is_reduction(s, block)]
    if len(found) != 1 or len(s.get(found[0]).reads) != 1:
        return None
    reduced = [i for i in s.get(found[0]).iter_vars if i.iter_type == tirx.IterVar.CommReduce]
    return found[0] if prod(int(i.dom.extent) for i in reduced) <= WARP else None


def by_elements(s: s_tir.Schedule, anchor: SBlockRV, gpu: Gpu) -> None:
    """Schedule a reduction whose threads compute one element each.

    Raises:
        ScheduleError: the block is no reduction of a form that is known.
    """
    size = _elements(s, anchor)
    _inline_producers(s, anchor)
    loops, axes = s.get_loops(anchor), s.get(anchor).iter_vars
    reduced = [loop for loop, i in zip(loops, axes, strict=True) if i.iter_type == tirx.IterVar.CommReduce]
    outer = [loop for loop, i in zip(loops, axes, strict=True) if i.iter_type != tirx.IterVar.CommReduce]
    s.reorder(*outer, *reduced)
    thread = _by_blocks_of_threads(s, outer, gpu)
    result = s.cache_write(anchor, 0, "local")
    s.reverse_compute_at(result, thread, preserve_unit_loops=True)
    for loop in reduced:
        s.unroll(loop)
    _take_in_consumers(s, result, size)
    s.decompose_reduction(anchor, reduced[0])


def _by_blocks_of_threads(s: s_tir.Schedule, loops: Sequence[LoopRV], gpu: Gpu) -> LoopRV:
    """Give each round of these loops a thread, and return the loop over the threads of a block.

    A block has no more threads than there are rounds: TVM leaves out the condition on a store behind a reduction where
    one block has idle threads, which would then write beyond the result.
    """
    rounds = s.fuse(*loops)
    block, thread = s.split(rounds, [None, min(_THREADS, gpu.block_threads, int(s.get(rounds).extent))])
    s.bind(block, "blockIdx.x")
    s.bind(thread, "threadIdx.x")
    s.annotate(thread, "pragma_unroll_explicit", 0)
    return thread


def pixels_of_a_thread(extents: Extents, most: int) -> tuple[int, int]:
    """Return the rows and columns of pixels that one thread computes: as many as divide the image, and up to `most`.

    Neighbours read the same numbers of the image, but threads that do not fill the device waste more.
    """
    width = extents.pixels[-1]
    height = extents.pixels[-2] if len(extents.pixels) > 1 else 1
    columns = next(n for n in (4, 7, 3, 2, 1) if width % n == 0 and (n <= most or n == 1))
    rows = 2 if height % 2 == 0 and 2 * columns <= most else 1
    return rows, columns


def _inline_producers(s: s_tir.Schedule, block: SBlockRV) -> None:
    """Compute what a block reads where it reads it, all the way back to the arguments of the function."""
    while producers := s.get_producers(block):
        s.compute_inline(producers[0])


def _take_in_consumers(s: s_tir.Schedule, sums: SBlockRV, size: int) -> None:
    """Compute what is elementwise behind a convolution where its sums are stored.

    What has another size, such as a product with a larger tensor that the sums are broadcast in, stays behind.

    Args:
        size: elements of the result.
    """
    while consumers := s.get_consumers(sums):
        first, *others = sorted(consumers, key=lambda block: len(s.get_consumers(block)), reverse=True)
        behind = s.get_consumers(first)
        if _elements(s, first) != size or (others and any(_elements(s, block) != size for block in behind)):
            return
        if others:  # a value that is read twice, as in x * sigmoid(x), becomes one that is read by the last alone
            s.compute_inline(first)
        else:
            s.reverse_compute_inline(first)


def _elements(s: s_tir.Schedule, block: SBlockRV) -> int:
    return prod(int(extent) for extent in s.get(block).writes[0].source.shape)


def _is_reduction(s: s_tir.Schedule, block: SBlockRV) -> bool:
    return any(i.iter_type == tirx.IterVar.CommReduce for i in s.get(block).iter_vars)
