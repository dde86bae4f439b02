"""What an order of operators costs in memory: buffers, who writes and who reads them, and the bytes alive at each step.

A MemoryGraph is an OperatorGraph seen by an allocator. It says only what matters to it, so that graphs from Relay, from
a .tflite file and from a rewriting look alike. Next: `orders.py` (orders that cost no search), `exact.py` (the order
that needs least), `layout.py` (where in an arena the buffers of an order lie).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.errors import GraphError

INT64_MAX = (1 << 63) - 1

# Kinds each of whose output elements depends on the input element at its place alone, as Keras, Relay and TFLite name
# them, in lower case; those of the last line only rename a shape.
ELEMENTWISE = """
    abs activation add batchnormalization batch_norm bias_add cast clip customscalelayer divide elu erf exp gelu
    hard_swish hardswish leaky_relu leakyrelu log logistic maximum minimum mul multiply negative power prelu relu relu6
    rsqrt sigmoid sqrt sub subtract swish tanh
    batch_flatten dropout expand_dims flatten identity reshape squeeze
"""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes that are alive from the operator that first writes them to the one that reads them last.

    A buffer of no bytes is a way to say that one operator must come after another.

    Attributes:
        producers: indices of the operators that write it; none for an input of the graph, which is alive from the
            start. Several write parts or sums of one buffer in any order: an accumulation, or a concatenation whose
            parts are written where they belong.
        consumers: indices of the operators that read it, after all producers. Where there are none, it dies as its
            last producer ends; an input that nobody reads takes no room at all.
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
        operators: their names; everywhere else an operator is its index here.
        workspace_bytes: what each operator needs besides while it runs; left out, nothing.
        in_place: for each operator the indices of the buffers that it may overwrite with its output. It does where one
            of them dies as it runs, is not pinned and is at least as large; else the output gets a place of its own.

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
    """The buffers of a graph, or of one stage: one for every tensor that its operators read or write.

    Args:
        operators: names of the stage's operators, in any order; tensors that others write are its inputs, those that
            others read its outputs, as are the graph's own. All operators by default.
        pin_inputs: inputs stay alive to the end, as those of a graph executor do; else they die after their last use.
        pin_outputs: outputs stay alive to the end; else they die as what writes or reads them last has run.
        in_place: elementwise operators may overwrite an input of as many elements.

    Raises:
        GraphError: an operator is not in the graph, or its sizes are ones that MemoryGraph refuses.
    """
    inside = {part.name for part in graph.operators} if operators is None else set(operators)
    members = [part for part in graph.operators if part.name in inside]
    if len(members) < len(inside):
        missing = min(inside.difference(part.name for part in members))
        raise GraphError(f"graph {graph.name} has no operator {missing}; name operators of this graph")
    tensors = graph.tensors
    writers = {tensor.name: index for index, part in enumerate(members) for tensor in part.outputs}
    given = [tensor.name for tensor in graph.inputs] if operators is None else []
    readers: dict[str, list[int]] = {name: [] for name in (*given, *writers)}
    for index, part in enumerate(members):
        for read in dict.fromkeys(part.inputs):
            readers.setdefault(read, []).append(index)
    leaving = {*graph.outputs, *(read for part in graph.operators if part.name not in inside for read in part.inputs)}
    buffers = tuple(
        Buffer(
            name,
            tensors[name].bytes,
            (writers[name],) if name in writers else (),
            tuple(users),
            (pin_outputs and name in leaving) or (pin_inputs and name not in writers),
        )
        for name, users in readers.items()
    )
    position = {name: index for index, name in enumerate(readers)}
    marks = tuple(_overwritable(part, tensors, position) for part in members) if in_place else ()
    return MemoryGraph(graph.name, tuple(part.name for part in members), buffers, (), marks)


def _overwritable(part: Operator, tensors: dict[str, Tensor], position: dict[str, int]) -> tuple[int, ...]:
    kinds = (kind.rpartition(".")[2].lower() for kind in part.kind.split("+"))
    if len(part.outputs) != 1 or not set(kinds) <= set(ELEMENTWISE.split()):
        return ()
    elements = math.prod(part.outputs[0].shape)
    return tuple(position[read] for read in dict.fromkeys(part.inputs) if math.prod(tensors[read].shape) == elements)


def predecessors(graph: MemoryGraph) -> list[set[int]]:
    """For each operator those that must run before it: the producers of what it reads."""
    before: list[set[int]] = [set() for _ in graph.operators]
    for buffer in graph.buffers:
        for consumer in buffer.consumers:
            before[consumer].update(buffer.producers)
    return before


def check_order(graph: MemoryGraph, order: Sequence[int]) -> None:
    """Raises GraphError unless `order` holds every operator once, each after those whose output it reads."""
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
    """Bytes alive while each operator of `order` runs: what lives before it, what it writes, and its workspace.

    Raises:
        GraphError: `order` is none that `check_order` takes.
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
    """The most bytes that are alive at once when the operators run in `order`; raises as `footprint` does."""
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
