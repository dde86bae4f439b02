"""The layout of an order's buffers: one arena, a tensor at each offset, without overlap of tensors alive together.

After a good order, the greedy layout by size is nearly always as small as possible. If it takes more than is alive at
the same time, `exact_layout` asks CP-SAT. `check_layout` checks the result of either.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter
from typing import Any, Literal

from tvm_pipeline.errors import PlanError
from tvm_pipeline.memory.fitting import fitting_offsets
from tvm_pipeline.memory.memory_graph import MemoryGraph, check_order

ALIGNMENT = 64  # TVM allocates with it, and compiled kernels rely on it


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A tensor alive from step `first` to step `last`, both included.

    Attributes:
        block: tensors of one block keep their distances: each begins `begin` bytes behind a point that they share. Two
            of them never overlap while both are alive. None where a tensor can lie anywhere.
        begin: a multiple of the alignment; it may be negative.
    """

    first: int
    last: int
    bytes: int
    name: str = ""
    block: Hashable = None
    begin: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """The offsets of tensors in an arena.

    Attributes:
        offsets: in bytes, one for each tensor.
        bound_bytes: no arena for these tensors is smaller.
        status: `optimal` if the two are equal.
    """

    offsets: tuple[int, ...]
    arena_bytes: int
    bound_bytes: int

    @property
    def status(self) -> Literal["optimal", "feasible"]:
        return "optimal" if self.arena_bytes == self.bound_bytes else "feasible"


def lifetimes(graph: MemoryGraph, order: Sequence[int]) -> tuple[list[Lifetime], list[int]]:
    """Return the tensors to lay out when the operators run in `order`, and which of them each buffer lies in.

    A buffer with several producers is alive from the first of them on. A buffer that an operator writes in place lies
    in the tensor that it overwrites, which keeps the size of the larger one. The workspaces come after the buffers.

    Returns:
        The tensors, and for every buffer of the graph the index of its tensor, -1 for an input that nobody reads.

    Raises:
        GraphError: `check_order` refuses `order`.
    """
    check_order(graph, order)
    step = {index: position for position, index in enumerate(order)}
    spans = []
    for buffer in graph.buffers:
        first = min((step[index] for index in buffer.producers), default=0)
        last = max((step[index] for index in (*buffer.producers, *buffer.consumers)), default=-1)
        spans.append(Lifetime(first, len(order) - 1 if buffer.pinned else last, buffer.bytes, buffer.name))
    tensors: list[Lifetime] = []
    tensor_of = [-1] * len(spans)
    for index in sorted(range(len(spans)), key=lambda b: spans[b].first):
        span = spans[index]
        if span.last < span.first:
            continue
        below = _overwritten(graph, order, spans, index)
        if below is None:
            tensor_of[index] = len(tensors)
            tensors.append(span)
        else:
            tensor_of[index] = tensor_of[below]
            tensors[tensor_of[index]] = replace(tensors[tensor_of[index]], last=span.last)
    for index, size in enumerate(graph.workspace_bytes):
        if size:
            tensors.append(Lifetime(step[index], step[index], size, f"workspace of {graph.operators[index]}"))
    return tensors, tensor_of


def _overwritten(graph: MemoryGraph, order: Sequence[int], spans: Sequence[Lifetime], index: int) -> int | None:
    """Return the buffer that this one overwrites: the smallest of those that may be overwritten and die then."""
    span, buffer = spans[index], graph.buffers[index]
    if not buffer.producers or not graph.in_place:
        return None
    fits = [
        mark
        for mark in graph.in_place[order[span.first]]
        if spans[mark].last == span.first and spans[mark].bytes >= span.bytes and not graph.buffers[mark].pinned
    ]
    return min(fits, key=lambda mark: spans[mark].bytes, default=None)


def most_alive(tensors: Sequence[Lifetime], alignment: int = ALIGNMENT) -> int:
    """Return the peak of the bytes alive, with each tensor a multiple of `alignment`: no arena is smaller."""
    change = [0] * (max((tensor.last for tensor in tensors), default=0) + 2)
    for tensor, size in zip(tensors, _sizes(tensors, alignment), strict=True):
        change[tensor.first] += size
        change[tensor.last + 1] -= size
    return max(accumulate(change))


