"""Put the operators of a .tflite into the order in which TFLite's interpreter needs the least memory.

The interpreter runs operators in the order of the file, and plans one arena for its tensors before it runs the first.
This file reads that plan from the addresses of the tensors. The addresses also show which operators overwrite their
input, so no table of such operators is needed: whether an operator does so depends on sizes, on the readers of a tensor
and on the inputs and outputs of the graph, not on the order.
Next: `compiled.py`, which puts stages into this order, and `tvm_pipeline/memory`, which finds it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from tvm_pipeline.errors import ModelError
from tvm_pipeline.frontends.tflite_resizing import packed
from tvm_pipeline.memory import Buffer, MemoryGraph, footprint, minimum_peak
from tvm_pipeline_edgetpu.delegate import tflite
from tvm_pipeline_edgetpu.model import indices

# A running pipeline waits for the stages to be cut; nearly all orders are proven in a fraction of this.
TIME_LIMIT_S = 2.0
_ALIGNMENT = 64  # the alignment of tensors in TFLite's arena, in bytes


def memory_ordered(content: bytes) -> bytes:
    """Return a .tflite with its operators in the order of least memory; the same file where that needs no less.

    Every operator computes the same as before on the same kernels, so the outputs are equal bit for bit.

    Raises:
        ModelError: TFLite cannot allocate the tensors of the file.
    """
    parsed = schema.ModelT.InitFromPackedBuf(content, 0)
    subgraph = parsed.subgraphs[0]
    if len(subgraph.operators) < 2:
        return content
    spans = _spans(content)
    graph = _memory_graph(subgraph, spans)
    order = _settled(graph, range(len(graph)), frozenset(), time.monotonic() + TIME_LIMIT_S)
    subgraph.operators = [subgraph.operators[index] for index in order]
    ordered = packed(parsed)
    return ordered if _arena(subgraph, _spans(ordered)) < _arena(subgraph, spans) else content


def _settled(
    graph: MemoryGraph, members: Sequence[int], later: frozenset[int], deadline: float, enough_bytes: int = 0
) -> list[int]:
    """Return `members` in an order of the least peak; treat those before and those after the peak in the same way.

    Many orders have the least peak, and the search returns any of them. TFLite lays tensors out greedily by size. It
    reaches that peak more often if fewer bytes are alive at the other steps.

    Args:
        members: operators that run one after another, in an order that can run.
        later: the operators that run after them; all others have run before.
        deadline: a time of time.monotonic(), after which parts keep their order.
        enough_bytes: parts that need no more than this keep their order; 0 stands for half of the whole.
    """
    left_s = deadline - time.monotonic()
    if len(members) < 3 or left_s <= 0:
        return list(members)
    part = _part(graph, members, later)
    found = minimum_peak(part, time_limit_s=left_s)
    order = [members[position] for position in found.order]
    if found.peak_bytes <= enough_bytes:
        return order
    steps = footprint(part, found.order)
    peak, enough_bytes = steps.index(max(steps)), enough_bytes or found.peak_bytes // 2
    before, after = order[:peak], order[peak + 1 :]
    return [
        *_settled(graph, before, later.union(order[peak:]), deadline, enough_bytes),
        order[peak],
        *_settled(graph, after, later, deadline, enough_bytes),
    ]


def _part(graph: MemoryGraph, members: Sequence[int], later: frozenset[int]) -> MemoryGraph:
    """Return the graph of `members` alone, in which tensors that later operators read stay alive to the end."""
    position = {index: new for new, index in enumerate(members)}
    buffers = []
    for buffer in graph.buffers:
        producers, consumers = (
            tuple(sorted(position[index] for index in users if index in position))
            for users in (buffer.producers, buffer.consumers)
        )
        if producers or consumers:
            pinned = buffer.pinned or not later.isdisjoint(buffer.consumers)
            buffers.append(Buffer(buffer.name, buffer.bytes, producers, consumers, pinned))
    return MemoryGraph(graph.name, tuple(graph.operators[index] for index in members), tuple(buffers))


def least_peak_bytes(content: bytes) -> int:
    """Return the peak bytes of the best order of the operators, without the inputs; in-place operators count as such.

    Raises:
        ModelError: TFLite cannot allocate the tensors of the file.
    """
    subgraph = schema.ModelT.InitFromPackedBuf(content, 0).subgraphs[0]
    return minimum_peak(_memory_graph(subgraph, _spans(content)), time_limit_s=TIME_LIMIT_S).peak_bytes


def arena_bytes(content: bytes) -> int:
    """Return the bytes of the arena in which TFLite's own kernels, on one thread, keep inputs and computed tensors.

    The arena spans the addresses of the tensors. Temporary tensors of kernels count if they are inside. XNNPACK has a
    workspace of its own for the operators that it takes over; no address shows that workspace.

    Raises:
        ModelError: TFLite cannot allocate the tensors of the file.
    """
    return _arena(schema.ModelT.InitFromPackedBuf(content, 0).subgraphs[0], _spans(content))


def concatenations(content: bytes) -> tuple[int, int]:
    """Return how many concatenations of a file TFLite has in place, all inputs inside the output, and how many copy.

    Raises:
        ModelError: TFLite cannot allocate the tensors of the file.
    """
    parsed, spans = schema.ModelT.InitFromPackedBuf(content, 0), _spans(content)
    counts = [0, 0]
    for operator in parsed.subgraphs[0].operators:
        code = parsed.operatorCodes[operator.opcodeIndex].builtinCode
        if code == schema.BuiltinOperator.CONCATENATION:
            start, size = spans[indices(operator.outputs)[0]]
            reads = [spans[index] for index in indices(operator.inputs)]
            counts[not all(start <= first and first + length <= start + size for first, length in reads)] += 1
    return counts[0], counts[1]


def _arena(subgraph: Any, spans: list[tuple[int, int]]) -> int:
    """Return the bytes of the blocks of memory that contain computed tensors."""
    computed = _computed(subgraph)
    in_order = sorted(
        (start, start + size, index in computed)
        for index, (start, size) in enumerate(spans)
        if size and (index in computed or index >= len(subgraph.tensors))  # the last ones are temporary
    )
    total, end, block, counts = 0, -_ALIGNMENT, 0, False
    for start, stop, is_computed in [*in_order, (1 << 64, 0, False)]:
        if start >= end + _ALIGNMENT:  # no arena has such a gap; kernels keep persistent tensors elsewhere
            total += end - block if counts else 0
            block, counts = start, False
        end, counts = max(end, stop), counts or is_computed
    return total


def _computed(subgraph: Any) -> set[int]:
    return {
        *indices(subgraph.inputs),
        *(index for operator in subgraph.operators for index in indices(operator.outputs)),
    }


def _spans(content: bytes) -> list[tuple[int, int]]:
    """Return address and bytes of every tensor, those of the file first; no bytes where it is not allocated yet."""
    module = tflite()
    plain = module.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    try:
        interpreter = module.Interpreter(model_content=content, num_threads=1, experimental_op_resolver_type=plain)
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"TFLite cannot allocate the tensors of a stage: {error}") from error
    spans = []
    for detail in interpreter.get_tensor_details():
        try:
            view = interpreter.tensor(detail["index"])()
        except ValueError:  # its extents are not known before it is computed
            spans.append((0, 0))
            continue
        spans.append((view.__array_interface__["data"][0], view.nbytes))
    return spans


def _memory_graph(subgraph: Any, spans: list[tuple[int, int]]) -> MemoryGraph:
    """Return the tensors of the arena without the inputs, which are always alive; unread ones are alive to the end."""
    operators = [(indices(operator.inputs), indices(operator.outputs)) for operator in subgraph.operators]
    ends = set(indices(subgraph.outputs))
    writer = {tensor: index for index, (_, writes) in enumerate(operators) for tensor in writes}
    readers: dict[int, list[int]] = {tensor: [] for tensor in writer}
    # The tensor whose bytes a tensor has. An operator's input is alive while the operator runs, so an output has the
    # address of an input only if the two share their bytes.
    home: dict[int, int] = {}
    for index, (reads, writes) in enumerate(operators):
        own = [tensor for tensor in dict.fromkeys(reads) if tensor in writer]
        for tensor in own:
            readers[tensor].append(index)
        for tensor in writes:
            home[tensor] = next((home[t] for t in own if spans[t] == spans[tensor] and spans[t][1]), tensor)
    users: dict[int, set[int]] = {tensor: set() for tensor in home.values()}
    kept = {home[tensor] for tensor in home if tensor in ends or not readers[tensor]}
    for tensor, start in home.items():
        users[start].update(readers[tensor])
    arena = (
        Buffer(str(t), -(-spans[t][1] // _ALIGNMENT) * _ALIGNMENT, (writer[t],), tuple(sorted(users[t])), t in kept)
        for t in users
    )
    after = (Buffer(f"{t} in {home[t]}", 0, (writer[t],), tuple(readers[t])) for t in home if home[t] != t)
    names = tuple(f"operator {index}" for index in range(len(operators)))
    return MemoryGraph("subgraph", names, (*arena, *after))
