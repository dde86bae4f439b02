"""What all schedules share: the blocks around an anchor, which FuseOps put into the same function.

    before     padding, a block of the name `pad`, which stays; others, as an activation before a pool, are inlined
    anchor     a convolution, a pool
    behind     bias, addition, activation ..: any lattice of elementwise and broadcast blocks; all but the last are
               inlined
    output     the last of them, which stores what the function returns

A schedule tiles the loops of the output and computes the anchor within them.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir
from tvm.s_tir.schedule import SBlockRV

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


def output(s: s_tir.Schedule, anchor: SBlockRV) -> SBlockRV:
    """Inline what is computed behind an anchor but the last, and return that; its loops are those of its shape.

    Where nothing is behind the anchor, or something of another shape, a new block stores the anchor's values and is
    returned; what is behind it stays as it was.
    """
    behind = _related(s, anchor, s.get_producers)
    if not behind or any(shape_of(s, block) != shape_of(s, anchor) for block in behind):
        s.cache_write(anchor, 0, "local")
        return s.get_consumers(anchor)[0]
    for block in behind[:-1]:
        s.compute_inline(block)
    return behind[-1]


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
