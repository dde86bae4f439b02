"""What doing concatenations and sums in parts saves: of a compiled model, and of an operator graph.

Read next: `backends/memory_rewriter.py`, `memory/rewriting_savings.py`.
"""

from __future__ import annotations

from tvm_pipeline.backends.memory_rewriter import MemoryRewriting
from tvm_pipeline.report.tables import TextTable, percent


def in_parts_table(found: MemoryRewriting) -> TextTable:
    """Return the memory of a compiled model before and after it was rewritten."""
    pairs = {"peak": found.peak_bytes, f"arena on {found.device}": found.arena_bytes}
    rows = tuple((name, f"{before:,}", f"{after:,}", _change(before, after)) for name, (before, after) in pairs.items())
    return TextTable("Memory with operators in parts, bytes", ("whole model", "before", "after", "change"), rows)


def in_parts_text(found: MemoryRewriting) -> str:
    """Return what is done in parts and how the outputs differ; or why nothing is; and what was left out and why."""
    lines = [f"{name} is not done in parts: {reason}" for name, reason in found.left_out.items()]
    if found.why:
        return "\n".join([f"nothing is done in parts: {found.why}", *lines])
    differ = "they are equal bit for bit"
    if found.difference:
        differ = f"they differ by {found.difference:.1e} of the largest output, and {found.tolerance:g} is allowed"
    done = f"in parts: {', '.join(found.operators)}; outputs compared on {found.device}: {differ}"
    return "\n".join([done, *lines])


def _change(before: int, after: int) -> str:
    return percent(after / before - 1 if before else 0.0, signed=True)
