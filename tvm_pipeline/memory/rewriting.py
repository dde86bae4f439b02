"""Graphs rewritten so that they need less memory and compute the same: concatenations and sums done in parts.

    conv(concat(x, y))       ->  z  = conv_x(x);  z += conv_y(y)            channel-wise, the partial sums in one buffer
    depthwise(concat(x, y))  ->  z[: x] = depthwise_x(x);  z[x :] = depthwise_y(y)    kernel-wise, the parts in place
    concat(x, y), x + y      ->  z[: x] = x, z[x :] = y;  z = x, z += y                  elsewhere

The first two are the identity graph rewriting of SERENITY (Ahn et al., "Ordering Chaos", MLSys 2020, section 3.3). What
looks at each channel by itself (ReLU, pooling, a depthwise convolution) may stand between concatenation and
convolution: it is done in parts, too. In every case several operators write one buffer in any order, and each input
may die as soon as its own part is done. In float32 the parts, run one after the other where the operator stood, take
no more memory than it did; an integer sum is carried in int32, of which that cannot be said: so `rewrite` asks the
exact search. Relay modules are really rewritten by `tvm_pipeline/relay/rewriting.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, TypeAlias, TypeVar

import numpy as np

from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.errors import GraphError
from tvm_pipeline.memory import minimum_peak
from tvm_pipeline.memory.memory_graph import ELEMENTWISE, Buffer, MemoryGraph
from tvm_pipeline.memory.orders import Ordering

_T = TypeVar("_T", bound=Hashable)
How: TypeAlias = Literal["partitioned", "piecewise"]

# Kinds as Keras, TFLite and memory benchmarks name them, in lower case and without underscores.
CONCATENATIONS = {"concat", "concatenate", "concatenation"}
SUMS = {"add", "addn", "average", "mean", "sum"}
CONVOLUTIONS = {"conv2d"}
DEPTHWISE = {"depthwiseconv2d"}
BY_CHANNEL = DEPTHWISE | {
    *("averagepool2d", "averagepooling2d", "avgpool", "avgpool2d", "maxpool", "maxpool2d", "maxpooling2d"),
    *("cropping2d", "pad", "resizebilinear", "slice", "stridedslice", "upsampling2d", "zeropadding2d"),
}
BY_ELEMENT = {kind.replace("_", "") for kind in ELEMENTWISE.split()}


@dataclass(frozen=True, slots=True)
class Rewriting:
    """A memory graph that was rewritten.

    Attributes:
        graph: the new graph; where nothing is gained it is the one given.
        operators: names of the concatenations and sums that are done in parts.
        ordering: the order of the new graph that needs least, as far as the search came.
    """

    graph: MemoryGraph
    operators: tuple[str, ...]
    ordering: Ordering


def rewrite(
    graph: OperatorGraph,
    memory: MemoryGraph,
    candidates: Iterable[str] | None = None,
    *,
    time_limit_s: float | None = 10.0,
) -> Rewriting:
    """Does those concatenations and sums in parts that the least peak asks for, and no others.

    `fewest` says how they are found. Where every rewriting costs no memory (float32) no graph with some of them needs
    less than the answer; where one may (int32 sums) another choice could.

    Args:
        memory: the graph, or a stage of it, as `memory_graph` makes it.
        candidates: names among those of `rewritable`; all of them by default.
        time_limit_s: for each call of the exact search; a peak that is then unproven counts as it is.

    Raises:
        GraphError: `memory` is of another graph, or a candidate is none.
    """
    names = [*rewritable(graph, memory)] if candidates is None else list(dict.fromkeys(candidates))
    found: dict[tuple[str, ...], Rewriting] = {}

    def peak(chosen: Sequence[str]) -> int:
        new = rewritten(graph, memory, chosen)
        found[tuple(chosen)] = Rewriting(new, tuple(chosen), minimum_peak(new, time_limit_s=time_limit_s))
        return found[tuple(chosen)].ordering.peak_bytes

    return found[tuple(fewest(names, peak))]


def fewest(candidates: Sequence[_T], peak: Callable[[Sequence[_T]], int]) -> list[_T]:
    """The candidates that the least peak asks for; none where the peak of all is not below that of none.

    All are taken at once, since one alone often gains nothing while an equal peak stands elsewhere. Then those that can
    be left out without raising the peak again are, by halves: QuickXplain (Junker, AAAI 2004). If no candidate ever
    raises the peak, what is left cannot do without one of its own; else it is a greedy answer.

    Args:
        peak: bytes where some of the candidates, in their order, are rewritten. It is asked of the answer, too.
    """

    @cache
    def asked(some: frozenset[_T]) -> int:
        return peak([each for each in candidates if each in some])

    without, least = asked(frozenset()), asked(frozenset(candidates))
    if least >= without:
        return []

    def needed(maybe: Sequence[_T], others: Sequence[_T]) -> Sequence[_T]:
        """Those of `maybe` without which, beside `others`, the peak is higher."""
        nonlocal least
        below = asked(frozenset(others))
        if below <= least:
            least = below
            return []
        if len(maybe) == 1:
            return maybe
        first, last = maybe[: len(maybe) // 2], maybe[len(maybe) // 2 :]
        first = needed(first, [*others, *last])
        return [*first, *needed(last, [*others, *first])]

    return list(needed(candidates, []))


def rewritable(graph: OperatorGraph, memory: MemoryGraph) -> dict[str, How]:
    """The concatenations and sums that can be done in parts, by name.

    A concatenation is `partitioned` if all that read it can read its inputs instead. It is `piecewise`, as every sum
    is, if its inputs are copied (or added) one by one. Channels are the last axis.
    """
    readers = _Readers(graph, memory)
    inside = set(memory.operators)
    found: dict[str, How] = {}
    for operator in graph.operators:
        if operator.name in inside and _is_concatenation(operator, readers.tensors):
            found[operator.name] = "partitioned" if readers.take_parts(operator.outputs[0].name) else "piecewise"
        elif operator.name in inside and _is_sum(operator, readers.tensors):
            found[operator.name] = "piecewise"
    return found


def rewritten(graph: OperatorGraph, memory: MemoryGraph, chosen: Collection[str]) -> MemoryGraph:
    """`memory` with the operators `chosen` done in parts, whatever that costs.

    The parts of `conv` are called `conv[0]`, `conv[1]` and so on. An integer sum is one of int32, and
    `conv[requantize]` makes the output of it.

    Raises:
        GraphError: `memory` is of another graph, or one of `chosen` is not `rewritable`.
    """
    if unknown := set(memory.operators).difference(operator.name for operator in graph.operators):
        raise GraphError(f"graph {graph.name} has no operator {min(unknown)}; give the memory graph of this one")
    if unknown := set(chosen).difference(rewritable(graph, memory)):
        raise GraphError(
            f"graph {graph.name}: {min(unknown)} cannot be rewritten; `rewritable` lists what can: concatenations of "
            "channels and sums of equal shapes"
        )
    if not chosen:
        return memory
    return _Rewriter(graph, memory).run(set(chosen))


def _kinds(operator: Operator) -> list[str]:
    return [kind.rpartition(".")[2].lower().replace("_", "") for kind in operator.kind.split("+")]


def _is_concatenation(operator: Operator, tensors: Mapping[str, Tensor]) -> bool:
    if not set(_kinds(operator)) <= CONCATENATIONS or len(operator.inputs) < 2 or len(operator.outputs) != 1:
        return False
    made, reads = operator.outputs[0].shape, [tensors[name].shape for name in operator.inputs]
    return all(shape[:-1] == made[:-1] for shape in reads) and sum(shape[-1] for shape in reads) == made[-1] > 0


def _is_sum(operator: Operator, tensors: Mapping[str, Tensor]) -> bool:
    first, *rest = _kinds(operator)
    if first not in SUMS or not set(rest) <= {"add", "relu", "relu6"} or len(operator.outputs) != 1:
        return False
    made = operator.outputs[0]
    same = all((tensors[name].shape, tensors[name].dtype) == (made.shape, made.dtype) for name in operator.inputs)
    return same and len(operator.inputs) > 1


def _is_convolution(operator: Operator, tensors: Mapping[str, Tensor]) -> bool:
    """Whether each output element is a sum over all channels of what it reads, and then maybe an elementwise function.

    A convolution in groups, which some sources call by the same name, has fewer multiplications than that.
    """
    first, *rest = _kinds(operator)
    least = math.prod(operator.outputs[0].shape) * tensors[operator.inputs[0]].shape[-1]
    return first in CONVOLUTIONS and set(rest) <= BY_ELEMENT and not 0 < operator.macs < least


def _is_by_channel(operator: Operator, tensors: Mapping[str, Tensor]) -> bool:
    kinds, made, read = set(_kinds(operator)), operator.outputs[0].shape, tensors[operator.inputs[0]].shape
    if kinds <= BY_ELEMENT:
        return made == read
    multiplied = made[-1] % read[-1] == 0 if kinds & DEPTHWISE else made[-1] == read[-1]
    return kinds <= BY_ELEMENT | BY_CHANNEL and len(made) == len(read) and multiplied


class _Readers:
    """Who reads which tensor, and whether it could read the tensor in parts."""

    def __init__(self, graph: OperatorGraph, memory: MemoryGraph) -> None:
        self.tensors = graph.tensors
        inside = set(memory.operators)
        self.leaving = set(graph.outputs)
        self.of: dict[str, list[Operator]] = {}
        for operator in graph.operators:
            for name in dict.fromkeys(operator.inputs):
                self.of.setdefault(name, []).append(operator)
                if operator.name not in inside:
                    self.leaving.add(name)

    def take_parts(self, tensor: str) -> bool:
        """Whether nobody wants the tensor whole."""
        readers = self.of.get(tensor, [])
        return bool(readers) and tensor not in self.leaving and all(map(self._takes_parts, readers))

    def _takes_parts(self, operator: Operator) -> bool:
        if _is_concatenation(operator, self.tensors):
            return True
        if len(operator.inputs) != 1 or len(operator.outputs) != 1:
            return False
        return _is_convolution(operator, self.tensors) or _is_by_channel(operator, self.tensors)


@dataclass(slots=True)
class _Made:
    """A buffer in the making."""

    name: str
    bytes: int
    pinned: bool
    producers: list[int] = field(default_factory=list)
    consumers: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Part:
    """A buffer that holds so many of the channels of a tensor."""

    buffer: _Made
    channels: int


class _Rewriter:
    """Writes a memory graph down again, operator by operator, with some of them in parts."""

    def __init__(self, graph: OperatorGraph, memory: MemoryGraph) -> None:
        self.graph, self.memory, self.readers = graph, memory, _Readers(graph, memory)
        self.old = {buffer.name: buffer for buffer in memory.buffers}
        self.operators: list[str] = []
        self.workspace: list[int] = []
        self.overwrites: list[list[_Made]] = []
        self.buffers: list[_Made] = []
        self.holds: dict[str, list[_Part]] = {}

    def run(self, chosen: set[str]) -> MemoryGraph:
        for buffer in self.memory.buffers:
            if not buffer.producers:
                self.whole(self.readers.tensors[buffer.name])
        by_name = {operator.name: operator for operator in self.graph.operators}
        for index, name in enumerate(self.memory.operators):
            self.operator(index, by_name[name], name in chosen)
        position = {id(made): place for place, made in enumerate(self.buffers)}
        buffers = (Buffer(m.name, m.bytes, tuple(m.producers), tuple(m.consumers), m.pinned) for m in self.buffers)
        workspace = tuple(self.workspace) if self.memory.workspace_bytes else ()
        marks = tuple(tuple(position[id(made)] for made in marked) for marked in self.overwrites)
        in_place = marks if self.memory.in_place else ()
        return MemoryGraph(self.memory.name, tuple(self.operators), tuple(buffers), workspace, in_place)

    def operator(self, index: int, operator: Operator, chosen: bool) -> None:
        reads = [part for name in operator.inputs for part in self.holds[name]]
        if not (chosen or (len(operator.inputs) == 1 and len(reads) > 1)):
            made = [self.whole(tensor) for tensor in operator.outputs]
            marked = {self.memory.buffers[b].name for b in self.memory.in_place[index]} if self.memory.in_place else ()
            overwrites = [part.buffer for name in marked for part in self.holds[name]]
            self.add(index, "", [part.buffer for part in reads], made, overwrites)
            return
        tensor = operator.outputs[0]
        apart = self.readers.take_parts(tensor.name)
        adds = _is_sum if chosen else _is_convolution
        if chosen and apart and _is_concatenation(operator, self.readers.tensors):
            self.holds[tensor.name] = reads  # whoever reads it reads them
        elif adds(operator, self.readers.tensors):
            self.summed(index, reads, tensor)
        elif apart:
            self.by_channel(index, reads, tensor)
        else:
            self.in_parts(index, reads, self.whole(tensor))

    def summed(self, index: int, reads: list[_Part], tensor: Tensor) -> None:
        carried = np.dtype(tensor.dtype).kind in "iu" and np.dtype(tensor.dtype).itemsize < 4
        total = self.buffer(f"{tensor.name}[sum]", 4 * math.prod(tensor.shape)) if carried else self.whole(tensor)
        self.in_parts(index, reads, total)
        if carried:
            self.add(index, "[requantize]", [total], [self.whole(tensor)], [total])

    def in_parts(self, index: int, reads: list[_Part], made: _Made) -> None:
        for place, part in enumerate(reads):
            self.add(index, f"[{place}]", [part.buffer], [made], [part.buffer])

    def by_channel(self, index: int, reads: list[_Part], tensor: Tensor) -> None:
        """One buffer for each part."""
        channels = sum(part.channels for part in reads)
        size = self.old[tensor.name].bytes // channels
        parts = []
        for place, part in enumerate(reads):
            made = self.buffer(f"{tensor.name}[{place}]", size * part.channels)
            self.add(index, f"[{place}]", [part.buffer], [made], [part.buffer])
            parts.append(_Part(made, part.channels * tensor.shape[-1] // channels))
        self.holds[tensor.name] = parts

    def whole(self, tensor: Tensor) -> _Made:
        made = self.buffer(tensor.name, self.old[tensor.name].bytes, self.old[tensor.name].pinned)
        self.holds[tensor.name] = [_Part(made, tensor.shape[-1] if tensor.shape else 1)]
        return made

    def buffer(self, name: str, size: int, pinned: bool = False) -> _Made:
        self.buffers.append(_Made(name, size, pinned))
        return self.buffers[-1]

    def add(
        self, index: int, suffix: str, reads: list[_Made], writes: list[_Made], overwrites: Iterable[_Made]
    ) -> None:
        """An operator in the place of operator `index`; it overwrites where that one may."""
        here = len(self.operators)
        self.operators.append(self.memory.operators[index] + suffix)
        self.workspace.append(self.memory.workspace_bytes[index] if self.memory.workspace_bytes else 0)
        self.overwrites.append(list(overwrites) if self.memory.in_place and self.memory.in_place[index] else [])
        for made in {id(made): made for made in reads}.values():
            made.consumers.append(here)
        for made in writes:
            made.producers.append(here)