def plan_arena(tensors: Sequence[Lifetime], alignment: int = ALIGNMENT) -> tuple[list[int], int]:
    """Return the offset of each tensor, a multiple of `alignment`, and the bytes of the arena, greedily.

    The largest tensor comes first. Each tensor gets the lowest offset that is free of tensors alive at the same time
    (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020). Tensors of equal size are
    taken once from the first step on and once from the last step back. Therefore a chain whose tensors only shrink, or
    only grow, takes no more than is alive at the same time. If that is more than the bytes alive, the tensors are taken
    as they come, and by bytes times steps, too; the smallest arena is the answer.
    """
    sizes, blocks, alive = _sizes(tensors, alignment), _blocks(tensors), most_alive(tensors, alignment)
    extents = [max(tensors[i].begin + sizes[i] for i in block) - tensors[block[0]].begin for block in blocks]
    firsts = [min(tensors[i].first for i in block) for block in blocks]
    lasts = [max(tensors[i].last for i in block) for block in blocks]
    keys: tuple[Callable[[int], tuple[int, int]], ...] = (
        lambda i: (-extents[i], firsts[i]),
        lambda i: (-extents[i], -lasts[i]),
        lambda i: (firsts[i], -extents[i]),
        lambda i: (-sum(sizes[j] * (tensors[j].last - tensors[j].first + 1) for j in blocks[i]), firsts[i]),
    )
    best: tuple[list[int], int] | None = None
    for key in keys:
        arena = _place(tensors, sizes, [blocks[i] for i in sorted(range(len(blocks)), key=key)])
        best = arena if best is None or arena[1] < best[1] else best
        if best[1] == alive:
            break
    assert best is not None
    return best


def _blocks(tensors: Sequence[Lifetime]) -> list[list[int]]:
    """Return the tensors of each block, those that begin first in front; a tensor of no block is one by itself."""
    blocks: dict[Hashable, list[int]] = {}
    for index, tensor in enumerate(tensors):
        blocks.setdefault(("alone", index) if tensor.block is None else ("block", tensor.block), []).append(index)
    return [sorted(block, key=lambda index: tensors[index].begin) for block in blocks.values()]


