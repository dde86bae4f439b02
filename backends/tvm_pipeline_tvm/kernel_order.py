"""The order of a slice's kernels, or a module's, that needs the least memory; free of any IR.

The tensors that kernels write and read become a MemoryGraph (`tvm_pipeline/memory`), and the search there gives the
order. TVM gives every result bytes of its own; slices let tensors share them (`shared_bytes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from tvm_pipeline.memory import Buffer, MemoryGraph, minimum_peak
from tvm_pipeline.memory.arena import ALIGNMENT
from tvm_pipeline_tvm.kernels import Entry, Kernel, tensor_bytes
from tvm_pipeline_tvm.shared_bytes import SharedBytes

# Slices are cut while a pipeline runs and waits; nearly all orders are proven in a fraction of this.
TIME_LIMIT_S = 2.0


def kernel_order(
    kernels: Mapping[int, Kernel],
    is_view: Callable[[int], bool],
    live_at_end: Collection[Entry],
    elsewhere: Collection[Entry] = (),
    shared: SharedBytes | None = None,
) -> list[int]:
    """Return the kernels in the order that needs the least memory.

    Args:
        kernels: kernels by index; in ascending order they can run.
        is_view: whether a kernel only shows its input under another shape: nothing runs, and the bytes are the same.
        live_at_end: entries that stay alive to the end.
        elsewhere: entries that are written into the caller's buffers, and so take no memory here.
        shared: which concatenations are done without running.
    """
    owner = _owners(kernels, is_view)

    def apart(entry: Entry) -> Sequence[Entry]:
        return [owner[entry]] if entry in owner else []

    def outputs(index: int) -> Sequence[Entry]:
        return [(index, output) for output in range(len(kernels[index].outputs))]

    def size_apart(entry: Entry) -> int:
        output = kernels[entry[0]].outputs[entry[1]]
        return tensor_bytes(output.shape, output.dtype)

    written, makes, size = (shared.written, shared.makes, shared.size) if shared else (apart, outputs, size_apart)
    running = [index for index in sorted(kernels) if not is_view(index) and makes(index)]
    readers: dict[Entry, list[int]] = {}
    for step, index in enumerate(running):
        for entry in dict.fromkeys(made for read in kernels[index].reads for made in written(read)):
            readers.setdefault(entry, []).append(step)
    kept = {made for entry in live_at_end for made in written(entry)}
    made = [(step, entry) for step, index in enumerate(running) for entry in makes(index)]
    buffers = [
        Buffer(
            f"{entry[0]}.{entry[1]}",
            0 if entry in elsewhere else -(-size(entry) // ALIGNMENT) * ALIGNMENT,
            (step,),
            tuple(readers.get(entry, ())),
            entry in kept,
        )
        for step, entry in made
    ]
    position = {entry: index for index, (_, entry) in enumerate(made)}
    marks = tuple(tuple(position[entry] for entry in shared.replaceable(index)) for index in running) if shared else ()
    graph = MemoryGraph("kernels", tuple(map(str, running)), tuple(buffers), (), marks)
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
