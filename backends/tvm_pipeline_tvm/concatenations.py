"""Concatenations of channels done in parts, as far as Relay and Relax have it alike: the rules and the interface.

    conv2d(concat(x, y), w)                 ->  conv2d(y, w[:, a:]) + conv2d(x, w[:, :a])     (x has the most channels)
    conv2d(concat(x, y), w, groups=a + b)   ->  concat(conv2d(x, w[:a], groups=a), conv2d(y, w[a:], groups=b))

It is the identity graph rewriting of `tvm_pipeline/memory/rewriting.py`. In that file the operators that write parts
of one buffer run in any order. TVM gives every kernel a buffer of its own, so partial sums form a chain here: each
kernel reads the sum that the one before it wrote. Partial results are concatenated at the end.

The attributes of convolutions have the same names in both. Next: `relay/rewrite_concat.py`, `relax/rewrite_concat.py`.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import tvm

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.model import Format, Model
from tvm_pipeline.memory import memory_graph, minimum_peak

_log = logging.getLogger(__name__)

# For each search of the order of least memory; nearly all searches end with a proof in a fraction of this.
TIME_LIMIT_S = 2.0

T = TypeVar("T")
Shape = Sequence[int]


class Concatenations(ABC, Generic[T]):
    """The concatenations of a module that can be done in parts; some of them are chosen by their names.

    Args:
        found: the concatenations, as `named` gives them.

    Attributes:
        names: one for each.
    """

    def __init__(self, found: Mapping[str, T]) -> None:
        self._found = found
        self.names = tuple(found)

    def peak_bytes(self, chosen: Collection[str]) -> int:
        """Return the bytes of the best order of the fused kernels if these are done in parts; inputs stay alive."""
        return self._optimal_peak_bytes(self.rewritten(chosen))

    def rewritten(self, chosen: Collection[str]) -> tvm.IRModule:
        """Return the module with these done in parts."""
        return self._written([self._found[name] for name in chosen])

    @staticmethod
    @abstractmethod
    def _optimal_peak_bytes(mod: tvm.IRModule) -> int:
        """Return the peak bytes of the best order of the kernels that are made of a module."""

    @abstractmethod
    def _written(self, chosen: Sequence[T]) -> tvm.IRModule:
        """Return the module with these concatenations done in parts; the same one without any."""


def named(concatenations: Iterable[tuple[T, Shape, str]]) -> dict[str, T]:
    """Return all concatenations of a module, in its order, by names.

    Args:
        concatenations: each with its shape, and with the node of the model's file that it comes from, where that is
            known. The node is its name, where no other has it; else it is named by position and shape.

    Examples:
        >>> named([("first", (1, 56, 8, 8), ""), ("second", (1, 12, 4, 4), "join")])
        {'concatenation 0 (1x56x8x8)': 'first', 'join': 'second'}
    """
    rows = list(concatenations)
    nodes = [node for _, _, node in rows]
    return {
        node if node and nodes.count(node) == 1 else f"concatenation {index} ({'x'.join(map(str, shape))})": each
        for index, (each, shape, node) in enumerate(rows)
    }


def least_peak_bytes(graph: OperatorGraph) -> int:
    """Return the peak bytes of the best order of a graph's operators; inputs stay alive."""
    return minimum_peak(memory_graph(graph, pin_inputs=True), time_limit_s=TIME_LIMIT_S).peak_bytes


def widest_first(channels: Sequence[int]) -> list[int]:
    """Return the sequence in which partial sums are added up: each but the first is computed beside the sum so far.

    Examples:
        >>> widest_first([16, 24, 16])
        [1, 0, 2]
    """
    return sorted(range(len(channels)), key=lambda index: -channels[index])


def is_depthwise(attrs: Any, data: Shape, axis: int) -> bool:
    """Return whether a convolution of these attributes and data computes each channel, on that axis, by itself."""
    return int(attrs.groups) == data[axis]


def splits_convolution(attrs: Any, data: Shape, kernel: Shape, axis: int) -> bool:
    """Return whether a convolution can be done in parts along the channels of its data, which that axis must be.

    Args:
        data: the shape of its data.
        kernel: the shape of its weights.
    """
    layout, kernel_layout = str(attrs.data_layout), str(attrs.kernel_layout)
    plain = all(each.isalpha() and each.isupper() for each in (layout, kernel_layout))
    alone = str(attrs.out_layout) in ("", layout) and layout.find("C") == axis
    one = kernel[kernel_layout.find("I")] == 1
    return plain and alone and (int(attrs.groups) == 1 or (is_depthwise(attrs, data, axis) and one))


class PartOfKernel(NamedTuple):
    """The weights of a part of a convolution.

    Attributes:
        axis: of the weights, along which they are cut.
        start, extent: the first index on that axis, and how many there are.
        groups: of the part.
    """

    axis: int
    start: int
    extent: int
    groups: int


def partial_kernel(attrs: Any, data: Shape, kernel: Shape, axis: int, start: int, count: int) -> PartOfKernel:
    """Return which weights a convolution of some channels has; the arguments are those of `splits_convolution`.

    Args:
        start: the first channel of the part.
        count: the number of its channels.
    """
    layout = str(attrs.kernel_layout)
    if not is_depthwise(attrs, data, axis):
        return PartOfKernel(layout.find("I"), start, count, 1)
    multiplier = kernel[layout.find("O")] // data[axis]
    return PartOfKernel(layout.find("O"), start * multiplier, count * multiplier, count)


def axis_of(constant: Shape, result: Shape, axis: int, stated: int | None) -> int | None:
    """Return the axis of a constant along which its numbers are those of the channels; None where it is no such vector.

    Args:
        constant: the shape of an argument of an operator that computes element by element.
        result: the shape of the operator's result.
        axis: of the result: the channels.
        stated: the axis of the result along which the operator says that the constant runs, if it says so.

    Examples:
        >>> axis_of((8, 1, 1), (1, 8, 4, 4), 1, None), axis_of((8,), (1, 8, 4, 4), 1, 1)
        (0, 0)
    """
    if stated is not None:
        return 0 if stated % len(result) == axis and tuple(constant) == (result[axis],) else None
    own = axis - len(result) + len(constant)
    return own if own >= 0 and constant[own] == result[axis] == math.prod(constant) else None


def cut(values: np.ndarray, axis: int | None, start: int, count: int) -> np.ndarray:
    """Return some channels of a constant; all of it where it is one number, or `axis` is None."""
    if axis is None or values.size == 1:
        return values
    return np.ascontiguousarray(np.take(values, range(start, start + count), axis))


class ModelInParts:
    """A Model that TVM imports, and its concatenations; see `backends.contract.Rewriting`.

    The rewritten one is a Model again, a module as JSON, so that every target compiles the same module, and the cache,
    stages and bundles know it by its own content.

    Args:
        format: of a module of the IR.
        is_quantized: whether the model computes in integers.
    """

    refused: Mapping[str, str] = {}

    def __init__(
        self, model: Model, concatenations: Concatenations[Any], format: Format, *, is_quantized: bool
    ) -> None:
        self._model, self._concatenations, self._format = model, concatenations, format
        self.names, self.is_quantized = concatenations.names, is_quantized

    def peak_bytes(self, chosen: Sequence[str]) -> int:
        _log.info(f"least memory of {self._model.name} with {len(chosen)} of {len(self.names)} in parts")
        return self._concatenations.peak_bytes(chosen)

    def rewritten(self, chosen: Sequence[str]) -> Model:
        content = tvm.ir.save_json(self._concatenations.rewritten(chosen)).encode()
        return replace(self._model, format=self._format, content=content, params=b"")
