"""The order of a slice's kernels, or a module's, that needs the least memory; free of any IR.

The tensors that kernels write and read become a MemoryGraph (`tvm_pipeline/memory`), and the search there gives the
order. A kernel never overwrites its input: TVM gives every result bytes of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from tvm_pipeline.memory import Buffer, MemoryGraph, minimum_peak
from tvm_pipeline.memory.arena import ALIGNMENT
from tvm_pipeline.tvm.kernels import Entry, Kernel, tensor_bytes

# Slices are cut while a pipeline runs and waits; nearly all orders are proven in a fraction of this.
TIME_LIMIT_S = 2.0


def kernel_order(
    kernels: Mapping[int, Kernel],
    is_view: Callable[[int], bool],
    live_at_end: Collection[Entry],
    elsewhere: Collection[Entry] = (),
) -> list[int]:
    """Return the kernels in the order that needs the least memory.

    Args:
        kernels: kernels by index; in ascending order they can run.
        is_view: whether a kernel only shows its input under another shape: nothing runs, and the bytes are the same.
        live_at_end: entries that stay alive to the end.
        elsewhere: entries that are written into the caller's buffers, and so take no memory here.
    """
    owner = _owners(kernels, is_view)
    running = [index for index in sorted(kernels) if not is_view(index)]
    readers: dict[Entry, list[int]] = {}
    for step, index in enumerate(running):
        for entry in dict.fromkeys(owner[read] for read in kernels[index].reads if read in owner):
            readers.setdefault(entry, []).append(step)
    kept = {owner[entry] for entry in live_at_end if entry in owner}
    buffers = [
        Buffer(
            f"{index}.{output}",
            0 if (index, output) in elsewhere else _aligned_bytes(kernels[index], output),
            (step,),
            tuple(readers.get((index, output), ())),
            (index, output) in kept,
        )
        for step, index in enumerate(running)
        for output in range(len(kernels[index].outputs))
    ]
    graph = MemoryGraph("kernels", tuple(map(str, running)), tuple(buffers))
    found = minimum_peak(graph, time_limit_s=TIME_LIMIT_S)
    return _with_views(kernels, [running[step] for step in found.order])


def _owners(kernels: Mapping[int, Kernel], is_view: Callable[[int], bool]) -> dict[Entry, Entry]:
    """Return for each entry the entry whose bytes it shows; entries that other kernels make are left out."""
    owner: dict[Entry, Entry] = {}
    for index in sorted(kernels):
        reads = kernels[index].reads
        for output in range(len(kernels[index].outputs)):
            if not is_view(index):
                owner[index, output] = index, output
            elif reads and reads[0] in owner:
                owner[index, output] = owner[reads[0]]
    return owner


def _aligned_bytes(kernel: Kernel, output: int) -> int:
    size = tensor_bytes(kernel.outputs[output].shape, kernel.outputs[output].dtype)
    return -(-size // ALIGNMENT) * ALIGNMENT


def _with_views(kernels: Mapping[int, Kernel], order: Sequence[int]) -> list[int]:
    """Put each kernel that is not in `order` before the first that reads it; at the end where none does."""
    step_of = {index: step for step, index in enumerate(order)}
    views = [index for index in kernels if index not in step_of]
    first = dict.fromkeys(views, len(order))
    for index in sorted(kernels, reverse=True):  # a view's readers come after it, views among them
        for read, _ in kernels[index].reads:
            if read in first:
                first[read] = min(first[read], step_of.get(index, first.get(index, len(order))))
    return sorted(kernels, key=lambda index: (step_of.get(index, first.get(index)), index in step_of, index))
