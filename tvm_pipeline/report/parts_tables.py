"""What doing concatenations and sums in parts saves: of a compiled model, and of an operator graph.

Read next: `backends/contract.py`, `memory/savings.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm_pipeline.backends.contract import MemoryRewriting
from tvm_pipeline.memory.rewriting import Rewriting
from tvm_pipeline.memory.savings import Savings
from tvm_pipeline.report.tables import TextTable, percent


def in_parts_table(found: MemoryRewriting) -> TextTable:
    """Return the memory of a compiled model before and after it was rewritten."""
    pairs = {"peak": found.peak_bytes, f"arena on {found.device}": found.arena_bytes}
    rows = tuple((name, f"{before:,}", f"{after:,}", _change(before, after)) for name, (before, after) in pairs.items())
    return TextTable("Memory with operators in parts, bytes", ("whole model", "before", "after", "change"), rows)


def in_parts_text(found: MemoryRewriting) -> str:
    """Return what is done in parts and how the outputs differ; or why nothing is; and what was left out and why."""
    if found.why:
        return "\n".join([f"nothing is done in parts: {found.why}", *found.omissions])
    differ = "they are equal bit for bit"
    if found.difference:
        differ = f"they differ by {found.difference:.1e} of the largest output, and {found.tolerance:g} is allowed"
    done = f"in parts: {', '.join(found.operators)}; outputs compared on {found.device}: {differ}"
    return "\n".join([done, *found.omissions])


def savings_table(found: Sequence[Savings]) -> TextTable:
    """Return the least peak as it is, with SERENITY's rewritings, and with sums and other concatenations in parts."""
    columns = ("bytes at the least peak", "as it is", "partitioned", "piecewise, too", "saved")

    def cell(made: Rewriting) -> str:
        return f"{made.ordering.peak_bytes:,}{'' if made.ordering.status == 'optimal' else ' (unproven)'}"

    rows = [
        (
            part.name,
            f"{part.plain.peak_bytes:,}{'' if part.plain.status == 'optimal' else ' (unproven)'}",
            cell(part.partitioned),
            cell(part.every),
            _change(part.plain.peak_bytes, part.every.ordering.peak_bytes),
        )
        for part in found
    ]
    return TextTable("Concatenations and sums in parts", columns, tuple(rows))


def savings_text(found: Savings) -> str:
    """Return which operators of a graph are done in parts, and what their sums in int32 take; or why nothing is gained.

    Examples:
        >>> from tvm_pipeline.testing import example_problem
        >>> from tvm_pipeline.memory.savings import savings
        >>> savings_text(savings("net", example_problem().graph))
        'net: nothing is gained by parts: it has no concatenation of channels, and no sum of equal shapes'
    """
    if found.why:
        return f"{found.name}: nothing is gained by parts: {found.why}"
    carried = f"; sums in int32 of {found.carried_bytes:,} bytes are counted" if found.carried_bytes else ""
    if found.every.operators == found.partitioned.operators:
        return f"{found.name} in parts: {', '.join(found.every.operators)}{carried}"
    partitioned = ", ".join(found.partitioned.operators) or "nothing"
    return f"{found.name} in parts: {partitioned}; with piecewise ones, {', '.join(found.every.operators)}{carried}"


def _change(before: int, after: int) -> str:
    return percent(after / before - 1 if before else 0.0, signed=True)
