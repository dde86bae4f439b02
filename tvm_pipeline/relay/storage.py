"""Where the activations of a slice live: one arena, each tensor at an offset, by liveness.

Greedy by size, after Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference" (2020): the
largest tensor first, each at the lowest offset where no tensor stands that is alive at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64  # what TVM allocates for, and compiled kernels assume


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A tensor alive from step `first` to step `last`, both included."""

    first: int
    last: int
    bytes: int


def plan_arena(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """The offset of each tensor, a multiple of 64, and the bytes of the arena."""
    offsets = [0] * len(lifetimes)
    placed: list[tuple[int, int, Lifetime]] = []  # (offset, end, lifetime), by offset
    for index in sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].bytes, lifetimes[i].first)):
        tensor = lifetimes[index]
        size = -(-tensor.bytes // ALIGNMENT) * ALIGNMENT
        offset = 0
        for start, end, other in placed:
            if tensor.last < other.first or other.last < tensor.first:
                continue
            if offset + size <= start:
                break
            offset = max(offset, end)
        offsets[index] = offset
        placed.append((offset, offset + size, tensor))
        placed.sort(key=lambda entry: entry[0])
    return offsets, max((end for _, end, _ in placed), default=0)
