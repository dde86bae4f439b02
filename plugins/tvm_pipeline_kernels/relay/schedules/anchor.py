"""The operator that a schedule is about, among what Relay fuses to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import te
from tvm.topi.utils import traverse_inline


def anchors(outs: list[te.Tensor], is_anchor: Callable[[str], bool]) -> tuple[te.Schedule, list[te.Tensor]]:
    """Return a new schedule of `outs` with what is fused inlined, and the tensors of the operators with such a tag."""
    s = te.create_schedule([tensor.op for tensor in outs])
    found: list[te.Tensor] = []

    def remember(op: Any) -> None:
        if is_anchor(op.tag):
            found.append(op.output(0))

    traverse_inline(s, outs[0].op, remember)
    return s, found
