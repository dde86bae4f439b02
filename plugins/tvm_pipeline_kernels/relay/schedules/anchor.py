"""The operator that a schedule is about, among what Relay fuses to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import te
from tvm.topi.utils import traverse_inline


def scheduled(
    outs: list[te.Tensor], tag: str, schedule: Callable[[te.Schedule, te.Tensor, te.Tensor], None]
) -> te.Schedule | None:
    """Return a schedule of `outs`, whose loops `schedule` made for the operator of this tag; None without one.

    Args:
        schedule: is given the new schedule, the operator's tensor and the output.
    """
    s, found = anchors(outs, tag.__eq__)
    if not found:
        return None
    schedule(s, found[0], outs[0])
    return s


def anchors(outs: list[te.Tensor], is_anchor: Callable[[str], bool]) -> tuple[te.Schedule, list[te.Tensor]]:
    """Return a new schedule of `outs` with what is fused inlined, and the tensors of the operators with such a tag."""
    s = te.create_schedule([tensor.op for tensor in outs])
    found: list[te.Tensor] = []

    def remember(op: Any) -> None:
        if is_anchor(op.tag):
            found.append(op.output(0))

    traverse_inline(s, outs[0].op, remember)
    return s, found
