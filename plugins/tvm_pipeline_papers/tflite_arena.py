"""The arena that TensorFlow Lite laid out in 2019, as a model: published figures of that time are its.

Its planner goes through the operators in the order in which they run. It allocates the graph's inputs first, and then
for each operator the tensors that it writes, before it frees those that nobody reads any more. A new tensor gets the
smallest free gap that holds it (online best fit), or the place behind the last tensor. So a tensor is placed without a
look at those that come later, and the arena may be larger than what is alive. The interpreter keeps the graph's inputs
to the end (`memory_graph(graph, pin_inputs=True)`). Today's TFLite places all tensors from the largest to the smallest,
as `memory/arena.py` does.

The source is the public history of `simple_memory_arena.cc`, `arena_planner.cc` and `subgraph.cc` in TensorFlow's
repository: the rule above is that of the first two under `tensorflow/contrib/lite`; sorting by size is in later states.
Not in the model: temporaries of kernels, such as the patches that a convolution gathers.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm_pipeline.memory.arena import Lifetime

ALIGNMENT = 64


def online_arena(tensors: Sequence[Lifetime], alignment: int = ALIGNMENT) -> tuple[list[int], int]:
    """Return the offset of each tensor, a multiple of `alignment`, and the bytes of the arena.

    Args:
        tensors: as `lifetimes` returns them. Those that begin at the same step are allocated in their order.

    Examples:
        >>> tensors = [Lifetime(0, 1, 64), Lifetime(0, 3, 64), Lifetime(2, 3, 128)]
        >>> online_arena(tensors)  # the gap of the first tensor is too small for the last one
        ([0, 64, 128], 256)
    """
    offsets = [0] * len(tensors)
    alive: list[int] = []  # by offset
    arena = 0
    for index in sorted(range(len(tensors)), key=lambda i: tensors[i].first):
        tensor = tensors[index]
        if not tensor.bytes:
            continue
        alive = [other for other in alive if tensors[other].last >= tensor.first]
        free_from, best, fit = 0, None, 0
        for other in alive:
            start, gap = _aligned(free_from, alignment), offsets[other] - free_from
            if start + tensor.bytes <= offsets[other] and (best is None or gap < fit):
                best, fit = start, gap
            free_from = offsets[other] + tensors[other].bytes
        offsets[index] = _aligned(free_from, alignment) if best is None else best
        arena = max(arena, offsets[index] + tensor.bytes)
        alive = sorted((*alive, index), key=lambda i: offsets[i])
    return offsets, arena


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
