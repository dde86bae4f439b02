"""The operators of a .tflite in the order in which TFLite's interpreter needs the least memory.

The interpreter runs operators in the order of the file, and plans one arena for its tensors before it runs the first.
Its plan is read from the addresses of the tensors: so are the operators that write over their input, which no table of
ours has to know. Whether one does depends on sizes, on who reads a tensor and on the ends of the graph, not on the
order. Next: `compiled.py`, which puts stages into this order, and `tvm_pipeline/memory`, which finds it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from tvm_pipeline.errors import ModelError
from tvm_pipeline.memory import Buffer, MemoryGraph, footprint, minimum_peak
from tvm_pipeline_edgetpu.model import indices
from tvm_pipeline_edgetpu.slicer import packed

# Stages are cut while a pipeline runs, and it waits; nearly all orders are proven in a fraction of this.
TIME_LIMIT_S = 2.0
_ALIGNMENT = 64  # of tensors in TFLite's arena


def memory_ordered(content: bytes) -> bytes:
    """A .tflite of one subgraph with its operators in the order of the least memory; the same where that is no less.

    Every operator computes what it did, on the same kernels: the outputs are equal, bit for bit.

    Raises:
        ModelError: TFLite cannot allocate the tensors of the file.
    """
    parsed = schema.ModelT.InitFromPackedBuf(content, 0)
    subgraph = parsed.subgraphs[0]
    if len(subgraph.operators) < 2:
        return content
    places = _places(content)
    graph = _memory_graph(subgraph, places)
    order = _settled(graph, range(len(graph)), frozenset(), time.monotonic() + TIME_LIMIT_S)
    subgraph.operators = [subgraph.operators[index] for index in order]
    ordered = packed(parsed)
    return ordered if _arena(subgraph, _places(ordered)) < _arena(subgraph, places) else content


def _settled(
    graph: MemoryGraph, members: Sequence[int], later: frozenset[int], deadline: float, enough_bytes: int = 0
) -> list[int]:
    """`members` in the order whose peak is least; then those before the peak, and those after it, in the same way.

    Many orders have the least peak, and the search gives any. TFLite lays tensors out greedily by size, and fits them
    into that peak the sooner, the less is alive at the other steps.

    Args:
        members: operators that run one after another, in an order that can run.
        later: those that run after them; all others have run before.
        deadline: by time.monotonic(), after which parts stay as they are.
        enough_bytes: parts that need no more than this stay as they are; half of the whole, where it is 0.
    """
    left_s = deadline - time.monotonic()
    if len(members) < 3 or left_s <= 0:
        return list(members)
    part = _part(graph, members, later)
    found = minimum_peak(part, time_limit_s=left_s)
    order = [members[place] for place in found.order]
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
    """`members` by themselves: what is read later stays alive to the end."""
    place = {index: new for new, index in enumerate(members)}
    buffers = []
    for buffer in graph.buffers:
        producers, consumers = (
            tuple(sorted(place[index] for index in users if index in place))
            for users in (buffer.producers, buffer.consumers)
        )
        if producers or consumers:
            pinned = buffer.pinned or not later.isdisjoint(buffer.consumers)
            buffers.append(Buffer(buffer.name, buffer.bytes, producers, consumers, pinned))
    return MemoryGraph(graph.name, tuple(graph.operators[index] for index in members), tuple(buffers))


def arena_bytes(content: bytes) -> int:
    """The arena in which TFLite's own kernels, on one thread, keep all that a .tflite computes, its inputs among it.

    It spans the addresses of the tensors; a kernel's temporary ones count where they lie in it. XNNPACK, where it takes
    operators over, has a workspace of its own, which no address tells of.

    Raises:
        ModelError: TFLite cannot allocate the tensors of the file.
    """
    return _arena(schema.ModelT.InitFromPackedBuf(content, 0).subgraphs[0], _places(content))


def _arena(subgraph: Any, places: list[tuple[int, int]]) -> int:
    computed = _computed(subgraph)
    spans = sorted(
        (start, start + size, index in computed)
        for index, (start, size) in enumerate(places)
        if size and (index in computed or index >= len(subgraph.tensors))  # beyond the file's: temporary ones
    )
    total, end, block, counts = 0, -_ALIGNMENT, 0, False
    for start, stop, is_computed in [*spans, (1 << 64, 0, False)]:
        if start >= end + _ALIGNMENT:  # no arena has such a gap; what kernels keep for ever lies elsewhere
            total += end - block if counts else 0
            block, counts = start, False
        end, counts = max(end, stop), counts or is_computed
    return total


def _computed(subgraph: Any) -> set[int]:
    return {
        *indices(subgraph.inputs),
        *(index for operator in subgraph.operators for index in indices(operator.outputs)),
    }


def _places(content: bytes) -> list[tuple[int, int]]:
    """Address and bytes of every tensor, those of the file first; no bytes where it has no place yet."""
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    try:
        interpreter = Interpreter(model_content=content, num_threads=1, experimental_op_resolver_type=plain)
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"TFLite cannot allocate the tensors of a stage: {error}") from error
    places = []
    for detail in interpreter.get_tensor_details():
        try:
            view = interpreter.tensor(detail["index"])()
        except ValueError:  # its extents are known only when it has been computed
            places.append((0, 0))
            continue
        places.append((view.__array_interface__["data"][0], view.nbytes))
    return places


def _memory_graph(subgraph: Any, places: list[tuple[int, int]]) -> MemoryGraph:
    """What the arena holds: inputs live from first to last and need not be told, unread tensors live to the end."""
    operators = [(indices(operator.inputs), indices(operator.outputs)) for operator in subgraph.operators]
    ends = set(indices(subgraph.outputs))
    writer = {tensor: index for index, (_, writes) in enumerate(operators) for tensor in writes}
    readers: dict[int, list[int]] = {tensor: [] for tensor in writer}
    home: dict[int, int] = {}  # the tensor whose bytes a tensor has; what an operator reads lives as long as it runs,
    for index, (reads, writes) in enumerate(operators):  # so it has the address of what it writes only if they share
        own = [tensor for tensor in dict.fromkeys(reads) if tensor in writer]
        for tensor in own:
            readers[tensor].append(index)
        for tensor in writes:
            home[tensor] = next((home[t] for t in own if places[t] == places[tensor] and places[t][1]), tensor)
    users: dict[int, set[int]] = {tensor: set() for tensor in home.values()}
    kept = {home[tensor] for tensor in home if tensor in ends or not readers[tensor]}
    for tensor, start in home.items():
        users[start].update(readers[tensor])
    arena = (
        Buffer(str(t), -(-places[t][1] // _ALIGNMENT) * _ALIGNMENT, (writer[t],), tuple(sorted(users[t])), t in kept)
        for t in users
    )
    after = (Buffer(f"{t} in {home[t]}", 0, (writer[t],), tuple(readers[t])) for t in home if home[t] != t)
    names = tuple(f"operator {index}" for index in range(len(operators)))
    return MemoryGraph("subgraph", names, (*arena, *after))
