"""Rewrite graphs so that they need less memory and compute the same: concatenations and sums are done in parts.

    conv(concat(x, y))       ->  z  = conv_x(x);  z += conv_y(y)            channel-wise, the partial sums in one buffer
    depthwise(concat(x, y))  ->  z[: x] = depthwise_x(x);  z[x :] = depthwise_y(y)    kernel-wise, the parts in place
    concat(x, y), x + y      ->  z[: x] = x, z[x :] = y;  z = x, z += y                  elsewhere

The first two are the identity graph rewriting of SERENITY (Ahn et al., "Ordering Chaos", MLSys 2020, section 3.3).
Operators that compute each channel by itself (ReLU, pooling, a depthwise convolution) may stand between concatenation
and convolution; they are done in parts, too. In every case several operators write one buffer in any order, and each
input may die as soon as its own part is done. In float32, the parts take no more memory than the operator if they run
one after the other in its position. An integer sum is carried in int32 and may take more, so `rewrite` asks the exact
search. `tvm_pipeline_tvm/concatenations.py` does the same to modules of Relay and Relax.
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
from tvm_pipeline.memory.concatenation import CONCATENATIONS
from tvm_pipeline.memory.memory_graph import ELEMENTWISE, Buffer, MemoryGraph
from tvm_pipeline.memory.orders import Ordering

_T = TypeVar("_T", bound=Hashable)
How: TypeAlias = Literal["partitioned", "piecewise"]

# Kinds as Keras, TFLite and memory benchmarks name them, in lower case and without underscores.
SUMS = {"add", "addn", "average", "mean", "sum"}
CONVOLUTIONS = {"conv2d"}
DEPTHWISE = {"depthwiseconv2d"}
BY_CHANNEL = DEPTHWISE | {
    *("averagepool2d", "averagepooling2d", "avgpool", "avgpool2d", "maxpool", "maxpool2d", "maxpooling2d"),
    *("cropping2d", "pad", "resizebilinear", "slice", "stridedslice", "upsampling2d", "zeropadding2d"),
}
BY_ELEMENT = {kind.replace("_", "") for kind in ELEMENTWISE.split()}
BY_ELEMENT |= {"fixedpointmultiply", "floor", "rightshift", "round", "subtract"}  # as Relay requantizes


@dataclass(frozen=True, slots=True)
class Rewriting:
    """A memory graph that was rewritten.

    Attributes:
        graph: the new graph; the given one if nothing is gained.
        operators: names of the concatenations and sums that are done in parts.
        ordering: the order of the new graph that needs least, or the best one that the search found.
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
    """Do those concatenations and sums in parts that the least peak requires, and no others.

    `fewest` says how they are found. If no rewriting costs memory (float32), no choice of them needs less than the
    answer. If one may cost memory (int32 sums), another choice could need less.

    Args:
        memory: the graph, or a stage of it, as `memory_graph` makes it.
        candidates: names among those of `rewritable`; all of them by default.
        time_limit_s: for each call of the exact search; a peak that is then unproven is used as it is.

    Raises:
        GraphError: `memory` is of another graph, or a candidate is not `rewritable`.
    """
    names = [*rewritable(graph, memory)] if candidates is None else list(dict.fromkeys(candidates))
    found: dict[tuple[str, ...], Rewriting] = {}

    def peak(chosen: Sequence[str]) -> int:
        new = rewritten(graph, memory, chosen)
        found[tuple(chosen)] = Rewriting(new, tuple(chosen), minimum_peak(new, time_limit_s=time_limit_s))
        return found[tuple(chosen)].ordering.peak_bytes

    return found[tuple(fewest(names, peak))]


