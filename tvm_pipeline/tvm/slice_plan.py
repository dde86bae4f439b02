"""Which kernels a slice of a compiled library runs, and where each tensor lies: compile once, cut anywhere.

A slice is the part of a library that computes some operators. Its inputs are the tensors that it reads from outside,
its outputs the tensors that are read outside. Nothing is compiled and no parameter is copied:

    whole:  data -> conv_0 -> pool_1 -> conv_2 -> add_3(conv_2, pool_1) -> softmax_4
    slice {conv_2, add_3}:  pool_1 -> conv_2 -> add_3(conv_2, pool_1)

`plan_slice` is all of it, and no IR is known here: each makes of the plan what its executor takes, as
`relay/slicing.py` makes graph JSON. Next: `compiled_model.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

from tvm_pipeline.backends.contract import Port
from tvm_pipeline.core.graph import OperatorGraph, Tensor
from tvm_pipeline.core.partition import check_stage
from tvm_pipeline.errors import PlanError
from tvm_pipeline.memory.arena import ALIGNMENT, Lifetime, exact_layout, plan_arena
from tvm_pipeline.tvm.alignment import Alignment
from tvm_pipeline.tvm.kernel_order import TIME_LIMIT_S, kernel_order
from tvm_pipeline.tvm.kernels import Entry, Kernel, tensor_bytes

Shape = tuple[int, ...]


class KernelLibrary(Protocol):
    """One model compiled for one target, as far as cutting needs it.

    Attributes:
        inputs: the model's inputs, in order.
        kernels: in an order in which they can run.
        heads: the model's outputs.
    """

    @property
    def target(self) -> str: ...

    @property
    def inputs(self) -> tuple[Tensor, ...]: ...

    @property
    def kernels(self) -> Sequence[Kernel]: ...

    @property
    def heads(self) -> Sequence[Entry]: ...

    def is_reshape(self, kernel: int) -> bool:
        """Whether the kernel only shows its input under another shape, and nothing runs."""


def entry_shape(library: KernelLibrary, entry: Entry) -> Shape:
    """Return the physical shape of an entry."""
    kernel, index = entry
    return library.inputs[index].shape if kernel < 0 else library.kernels[kernel].outputs[index].shape


def entry_dtype(library: KernelLibrary, entry: Entry) -> str:
    """Return the element type of an entry."""
    kernel, index = entry
    return library.inputs[index].dtype if kernel < 0 else library.kernels[kernel].outputs[index].dtype


class Call(NamedTuple):
    """A kernel of a slice.

    Attributes:
        operator: whose time it counts to; glue counts to the operator behind it in the library, or to the last.
        is_view: nothing runs, since its output is its input under another shape.
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
        offsets: position in the arena of each entry that lies there, views included.
        written: the output that an entry is written into at once. Such an entry is not in the arena.
        copied: outputs (by index) that must be copied out of an entry in the arena, since a view shows them as well.
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
    copied: Mapping[int, Entry]
    activation_bytes: int
    unordered_bytes: int


def plan_slice(
    library: KernelLibrary,
    alignment: Alignment,
    graph: OperatorGraph,
    operators: Sequence[str],
    memory_ordered: bool = False,
    alignment_bytes: int = ALIGNMENT,
) -> SlicePlan:
    """Plan the slice of a library that computes `operators`.

    Args:
        alignment: of this library, to `graph`.
        memory_ordered: the kernels run in the order that needs the least memory, and their results are packed as
            closely as possible, if that makes the arena smaller; else they run in the library's order and are laid out
            greedily.
        alignment_bytes: activations begin at multiples of it.

    Raises:
        PlanError: an operator is not in the graph, a path leaves the slice and comes back to it, or a tensor that
            crosses has no name.
    """
    check_stage(graph, operators)
    chosen = _Selection(library, alignment, operators)
    exports = _exports(chosen, graph, set(operators))
    for entry, _ in exports.values():
        chosen.need(entry)
    greedy = partial(plan_arena, alignment=alignment_bytes)
    plain = _planned(chosen, exports, operators, sorted(chosen.kernels), greedy)
    if not memory_ordered:
        return plain
    exact = partial(_least_arena, alignment=alignment_bytes)
    ordered = _planned(chosen, exports, operators, _least_memory_order(chosen, exports), exact)
    if ordered.activation_bytes >= plain.activation_bytes:
        return plain
    return replace(ordered, unordered_bytes=plain.activation_bytes)


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
        shown = self.origin(entry), entry_shape(self.library, entry), _layout(self.library, entry)
        self.read_from[entry] = self.imports.setdefault(shown, len(self.imports))

    def inside(self, entry: Entry) -> bool:
        """Return whether the bytes of `entry` are computed here rather than read from an input."""
        kernel, _ = entry
        if kernel < 0 or kernel in self.own:
            return kernel >= 0
        if not self.library.kernels[kernel].is_glue:
            return False
        return not self.library.is_reshape(kernel) or self.inside(self.library.kernels[kernel].reads[0])

    def origin(self, entry: Entry) -> Entry:
        """Return the entry whose bytes `entry` shows under a shape of its own."""
        while entry[0] >= 0 and self.library.is_reshape(entry[0]):
            entry = self.library.kernels[entry[0]].reads[0]
        return entry

    def views(self) -> dict[Entry, Entry]:
        """Return for each entry that a view of the slice shows the entry whose bytes these are."""
        return {(k, 0): self.origin((k, 0)) for k in sorted(self.kernels) if self.library.is_reshape(k)}


