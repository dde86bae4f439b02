"""Kernels, their outputs and their entries: the vocabulary of this package, free of any intermediate representation.

Each IR's walkers make kernels (`relay/kernel_walkers.py`); `alignment.py` turns the kernels of several libraries into
one operator graph, `slice_plan.py` selects some of them, and `kernel_order.py` orders them by memory.

A kernel is one fused function. Each keeps its elementary operators and their arguments (two libraries are aligned by
them), its work, and the origin of each output. Operators that only move elements (layout changes, reshapes)
compute no value of their own: the value passes through them. A kernel made of nothing else is glue. A slice takes in
the glue that it needs, and no cut or plan ever names glue.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from tvm_pipeline.core.graph import Tensor

Entry = tuple[int, int]  # (kernel, output), or (-1, index of a model input)


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a value: field `index` of the kernel's own `operator`; where that is None, `reads[index]`.

    Without an operator, index -1 is a weight.
    """

    operator: int | None
    index: int


@dataclass(frozen=True, slots=True)
class Output:
    """One output of a kernel: its physical shape and blocked layout (empty for the logical order)."""

    shape: tuple[int, ...]
    dtype: str
    layout: str
    source: Source


@dataclass(frozen=True, slots=True)
class Kernel:
    """One fused function where it is called.

    Attributes:
        operators: short name and output elements of each elementary operator, in order.
        arguments: the origins of what each elementary operator reads, in the order of its arguments.
        reads: the activations it reads.
        outputs: the tensors it writes.
        param_bytes: bytes of the parameters it reads.
        macs: multiply-accumulates of one call.
        node: its node in the graph executor's JSON; None for a kernel that was read from a module.
    """

    operators: tuple[tuple[str, int], ...]
    arguments: tuple[tuple[Source, ...], ...]
    reads: tuple[Entry, ...]
    outputs: tuple[Output, ...]
    param_bytes: int
    macs: int
    node: int | None = None

    @property
    def is_glue(self) -> bool:
        """Whether the kernel only moves elements."""
        return not self.operators


def tensor_bytes(shape: Sequence[int], dtype: str) -> int:
    """Return the bytes of a tensor, its dtype named as TVM does.

    >>> tensor_bytes((1, 3, 224, 224), "float32"), tensor_bytes((8,), "bool"), tensor_bytes((8,), "bfloat16")
    (602112, 8, 16)
    """
    count = 1
    for extent in shape:
        count *= int(extent)
    bits = re.match(r"(?:e\dm\d_)?[a-z]+(\d+)", dtype)  # as float32, float8_e4m3fn or e4m3_float8; bool has none
    return count * max(int(bits[1]) // 8 if bits else 0, 1)


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

    def overwrites(self, kernel: int) -> Collection[Entry]:
        """Return those of what the kernel reads whose bytes may be those of its single output.

        It reads an element of them where it writes it, and nowhere else.
        """


def entry_shape(library: KernelLibrary, entry: Entry) -> tuple[int, ...]:
    """Return the physical shape of an entry."""
    kernel, index = entry
    return library.inputs[index].shape if kernel < 0 else library.kernels[kernel].outputs[index].shape


def entry_dtype(library: KernelLibrary, entry: Entry) -> str:
    """Return the element type of an entry."""
    kernel, index = entry
    return library.inputs[index].dtype if kernel < 0 else library.kernels[kernel].outputs[index].dtype


def origin(library: KernelLibrary, entry: Entry) -> Entry:
    """Return the entry whose bytes `entry` shows under a shape of its own."""
    while entry[0] >= 0 and library.is_reshape(entry[0]):
        entry = library.kernels[entry[0]].reads[0]
    return entry


def entry_bytes(library: KernelLibrary, entry: Entry) -> int:
    """Return the bytes of an entry."""
    return tensor_bytes(entry_shape(library, entry), entry_dtype(library, entry))
