"""The kernels of one or several libraries become one operator graph.

Two targets fuse the same network into different kernels: their layouts differ, and so do the layout changes between
them. Without the operators that only move elements, the sequence of elementary operators is the same, and each of
them has an ordinal in it. An operator of the graph is a run of ordinals that begins and ends with a kernel in every
library; with one library it is simply a kernel. A tensor is identified by the ordinal of the operator that computes
it. No intermediate representation is known here: read `kernels.py` before this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.tensor_layout import logical_shape
from tvm_pipeline.errors import ModelError
from tvm_pipeline.tvm.kernels import Entry, Kernel

# An activation's value: (ordinal of its operator, field), or (-1, index of a model input).
Value = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Alignment:
    """How the kernels of one library belong to the shared operator graph.

    Attributes:
        kernels: for each operator of the graph its kernels in this library; glue belongs to none.
        names: the graph's tensor name of each value that crosses operators.
        values: for each kernel the value of each output.
    """

    kernels: dict[str, tuple[int, ...]]
    names: dict[Value, str]
    values: tuple[tuple[Value, ...], ...]


def align(
    name: str,
    inputs: tuple[Tensor, ...],
    libraries: Sequence[Sequence[Kernel]],
    heads: Sequence[Sequence[Entry]],
) -> tuple[OperatorGraph, list[Alignment]]:
    """Return one operator graph over all libraries (its sizes are those of the first), and the alignment of each.

    Args:
        name: the name of the graph.
        inputs: the model's inputs.
        libraries: the kernels of each library, in order.
        heads: for each library the entries that are the model's outputs.

    Raises:
        ModelError: the libraries do not compute the same sequence of operators.
    """
    _check_same_sequence(name, libraries)
    starts = [_starts(kernels) for kernels in libraries]
    cuts = sorted(set.intersection(*(set(s) for s in starts)))
    total = sum(len(kernel.operators) for kernel in libraries[0])
    runs = list(pairwise((*cuts, total)))
    labels = _labels(libraries[0], runs)
    values = [_values(kernels) for kernels in libraries]
    reference = libraries[0]
    head_values = [_value(values[0], entry) for entry in heads[0]]
    if len(set(head_values)) < len(set(heads[0])):
        raise ModelError(f"{name}: two of its outputs are one tensor under different shapes; keep one of them")

    run_of = {ordinal: index for index, (start, end) in enumerate(runs) for ordinal in range(start, end)}
    crossing = _crossing(libraries, values, starts, run_of, head_values)
    names = {(-1, index): tensor.name for index, tensor in enumerate(inputs)}
    for index, label in enumerate(labels):
        own = sorted(value for value in crossing if value[0] >= 0 and run_of[value[0]] == index)
        names.update({v: label if len(own) == 1 else f"{label}.{position}" for position, v in enumerate(own)})

    members = [_members(kernels, s, run_of, labels) for kernels, s in zip(libraries, starts, strict=True)]
    shapes = _tensors(reference, values[0])
    operators = []
    for index, label in enumerate(labels):
        own_kernels = [reference[k] for k in members[0][label]]
        # Of every library: a kernel may be given all fields of a split, and read one.
        read = [
            value
            for kernels, known, of in zip(libraries, values, members, strict=True)
            for kernel in of[label]
            for entry in kernels[kernel].reads
            for value in _needed(kernels, known, entry)
        ]
        outside = dict.fromkeys(v for v in read if v[0] < 0 or run_of[v[0]] != index)
        written = sorted(v for v in crossing if v[0] >= 0 and run_of[v[0]] == index)
        operators.append(
            Operator(
                name=label,
                kind="+".join(short for kernel in own_kernels for short, _ in kernel.operators),
                inputs=tuple(names[v] for v in outside),
                outputs=tuple(Tensor(names[v], *shapes[v]) for v in written),
                param_bytes=sum(kernel.param_bytes for kernel in own_kernels),
                macs=sum(kernel.macs for kernel in own_kernels),
            )
        )
    graph = OperatorGraph(name, inputs, tuple(operators), tuple(names[v] for v in head_values))
    return graph, [Alignment(m, names, tuple(v)) for m, v in zip(members, values, strict=True)]


def _check_same_sequence(name: str, libraries: Sequence[Sequence[Kernel]]) -> None:
    sequences = [[op for kernel in kernels for op in kernel.operators] for kernels in libraries]
    for other in sequences[1:]:
        if other != sequences[0]:
            differs_at = next(
                (i for i, pair in enumerate(zip(sequences[0], other, strict=False)) if pair[0] != pair[1]),
                min(len(sequences[0]), len(other)),
            )
            shown = [s[differs_at][0] if differs_at < len(s) else "the end" for s in (sequences[0], other)]
            raise ModelError(
                f"{name}: its targets compile it to different operators (at {differs_at}: {shown[0]} and {shown[1]}), "
                "so it cannot be cut between them; give its devices one target"
            )


def _starts(kernels: Sequence[Kernel]) -> list[int]:
    """Return the first ordinal of every kernel that is not glue."""
    starts, ordinal = [], 0
    for kernel in kernels:
        if not kernel.is_glue:
            starts.append(ordinal)
        ordinal += len(kernel.operators)
    return starts


def _members(
    kernels: Sequence[Kernel], starts: list[int], run_of: dict[int, int], labels: list[str]
) -> dict[str, tuple[int, ...]]:
    real = [index for index, kernel in enumerate(kernels) if not kernel.is_glue]
    members: dict[str, list[int]] = {label: [] for label in labels}
    for index, start in zip(real, starts, strict=True):
        members[labels[run_of[start]]].append(index)
    return {label: tuple(indices) for label, indices in members.items()}


def _values(kernels: Sequence[Kernel]) -> list[tuple[Value, ...]]:
    """Return the value of every output, followed through the operators that only move elements."""
    values: list[tuple[Value, ...]] = []
    ordinal = 0
    for kernel in kernels:
        values.append(
            tuple(
                (ordinal + output.source.operator, output.source.index)
                if output.source.operator is not None
                else _value(values, kernel.reads[output.source.index])
                for output in kernel.outputs
            )
        )
        ordinal += len(kernel.operators)
    return values


def _value(values: Sequence[tuple[Value, ...]], entry: Entry) -> Value:
    kernel, index = entry
    return (-1, index) if kernel < 0 else values[kernel][index]


def _needed(kernels: Sequence[Kernel], values: Sequence[tuple[Value, ...]], entry: Entry) -> list[Value]:
    """The value of an entry; behind glue all that the glue is given, which is more where it is given a tuple."""
    if entry[0] < 0 or not kernels[entry[0]].is_glue:
        return [_value(values, entry)]
    return [value for read in kernels[entry[0]].reads for value in _needed(kernels, values, read)]


def _crossing(
    libraries: Sequence[Sequence[Kernel]],
    values: Sequence[Sequence[tuple[Value, ...]]],
    starts: Sequence[list[int]],
    run_of: dict[int, int],
    heads: list[Value],
) -> set[Value]:
    """Return the values that some library reads in another run than the one that computes them, and the outputs."""
    crossing = {value for value in heads if value[0] >= 0}
    for kernels, known, begins in zip(libraries, values, starts, strict=True):
        real = [kernel for kernel in kernels if not kernel.is_glue]
        for kernel, begin in zip(real, begins, strict=True):
            for entry in kernel.reads:
                needed = _needed(kernels, known, entry)
                crossing.update(value for value in needed if value[0] >= 0 and run_of[value[0]] != run_of[begin])
    return crossing


def _tensors(
    kernels: Sequence[Kernel], values: Sequence[tuple[Value, ...]]
) -> dict[Value, tuple[tuple[int, ...], str]]:
    """Return the logical shape and the dtype of every value, as its own kernel writes it."""
    shapes: dict[Value, tuple[tuple[int, ...], str]] = {}
    for kernel, written in zip(kernels, values, strict=True):
        for output, value in zip(kernel.outputs, written, strict=True):
            shapes.setdefault(value, (logical_shape(output.shape, output.layout), output.dtype))
    return shapes


def _labels(kernels: Sequence[Kernel], runs: Sequence[tuple[int, int]]) -> list[str]:
    """Return a readable, unique name for each run: its first operators and its index."""
    flat = [short for kernel in kernels for short, _ in kernel.operators]
    return ["+".join(flat[start:end][:3]) + f"_{index}" for index, (start, end) in enumerate(runs)]
