"""Which kernels a slice of a compiled library runs, and where each tensor lies: compile once, cut anywhere.

A slice is the part of a library that computes some operators. Its inputs are the tensors that it reads from outside,
its outputs the tensors that are read outside. Nothing is compiled and no parameter is copied:

    whole:  data -> conv_0 -> pool_1 -> conv_2 -> add_3(conv_2, pool_1) -> softmax_4
    slice {conv_2, add_3}:  pool_1 -> conv_2 -> add_3(conv_2, pool_1)

Tensors of a slice share bytes where `shared_bytes.py` finds that they can.

`plan_slice` is all of it, and no IR is known here: each makes of the plan what its executor takes, as
`relay/slicing.py` makes graph JSON. Next: `compiled_model.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from tvm_pipeline.backends.contract import Port
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.partition import check_stage
from tvm_pipeline.errors import PlanError
from tvm_pipeline.memory.arena import ALIGNMENT, Lifetime, exact_layout, most_alive, plan_arena
from tvm_pipeline.memory.rewriting import fewest
from tvm_pipeline_tvm.alignment import Alignment
from tvm_pipeline_tvm.kernel_order import TIME_LIMIT_S, kernel_order
from tvm_pipeline_tvm.kernels import Entry, KernelLibrary, entry_bytes, entry_dtype, entry_shape, origin
from tvm_pipeline_tvm.shared_bytes import SharedBytes, parts_of

Shape = tuple[int, ...]
LayOut = Callable[[Sequence[Lifetime]], tuple[Sequence[int], int]]


class Call(NamedTuple):
    """A kernel of a slice.

    Attributes:
        operator: whose time it counts to; glue counts to the operator behind it in the library, or to the last.
        is_view: nothing runs, since its output is its input under another shape, or its inputs already lie there.
    """

    kernel: int
    operator: str
    is_view: bool


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """A slice as data. An entry is an output of one of its kernels, or a tensor that it reads from outside.

    Attributes:
        inputs, outputs: the tensors that cross, in the order in which a run takes them.
        imports: for each input the entry of the library that it is, and the shape under which it is read.
        read_from: for each entry that the slice reads from outside the index of the input.
        exports: for each output the entry whose bytes it is; its port may show them under another shape.
        calls: the kernels in running order.
        views: for each entry that a view shows the entry whose bytes these are.
        offsets: position in the arena of each entry that lies there, views and parts of other entries included.
        written: the output that an entry is written into at once. Such an entry is not in the arena.
        within: for each other entry that lies in an output, the output and the byte there at which it begins.
        copied: outputs (by index) that must be copied out of an entry in the arena, since a view shows them as well.
        concatenations: how many are written in place, and how many copy.
        activation_bytes, unordered_bytes: size of the arena, and what it would be in the library's order.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    imports: tuple[tuple[Entry, Shape], ...]
    read_from: Mapping[Entry, int]
    exports: tuple[Entry, ...]
    calls: tuple[Call, ...]
    views: Mapping[Entry, Entry]
    offsets: Mapping[Entry, int]
    written: Mapping[Entry, int]
    within: Mapping[Entry, tuple[int, int]]
    copied: Mapping[int, Entry]
    concatenations: tuple[int, int]
    activation_bytes: int
    unordered_bytes: int


