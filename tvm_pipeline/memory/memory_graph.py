"""The memory that an order of operators needs: buffers, their writers and readers, and the bytes alive at each step.

A MemoryGraph is an OperatorGraph as an allocator sees it. It holds only what an allocator needs, so that graphs from
Relay, from a .tflite file and from a rewriting have one form. Next: `orders.py` (orders that cost no search),
`exact_order.py` (the order with the least peak), `arena.py` (where in an arena the buffers of an order lie).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.errors import GraphError

INT64_MAX = (1 << 63) - 1

# The kinds that compute each output element from the input element at the same position alone, as Keras, Relay and
# TFLite name them, in lower case. Those of the last line only change the shape.
ELEMENTWISE = """
    abs activation add batchnormalization batch_norm bias_add cast clip customscalelayer divide elu erf exp gelu
    hard_swish hardswish leaky_relu leakyrelu log logistic maximum minimum mul multiply negative power prelu relu relu6
    rsqrt sigmoid sqrt sub subtract swish tanh
    batch_flatten dropout expand_dims flatten identity reshape squeeze
"""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes that are alive from the operator that first writes them to the operator that reads them last.

    A buffer of 0 bytes expresses that one operator must come after another.

    Attributes:
        producers: indices of the operators that write it; none for an input of the graph, which is alive from the
            start. Several producers write parts or sums of one buffer in any order: an accumulation, or a concatenation
            whose parts are written where they belong.
        consumers: indices of the operators that read it, after all producers. A buffer without consumers dies when its
            last producer ends; an input without consumers takes no memory.
        pinned: whether it stays alive to the end, as an output of the graph does.
    """

    name: str
    bytes: int
    producers: tuple[int, ...]
    consumers: tuple[int, ...]
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class MemoryGraph:
    """Operators in a topological order (the "program order") and the buffers between them.

    Attributes:
        operators: their names; elsewhere an operator is named by its index in this tuple.
        workspace_bytes: what each operator needs in addition while it runs; empty if no operator needs any.
        in_place: for each operator the indices of the buffers that it may overwrite with its output. It overwrites one
            that dies while the operator runs, is not pinned and is at least as large; else the output gets memory of
            its own.

    Raises GraphError when a buffer is read before it is written (a cycle, or a wrong order), a size is negative,
    unknown or all of them together more than an int64 holds, or an operator is to overwrite what it does not read.
    """

    name: str
    operators: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    workspace_bytes: tuple[int, ...] = ()
    in_place: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        count = len(self.operators)
        for what, figures in (("workspace_bytes", self.workspace_bytes), ("in_place", self.in_place)):
            if figures and len(figures) != count:
                raise GraphError(f"graph {self.name}: {what} has {len(figures)} entries for {count} operators")
        for buffer in self.buffers:
            self._check(buffer)
        for name, size in zip(self.operators, self.workspace_bytes, strict=False):
            _check_size(f"graph {self.name}: the workspace of operator {name}", size)
        if sum(buffer.bytes for buffer in self.buffers) + sum(self.workspace_bytes) > INT64_MAX:
            largest = max(self.buffers, key=lambda buffer: buffer.bytes, default=None)
            which = f", such as that of {largest.name} ({largest.bytes} bytes)" if largest else ""
            raise GraphError(
                f"graph {self.name}: its buffers are more bytes than 64 bits can count; check their shapes{which}"
            )
        for index, marks in enumerate(self.in_place):
            if marks and sum(index in buffer.producers for buffer in self.buffers) != 1:
                raise GraphError(
                    f"graph {self.name}: operator {self.operators[index]} is marked in place and does not write "
                    "exactly one buffer; leave the mark out"
                )
            for mark in marks:
                if not 0 <= mark < len(self.buffers) or index not in self.buffers[mark].consumers:
                    what = self.buffers[mark].name if 0 <= mark < len(self.buffers) else f"buffer {mark}"
                    raise GraphError(
                        f"graph {self.name}: operator {self.operators[index]} is to overwrite {what}, which it does "
                        "not read; mark inputs of the operator only"
                    )

    def __len__(self) -> int:
        return len(self.operators)

    def _check(self, buffer: Buffer) -> None:
        where = f"graph {self.name}: buffer {buffer.name}"
        _check_size(where, buffer.bytes)
        for users in (buffer.producers, buffer.consumers):
            if len(set(users)) != len(users) or any(not 0 <= index < len(self.operators) for index in users):
                raise GraphError(
                    f"{where} names operators {users}; each must be there once, from 0 to {len(self.operators) - 1}"
                )
        if buffer.producers and buffer.consumers and max(buffer.producers) >= min(buffer.consumers):
            reader, writer = self.operators[min(buffer.consumers)], self.operators[max(buffer.producers)]
            raise GraphError(
                f"{where} is read by operator {reader} before {writer} has written it; list the operators in "
                "topological order and check for a cycle"
            )


def _check_size(what: str, size: Any) -> None:
    try:
        known = operator.index(size) >= 0
    except TypeError:
        known = False
    if not known:
        raise GraphError(f"{what} has {size} bytes; give a whole number, 0 or more: sizes must be known")


