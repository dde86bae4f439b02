"""A 3x3 convolution in blocked layout by Winograd's algorithm (`../../winograd.py`): Relay's schedule, in S-TIR.

    pad                                                                               in parallel
    for bands: some rows of tiles of the image                                        in parallel
      for input blocks, tiles: transform m + 2 columns, then m + 2 rows               unrolled, in vectors
      for points (m + 2)^2: multiply tiles by weights, in register tiles as in `conv2d.py`
      for output blocks, tiles: transform back; what follows: bias, addition, activation; store

A band that is the whole image has three loops in parallel instead. The tiles of a band are filled up to whole register
tiles by its last tile, so that no loop of the multiplication asks where the image ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from tvm import s_tir, te, tirx

from tvm_pipeline_kernels.relax.schedules.choice import Attributes
from tvm_pipeline_kernels.relax.schedules.cores import Cores
from tvm_pipeline_kernels.relax.schedules.epilogue import RULE, in_registers, output, shape_of
from tvm_pipeline_kernels.winograd import KERNEL, Winograd, input_transform, output_transform
from tvm_pipeline_tvm.relax.kernel_walkers import MACS

NAME = "conv2d_winograd"
_STEPS = ("pad", "half_input", "tiles", "products", "half_output", "squares")


def compute(
    data: te.Tensor,
    kernel: te.Tensor,
    padding: Sequence[int],
    form: Sequence[int],
    tuned: Attributes = MappingProxyType({}),
) -> te.Tensor:
    """Return the convolution: (n, blocks, height, width, channels of a block).

    Args:
        data: (n, input blocks, height, width, input channels of a block).
        kernel: as `winograd.packed` has it.
        padding: top, left, bottom, right.
        form: the numbers of a `Winograd`, of which Relax makes a tuple.
        tuned: see `choice.attributes`.
    """
    form = Winograd(*map(int, form))
    m, edge = form.winograd, form.winograd + KERNEL - 1
    top, left, bottom, right = (int(extent) for extent in padding)
    n, inputs, height, width, in_block = (int(extent) for extent in data.shape)
    _, outputs, _, _, block = (int(extent) for extent in kernel.shape)
    out_height, out_width = height + top + bottom - KERNEL + 1, width + left + right - KERNEL + 1
    across, rows = -(-out_width // m), form.rows
    bands = -(-out_height // (m * rows))
    there = rows * across
    count = there + -there % form.columns

    padded = te.compute(
        (n, inputs, bands * rows * m + KERNEL - 1, across * m + KERNEL - 1, in_block),
        lambda b, i, y, x, c: tirx.if_then_else(
            tirx.all(y >= top, y < height + top, x >= left, x < width + left),
            data(b, i, y - top, x - left, c),
            tirx.const(0, data.dtype),
        ),
        name="pad",
    )

    def columns_of_input(b: Any, band: Any, i: Any, t: Any, row: Any, x: Any, c: Any) -> Any:
        tile = tirx.min(t, there - 1)
        y0, x0 = (band * rows + tile // across) * m, tile % across * m
        return _select(row, input_transform([padded(b, i, y0 + y, x0 + x, c) for y in range(edge)], m))

    half_input = te.compute((n, bands, inputs, count, edge, edge, in_block), columns_of_input, name="half_input")
    tiles = te.compute(
        (n, bands, edge, edge, inputs, count, in_block),
        lambda b, band, y, x, i, t, c: _select(
            x, input_transform([half_input(b, band, i, t, y, k, c) for k in range(edge)], m)
        ),
        name="tiles",
    )
    chunk, term = te.reduce_axis((0, inputs), "chunk"), te.reduce_axis((0, in_block), "term")
    products = te.compute(
        (n, bands, edge, edge, outputs, count, block),
        lambda b, band, y, x, o, t, c: te.sum(
            tiles(b, band, y, x, chunk, t, term) * kernel(y * edge + x, o, chunk, term, c), axis=[chunk, term]
        ),
        name="products",
    )
    half_output = te.compute(
        (n, bands, outputs, count, m, edge, block),
        lambda b, band, o, t, row, x, c: _select(
            row, output_transform([products(b, band, y, x, o, t, c) for y in range(edge)], m)
        ),
        name="half_output",
    )
    squares = te.compute(
        (n, bands, outputs, count, m, m, block),
        lambda b, band, o, t, y, x, c: _select(
            x, output_transform([half_output(b, band, o, t, y, k, c) for k in range(edge)], m)
        ),
        name="squares",
    )
    macs = n * outputs * block * out_height * out_width * inputs * in_block * KERNEL**2
    return te.compute(
        (n, outputs, out_height, out_width, block),
        lambda b, o, y, x, c: squares(b, y // (m * rows), o, y // m % rows * across + x // m, y % m, x % m, c),
        name=NAME,
        attrs={RULE: NAME, MACS: macs, **form._asdict(), **tuned},
    )


def _select(index: Any, values: Sequence[Any]) -> Any:
    """Return the value of this index, which loops that are unrolled know."""
    made = values[-1]
    for position, value in reversed(list(enumerate(values[:-1]))):
        made = tirx.if_then_else(index == position, value, made)
    return made


def schedule(s: s_tir.Schedule, anchor: s_tir.schedule.SBlockRV, cores: Cores) -> None:
    """Schedule a convolution of `compute` and what is fused to it."""
    annotations = s.get(anchor).annotations
    form = Winograd(*(int(annotations[name]) for name in Winograd._fields))
    m = form.winograd
    pad, half_input, tiles, products, half_output, squares = _steps(s, anchor)
    _, bands, *_ = shape_of(s, tiles)
    last = output(s, anchor, cores)
    s.annotate(last, MACS, annotations[MACS])
    s.compute_inline(anchor)

    n, block, row, column, channel = s.get_loops(last)
    band, row, inner_row = s.split(row, [None, form.rows, m])
    column, inner_column = s.split(column, [None, m])
    s.reorder(n, band, block, row, column, inner_row, inner_column, channel)
    outer = s.fuse(n, band) if bands > 1 else None
    s.parallel(outer if outer is not None else s.fuse(n, band, block, row))
    for step in (squares, half_output):
        s.compute_at(step, column, preserve_unit_loops=True)
        in_registers(s, *s.get_loops(step)[-3:])
        s.set_scope(step, 0, "local")
    s.vectorize(channel)
    s.unroll(inner_row)
    s.unroll(inner_column)

    stored = s.cache_write(products, 0, "local")
    if outer is not None:
        s.compute_at(stored, outer, preserve_unit_loops=True)
    n, band, y, x, block, tile, channel = s.get_loops(stored)[-7:]
    block_outer, block = s.split(block, [None, form.chunks])
    tile_outer, tile = s.split(tile, [None, form.columns])
    s.reorder(n, band, y, x, block_outer, tile_outer, block, tile, channel)
    in_registers(s, block, tile, channel)
    if outer is None:
        s.parallel(s.fuse(n, band, y, x, block_outer))
    s.compute_at(products, tile_outer, preserve_unit_loops=True)
    *_, block, tile, channel, chunk, term = s.get_loops(products)
    s.reorder(chunk, term, tile, block, channel)
    in_registers(s, tile, block, channel)
    in_registers(s, *s.get_loops(s.decompose_reduction(products, chunk))[-3:])

    if outer is not None:
        s.compute_at(tiles, outer, preserve_unit_loops=True)
    n, band, y, x, block, tile, channel = s.get_loops(tiles)[-7:]
    s.reorder(n, band, block, tile, y, x, channel)
    in_registers(s, y, x, channel)
    if outer is None:
        s.parallel(s.fuse(n, band, block))
    s.compute_at(half_input, tile, preserve_unit_loops=True)
    in_registers(s, *s.get_loops(half_input)[-3:])
    s.set_scope(half_input, 0, "local")

    n, block, row, *_, channel = s.get_loops(pad)
    s.vectorize(channel)
    s.parallel(s.fuse(n, block, row))


def _steps(s: s_tir.Schedule, anchor: s_tir.schedule.SBlockRV) -> list[s_tir.schedule.SBlockRV]:
    """Return the blocks before the anchor, in the order of computation."""
    found = [anchor]
    while len(found) <= len(_STEPS):
        [producer] = s.get_producers(found[0])
        found.insert(0, producer)
    return found[:-1]
