"""Number the elementary operators of a library so that every library of a model has the same numbers.

Targets fuse one network into different kernels, in different orders. But each of its operators reads the same tensors
everywhere, in the order of its arguments, once the operators that only move elements are left out. So a walk from the
model's outputs through the arguments meets the operators in one order, whatever the fusion:

    the model:          add(conv(x), conv'(x))
    one library:        kernel 0: conv (reads x)    kernel 1: conv' + add (reads x and kernel 0)
    another:            kernel 0: conv' (reads x)   kernel 1: conv + add (reads x and kernel 0)
    numbers in both:    conv 0, conv' 1, add 2

Two look-alike convolutions thus never swap. Next: `alignment.py`, which uses the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_pipeline_tvm.kernels import Entry, Kernel

# An activation's value: (number of its operator, field), (-1, index of a model input), or WEIGHT.
Value = tuple[int, int]
WEIGHT: Value = (-2, 0)
# An operator of a kernel: (kernel, position in it).
_Place = tuple[int, int]
# Where a value is made: (kernel, position, field), (-1, index of a model input, 0), or _CONSTANT.
_Origin = tuple[int, int, int]
_CONSTANT: _Origin = (-2, 0, 0)


@dataclass(frozen=True, slots=True)
class NumberedOperators:
    """The operators of one library by their numbers.

    Attributes:
        kinds: short name and output elements of each operator.
        reads: the values that each operator reads, in the order of its arguments.
        places: the kernel that holds each operator, and its position there.
        values: for each kernel the value of each output.
        heads: the values of the model's outputs.
    """

    kinds: tuple[tuple[str, int], ...]
    reads: tuple[tuple[Value, ...], ...]
    places: tuple[tuple[int, int], ...]
    values: tuple[tuple[Value, ...], ...]
    heads: tuple[Value, ...]


def numbered(kernels: Sequence[Kernel], heads: Sequence[Entry]) -> NumberedOperators:
    """Number the operators of a library, depth first from the entries that are the model's outputs."""
    numbers: dict[_Place, int] = {}
    roots = [_origin(kernels, head)[:2] for head in heads]
    # What no output needs comes last.
    rest = [(index, position) for index, kernel in enumerate(kernels) for position in range(len(kernel.operators))]
    stack: list[tuple[_Place, bool]] = [(root, False) for root in (*roots, *rest) if root[0] >= 0][::-1]
    while stack:
        place, is_ready = stack.pop()
        if place in numbers:
            continue
        if is_ready:
            numbers[place] = len(numbers)
            continue
        stack.append((place, True))
        stack.extend((made[:2], False) for made in reversed(_arguments(kernels, place)) if made[0] >= 0)

    def value(made: _Origin) -> Value:
        kernel, position, field = made
        return (numbers[kernel, position], field) if kernel >= 0 else (kernel, position)

    outputs = [[_origin(kernels, (index, o)) for o in range(len(k.outputs))] for index, k in enumerate(kernels)]
    return NumberedOperators(
        tuple(kernels[kernel].operators[position] for kernel, position in numbers),
        tuple(tuple(map(value, _arguments(kernels, place))) for place in numbers),
        tuple(numbers),
        tuple(tuple(map(value, made)) for made in outputs),
        tuple(value(_origin(kernels, head)) for head in heads),
    )


def _arguments(kernels: Sequence[Kernel], place: _Place) -> list[_Origin]:
    """Return where the arguments of an operator are made."""
    kernel, position = place
    found = []
    for source in kernels[kernel].arguments[position]:
        if source.operator is not None:
            found.append((kernel, source.operator, source.index))
        else:
            found.append(_CONSTANT if source.index < 0 else _origin(kernels, kernels[kernel].reads[source.index]))
    return found


def _origin(kernels: Sequence[Kernel], entry: Entry) -> _Origin:
    """Return where the value of an entry is made, behind all that only moves elements."""
    kernel, index = entry
    while kernel >= 0:
        source = kernels[kernel].outputs[index].source
        if source.operator is not None:
            return kernel, source.operator, source.index
        if source.index < 0:
            return _CONSTANT
        kernel, index = kernels[kernel].reads[source.index]
    return kernel, index, 0
