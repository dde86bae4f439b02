"""A concatenation in one pass over memory, together with what is fused to it.

    for each input:
      for what it gives of the output:                    as the plain rule has it: long loops, in vectors
        what follows: scale, shift, activation; store

As an expression a concatenation asks at each number which input it is of. `schedule` makes a pass of each input, whose
expression asks no more. Images in blocks whose blocks differ from the output's are the exception: a vector of the
output may be of several inputs, so the channels of a position are written one by one, and LLVM joins them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import te, tirx
from tvm.ir import Call, TensorLoad, Var
from tvm.s_tir import SBlock, SBlockRealize, Schedule
from tvm.s_tir.schedule import SBlockRV
from tvm.tirx import For, ForKind, IterVar, SeqStmt
from tvm_ffi import structural_map, structural_walk

from tvm_pipeline_kernels.relax.schedules import plain
from tvm_pipeline_kernels.relax.schedules.cores import Cores
from tvm_pipeline_kernels.relax.schedules.epilogue import RULE, blocks_of, output, padding

NAME = "concatenate"
CHOICE = "prim.if_then_else"
MOST_CHANNELS = 512  # that are written one by one


def compute_plain(inputs: Sequence[te.Tensor], axis: int) -> te.Tensor:
    """Return the concatenation of tensors along an axis."""
    rank = len(inputs[0].shape)
    axis %= rank
    extents = [int(tensor.shape[axis]) for tensor in inputs]
    shape = [*inputs[0].shape]
    shape[axis] = sum(extents)

    def number(*at: Any) -> Any:
        end = sum(extents)
        value = None
        for tensor, extent in zip(reversed(inputs), reversed(extents), strict=True):
            begin = end - extent
            here = tensor(*at[:axis], at[axis] - begin, *at[axis + 1 :])
            value = here if value is None else tirx.if_then_else(at[axis] < end, here, value)
            end = begin
        return value

    return te.compute(shape, number, name=NAME, attrs={RULE: NAME})


def compute(inputs: Sequence[te.Tensor], block: int) -> te.Tensor:
    """Return the concatenation of the channels of images in blocks, in blocks of `block` channels.

    The inputs are (n, blocks, height, width, channels of a block), each with blocks of its own.
    """
    if all(int(tensor.shape[4]) == block for tensor in inputs):
        return compute_plain(inputs, 1)
    n, _, height, width, _ = inputs[0].shape
    counts = [int(tensor.shape[1] * tensor.shape[4]) for tensor in inputs]

    def number(n: Any, chunk: Any, y: Any, x: Any, lane: Any) -> Any:
        end = sum(counts)
        value = None
        for tensor, count in zip(reversed(inputs), reversed(counts), strict=True):
            channel, own = chunk * block + lane - (end - count), tensor.shape[4]
            here = tensor[n, te.indexdiv(channel, own), y, x, te.indexmod(channel, own)]
            value = here if value is None else tirx.if_then_else(chunk * block + lane < end, here, value)
            end -= count
        return value

    return te.compute((n, sum(counts) // block, height, width, block), number, name=NAME, attrs={RULE: NAME})


def schedule(s: Schedule, anchor: SBlockRV, cores: Cores) -> None:
    """Schedule a concatenation of this module and what is fused to it."""
    padding(s, anchor)
    last = output(s, anchor, cores)
    if any(s.get(block).same_as(s.get(anchor)) for block in blocks_of(s)):
        s.compute_inline(anchor)
    parts = _parts(s.get(last))
    if not parts:
        _schedule_mixed(s, last, cores)
        return
    loop = s.get(s.get_loops(last)[0])
    passes = SeqStmt([_of_part(s.get(last), *part) for part in parts])
    function = structural_map(s.mod["main"], (For, lambda found: passes if found.same_as(loop) else found))
    split = Schedule(function, error_render_level="none")
    for block in blocks_of(split):
        plain.schedule_block(split, block, cores)
    old, new = (of.get(of.get_sblock("root")) for of in (s, split))
    s.state.replace(s.get_sref(old), new, {old: new})


def _schedule_mixed(s: Schedule, last: SBlockRV, cores: Cores) -> None:
    """Schedule what is in other blocks than the inputs: all channels of a position, as far as code stays short."""
    loops = s.get_loops(last)
    if (
        len(loops) != 5
        or len(blocks_of(s)) > 1
        or math.prod(int(s.get(loops[i]).extent) for i in (1, 4)) > MOST_CHANNELS
    ):
        for block in blocks_of(s):
            plain.schedule_block(s, block, cores)
        return
    n, chunk, row, column, lane = loops
    s.reorder(n, row, column, chunk, lane)
    s.parallel(s.fuse(n, row))
    s.unroll(chunk)
    s.unroll(lane)


def _parts(block: SBlock) -> list[tuple[Var, int, int]]:
    """Return an axis, and where on it each input begins and ends; nothing where an input is asked for otherwise."""
    asked: list[Any] = []

    def look(call: Call) -> None:
        if call.op.name == CHOICE:
            asked.append(call.args[0])

    structural_walk(block.body, (Call, look))
    if not asked or not all(isinstance(condition, tirx.LT) for condition in asked):
        return []
    axis = asked[0].a
    extent = next((int(found.dom.extent) for found in block.iter_vars if found.var.same_as(axis)), None)
    if extent is None or not all(condition.a.same_as(axis) for condition in asked):
        return []
    ends = sorted({int(condition.b) for condition in asked} | {extent})
    return [(axis, begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _of_part(block: SBlock, axis: Var, begin: int, end: int) -> For:
    """Return loops over what is between two places of an axis, where conditions of the axis are decided."""
    loops = [Var(f"{found.var.name}_{begin}", found.var.ty) for found in block.iter_vars]
    axes = [IterVar(found.dom, Var(found.var.name, found.var.ty), 0) for found in block.iter_vars]
    names = {found.var: new.var for found, new in zip(block.iter_vars, axes, strict=True)}

    def decided(call: Call) -> Any:
        return call.args[1 if begin < int(call.args[0].b) else 2] if call.op.name == CHOICE else call

    body = structural_map(block.body, [(Call, decided), (Var, lambda var: names.get(var, var))])
    reads, writes = structural_map((block.reads, block.writes), (Var, lambda var: names.get(var, var)))
    read: list[Any] = []
    structural_walk(body, (TensorLoad, lambda load: read.append(load.source)))
    reads = [region for region in reads if any(region.source.same_as(tensor) for tensor in read)]
    places, nest = [], []
    for loop, new, old in zip(loops, axes, block.iter_vars, strict=True):
        is_axis = old.var.same_as(axis)
        places.append(loop + begin if is_axis else loop)
        nest.append((loop, end - begin if is_axis else new.dom.extent))
    body = SBlockRealize(places, True, SBlock(axes, reads, writes, f"{NAME}_{begin}", body))
    for loop, extent in reversed(nest):
        body = For(loop, tirx.const(0, loop.ty.dtype), tirx.const(int(extent), loop.ty.dtype), ForKind.SERIAL, body)
    return body
