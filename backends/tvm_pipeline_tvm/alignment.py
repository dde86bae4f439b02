"""The kernels of one or several libraries become one operator graph.

Two targets fuse the same network into different kernels: their layouts differ, and so do the layout changes between
them. `numbering.py` gives each elementary operator the same number in every library, and that the numbers agree in all
that operators compute and read is checked here. Operators that one kernel of any library holds must run together. So an
operator of the graph is a group of them: those that share kernels, in any library, and those on a cycle between such
groups. With one library it is simply a kernel. A tensor is identified by the number of the operator that computes it.

No intermediate representation is known here: read `kernels.py` and `numbering.py` before this file.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.tensor_layout import logical_shape
from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.kernels import Entry, Kernel
from tvm_pipeline_tvm.numbering import WEIGHT, NumberedOperators, Value, numbered


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
    outputs: Sequence[str] = (),
) -> tuple[OperatorGraph, list[Alignment]]:
    """Return one operator graph over all libraries (its sizes are those of the first), and the alignment of each.

    Args:
        name: the name of the graph.
        inputs: the model's inputs.
        libraries: the kernels of each library, in order.
        heads: for each library the entries that are the model's outputs.
        outputs: the names of the model's outputs in its file; without them, operators name them as all other tensors.

    Raises:
        ModelError: the libraries do not compute the same operators of the same tensors.
    """
    known = [numbered(kernels, own) for kernels, own in zip(libraries, heads, strict=True)]
    first, reference = known[0], libraries[0]
    for other in known[1:]:
        _check_same(name, first, other)
    if len(set(first.heads)) < len(set(heads[0])):
        raise ModelError(f"{name}: two of its outputs are one tensor under different shapes; keep one of them")

    given = [_given(kernels, one, own) for kernels, one, own in zip(libraries, known, heads, strict=True)]
    groups = _groups(known, given)
    group_of = {operator: index for index, group in enumerate(groups) for operator in group}
    labels = ["+".join(first.kinds[o][0] for o in group[:3]) + f"_{index}" for index, group in enumerate(groups)]
    members = [_members(one, group_of, labels) for one in known]
    outside = {}
    for index, label in enumerate(labels):
        read = [value for own, of in zip(given, members, strict=True) for kernel in of[label] for value in own[kernel]]
        outside[label] = list(dict.fromkeys(v for v in read if v[0] < 0 or group_of[v[0]] != index))
    crossing = {value for values in (first.heads, *outside.values()) for value in values if value[0] >= 0}
    names = {(-1, index): tensor.name for index, tensor in enumerate(inputs)}
    written: dict[str, list[Value]] = {label: [] for label in labels}
    for value in sorted(crossing, key=lambda value: (first.places[value[0]], value[1])):
        written[labels[group_of[value[0]]]].append(value)
    names.update(_names_of_outputs(inputs, first.heads, outputs))
    taken = set(names.values())
    for label, values in written.items():
        for position, value in enumerate(values):
            if value not in names:
                names[value] = _free(label if len(values) == 1 else f"{label}.{position}", taken)

    shapes = _tensors(reference, first.values)
    operators = []
    for label, group in zip(labels, groups, strict=True):
        own_kernels = [reference[kernel] for kernel in members[0][label]]
        operators.append(
            Operator(
                name=label,
                kind="+".join(first.kinds[operator][0] for operator in group),
                inputs=tuple(names[value] for value in outside[label]),
                outputs=tuple(Tensor(names[value], *shapes[value]) for value in written[label]),
                param_bytes=sum(kernel.param_bytes for kernel in own_kernels),
                macs=sum(kernel.macs for kernel in own_kernels),
            )
        )
    graph = OperatorGraph(name, inputs, tuple(operators), tuple(names[value] for value in first.heads))
    return graph, [Alignment(held, names, one.values) for held, one in zip(members, known, strict=True)]


def _names_of_outputs(inputs: Sequence[Tensor], heads: Sequence[Value], outputs: Sequence[str]) -> dict[Value, str]:
    """Return the file's names of the outputs that operators write.

    A name that another output or an input has already is left out, and so is a second name of one tensor: tensors are
    told apart by their names.
    """
    taken = {tensor.name for tensor in inputs}
    names: dict[Value, str] = {}
    for value, name in zip(heads, outputs, strict=bool(outputs)):
        if name and name not in taken and value[0] >= 0 and value not in names:
            names[value] = name
            taken.add(name)
    return names


def _free(name: str, taken: set[str]) -> str:
    """Return the name, with dashes behind it where the file's names have taken it."""
    while name in taken:
        name += "'"
    return name


