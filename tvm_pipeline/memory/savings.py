"""What doing concatenations and sums in parts saves: the least peak without, as SERENITY does it, and with sums too.

The graph may have its channels last, as TFLite and Keras store them, or first, as Relay compiles them. Sources of
graphs do not say which, so it is read from the convolutions (`channels_last`). Depthwise convolutions of Relay are not
told from those in groups, and are not done in parts here; `compile` sees their attributes. Next: `rewriting.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.memory.arena import lifetimes
from tvm_pipeline.memory.memory_graph import MemoryGraph, footprint
from tvm_pipeline.memory.minimum_peak import minimum_peak
from tvm_pipeline.memory.orders import Ordering
from tvm_pipeline.memory.rewriting import Rewriting, rewritable, rewrite, rewritten
from tvm_pipeline.memory.stage_memory import stage_graph

TIME_LIMIT_S = 5.0  # for each search of an order
_CARRIED = "[sum]"  # ends the names of partial sums of integers, which are kept in int32


@dataclass(frozen=True, slots=True)
class Savings:
    """The least peak of a graph or a stage, with fewer and with more of its operators in parts.

    Attributes:
        plain: the best order of the graph as it is.
        partitioned: with those concatenations in parts that the least peak requires, of those whose readers can all
            read parts; they are SERENITY's rewritings.
        every: with other concatenations and sums, too, which take their inputs one by one.
        why: why nothing is gained; empty where anything is.
    """

    name: str
    plain: Ordering
    partitioned: Rewriting
    every: Rewriting
    why: str = ""

    @property
    def carried_bytes(self) -> int:
        """The bytes of all partial sums that are kept in int32; they are part of the peaks where they are alive."""
        return sum(buffer.bytes for buffer in self.every.graph.buffers if buffer.name.endswith(_CARRIED))


def savings(name: str, graph: OperatorGraph, operators: Iterable[str] | None = None) -> Savings:
    """Return what doing operators of a stage (all by default) in parts saves; inputs and outputs stay alive to the end.

    Raises:
        GraphError: as `stage_graph` does.

    Examples:
        >>> from tvm_pipeline.core.graph import Operator, Tensor
        >>> def op(name, kind, reads, channels):
        ...     return Operator(name, kind, reads, (Tensor(name, (2, 2, channels)),))
        >>> wide = [op(name, "conv2d", ("x",), 8) for name in "ab"]
        >>> last = op("c", "concat", ("a", "b"), 16), op("d", "conv2d", ("c",), 1)
        >>> found = savings("net", OperatorGraph("net", (Tensor("x", (2, 2, 1)),), (*wide, *last), ("d",)))
        >>> found.plain.peak_bytes, found.partitioned.ordering.peak_bytes, found.partitioned.operators
        (528, 160, ('c',))
    """
    graph = channels_last(graph)
    memory = stage_graph(graph, operators)
    able = rewritable(graph, memory)
    plain = minimum_peak(memory, time_limit_s=TIME_LIMIT_S)
    partitioned = _least(graph, memory, [name for name in able if able[name] == "partitioned"])
    every = _least(graph, memory, list(able))
    if every.ordering.peak_bytes >= partitioned.ordering.peak_bytes:
        every = partitioned
    if not every.operators:  # the same graph again; one search may have ended without a proof
        plain = min(plain, every.ordering, key=lambda order: order.peak_bytes)
    why = "" if every.operators else _why(graph, memory, plain, list(able))
    return Savings(name, plain, partitioned, every, why)


def _least(graph: OperatorGraph, memory: MemoryGraph, candidates: Sequence[str]) -> Rewriting:
    """Return the better of two: with all candidates that pay in parts, and with those that carry no sum in int32."""
    found = rewrite(graph, memory, candidates, time_limit_s=TIME_LIMIT_S)
    free = [name for name in candidates if not _carries(rewritten(graph, memory, [name]))]
    if len(free) == len(candidates):
        return found
    other = rewrite(graph, memory, free, time_limit_s=TIME_LIMIT_S)
    return other if other.ordering.peak_bytes < found.ordering.peak_bytes else found


def _carries(memory: MemoryGraph) -> bool:
    return any(buffer.name.endswith(_CARRIED) for buffer in memory.buffers)


def _why(graph: OperatorGraph, memory: MemoryGraph, plain: Ordering, names: Sequence[str]) -> str:
    if not names:
        return "it has no concatenation of channels, and no sum of equal shapes"
    new = rewritten(graph, memory, names)
    found = minimum_peak(new, time_limit_s=TIME_LIMIT_S)
    steps = footprint(new, found.order)
    peak = steps.index(max(steps))
    alive = [t.name for t in lifetimes(new, found.order)[0] if t.first <= peak <= t.last]
    carried = [name.removesuffix(_CARRIED) for name in alive if name.endswith(_CARRIED)]
    at = new.operators[found.order[peak]]
    bytes_ = f"with all {len(names)} in parts the least peak is {found.peak_bytes:,} bytes, at operator {at}"
    if carried:
        kept = f"partial sums of {carried[0]} are kept in int32, 4 bytes an element"
        return f"{bytes_}, as it is {plain.peak_bytes:,}: {kept}"
    return f"{bytes_}, which needs as much whatever is in parts"


def channels_last(graph: OperatorGraph) -> OperatorGraph:
    """Return the graph with the channels of tensors of four axes in the last one.

    A convolution may make many channels of few, but it enlarges no picture. Where some convolution would do that if
    channels were last, and none if they were first, they are first.
    """
    tensors = graph.tensors
    pairs = [
        (tensors[operator.inputs[0]].shape, operator.outputs[0].shape)
        for operator in graph.operators
        if "conv" in operator.kind and "transpose" not in operator.kind and operator.inputs
    ]
    pairs = [(read, made) for read, made in pairs if len(read) == len(made) == 4]

    def enlarges(axes: slice) -> bool:
        return any(after > before for read, made in pairs for before, after in zip(read[axes], made[axes], strict=True))

    if not enlarges(slice(1, 3)) or enlarges(slice(2, 4)):
        return graph

    def moved(tensor: Tensor) -> Tensor:
        if len(tensor.shape) != 4:
            return tensor
        batch, channels, *picture = tensor.shape
        return replace(tensor, shape=(batch, *picture, channels))

    def of(operator: Operator) -> Operator:
        return replace(operator, outputs=tuple(map(moved, operator.outputs)))

    return replace(graph, inputs=tuple(map(moved, graph.inputs)), operators=tuple(map(of, graph.operators)))