def plan_slice(
    library: KernelLibrary,
    alignment: Alignment,
    graph: OperatorGraph,
    operators: Sequence[str],
    memory_ordered: bool = False,
    alignment_bytes: int = ALIGNMENT,
    *,
    share: bool = True,
    into_outputs: bool = True,
) -> SlicePlan:
    """Plan the slice of a library that computes `operators`.

    Concatenations are written in place where their parts can lie side by side; with `memory_ordered`, only if the arena
    is not larger so.

    Args:
        alignment: of this library, to `graph`.
        memory_ordered: the kernels run in the order that needs the least memory, and their results are packed as
            closely as possible, if that makes the arena smaller; else they run in the library's order and are laid out
            greedily.
        alignment_bytes: activations begin at multiples of it.
        share: without it each tensor has bytes of its own, as a runtime of TVM gives them.
        into_outputs: whether other tensors may lie in the outputs, too.

    Raises:
        PlanError: an operator is not in the graph, a path leaves the slice and comes back to it, or a tensor that
            crosses has no name.
    """
    check_stage(graph, operators)
    chosen = _Selection(library, alignment, operators)
    exports = _Exports(chosen, graph, set(operators))
    joins = [kernel for kernel in chosen.made if parts_of(library, kernel)] if share else []
    alone = () if into_outputs else exports.written

    def planned(
        joins: Sequence[int], lay_out: LayOut, order: Sequence[int] | None = None, overwrite: bool = share
    ) -> SlicePlan:
        shared = _joined(chosen, exports, joins, alone, alignment_bytes)
        if order is None:
            order = _least_memory_order(chosen, exports, shared)
        return _planned(chosen, exports, operators, shared, order, lay_out, overwrite=overwrite)

    plain = planned(joins, partial(plan_arena, alignment=alignment_bytes), sorted(chosen.kernels))
    if not memory_ordered:
        return plain
    alive = partial(_most_alive, alignment=alignment_bytes)
    exact = partial(_least_arena, alignment=alignment_bytes)
    needed = fewest(joins, lambda some: planned(some, alive).activation_bytes)
    # Tensors at fixed distances leave gaps: the arena may be smaller where fewer of them are.
    ways = dict.fromkeys(((tuple(joins), share), (tuple(needed), share), ((), share), ((), False)))
    best = min((plain, *(planned(way, exact, overwrite=overwrite) for way, overwrite in ways)), key=_arena_bytes)
    return replace(best, unordered_bytes=plain.activation_bytes)


def _arena_bytes(plan: SlicePlan) -> int:
    return plan.activation_bytes


class _Selection:
    """Collects the kernels of a slice: those of its operators, and the glue that they and the outputs need."""

    def __init__(self, library: KernelLibrary, alignment: Alignment, operators: Sequence[str]) -> None:
        self.library, self.alignment = library, alignment
        self.kernels = {k for name in operators for k in alignment.kernels[name]}
        self.own = frozenset(self.kernels)
        self.imports: dict[tuple[Entry, Shape, str], int] = {}
        self.read_from: dict[Entry, int] = {}
        for kernel in sorted(self.own):
            for entry in library.kernels[kernel].reads:
                self.need(entry)

    def need(self, entry: Entry) -> None:
        """Take in the glue behind `entry`, or make it an input."""
        kernel, _ = entry
        if kernel in self.kernels:
            return
        if kernel >= 0 and self.library.kernels[kernel].is_glue:
            behind = self.library.kernels[kernel].reads  # several where it is given a tuple, of which it shows a field
            if not self.library.is_reshape(kernel) or self.inside(behind[0]):
                self.kernels.add(kernel)
                for each in behind:
                    self.need(each)
                return
        shown = origin(self.library, entry), entry_shape(self.library, entry), _layout(self.library, entry)
        self.read_from[entry] = self.imports.setdefault(shown, len(self.imports))

    def inside(self, entry: Entry) -> bool:
        """Return whether the bytes of `entry` are computed here rather than read from an input."""
        kernel, _ = entry
        if kernel < 0 or kernel in self.own:
            return kernel >= 0
        if not self.library.kernels[kernel].is_glue:
            return False
        return not self.library.is_reshape(kernel) or self.inside(self.library.kernels[kernel].reads[0])

    @property
    def made(self) -> list[int]:
        """The kernels of the slice that are no views."""
        return [kernel for kernel in sorted(self.kernels) if not self.library.is_reshape(kernel)]

    def views(self) -> dict[Entry, Entry]:
        """Return for each entry that a view of the slice shows the entry whose bytes these are."""
        return {(k, 0): origin(self.library, (k, 0)) for k in sorted(self.kernels) if self.library.is_reshape(k)}