def _check_same(name: str, first: NumberedOperators, other: NumberedOperators) -> None:
    """Raise ModelError at the first operator that differs, or reads other tensors; how weights are kept may differ."""
    rows = [
        [*zip(one.kinds, map(_activations, one.reads), strict=True), (("the end", 0), one.heads)]
        for one in (first, other)
    ]
    for number, (mine, its) in enumerate(zip(*rows, strict=False)):
        if mine != its:
            (one, _), (another, _) = mine[0], its[0]
            shown = f"{one} and {another}" if one != another else f"{one} of different sizes or tensors"
            raise ModelError(
                f"{name}: its targets compile it to different operators (at {number}: {shown}), so it cannot be cut "
                "between them; give its devices one target"
            )


def _groups(known: Sequence[NumberedOperators], given: Sequence[Sequence[Sequence[Value]]]) -> list[list[int]]:
    """Return the operators that must run together, in an order that can run, as near to the first library's as can be.

    The operators of a group are in the first library's order. `given` is what `_given` returns, for each library.
    """
    leader = list(range(len(known[0].kinds)))

    def find(operator: int) -> int:
        while leader[operator] != operator:
            leader[operator] = operator = leader[leader[operator]]
        return operator

    for one in known:
        of_kernel: dict[int, int] = {}
        for operator, (kernel, _) in enumerate(one.places):
            leader[find(operator)] = find(of_kernel.setdefault(kernel, operator))
    while True:
        before: dict[int, set[int]] = {find(operator): set() for operator in range(len(leader))}
        for one, own in zip(known, given, strict=True):
            for operator, (kernel, _) in enumerate(one.places):
                before[find(operator)].update(find(value[0]) for value in own[kernel] if value[0] >= 0)
        order = TopologicalSorter({group: groups - {group} for group, groups in before.items()})
        try:
            order.prepare()
            break
        except CycleError as error:
            for operator in error.args[1]:
                leader[find(operator)] = find(error.args[1][0])

    groups: dict[int, list[int]] = {}
    for operator in sorted(range(len(leader)), key=known[0].places.__getitem__):
        groups.setdefault(find(operator), []).append(operator)
    found: list[list[int]] = []
    ready: list[tuple[int, int]] = []  # groups by the last kernel of theirs in the first library
    while order.is_active():
        for group in order.get_ready():
            heapq.heappush(ready, (known[0].places[groups[group][-1]][0], group))
        _, group = heapq.heappop(ready)
        order.done(group)
        found.append(groups[group])
    return found


def _members(one: NumberedOperators, group_of: dict[int, int], labels: list[str]) -> dict[str, tuple[int, ...]]:
    """Return the kernels of each group."""
    held: dict[str, set[int]] = {label: set() for label in labels}
    for operator, (kernel, _) in enumerate(one.places):
        held[labels[group_of[operator]]].add(kernel)
    return {label: tuple(sorted(kernels)) for label, kernels in held.items()}


def _given(kernels: Sequence[Kernel], one: NumberedOperators, heads: Sequence[Entry]) -> list[tuple[Value, ...]]:
    """Return the values that each kernel is given: all fields of a split where it reads one behind glue.

    What the glue in front of an output is given counts to the kernel that computes the output.
    """
    given = [[v for entry in kernel.reads for v in _needed(kernels, one.values, entry)] for kernel in kernels]
    for head, value in zip(heads, one.heads, strict=True):
        if value[0] >= 0:
            given[one.places[value[0]][0]].extend(_needed(kernels, one.values, head))
    return list(map(_activations, given))


def _activations(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(value for value in values if value != WEIGHT)


def _needed(kernels: Sequence[Kernel], values: Sequence[tuple[Value, ...]], entry: Entry) -> list[Value]:
    """Return the value of an entry; behind glue all that the glue is given, which is more where it is given a tuple."""
    kernel, index = entry
    if kernel < 0:
        return [entry]
    if not kernels[kernel].is_glue:
        return [values[kernel][index]]
    return [value for read in kernels[kernel].reads for value in _needed(kernels, values, read)]


def _tensors(
    kernels: Sequence[Kernel], values: Sequence[tuple[Value, ...]]
) -> dict[Value, tuple[tuple[int, ...], str]]:
    """Return the logical shape and the dtype of every value, as its own kernel writes it."""
    shapes: dict[Value, tuple[tuple[int, ...], str]] = {}
    for kernel, written in zip(kernels, values, strict=True):
        for output, value in zip(kernel.outputs, written, strict=True):
            shapes.setdefault(value, (logical_shape(output.shape, output.layout), output.dtype))
    return shapes