def fewest(candidates: Sequence[_T], peak: Callable[[Sequence[_T]], int]) -> list[_T]:
    """Return the candidates that the least peak requires; none if rewriting all of them does not lower the peak.

    The search starts from all candidates, since a single one often gains nothing while an equal peak stands elsewhere.
    Then it leaves out, by halves, candidates without which the peak stays the same: QuickXplain (Junker, AAAI 2004). If
    no candidate ever raises the peak, every candidate of the answer is needed; else the answer is a greedy one.

    Args:
        peak: returns the bytes if some of the candidates, in their order, are rewritten. It is called for the answer,
            too.
    """

    @cache
    def peak_with(some: frozenset[_T]) -> int:
        return peak([candidate for candidate in candidates if candidate in some])

    without, least = peak_with(frozenset()), peak_with(frozenset(candidates))
    if least >= without:
        return []

    def needed(maybe: Sequence[_T], others: Sequence[_T]) -> Sequence[_T]:
        """Return those of `maybe` that are needed in addition to `others` for the least peak."""
        nonlocal least
        below = peak_with(frozenset(others))
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
    """Return the concatenations and sums that can be done in parts, by name.

    A concatenation is `partitioned` if all its readers can read its inputs instead. Else it is `piecewise`, like every
    sum: its inputs are copied (or added) one by one. Channels are the last axis.
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


def rewritten(
    graph: OperatorGraph, memory: MemoryGraph, chosen: Collection[str], *, narrow_sums: bool = False
) -> MemoryGraph:
    """Return `memory` with the operators `chosen` done in parts, even if that costs memory.

    The parts of `conv` are called `conv[0]`, `conv[1]` and so on. An integer sum is computed in int32, and
    `conv[requantize]` makes the output of it.

    Args:
        narrow_sums: count partial sums in the element type of the output, as SERENITY does for its networks of 8 bits.
            It is a count alone: a runtime whose sums have 8 bits does not compute what the convolution computes.

    Raises:
        GraphError: `memory` is of another graph, or one of `chosen` is not `rewritable`.
    """
    if unknown := set(memory.operators).difference(graph.operator_names):
        raise GraphError(f"graph {graph.name} has no operator {min(unknown)}; give the memory graph of this one")
    if unknown := set(chosen).difference(rewritable(graph, memory)):
        raise GraphError(
            f"graph {graph.name}: {min(unknown)} cannot be rewritten; `rewritable` lists what can: concatenations of "
            "channels and sums of equal shapes"
        )
    if not chosen:
        return memory
    return _Rewriter(graph, memory, narrow_sums).run(set(chosen))


def _kinds(operator: Operator) -> list[str]:
    return [kind.rpartition(".")[2].lower().replace("_", "") for kind in operator.kind.split("+")]


def _is_concatenation(operator: Operator, tensors: Mapping[str, Tensor]) -> bool:
    first, *rest = _kinds(operator)
    if first not in CONCATENATIONS or not set(rest) <= CONCATENATIONS | BY_ELEMENT:
        return False
    if len(operator.inputs) < 2 or len(operator.outputs) != 1:
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
    """Return whether each output element is a sum over all input channels, at most with elementwise functions around.

    A convolution in groups, which has the same name in some sources, has other multiplications than that.
    """
    kinds = _kinds(operator)
    others = [kind for kind in kinds if kind not in CONVOLUTIONS]
    if len(others) != len(kinds) - 1 or not set(others) <= BY_ELEMENT:
        return False
    channels, elements = tensors[operator.inputs[0]].shape[-1], math.prod(operator.outputs[0].shape)
    # Some sources count an elementwise function as one multiplication for each element.
    each = [operator.macs - counted * elements for counted in (0, len(others))]
    return not operator.macs or any(macs > 0 and macs % (elements * channels) == 0 for macs in each)


def _is_by_channel(operator: Operator, tensors: Mapping[str, Tensor]) -> bool:
    kinds, made, read = set(_kinds(operator)), operator.outputs[0].shape, tensors[operator.inputs[0]].shape
    if kinds <= BY_ELEMENT:
        return made == read
    multiplied = made[-1] % read[-1] == 0 if kinds & DEPTHWISE else made[-1] == read[-1]
    return kinds <= BY_ELEMENT | BY_CHANNEL and len(made) == len(read) and multiplied


class _Readers:
    """The readers of each tensor, and whether they could read it in parts."""

    def __init__(self, graph: OperatorGraph, memory: MemoryGraph) -> None:
        self.graph, self.tensors = graph, graph.tensors
        self.outputs, self.inside = set(graph.outputs), set(memory.operators)

    def take_parts(self, tensor: str) -> bool:
        """Return whether the tensor has readers, all in the memory graph, that can read it in parts."""
        if tensor in self.outputs:
            return False
        readers = [self.graph.operators[index] for index in self.graph.edges.readers[tensor]]
        return bool(readers) and all(part.name in self.inside and self._takes_parts(part) for part in readers)

    def _takes_parts(self, operator: Operator) -> bool:
        if _is_concatenation(operator, self.tensors):
            return True
        if len(operator.inputs) != 1 or len(operator.outputs) != 1:
            return False
        return _is_convolution(operator, self.tensors) or _is_by_channel(operator, self.tensors)


@dataclass(slots=True)
class _Draft:
    """A buffer in the making."""

    name: str
    bytes: int
    pinned: bool
    producers: list[int] = field(default_factory=list)
    consumers: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Channels:
    """A buffer with some of the channels of a tensor."""

    buffer: _Draft
    channels: int


class _Rewriter:
    """A memory graph that is built operator by operator, with some operators in parts."""

    def __init__(self, graph: OperatorGraph, memory: MemoryGraph, narrow_sums: bool) -> None:
        self.graph, self.memory, self.readers = graph, memory, _Readers(graph, memory)
        self.narrow_sums = narrow_sums
        self.old = {buffer.name: buffer for buffer in memory.buffers}
        self.operators: list[str] = []
        self.workspace: list[int] = []
        self.overwrites: list[list[_Draft]] = []
        self.buffers: list[_Draft] = []
        self.parts: dict[str, list[_Channels]] = {}  # for each tensor the buffers that it lies in

    def run(self, chosen: set[str]) -> MemoryGraph:
        for buffer in self.memory.buffers:
            if not buffer.producers:
                self.whole(self.readers.tensors[buffer.name])
        by_name = {operator.name: operator for operator in self.graph.operators}
        for index, name in enumerate(self.memory.operators):
            self.operator(index, by_name[name], name in chosen)
        position = {id(made): index for index, made in enumerate(self.buffers)}
        buffers = (Buffer(m.name, m.bytes, tuple(m.producers), tuple(m.consumers), m.pinned) for m in self.buffers)
        workspace = tuple(self.workspace) if self.memory.workspace_bytes else ()
        marks = tuple(tuple(position[id(made)] for made in marked) for marked in self.overwrites)
        in_place = marks if self.memory.in_place else ()
        return MemoryGraph(self.memory.name, tuple(self.operators), tuple(buffers), workspace, in_place)

    def operator(self, index: int, operator: Operator, chosen: bool) -> None:
        reads = [part for name in operator.inputs for part in self.parts[name]]
        if not (chosen or (len(operator.inputs) == 1 and len(reads) > 1)):
            made = [self.whole(tensor) for tensor in operator.outputs]
            marked = {self.memory.buffers[b].name for b in self.memory.in_place[index]} if self.memory.in_place else ()
            overwrites = [part.buffer for name in marked for part in self.parts[name]]
            self.add(index, "", [part.buffer for part in reads], made, overwrites)
            return
        tensor = operator.outputs[0]
        apart = self.readers.take_parts(tensor.name)
        adds = _is_sum if chosen else _is_convolution
        if chosen and apart and set(_kinds(operator)) <= CONCATENATIONS:
            self.parts[tensor.name] = reads  # its readers read the parts
        elif adds(operator, self.readers.tensors):
            self.summed(index, reads, tensor)
        elif apart:
            self.by_channel(index, reads, tensor)
        else:
            self.in_parts(index, reads, self.whole(tensor))

    def summed(self, index: int, reads: list[_Channels], tensor: Tensor) -> None:
        dtype = np.dtype(tensor.dtype)
        carried = dtype.kind in "iu" and dtype.itemsize < 4 and not self.narrow_sums
        total = self.buffer(f"{tensor.name}[sum]", 4 * math.prod(tensor.shape)) if carried else self.whole(tensor)
        self.in_parts(index, reads, total)
        if carried:
            self.add(index, "[requantize]", [total], [self.whole(tensor)], [total])

    def in_parts(self, index: int, reads: list[_Channels], made: _Draft) -> None:
        for number, part in enumerate(reads):
            self.add(index, f"[{number}]", [part.buffer], [made], [part.buffer])

    def by_channel(self, index: int, reads: list[_Channels], tensor: Tensor) -> None:
        """Add one operator and one buffer for each part."""
        channels = sum(part.channels for part in reads)
        size = self.old[tensor.name].bytes // channels
        parts = []
        for number, part in enumerate(reads):
            made = self.buffer(f"{tensor.name}[{number}]", size * part.channels)
            self.add(index, f"[{number}]", [part.buffer], [made], [part.buffer])
            parts.append(_Channels(made, part.channels * tensor.shape[-1] // channels))
        self.parts[tensor.name] = parts

    def whole(self, tensor: Tensor) -> _Draft:
        made = self.buffer(tensor.name, self.old[tensor.name].bytes, self.old[tensor.name].pinned)
        self.parts[tensor.name] = [_Channels(made, tensor.shape[-1] if tensor.shape else 1)]
        return made

    def buffer(self, name: str, size: int, pinned: bool = False) -> _Draft:
        self.buffers.append(_Draft(name, size, pinned))
        return self.buffers[-1]

    def add(
        self, index: int, suffix: str, reads: list[_Draft], writes: list[_Draft], overwrites: Iterable[_Draft]
    ) -> None:
        """Add an operator in the position of operator `index`; it may overwrite buffers only if that one may."""
        here = len(self.operators)
        self.operators.append(self.memory.operators[index] + suffix)
        self.workspace.append(self.memory.workspace_bytes[index] if self.memory.workspace_bytes else 0)
        self.overwrites.append(list(overwrites) if self.memory.in_place and self.memory.in_place[index] else [])
        for made in {id(made): made for made in reads}.values():
            made.consumers.append(here)
        for made in writes:
            made.producers.append(here)