def memory_graph(
    graph: OperatorGraph,
    operators: Iterable[str] | None = None,
    *,
    pin_inputs: bool = False,
    pin_outputs: bool = True,
    in_place: bool = False,
) -> MemoryGraph:
    """Return the buffers of a graph, or of one stage: one for every tensor that its operators read or write.

    Args:
        operators: names of the stage's operators, in any order; all operators by default. The stage's inputs are the
            tensors that other operators write. Its outputs are the tensors that other operators read, and the outputs
            of the graph.
        pin_inputs: inputs stay alive to the end, as those of a graph executor do; else they die after their last use.
        pin_outputs: outputs stay alive to the end; else they die after the last operator that writes or reads them.
        in_place: elementwise operators may overwrite an input with the same number of elements.

    Raises:
        GraphError: an operator is not in the graph, or its sizes are ones that MemoryGraph refuses.
    """
    edges, tensors = graph.edges, graph.tensors
    names = edges.index.keys() if operators is None else set(operators)
    if missing := names - edges.index.keys():
        raise GraphError(f"graph {graph.name} has no operator {min(missing)}; name operators of this graph")
    chosen = sorted(edges.index[name] for name in names)
    members = [graph.operators[index] for index in chosen]
    own = {index: position for position, index in enumerate(chosen)}  # position in the stage of each of its operators
    given = [tensor.name for tensor in graph.inputs] if operators is None else []
    written = [tensor.name for part in members for tensor in part.outputs]
    touched = dict.fromkeys((*given, *written, *(read for part in members for read in part.inputs)))
    kept = set(graph.outputs)
    buffers = []
    for name in touched:
        producer = own.get(edges.writer.get(name, -1))
        consumers = tuple(own[reader] for reader in edges.readers[name] if reader in own)
        leaves = name in kept or len(consumers) < len(edges.readers[name])
        pinned = (pin_outputs and leaves) or (pin_inputs and producer is None)
        buffers.append(Buffer(name, tensors[name].bytes, () if producer is None else (producer,), consumers, pinned))
    position = {name: index for index, name in enumerate(touched)}
    marks = tuple(_overwritable(part, tensors, position) for part in members) if in_place else ()
    return MemoryGraph(graph.name, tuple(part.name for part in members), tuple(buffers), (), marks)


def _overwritable(part: Operator, tensors: Mapping[str, Tensor], position: dict[str, int]) -> tuple[int, ...]:
    kinds = (kind.rpartition(".")[2].lower() for kind in part.kind.split("+"))
    if len(part.outputs) != 1 or not set(kinds) <= set(ELEMENTWISE.split()):
        return ()
    elements = math.prod(part.outputs[0].shape)
    return tuple(position[read] for read in dict.fromkeys(part.inputs) if math.prod(tensors[read].shape) == elements)


def predecessors(graph: MemoryGraph) -> list[set[int]]:
    """Return for each operator those that must run before it: the producers of what it reads."""
    before: list[set[int]] = [set() for _ in graph.operators]
    for buffer in graph.buffers:
        for consumer in buffer.consumers:
            before[consumer].update(buffer.producers)
    return before


def check_order(graph: MemoryGraph, order: Sequence[int]) -> None:
    """Raise GraphError unless `order` holds every operator once, each after those whose output it reads."""
    if sorted(order) != list(range(len(graph))):
        raise GraphError(f"graph {graph.name}: an order holds each of 0 to {len(graph) - 1} once, not {list(order)}")
    done: set[int] = set()
    before = predecessors(graph)
    for index in order:
        missing = before[index] - done
        if missing:
            raise GraphError(
                f"graph {graph.name}: operator {graph.operators[index]} stands before {graph.operators[min(missing)]}, "
                "whose output it reads; give a topological order"
            )
        done.add(index)


def footprint(graph: MemoryGraph, order: Sequence[int]) -> list[int]:
    """Return the bytes alive while each operator of `order` runs.

    They are the buffers that are alive before it, those that it writes, and its workspace.

    Raises:
        GraphError: `check_order` refuses `order`.
    """
    check_order(graph, order)
    reads, writes = _reads_and_writes(graph)
    users = [len(buffer.producers) + len(buffer.consumers) for buffer in graph.buffers]
    begun = [not buffer.producers for buffer in graph.buffers]
    alive = _bytes_at_start(graph)
    steps = []
    for index in order:
        begins = [b for b in writes[index] if not begun[b]]
        written = sum(graph.buffers[b].bytes for b in begins)
        dying = []
        for b in {*reads[index], *writes[index]}:
            users[b] -= 1
            if users[b] == 0 and not graph.buffers[b].pinned:
                dying.append(b)
        overwrites = graph.in_place and any(
            b in dying and graph.buffers[b].bytes >= written for b in graph.in_place[index]
        )
        workspace = graph.workspace_bytes[index] if graph.workspace_bytes else 0
        steps.append(alive + workspace + (0 if overwrites else written))
        for b in begins:
            begun[b] = True
        alive += written - sum(graph.buffers[b].bytes for b in dying)
    return steps


def peak_bytes(graph: MemoryGraph, order: Sequence[int]) -> int:
    """Return the most bytes that are alive at the same time when the operators run in `order`.

    This is the judge of an order: it takes time in proportion to the operators and buffers, and searches nothing.

    Raises:
        GraphError: `check_order` refuses `order`.
    """
    return max(footprint(graph, order), default=_bytes_at_start(graph))


def _bytes_at_start(graph: MemoryGraph) -> int:
    return sum(buffer.bytes for buffer in graph.buffers if not buffer.producers and (buffer.consumers or buffer.pinned))


def _reads_and_writes(graph: MemoryGraph) -> tuple[list[list[int]], list[list[int]]]:
    reads: list[list[int]] = [[] for _ in graph.operators]
    writes: list[list[int]] = [[] for _ in graph.operators]
    for position, buffer in enumerate(graph.buffers):
        for index in buffer.consumers:
            reads[index].append(position)
        for index in buffer.producers:
            writes[index].append(position)
    return reads, writes
