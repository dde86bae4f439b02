"""A concatenation of channels in one pass over memory, together with what is fused to it.

    for images, channels (or blocks of them and rows):      in parallel
      for columns:                                          all of them from one and the same input
        what follows: scale, shift, activation; store

TOPI copies the inputs first, and computes what follows in a second pass, one number at a time. Nothing is added up, so
no bit changes.
"""

from __future__ import annotations

from typing import Any

from tvm import te, topi
from tvm.target.x86 import get_simd_32bit_lanes
from tvm.topi.utils import get_const_tuple
from tvm.topi.x86.injective import schedule_injective_from_existing

NAME = "T_concat"  # as TOPI names the stage


def compute(data: list[te.Tensor], axis: int) -> te.Tensor | None:
    """Return the concatenation; None where it is not ours to compute: not of channels of float32 images."""
    dimensions = len(data[0].shape)
    if dimensions not in (4, 5) or axis % dimensions != 1 or data[0].dtype != "float32":
        return None
    return topi.transform.concatenate(data, axis)


def schedule(outs: list[te.Tensor]) -> te.Schedule | None:
    """Schedule what `compute` returned and what is fused to it; None where it is not among `outs`."""
    s = te.create_schedule([tensor.op for tensor in outs])
    te.schedule.AutoInlineInjective(s)
    joined = [stage.op.output(0) for stage in s.stages if stage.op.name == NAME]
    if len(joined) != 1 or len(outs) != 1:
        return None
    (tensor,), output = joined, outs[0]
    if get_const_tuple(tensor.shape) == get_const_tuple(output.shape):
        tensor = output
    else:  # what follows changes the layout, and would ask at each number which input it comes from
        s[tensor].compute_root()
        schedule_injective_from_existing(s, output)
    _schedule(s[tensor], get_const_tuple(tensor.shape))
    return s


def _schedule(stage: Any, shape: tuple[int, ...]) -> None:
    image, channel, row, column, *lane = stage.op.axis
    if lane:
        stage.parallel(stage.fuse(image, channel, row))
        stage.vectorize(*lane)
        return
    stage.parallel(stage.fuse(image, channel))
    pixel = stage.fuse(row, column)
    lanes = get_simd_32bit_lanes()
    if shape[2] * shape[3] % lanes == 0:
        _, lane = stage.split(pixel, factor=lanes)
        stage.vectorize(lane)