def _least_arena(tensors: Sequence[Lifetime], alignment: int) -> tuple[Sequence[int], int]:
    layout = exact_layout(tensors, time_limit_s=TIME_LIMIT_S, alignment=alignment)
    return layout.offsets, layout.arena_bytes


def _least_memory_order(chosen: _Selection, exports: Mapping[str, tuple[Entry, Entry]]) -> list[int]:
    library = chosen.library
    kernels = {kernel: library.kernels[kernel] for kernel in sorted(chosen.kernels)}
    written = {origin for _, origin in exports.values()}
    shown = set(chosen.views().values())  # as in `_planned`
    return kernel_order(kernels, library.is_reshape, written & shown, written - shown)


def _exports(chosen: _Selection, graph: OperatorGraph, operators: set[str]) -> dict[str, tuple[Entry, Entry]]:
    """Return for each tensor that is read outside the entry that shows it and the entry whose bytes it shares."""
    heads = dict(zip(graph.outputs, chosen.library.heads, strict=True))
    written: dict[str | None, Entry] = {}
    for kernel in sorted(chosen.own):
        for index, value in enumerate(chosen.alignment.values[kernel]):
            written.setdefault(chosen.alignment.names.get(value), (kernel, index))
    edges = graph.edges
    inside = {edges.index[name] for name in operators}
    exports: dict[str, tuple[Entry, Entry]] = {}
    for operator in graph.operators:
        for tensor in operator.outputs if operator.name in operators else ():
            if tensor.name in heads or not inside.issuperset(edges.readers[tensor.name]):
                entry = heads[tensor.name] if tensor.name in heads else written[tensor.name]
                exports[tensor.name] = entry, chosen.origin(entry)
    return exports


def _planned(
    chosen: _Selection,
    exports: Mapping[str, tuple[Entry, Entry]],
    operators: Sequence[str],
    order: Sequence[int],
    lay_out: Callable[[Sequence[Lifetime]], tuple[Sequence[int], int]],
) -> SlicePlan:
    """Return the plan of a selection whose kernels run in `order`."""
    library, views = chosen.library, chosen.views()
    inputs = tuple(_input(chosen, operators, *shown) for shown in chosen.imports)
    origins = [origin for _, origin in exports.values()]
    # An output that is also shown under another shape cannot be redirected: its other readers would not follow.
    shown = set(views.values())
    copied = {index: origin for index, origin in enumerate(origins) if origin in shown}
    written = {origin: index for index, origin in enumerate(origins) if origin not in shown}
    tensors = _lifetimes(library, order, views, copied.values(), written)
    starts, arena_bytes = lay_out(list(tensors.values()))
    offsets = dict(zip(tensors, starts, strict=True))
    offsets.update({entry: offsets[below] for entry, below in views.items()})
    owners = _owners(chosen, operators)
    return SlicePlan(
        inputs,
        tuple(
            Port(name, entry_shape(library, entry), entry_dtype(library, entry), _layout(library, entry))
            for name, (entry, _) in exports.items()
        ),
        tuple((entry, shape) for entry, shape, _ in chosen.imports),
        chosen.read_from,
        tuple(origins),
        tuple(Call(kernel, owners[kernel], library.is_reshape(kernel)) for kernel in order),
        views,
        offsets,
        written,
        copied,
        arena_bytes,
        arena_bytes,
    )


def _lifetimes(
    library: KernelLibrary,
    order: Sequence[int],
    views: Mapping[Entry, Entry],
    kept: Collection[Entry],
    elsewhere: Collection[Entry],
) -> dict[Entry, Lifetime]:
    """Return when each entry of the arena is alive, in steps of `order`; `kept` are alive to the end."""
    last: dict[Entry, int] = {}
    for step, kernel in enumerate(order):
        for entry in library.kernels[kernel].reads:
            last[views.get(entry, entry)] = step
    last.update(dict.fromkeys(kept, len(order)))
    return {
        (kernel, index): Lifetime(
            step, max(last.get((kernel, index), 0), step), tensor_bytes(output.shape, output.dtype)
        )
        for step, kernel in enumerate(order)
        for index, output in enumerate(library.kernels[kernel].outputs)
        if (kernel, index) not in views and (kernel, index) not in elsewhere
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
