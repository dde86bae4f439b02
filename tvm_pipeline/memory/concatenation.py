"""Concatenations that take no memory of their own: what reads one reads its parts instead.

    c = concat(x, y);  z = conv(c)      ->      z = conv(x, y)

TVM and TFLite copy the parts into a new tensor, and `memory_graph` counts that copy. SERENITY (Ahn et al., "Ordering
Chaos", MLSys 2020) counts none: its figures are those of the graphs made here. Next: `rewriting.py`, which goes on to
do such readers in parts.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.memory.memory_graph import Buffer, MemoryGraph

Concatenation: TypeAlias = Literal["copied", "free"]

# Kinds as Keras, Relay, TFLite and memory benchmarks name them, in lower case.
CONCATENATIONS = {"concat", "concatenate", "concatenation"}


def free_concatenations(graph: OperatorGraph, memory: MemoryGraph) -> MemoryGraph:
    """Return `memory` without the concatenations of `graph`, and with readers of the parts in place of their readers.

    A concatenation of concatenations is one of all their parts. One that is an output of the graph, or that leaves the
    stage, stays as it is: a buffer of its own, and the operator that copies its parts there. So does one that nothing
    reads, one of constants, and one that was fused with other work. An operator that may overwrite a concatenation may
    overwrite none of its parts.

    Args:
        memory: the graph, or a stage of it, as `memory_graph` or `rewriting.rewritten` makes it.

    Examples:
        >>> from tvm_pipeline.core.graph import Operator, Tensor
        >>> from tvm_pipeline.memory import memory_graph, minimum_peak
        >>> concat = Operator("concat", "concatenation", ("x", "y"), (Tensor("c", (12,), "int8"),))
        >>> conv = Operator("conv", "conv2d", ("c",), (Tensor("z", (2,), "int8"),))
        >>> inputs = (Tensor("x", (4,), "int8"), Tensor("y", (8,), "int8"))
        >>> graph = OperatorGraph("net", inputs, (concat, conv), ("z",))
        >>> copied = memory_graph(graph)
        >>> free = free_concatenations(graph, copied)
        >>> [(buffer.name, buffer.consumers) for buffer in free.buffers]
        [('x', (0,)), ('y', (0,)), ('z', ())]
        >>> minimum_peak(copied).peak_bytes, minimum_peak(free).peak_bytes
        (24, 14)
    """
    kinds = {operator.name: operator.kind for operator in graph.operators}
    reads: list[list[int]] = [[] for _ in memory.operators]
    for index, buffer in enumerate(memory.buffers):
        for reader in buffer.consumers:
            reads[reader].append(index)
    gone: dict[int, int] = {}  # buffers of concatenations that disappear, and the operators that write them
    for index, buffer in enumerate(memory.buffers):
        if len(buffer.producers) == 1 and buffer.consumers and not buffer.pinned:
            (writer,) = buffer.producers
            parts = kinds.get(memory.operators[writer], "").split("+")
            if reads[writer] and all(part.rpartition(".")[2].lower() in CONCATENATIONS for part in parts):
                gone[index] = writer
    if not gone:
        return memory
    readers = [set(buffer.consumers) for buffer in memory.buffers]
    # The last concatenation comes first, so that chains of them end in their first parts.
    for index, writer in sorted(gone.items(), key=lambda item: -item[1]):
        for part in reads[writer]:
            readers[part] = (readers[part] - {writer}) | readers[index]
    stays = [op for op in range(len(memory)) if op not in set(gone.values())]
    operator = {op: position for position, op in enumerate(stays)}
    kept = [index for index in range(len(memory.buffers)) if index not in gone]
    position = {index: new for new, index in enumerate(kept)}
    return MemoryGraph(
        memory.name,
        tuple(memory.operators[op] for op in stays),
        tuple(
            Buffer(
                memory.buffers[index].name,
                memory.buffers[index].bytes,
                tuple(operator[op] for op in memory.buffers[index].producers),
                tuple(sorted(operator[op] for op in readers[index])),
                memory.buffers[index].pinned,
            )
            for index in kept
        ),
        tuple(memory.workspace_bytes[op] for op in stays) if memory.workspace_bytes else (),
        tuple(tuple(position[b] for b in memory.in_place[op] if b in position) for op in stays)
        if memory.in_place
        else (),
    )
