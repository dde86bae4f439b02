"""The operator graph: what a model computes, seen by the planner.

An OperatorGraph is a DAG of operators (one fused kernel each, or one operator of the source format) and of the
tensors between them. It holds sizes and work, never weights or code. Next: `graph_sources.py` (graphs from files and
from networkx), `profile.py` (how long each operator takes on each device) and `plan.py` (which device runs which
operators).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import numpy as np

from tvm_pipeline.errors import GraphError


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor by name, with its logical shape and its numpy dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Operator:
    """One node of the graph.

    Attributes:
        name: unique in the graph.
        kind: what it computes, such as `conv2d+add+relu`.
        inputs: names of the tensors it reads: outputs of earlier operators or inputs of the model.
        outputs: the tensors it writes.
        param_bytes: bytes of constants (weights) that it reads.
        macs: multiply-accumulates, or elementary operations where there is nothing to multiply.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[Tensor, ...]
    param_bytes: int = 0
    macs: int = 0

    @property
    def output_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.outputs)


@dataclass(frozen=True, slots=True)
class OperatorGraph:
    """Operators in a topological order, with the model's inputs and outputs.

    Raises GraphError when a name is not unique or cannot stand on a line of a plan, a tensor is read before it
    is written (a cycle, or a wrong order), or a figure is impossible.
    """

    name: str
    inputs: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        known = {tensor.name for tensor in self.inputs}
        if len(known) != len(self.inputs):
            raise GraphError(f"graph {self.name}: two inputs bear the same name")
        if len({operator.name for operator in self.operators}) != len(self.operators):
            raise GraphError(f"graph {self.name}: two operators bear the same name")
        for tensor in self.inputs:
            self._check_tensor(tensor)
        for operator in self.operators:
            if not _fits_a_line(operator.name):
                raise GraphError(
                    f"graph {self.name}: an operator cannot be called {operator.name!r}; a name is printable, not "
                    "empty, and neither begins with # or a blank nor ends with a blank"
                )
            for read in operator.inputs:
                if read not in known:
                    raise GraphError(
                        f"graph {self.name}: operator {operator.name} reads {read}, which nothing before it "
                        "writes; list the operators in topological order and check for a cycle"
                    )
            if operator.param_bytes < 0 or operator.macs < 0:
                raise GraphError(f"graph {self.name}: operator {operator.name} has a negative size")
            for tensor in operator.outputs:
                if tensor.name in known:
                    raise GraphError(f"graph {self.name}: tensor {tensor.name} is written twice")
                self._check_tensor(tensor)
                known.add(tensor.name)
        for output in self.outputs:
            if output not in known:
                raise GraphError(f"graph {self.name}: nothing writes the output {output}")

    def _check_tensor(self, tensor: Tensor) -> None:
        if any(extent < 0 for extent in tensor.shape):
            raise GraphError(f"graph {self.name}: tensor {tensor.name} has shape {tensor.shape}")
        try:
            np.dtype(tensor.dtype)
        except TypeError as error:
            raise GraphError(
                f"graph {self.name}: tensor {tensor.name} has dtype {tensor.dtype}, which numpy does not know"
            ) from error

    def __len__(self) -> int:
        return len(self.operators)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name: the model's inputs and what the operators write."""
        written = (tensor for operator in self.operators for tensor in operator.outputs)
        return {tensor.name: tensor for tensor in (*self.inputs, *written)}

    @property
    def fingerprint(self) -> str:
        """A name of the structure and sizes, the same for every order of the operators.

        A profile says by it which graph was measured.
        """
        unordered = (self.name, self.inputs, sorted(self.operators, key=lambda operator: operator.name), self.outputs)
        return hashlib.sha256(msgspec.json.encode(unordered)).hexdigest()[:16]


def _fits_a_line(name: str) -> bool:
    return bool(name) and name.isprintable() and name == name.strip() and not name.startswith("#")


def crossing_tensors(graph: OperatorGraph, groups: Sequence[Iterable[str]]) -> list[list[Tensor]]:
    """The tensors that cross each boundary of consecutive groups of operators.

    Boundary 0 lies before the first group, boundary k after group k-1; a tensor is handed from group to group
    until its last reader has it, so it is listed at every boundary it crosses, once. The model's outputs live
    to the last boundary.

    Returns:
        `len(groups) + 1` lists, each in the order in which the tensors are written.

    Raises:
        GraphError: an operator reads a tensor that a later group writes.
    """
    tensors = graph.tensors
    group_of = {name: index for index, names in enumerate(groups) for name in names}
    written = {tensor.name: 0 for tensor in graph.inputs}
    last_read: dict[str, int] = {}
    for operator in graph.operators:
        group = group_of[operator.name]
        for tensor in operator.outputs:
            written[tensor.name] = group + 1
    for operator in graph.operators:
        group = group_of[operator.name]
        for read in operator.inputs:
            if written[read] > group + 1:
                raise GraphError(f"operator {operator.name} of stage {group} reads {read}, which a later stage writes")
            last_read[read] = max(last_read.get(read, 0), group)
    last_read.update(dict.fromkeys(graph.outputs, len(groups)))
    boundaries: list[list[Tensor]] = [[] for _ in range(len(groups) + 1)]
    for name, first in written.items():
        for boundary in range(first, last_read.get(name, -1) + 1):
            boundaries[boundary].append(tensors[name])
    return boundaries


def readers_of(graph: OperatorGraph) -> dict[str, tuple[str, ...]]:
    """For each operator the operators that read what it writes, each once, in the graph's order."""
    writer = {tensor.name: operator.name for operator in graph.operators for tensor in operator.outputs}
    readers: dict[str, dict[str, None]] = {operator.name: {} for operator in graph.operators}
    for operator in graph.operators:
        for read in operator.inputs:
            if read in writer:
                readers[writer[read]][operator.name] = None
    return {name: tuple(found) for name, found in readers.items()}


def handed_on_bytes(graph: OperatorGraph, groups: Sequence[Iterable[str]]) -> list[int]:
    """Bytes that operators hand on across each of the `len(groups) - 1` boundaries between groups.

    A tensor counts once at every boundary between its writer and its last reader, however many readers it has; the
    model's own inputs and outputs do not count. `groups` are in a legal order.

    Objective (3) of Yin et al., SEC 2022, differs: their equations 9 and 10 count each edge, and only at the boundary
    in front of its reader's stage. A tensor with two readers in that stage counts twice there, and a tensor that skips
    a stage counts only in front of its reader. The count here is what devices move that hand tensors on in a chain.
    """
    group_of = {name: index for index, names in enumerate(groups) for name in names}
    last_read: dict[str, int] = {}
    for operator in graph.operators:
        for read in operator.inputs:
            last_read[read] = max(last_read.get(read, 0), group_of[operator.name])
    change = [0] * (len(groups) + 1)
    for operator in graph.operators:
        written = group_of[operator.name]
        for tensor in operator.outputs:
            size = tensor.bytes
            change[written] += size
            change[max(last_read.get(tensor.name, written), written)] -= size
    return list(accumulate(change))[: len(groups) - 1]
