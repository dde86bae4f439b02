"""Where the activations of a slice live: one arena, each tensor at an offset, by liveness.

Greedy by size, after Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference" (2020): the
largest tensor first, each at the lowest offset where no tensor stands that is alive at the same time.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

ALIGNMENT = 64  # what TVM allocates for, and compiled kernels assume


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A tensor alive from step `first` to step `last`, both included."""

    first: int
    last: int
    bytes: int


def plan_arena(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """The offset of each tensor, a multiple of 64, and the bytes of the arena.

    Tensors of equal size are taken from the first step on, and again from the last step back; the smaller arena
    is the answer. So a chain whose tensors only shrink, or only grow, takes no more than is alive at once.
    """
    sizes = [-(-tensor.bytes // ALIGNMENT) * ALIGNMENT for tensor in lifetimes]
    forward = sorted(range(len(sizes)), key=lambda i: (-sizes[i], lifetimes[i].first))
    backward = sorted(range(len(sizes)), key=lambda i: (-sizes[i], -lifetimes[i].last))
    arenas = [_place(lifetimes, sizes, order) for order in (forward, backward)]
    return min(arenas, key=lambda arena: arena[1])


def _place(lifetimes: Sequence[Lifetime], sizes: Sequence[int], order: Sequence[int]) -> tuple[list[int], int]:
    """Each tensor of `order` at the lowest offset that is free while it lives."""
    offsets = [0] * len(lifetimes)
    placed: list[tuple[int, int, Lifetime]] = []  # (offset, end, lifetime), by offset
    for index in order:
        tensor, size, offset = lifetimes[index], sizes[index], 0
        for start, end, other in placed:
            if tensor.last < other.first or other.last < tensor.first:
                continue
            if offset + size <= start:
                break
            offset = max(offset, end)
        offsets[index] = offset
        insort(placed, (offset, offset + size, tensor), key=itemgetter(0))
    return offsets, max((end for _, end, _ in placed), default=0)
