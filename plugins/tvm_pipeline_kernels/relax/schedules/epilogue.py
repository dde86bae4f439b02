"""What all schedules share: the blocks around an anchor, which FuseOps put into the same function.

    before     padding, a block of the name `pad`, which stays; others, as an activation before a pool, are inlined
    anchor     a convolution, a pool
    behind     bias, addition, activation ..: any lattice of elementwise and broadcast blocks; all but the last are
               inlined
    output     the last of them, which stores what the function returns
    elsewhere  what has another shape, as the product of an image and a number for each channel, with what follows it:
               separate passes, by `plain.py`

A schedule tiles the loops of the output and computes the anchor within them.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvm_pipeline_kernels.relax.schedules import plain
from tvm_pipeline_kernels.relax.schedules.cores import Cores

RULE = "tvm_pipeline.rule"  # the annotation of an anchor: the name of the schedule that serves it
PAD = "pad"


def shape_of(s: s_tir.Schedule, block: SBlockRV) -> list[int]:
    """Return the shape of what a block writes."""
    return [int(extent) for extent in s.get(block).writes[0].source.shape]


def padding(s: s_tir.Schedule, anchor: SBlockRV) -> SBlockRV | None:
    """Inline what is computed before an anchor but its padding, and return that; None without one."""
    pad = None
    for block in _related(s, anchor, s.get_consumers, backwards=True):
        if s.get(block).name_hint.startswith(PAD):
            pad = block
        else:
            s.compute_inline(block)
    return pad


def output(s: s_tir.Schedule, anchor: SBlockRV, cores: Cores) -> SBlockRV:
    """Inline what is computed behind an anchor but the last, and return that; its loops are those of its shape.

    Where nothing of its shape is behind the anchor, a new block stores the anchor's values and is returned. What is
    elsewhere gets its loops here.
    """
    behind, others = _parted(s, anchor)
    plain.schedule(s, others, cores)
    if not behind:
        s.cache_write(anchor, 0, "local")
        return s.get_consumers(anchor)[0]
    for block in behind[:-1]:
        s.compute_inline(block)
    return behind[-1]


def _parted(s: s_tir.Schedule, anchor: SBlockRV) -> tuple[list[SBlockRV], list[SBlockRV]]:
    """Return what is computed with an anchor, and what is elsewhere.

    What is elsewhere reads only the last block of what is computed with the anchor: the others have no place in memory.
    """
    behind = _related(s, anchor, s.get_producers)
    count = next((n for n, block in enumerate(behind) if shape_of(s, block) != shape_of(s, anchor)), len(behind))
    names = {s.get(block).name_hint for block in [anchor, *behind[:count]][:-1]}
    producers = (s.get(producer).name_hint for block in behind[count:] for producer in s.get_producers(block))
    if names.intersection(producers):
        count = 0
    return behind[:count], behind[count:]


def in_registers(s: s_tir.Schedule, *loops: LoopRV) -> None:
    """Make a vector of the last of these loops, and unroll the others."""
    *tile, channel = loops
    s.vectorize(channel)
    for loop in tile:
        s.unroll(loop)


def blocks_of(s: s_tir.Schedule) -> list[SBlockRV]:
    """Return the blocks of the only function, in the order of computation."""
    return list(s.get_child_blocks(s.get_sblock("root")))


def _related(s: s_tir.Schedule, anchor: SBlockRV, neighbours: Any, *, backwards: bool = False) -> list[SBlockRV]:
    """Return the blocks that are reached from an anchor, in the order of computation or against it.

    `neighbours` gives the blocks to the side of a block from which it is reached.
    """
    reached, found = {s.get(anchor).name_hint}, []
    for block in blocks_of(s)[:: -1 if backwards else 1]:
        if any(s.get(near).name_hint in reached for near in neighbours(block)):
            reached.add(s.get(block).name_hint)
            found.append(block)
    return found
