"""A planned slice computes what its operators do, from an arena in which nothing that is still read is overwritten.

Libraries are made up at random, with worse glue than TVM's. A plan is carried out on symbols: the arena and the outputs
are blocks, and each block holds the symbol of what was written there last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.stages import random_stages
from tests.tvm.test_numbering import library, random_fusion, random_network
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.errors import PlanError
from tvm_pipeline_tvm.alignment import align
from tvm_pipeline_tvm.kernels import Entry, Kernel, Output, Source, entry_bytes, entry_shape
from tvm_pipeline_tvm.slice_plan import SlicePlan, plan_slice

INPUTS = tuple(Tensor(f"x{index}", (1, 4, 4, 4)) for index in range(2))
BLOCK = 64
Symbol = tuple[Any, ...]  # ("x0",), or (operator, field, symbols of its arguments)


@dataclass
class Kernels:
    """A library of no IR. `own` are the operators of each kernel, by what they are called in all libraries."""

    kernels: list[Kernel]
    own: list[list[int]]
    heads: list[Entry]
    views: set[int]
    replaces: dict[int, tuple[Entry, ...]]
    target: str = "any"
    inputs: tuple[Tensor, ...] = INPUTS

    def is_reshape(self, kernel: int) -> bool:
        return kernel in self.views

    def overwrites(self, kernel: int) -> tuple[Entry, ...]:
        return self.replaces.get(kernel, ())

    def made(self, kernel: int, reads: Sequence[Symbol]) -> list[Symbol]:
        """Return what a kernel makes of what it reads."""
        made: list[Symbol] = []

        def symbol(source: Source) -> Symbol:
            if source.operator is not None:
                return (source.index, made[source.operator])
            return ("weight",) if source.index < 0 else reads[source.index]

        for name, arguments in zip(self.own[kernel], self.kernels[kernel].arguments, strict=True):
            made.append((name, *map(symbol, arguments)))
        return [symbol(output.source) for output in self.kernels[kernel].outputs]

    def whole(self, frame: Sequence[Symbol]) -> list[Symbol]:
        """Return the heads."""
        known: dict[Entry, Symbol] = {(-1, index): symbol for index, symbol in enumerate(frame)}
        for index, kernel in enumerate(self.kernels):
            made = self.made(index, [known[entry] for entry in kernel.reads])
            known.update({(index, field): symbol for field, symbol in enumerate(made)})
        return [known[head] for head in self.heads]


def random_library(draw: Random) -> Kernels:
    """Return a library with glue of several inputs, and with views of every third tensor that is read.

    Some kernels are concatenations, and some may overwrite what they read.
    """
    network = random_network(draw)
    given_, own_, heads = library(network, random_fusion(network, draw), draw, tangled=True)
    one = Kernels([], [], [], set(), {})
    index_of: dict[int, int] = {-1: -1}

    def shown(entry: Entry) -> Entry:
        known = index_of[entry[0]], entry[1]
        if draw.random() > 0.3:
            return known
        one.views.add(len(one.kernels))
        shape = (entry_bytes(one, known) // 64, 16)
        one.kernels.append(Kernel((), (), (known,), (Output(shape, "float32", "", Source(None, 0)),), 0, 0))
        one.own.append([])
        return len(one.kernels) - 1, 0

    for index, kernel in enumerate(given_):
        reads = tuple(map(shown, kernel.reads))
        index_of[index] = len(one.kernels)
        one.kernels.append(_concatenation(one, replace(kernel, reads=reads), draw))
        one.own.append(own_[index])
        if len(kernel.outputs) == 1 and one.kernels[-1].operators and draw.random() < 0.6:
            one.replaces[len(one.kernels) - 1] = tuple(draw.sample(reads, draw.randint(0, len(reads))))
    one.heads += map(shown, heads)
    return one


def _concatenation(one: Kernels, kernel: Kernel, draw: Random) -> Kernel:
    """Return a kernel, or a concatenation in its place; what it gives follows from the shapes of what it reads."""
    plain = len(kernel.operators) == 1 == len(kernel.outputs) and kernel.reads and draw.random() < 0.6
    if kernel.operators and plain and all(source.index >= 0 for source in kernel.arguments[0]):
        shapes = [entry_shape(one, entry) for entry in kernel.reads]
        if {len(shape) for shape in shapes} == {4}:
            shape = (1, sum(shape[1] for shape in shapes), 4, 4)
            made = replace(kernel.outputs[0], shape=shape)
            return replace(kernel, operators=(("concatenate", 16 * shape[1]),), outputs=(made,))
    if not kernel.operators:  # glue shows one of what it reads
        shown = kernel.outputs[0]
        return replace(kernel, outputs=(replace(shown, shape=entry_shape(one, kernel.reads[shown.source.index])),))
    return kernel


def content(of: Kernels, entry: Entry, symbol: Symbol) -> list[Any]:
    """Return what each block of an entry holds: the blocks of its parts for a concatenation, else its own, numbered."""
    kernel = of.kernels[entry[0]] if entry[0] >= 0 else None
    if kernel is not None and kernel.is_glue:
        return content(of, kernel.reads[kernel.outputs[entry[1]].source.index], symbol)
    if kernel is not None and [name for name, _ in kernel.operators] == ["concatenate"]:
        parts = zip(kernel.reads, symbol[1][1:], strict=True)
        return [block for read, of_part in parts for block in content(of, read, of_part)]
    return [(symbol, number) for number in range(entry_bytes(of, entry) // BLOCK)]


def carried_out(plan: SlicePlan, of: Kernels, frame: Sequence[Symbol]) -> list[Symbol]:
    """Return the outputs of a slice, in an arena that tells where something is read that was overwritten."""
    arena: list[Any] = [None] * (plan.activation_bytes // BLOCK)
    results: list[list[Any]] = [[None] * (entry_bytes(of, entry) // BLOCK) for entry in plan.exports]
    held: dict[Entry, Symbol] = {}

    def blocks(entry: Entry) -> tuple[list[Any], slice]:
        below = plan.views.get(entry, entry)
        if below in plan.written:
            where, begin = results[plan.written[below]], 0
        elif entry in plan.within:
            output, begin = plan.within[entry]
            where = results[output]
        else:
            where, begin = arena, plan.offsets[entry]
        size = entry_bytes(of, entry)
        assert begin % BLOCK == 0
        assert 0 <= begin <= begin + size <= len(where) * BLOCK
        return where, slice(begin // BLOCK, (begin + size) // BLOCK)

    def read(entry: Entry) -> Symbol:
        if entry in plan.read_from:
            return frame[plan.read_from[entry]]
        where, at = blocks(entry)
        symbol = held[plan.views.get(entry, entry)]
        assert where[at] == content(of, entry, symbol), f"{entry} was overwritten"
        return symbol

    for call in plan.calls:
        kernel = of.kernels[call.kernel]
        is_joined = call.is_view and not of.is_reshape(call.kernel)
        assert call.is_view or not of.is_reshape(call.kernel)
        assert not is_joined or kernel.operators[0][0] == "concatenate"
        if of.is_reshape(call.kernel):
            continue
        for field, symbol in enumerate(of.made(call.kernel, [read(entry) for entry in kernel.reads])):
            entry = call.kernel, field
            held[entry] = symbol
            if not call.is_view:
                where, at = blocks(entry)
                where[at] = content(of, entry, symbol)
        for entry in set(kernel.reads).difference(of.overwrites(call.kernel)):  # it read them while it wrote
            read(entry)
    for index, entry in plan.copied.items():
        where, at = blocks(entry)
        results[index] = where[at]
    symbols = [held[entry] for entry in plan.exports]
    for entry, symbol, result in zip(plan.exports, symbols, results, strict=True):
        assert result == content(of, entry, symbol)
    assert {**plan.written, **{entry: index for index, entry in plan.copied.items()}} == {
        entry: index for index, entry in enumerate(plan.exports)
    }
    return symbols


@examples(150)
@given(st.randoms(use_true_random=False))
def test_slices_compute_what_the_whole_does(draw: Random) -> None:
    one = random_library(draw)
    graph, [alignment] = align("net", INPUTS, [one.kernels], [one.heads])
    frame: dict[str, Symbol] = {tensor.name: (tensor.name,) for tensor in INPUTS}
    expected = one.whole(list(frame.values()))
    for memory_ordered in (False, *[True] * (draw.random() < 0.2)):  # that search takes a while
        known = dict(frame)
        for stage in random_stages(graph, draw, draw.randint(1, min(4, len(graph)))):
            plan = plan_slice(one, alignment, graph, stage, memory_ordered, into_outputs=draw.random() < 0.8)
            assert plan.unordered_bytes >= plan.activation_bytes
            assert {call.operator for call in plan.calls} == set(stage)
            assert len(plan.imports) == len(plan.inputs)
            made = carried_out(plan, one, [known[port.name] for port in plan.inputs])
            known.update({port.name: symbol for port, symbol in zip(plan.outputs, made, strict=True)})
        assert [known[name] for name in graph.outputs] == expected


def test_an_input_has_the_layout_of_the_view_that_is_read() -> None:
    """What is blocked for 8 channels of one pixel each is plain, byte for byte, under another shape."""
    blocked = Output((1, 2, 1, 1, 8), "float32", "NCHW8c", Source(0, 0))
    flat = Output((1, 16), "float32", "", Source(None, 0))
    kernels = [
        Kernel((("mean", 16),), ((Source(None, 0),),), ((-1, 0),), (blocked,), 0, 0),
        Kernel((), (), ((0, 0),), (flat,), 0, 0),
        Kernel((("matmul", 10),), ((Source(None, 0),),), ((1, 0),), (replace(flat, source=Source(0, 0)),), 0, 0),
    ]
    one = Kernels(kernels, [[0], [], [1]], [(2, 0)], {1}, {})
    graph, [alignment] = align("net", INPUTS, [kernels], [one.heads])
    first, second = graph.operator_names
    [out] = plan_slice(one, alignment, graph, [first]).outputs
    [into] = plan_slice(one, alignment, graph, [second]).inputs
    assert (out.name, out.shape, out.layout) == (into.name, (1, 2, 1, 1, 8), "NCHW8c")
    assert (into.shape, into.layout) == ((1, 16), "")


def test_a_path_that_leaves_the_slice_and_comes_back_is_refused() -> None:
    draw = Random(0)
    graph = None
    while graph is None or len(graph) < 3 or not any(2 in after for after in graph.edges.after):
        one = random_library(draw)
        graph, [alignment] = align("net", INPUTS, [one.kernels], [one.heads])
        edges = graph.edges
        chains = [(a, b, c) for a in range(len(graph)) for b in edges.after[a] for c in edges.after[b]]
        if not chains:
            graph = None
    first, _, last = (graph.operators[index].name for index in chains[0])
    with pytest.raises(PlanError):
        plan_slice(one, alignment, graph, [first, last])