def _least_arena(tensors: Sequence[Lifetime], alignment: int) -> tuple[Sequence[int], int]:
    layout = exact_layout(tensors, time_limit_s=TIME_LIMIT_S, alignment=alignment)
    return layout.offsets, layout.arena_bytes


class _Exports:
    """The outputs of a slice.

    Attributes:
        entries: by name, the entry that shows each.
        origins: for each the entry whose bytes it is.
        copied, written: as in SlicePlan. An output that is also shown under another shape cannot be redirected: its
            other readers would not follow.
    """

    def __init__(self, chosen: _Selection, graph: OperatorGraph, operators: set[str]) -> None:
        self.entries = _read_outside(chosen, graph, operators)
        for entry in self.entries.values():
            chosen.need(entry)
        self.origins = tuple(origin(chosen.library, entry) for entry in self.entries.values())
        shown = set(chosen.views().values())
        self.copied = {index: entry for index, entry in enumerate(self.origins) if entry in shown}
        self.written = {entry: index for index, entry in enumerate(self.origins) if entry not in shown}


def _read_outside(chosen: _Selection, graph: OperatorGraph, operators: set[str]) -> dict[str, Entry]:
    """Return for each tensor that is read outside the entry that shows it."""
    heads = dict(zip(graph.outputs, chosen.library.heads, strict=True))
    written: dict[str | None, Entry] = {}
    for kernel in sorted(chosen.own):
        for index, value in enumerate(chosen.alignment.values[kernel]):
            written.setdefault(chosen.alignment.names.get(value), (kernel, index))
    edges = graph.edges
    inside = {edges.index[name] for name in operators}
    return {
        tensor.name: heads[tensor.name] if tensor.name in heads else written[tensor.name]
        for operator in graph.operators
        for tensor in (operator.outputs if operator.name in operators else ())
        if tensor.name in heads or not inside.issuperset(edges.readers[tensor.name])
    }


def _most_alive(tensors: Sequence[Lifetime], alignment: int) -> tuple[Sequence[int], int]:
    """Return no layout, but the bytes that every layout needs."""
    return [0] * len(tensors), most_alive(tensors, alignment)


def _joined(
    chosen: _Selection, exports: _Exports, joins: Sequence[int], alone: Collection[Entry], alignment_bytes: int
) -> SharedBytes:
    """Return what a slice makes, with these concatenations in place where they can be, the largest first."""
    library, kept = chosen.library, exports.copied.values()
    shared = SharedBytes(library, chosen.made, exports.written, alone, kept, alignment_bytes)
    for kernel in sorted(joins, key=lambda kernel: -entry_bytes(library, (kernel, 0))):
        shared.join(kernel)
    return shared


def _least_memory_order(chosen: _Selection, exports: _Exports, shared: SharedBytes) -> list[int]:
    library = chosen.library
    kernels = {kernel: library.kernels[kernel] for kernel in sorted(chosen.kernels)}
    elsewhere = [entry for kernel in chosen.made for entry in shared.makes(kernel) if shared.output_of(entry)]
    return kernel_order(kernels, library.is_reshape, exports.copied.values(), elsewhere, shared)