def _sizes(tensors: Sequence[Lifetime], alignment: int) -> list[int]:
    return [-(-tensor.bytes // alignment) * alignment for tensor in tensors]


def _place(tensors: Sequence[Lifetime], sizes: Sequence[int], order: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """Put each block of `order` at the lowest offset where all its tensors are free while they are alive."""
    offsets = [0] * len(tensors)
    placed: list[tuple[int, int, Lifetime]] = []  # (offset, end, lifetime), by offset
    for block in order:
        lowest = tensors[block[0]].begin
        start, moved = 0, True
        while moved:  # another tensor of the block may have been free at a lower start only
            moved = False
            for index in block:
                tensor, behind = tensors[index], tensors[index].begin - lowest
                offset = _lowest(placed, tensor, sizes[index], start + behind)
                moved |= offset > start + behind and len(block) > 1
                start = offset - behind
        for index in block:
            offsets[index] = start + tensors[index].begin - lowest
            insort(placed, (offsets[index], offsets[index] + sizes[index], tensors[index]), key=itemgetter(0))
    return offsets, max((end for _, end, _ in placed), default=0)


def _lowest(placed: Sequence[tuple[int, int, Lifetime]], tensor: Lifetime, size: int, offset: int) -> int:
    """Return the lowest offset from `offset` on that is free while a tensor is alive."""
    for start, end, other in placed:
        if tensor.last < other.first or other.last < tensor.first:
            continue
        if offset + size <= start:
            break
        offset = max(offset, end)
    return offset


def exact_layout(tensors: Sequence[Lifetime], alignment: int = ALIGNMENT, time_limit_s: float = 10) -> Layout:
    """Return the smallest arena, or the best one found in `time_limit_s` with a lower bound.

    If the greedy arena takes no more than `most_alive`, it is the answer. Else, where no tensor is in a block, the
    search of `fitting.py` tries for a quarter of the time whether so much is enough. If it is not found to be, CP-SAT
    packs rectangles of steps by bytes, starting at the greedy layout. Offsets are multiples of `alignment`.

    Raises:
        OptionError: ortools is needed, and not installed.
    """
    offsets, arena = plan_arena(tensors, alignment)
    bound = most_alive(tensors, alignment)
    if arena > bound:
        sizes, deadline = _sizes(tensors, alignment), time.monotonic() + time_limit_s
        if all(tensor.block is None for tensor in tensors):
            spans = [(tensor.first, tensor.last) for tensor in tensors]
            fitting = fitting_offsets(spans, sizes, bound, deadline - 0.75 * time_limit_s)
            if fitting is not None:
                return Layout(tuple(fitting), bound, bound)
        offsets, arena, bound = _packed(tensors, sizes, offsets, arena, bound, deadline - time.monotonic())
    return Layout(tuple(offsets), arena, bound)


def _packed(
    tensors: Sequence[Lifetime], sizes: Sequence[int], offsets: list[int], arena: int, bound: int, time_limit_s: float
) -> tuple[list[int], int, int]:
    """Return the best offsets that CP-SAT finds, with their arena and the bound that it proves."""
    # The import of ortools takes a second, and few layouts need it.
    from tvm_pipeline.solvers.cpsat import library, search

    unit = math.gcd(*sizes, *(tensor.begin for tensor in tensors))
    model = library().CpModel()
    height = model.new_int_var(bound // unit, arena // unit, "")
    starts: list[Any] = [0] * len(tensors)
    steps, spaces = [], []
    for block in _blocks(tensors):
        lowest = block[0]
        first = model.new_int_var(0, arena // unit, "")
        model.add_hint(first, offsets[lowest] // unit)
        for index in block:
            tensor, size = tensors[index], sizes[index]
            starts[index] = start = first + (tensor.begin - tensors[lowest].begin) // unit
            model.add(start + size // unit <= height)
            if size:
                steps.append(model.new_fixed_size_interval_var(tensor.first, tensor.last + 1 - tensor.first, ""))
                spaces.append(model.new_fixed_size_interval_var(start, size // unit, ""))
    model.add_no_overlap_2d(steps, spaces)
    model.add_hint(height, arena // unit)
    model.minimize(height)
    answer = search(model, time.monotonic() + time_limit_s)
    proven = max(bound, math.ceil(answer.bound - 1e-6) * unit) if math.isfinite(answer.bound) else bound
    if answer.solver is None:
        return offsets, arena, proven
    found = [answer.solver.value(start) * unit for start in starts]
    return found, max(offset + size for offset, size in zip(found, sizes, strict=True)), proven


def check_layout(tensors: Sequence[Lifetime], offsets: Sequence[int], arena_bytes: int) -> None:
    """Raise PlanError unless every tensor lies within the arena and no two that are alive together overlap.

    The message names the tensors. The check compares every pair, which is slow but simple enough to trust.
    """
    if len(offsets) != len(tensors):
        raise PlanError(f"the layout has {len(offsets)} offsets for {len(tensors)} tensors; give one for each")
    names = [tensor.name or f"tensor {index}" for index, tensor in enumerate(tensors)]
    for index, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
        if offset < 0 or offset + tensor.bytes > arena_bytes:
            raise PlanError(
                f"{names[index]} lies at bytes {offset} to {offset + tensor.bytes} of an arena of {arena_bytes}; lay "
                "the tensors out again, or give a larger arena"
            )
        for other in range(index):
            below, start = tensors[other], offsets[other]
            together = tensor.first <= below.last and below.first <= tensor.last
            if together and max(offset, start) < min(offset + tensor.bytes, start + below.bytes):
                raise PlanError(
                    f"{names[other]} (bytes {start} to {start + below.bytes}) and {names[index]} (bytes {offset} to "
                    f"{offset + tensor.bytes}) overlap, and both are alive at step {max(tensor.first, below.first)}; "
                    "lay the tensors out again"
                )
