"""A concatenation of channels in one pass over memory, together with what is fused to it.

    for images, channels or blocks of them, rows:           in parallel
      for columns:                                          all of them from one and the same input
        what follows: scale, shift, activation; store

TOPI copies the inputs first, and computes what follows in further passes, one number at a time. Values are TOPI's but
for one case: LLVM turns a product and the addition that follows it into one instruction, which rounds once, where TOPI
stores the product between two passes.
"""

from __future__ import annotations

from tvm import te, topi
from tvm.topi.generic.injective import schedule_injective_from_existing
from tvm.topi.utils import get_const_tuple

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
    are_stored = all(isinstance(part.op, te.PlaceholderOp) for part in tensor.op.input_tensors)
    if get_const_tuple(tensor.shape) == get_const_tuple(output.shape):
        tensor = output
    else:  # what follows changes the layout, and would ask at each number which input it comes from
        s[tensor].compute_root()
        schedule_injective_from_existing(s, output)
    image, channel, row, _, *lanes = tensor.op.axis
    s[tensor].parallel(s[tensor].fuse(image, channel, row))
    if lanes and are_stored:  # else inputs may change their layout on the way, and LLVM 22 refuses vectors of indices
        s[tensor].vectorize(*lanes)
    return s