def _planned(
    chosen: _Selection,
    exports: _Exports,
    operators: Sequence[str],
    shared: SharedBytes,
    order: Sequence[int],
    lay_out: LayOut,
    *,
    overwrite: bool,
) -> SlicePlan:
    """Return the plan of a selection whose kernels run in `order`."""
    library, views = chosen.library, chosen.views()
    running = [kernel for kernel in order if not library.is_reshape(kernel) and shared.makes(kernel)]
    if overwrite:
        shared.overwrite(running)
    tensors = _lifetimes(library, running, shared, exports)
    starts, arena_bytes = lay_out(list(tensors.values()))
    lies, offsets, within = dict(zip(tensors, starts, strict=True)), {}, {}
    for kernel in chosen.made:
        for index in range(len(library.kernels[kernel].outputs)):
            (_, begin), output = shared.place((kernel, index)), shared.output_of((kernel, index))
            if output is None:
                some = shared.written((kernel, index))[0]
                offsets[kernel, index] = lies[some] + begin - shared.place(some)[1]
            elif output != (kernel, index):
                within[kernel, index] = exports.written[output], begin - shared.place(output)[1]
    offsets.update({entry: offsets[below] for entry, below in views.items() if below in offsets})
    within.update({entry: within[below] for entry, below in views.items() if below in within})
    owners = _owners(chosen, operators)
    copying = sum(any(name == "concatenate" for name, _ in library.kernels[kernel].operators) for kernel in running)
    return SlicePlan(
        tuple(_input(chosen, operators, *shown) for shown in chosen.imports),
        tuple(
            Port(name, entry_shape(library, entry), entry_dtype(library, entry), _layout(library, entry))
            for name, entry in exports.entries.items()
        ),
        tuple((entry, shape) for entry, shape, _ in chosen.imports),
        chosen.read_from,
        exports.origins,
        tuple(Call(kernel, owners[kernel], library.is_reshape(kernel) or not shared.makes(kernel)) for kernel in order),
        views,
        offsets,
        exports.written,
        within,
        exports.copied,
        (sum(not shared.makes(kernel) for kernel in chosen.made), copying),
        arena_bytes,
        arena_bytes,
    )


def _lifetimes(
    library: KernelLibrary, running: Sequence[int], shared: SharedBytes, exports: _Exports
) -> dict[Entry, Lifetime]:
    """Return when each tensor of the arena is alive, in steps of `running`; copied outputs are alive to the end."""
    first: dict[Entry, int] = {}
    last: dict[Entry, int] = {}
    for step, kernel in enumerate(running):
        for read in library.kernels[kernel].reads:
            last.update(dict.fromkeys(shared.written(read), step))
        for entry in shared.makes(kernel):
            first[entry] = last[entry] = step
    for entry in exports.copied.values():
        last.update(dict.fromkeys(shared.written(entry), len(running)))
    for entry, other in shared.overwritten.items():
        last[entry] = first[other] - 1
    return {
        entry: Lifetime(begin, last[entry], shared.size(entry), "", *shared.place(entry))
        for entry, begin in first.items()
        if not shared.output_of(entry)
    }


def _owners(chosen: _Selection, operators: Sequence[str]) -> dict[int, str]:
    """Return the operator of each kernel; glue counts to the operator behind it in the library, or to the last."""
    owner = {k: name for name in operators for k in chosen.alignment.kernels[name]}
    behind = owner[max(owner)]
    for kernel in sorted(chosen.kernels, reverse=True):
        behind = owner.setdefault(kernel, behind)
    return owner


def _input(chosen: _Selection, operators: Sequence[str], entry: Entry, shape: Shape, layout: str) -> Port:
    library, alignment = chosen.library, chosen.alignment
    kernel, output = entry
    value = alignment.values[kernel][output] if kernel >= 0 else (-1, output)
    if value not in alignment.names:
        held = ", ".join(operators[:3]) + (", ..." if len(operators) > 3 else "")
        raise PlanError(
            f"the stage of {held} reads a tensor that no operator hands on, on {library.target}; put it into one "
            "stage with the operators in front of it, and report this as a fault of tvm-pipeline"
        )
    return Port(alignment.names[value], shape, entry_dtype(library, entry), layout)


def _layout(library: KernelLibrary, entry: Entry) -> str:
    kernel, index = entry
    return library.kernels[kernel].outputs[index].layout if kernel >= 0 else ""
