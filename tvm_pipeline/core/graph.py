"""The operator graph: a model as the planner sees it.

An OperatorGraph is a DAG of operators (one fused kernel each, or one operator of the source format) and of the
tensors between them. It has sizes and work, never weights or code. Its `edges` give the writer and the readers of each
tensor. Next: `graph_files.py` (graphs from files and from networkx), `partition.py` (which groups of operators are
stages), `profile.py` (how long each operator takes on each device) and `plan.py` (which device runs which operators).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import msgspec

from tvm_pipeline.core.graph_limits import MOST, MOST_OPERATORS, tensor_fault
from tvm_pipeline.core.number_types import dtype_of
from tvm_pipeline.core.topology import successors
from tvm_pipeline.errors import GraphError


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor by name, with its logical shape and its numpy dtype name; see `number_types.py`.

    Examples:
        >>> Tensor("image", (1, 8, 8, 3), "int8").bytes
        192
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    def times(self, batch: int) -> Tensor:
        """Return the tensor of a call of so many frames; a single number is the same for all of them."""
        return replace(self, shape=(batch * self.shape[0], *self.shape[1:])) if batch > 1 and self.shape else self


@dataclass(frozen=True, slots=True)
class Operator:
    """One node of the graph.

    Attributes:
        name: unique in the graph.
        kind: the operation, such as `conv2d+add+relu`.
        inputs: names of the tensors it reads: outputs of earlier operators or inputs of the model.
        outputs: the tensors it writes.
        param_bytes: bytes of constants (weights) that it reads.
        macs: multiply-accumulates, or elementary operations where there is nothing to multiply.
        ordered: whether one instance takes all frames, in order, so that its stage has no replicas. An encoder of video
            is such an operator.
        carried: its state: tensors that it reads, and the output that each is in the next frame; see `state_loops.py`.

    Examples:
        >>> conv = Operator("conv", "conv2d+relu", ("image",), (Tensor("features", (1, 8, 8, 4)),), param_bytes=432)
        >>> conv.output_bytes
        1024
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[Tensor, ...]
    param_bytes: int = 0
    macs: int = 0
    ordered: bool = False
    carried: tuple[tuple[Tensor, str], ...] = ()

    @property
    def output_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.outputs)

    @property
    def is_host(self) -> bool:
        """Whether it is work of an application around its model: ordered, and no loop of the model's own."""
        return self.ordered and not self.carried


class _ComputedOnce:
    """The slots for figures that an OperatorGraph computes once and keeps.

    They are slots of a base class, and not fields, so that files, `==`, copies and pickles leave them out.
    """

    __slots__ = ("_edges", "_fingerprint", "_hash", "_tensors")
    _edges: Edges
    _fingerprint: str
    _hash: int
    _tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class OperatorGraph(_ComputedOnce):
    """Operators in a topological order, with the model's inputs and outputs.

    Attributes:
        batch: how many frames a call computes. The graph is that of one frame; the tensors of a call have the frames in
            their first axis.

    Raises GraphError when a name is not unique or cannot stand on a line of a plan, a tensor is read before it
    is written (a cycle, or a wrong order), or a figure is impossible.

    Examples:
        >>> image, hidden, label = Tensor("image", (8,)), Tensor("hidden", (4,)), Tensor("label", (2,))
        >>> first = Operator("first", "dense", ("image",), (hidden,), param_bytes=128, macs=32)
        >>> second = Operator("second", "dense", ("hidden",), (label,), param_bytes=32, macs=8)
        >>> graph = OperatorGraph("net", (image,), (first, second), ("label",))
        >>> len(graph), graph.edges.before
        (2, ((), (0,)))
        >>> OperatorGraph("net", (image,), (second, first), ("label",))
        Traceback (most recent call last):
            ...
        tvm_pipeline.errors.GraphError: graph net: operator second reads hidden, which nothing before it writes; ...
    """

    name: str
    inputs: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    outputs: tuple[str, ...]
    batch: int = 1

    def __post_init__(self) -> None:
        if len(self.operators) > MOST_OPERATORS:
            raise GraphError(
                f"graph {self.name} has {len(self.operators)} operators, and plans are made for up to "
                f"{MOST_OPERATORS}; merge some, as compilers fuse kernels"
            )
        known = {tensor.name for tensor in self.inputs}
        if len(known) != len(self.inputs):
            raise GraphError(f"graph {self.name}: two inputs bear the same name")
        if len(set(self.operator_names)) != len(self.operators):
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
            if not (0 <= operator.param_bytes <= MOST and 0 <= operator.macs <= MOST):
                raise GraphError(
                    f"graph {self.name}: operator {operator.name} has a negative size, or one beyond {MOST}: "
                    f"param_bytes {operator.param_bytes}, macs {operator.macs}"
                )
            for tensor in operator.outputs:
                if tensor.name in known:
                    raise GraphError(f"graph {self.name}: tensor {tensor.name} is written twice")
                self._check_tensor(tensor)
                known.add(tensor.name)
        for output in self.outputs:
            if output not in known:
                raise GraphError(f"graph {self.name}: nothing writes the output {output}")
        if self.batch != 1:
            self._check_batch()

    def _check_batch(self) -> None:
        if self.batch < 1:
            raise GraphError(f"graph {self.name}: a call computes {self.batch} frames; give `batch` 1 or more")
        if carrying := next((operator.name for operator in self.operators if operator.carried), None):
            raise GraphError(f"graph {self.name}: operator {carrying} hands a state on, so a call computes one frame")

    def _check_tensor(self, tensor: Tensor) -> None:
        if fault := tensor_fault(tensor.shape, tensor.dtype):
            raise GraphError(f"graph {self.name}: tensor {tensor.name} has {fault}")

    def __len__(self) -> int:
        return len(self.operators)

    def __hash__(self) -> int:
        """Return the hash of the fields; caches with graphs as keys need it at every look-up."""
        try:
            return self._hash
        except AttributeError:
            value = hash((self.name, self.inputs, self.operators, self.outputs, self.batch))
            object.__setattr__(self, "_hash", value)
            return value

    @property
    def operator_names(self) -> list[str]:
        """The names of the operators, in the graph's order."""
        return [operator.name for operator in self.operators]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor by name: the model's inputs, then the outputs of the operators, in the graph's order."""
        try:
            return self._tensors
        except AttributeError:
            written = (tensor for operator in self.operators for tensor in operator.outputs)
            tensors = {tensor.name: tensor for tensor in (*self.inputs, *written)}
            object.__setattr__(self, "_tensors", tensors)
            return tensors

    @property
    def edges(self) -> Edges:
        """The writer and the readers of each tensor, and the neighbours of each operator."""
        try:
            return self._edges
        except AttributeError:
            edges = Edges.of(self)
            object.__setattr__(self, "_edges", edges)
            return edges

    @property
    def fingerprint(self) -> str:
        """The hash of the structure and the sizes, the same for every order of the operators.

        A profile names the measured graph by its fingerprint.
        """
        try:
            return self._fingerprint
        except AttributeError:
            by_name = sorted(self.operators, key=lambda operator: operator.name)
            unordered = (self.name, self.inputs, [_hashed(operator) for operator in by_name], self.outputs)
            fingerprint = hashlib.sha256(msgspec.json.encode(unordered)).hexdigest()[:16]
            object.__setattr__(self, "_fingerprint", fingerprint)
            return fingerprint


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """The edges of an OperatorGraph. Operators are indices into `graph.operators`; lists of them ascend.

    Attributes:
        index: the index of each operator, by the operator's name.
        writer: the operator that writes a tensor, by the tensor's name; inputs of the model have none and are missing.
        readers: the operators that read a tensor, each once, by the tensor's name in the order of `graph.tensors`.
        before: for each operator, the operators that write its inputs.
        after: for each operator, the operators that read its outputs.

    Examples:
        >>> source, left = Tensor("source", (2,)), Tensor("left", (2,))
        >>> a = Operator("a", "relu", ("source",), (left,))
        >>> b = Operator("b", "add", ("source", "left"), (Tensor("sum", (2,)),))
        >>> edges = OperatorGraph("net", (source,), (a, b), ("sum",)).edges
        >>> edges.writer, edges.readers
        ({'left': 0, 'sum': 1}, {'source': (0, 1), 'left': (1,), 'sum': ()})
        >>> edges.before, edges.after
        (((), (0,)), ((1,), ()))
    """

    index: Mapping[str, int]
    writer: Mapping[str, int]
    readers: Mapping[str, tuple[int, ...]]
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, graph: OperatorGraph) -> Edges:
        """Return the edges of a graph."""
        writer = {tensor.name: index for index, operator in enumerate(graph.operators) for tensor in operator.outputs}
        readers: dict[str, list[int]] = {name: [] for name in graph.tensors}
        before = []
        for index, operator in enumerate(graph.operators):
            for read in dict.fromkeys(operator.inputs):
                readers[read].append(index)
            before.append(tuple(sorted({writer[read] for read in operator.inputs if read in writer})))
        return cls(
            {operator.name: index for index, operator in enumerate(graph.operators)},
            writer,
            {name: tuple(found) for name, found in readers.items()},
            tuple(before),
            tuple(map(tuple, successors(before))),
        )


def _hashed(operator: Operator) -> dict[str, object]:
    """Return the fields of an operator that its graph's fingerprint covers: these two only where they say anything."""
    fields = {name: getattr(operator, name) for name in Operator.__slots__}
    return {name: value for name, value in fields.items() if value or name not in ("ordered", "carried")}


def _fits_a_line(name: str) -> bool:
    return bool(name) and name.isprintable() and name == name.strip() and not name.startswith("#")


def crossing_tensors(graph: OperatorGraph, groups: Sequence[Iterable[str]]) -> list[list[Tensor]]:
    """Return the tensors that cross each boundary of consecutive groups of operators.

    Boundary 0 lies before the first group, boundary k after group k-1. A tensor is handed from group to group
    until it reaches its last reader, so it is listed once at every boundary that it crosses. The model's outputs cross
    every boundary behind their writer.

    Args:
        groups: names of operators; every operator of the graph is in one group.

    Returns:
        `len(groups) + 1` lists, each in the order in which the tensors are written.

    Raises:
        GraphError: an operator reads a tensor that a later group writes.

    Examples:
        >>> source, left = Tensor("source", (2,)), Tensor("left", (2,))
        >>> a = Operator("a", "relu", ("source",), (left,))
        >>> b = Operator("b", "add", ("source", "left"), (Tensor("sum", (2,)),))
        >>> graph = OperatorGraph("net", (source,), (a, b), ("sum",))
        >>> [[tensor.name for tensor in boundary] for boundary in crossing_tensors(graph, [["a"], ["b"]])]
        [['source'], ['source', 'left'], ['sum']]
    """
    edges, group = graph.edges, _group_of(graph, groups)
    for index, sources in enumerate(edges.before):
        for source in sources:
            if group[source] > group[index]:
                reader, written = graph.operators[index], {tensor.name for tensor in graph.operators[source].outputs}
                read = next(name for name in reader.inputs if name in written)
                raise GraphError(
                    f"operator {reader.name} of stage {group[index]} reads {read}, which a later stage writes"
                )
    kept, writer = set(graph.outputs), edges.writer
    boundaries: list[list[Tensor]] = [[] for _ in range(len(groups) + 1)]
    for name, readers in edges.readers.items():
        if name in kept:
            last = len(groups)
        elif readers:
            last = max([group[reader] for reader in readers])
        else:
            continue
        first = group[writer[name]] + 1 if name in writer else 0
        if first <= last:
            tensor = graph.tensors[name]
            for boundary in range(first, last + 1):
                boundaries[boundary].append(tensor)
    return boundaries


def readers_of(graph: OperatorGraph) -> dict[str, tuple[str, ...]]:
    """Return for each operator the operators that read its outputs, each once, in the graph's order.

    Examples:
        >>> a = Operator("a", "input", (), (Tensor("x", (2,)),))
        >>> b = Operator("b", "relu", ("x",), (Tensor("y", (2,)),))
        >>> readers_of(OperatorGraph("net", (), (a, b), ("y",)))
        {'a': ('b',), 'b': ()}
    """
    names = graph.operator_names
    return {
        name: tuple(names[reader] for reader in found) for name, found in zip(names, graph.edges.after, strict=True)
    }


def handed_on_bytes(graph: OperatorGraph, groups: Sequence[Iterable[str]]) -> list[int]:
    """Return the bytes that operators hand on across each of the `len(groups) - 1` boundaries between groups.

    A tensor counts once at every boundary between its writer and its last reader, however many readers it has; the
    model's own inputs and outputs do not count.

    This is what devices move that hand tensors on in a chain. Objective (3) of Yin et al., SEC 2022, counts otherwise:
    see `edge_communication_bytes`.

    Args:
        groups: names of operators; every operator of the graph is in one group, and the groups are in a legal order.

    Examples:
        >>> a = Operator("a", "input", (), (Tensor("x", (2,), "int8"),))
        >>> b = Operator("b", "relu", ("x",), (Tensor("y", (3,), "int8"),))
        >>> c = Operator("c", "concat", ("x", "y"), (Tensor("z", (5,), "int8"),))
        >>> handed_on_bytes(OperatorGraph("net", (), (a, b, c), ("z",)), [["a"], ["b"], ["c"]])
        [2, 5]
    """
    edges, group = graph.edges, _group_of(graph, groups)
    change = [0] * (len(groups) + 1)
    for index, operator in enumerate(graph.operators):
        for tensor in operator.outputs:
            last = max((group[reader] for reader in edges.readers[tensor.name]), default=group[index])
            if last > group[index]:
                size = tensor.bytes
                change[group[index]] += size
                change[last] -= size
    return list(accumulate(change))[: len(groups) - 1]


def edge_bytes(graph: OperatorGraph) -> dict[tuple[int, int], int]:
    """Return the bytes that the reader of each edge reads from its writer, by the indices of the two operators.

    Example:
        >>> a = Operator("a", "split", (), (Tensor("x", (2,), "int8"), Tensor("y", (3,), "int8")))
        >>> b = Operator("b", "add", ("x", "y", "x"), (Tensor("z", (2,), "int8"),))
        >>> edge_bytes(OperatorGraph("net", (), (a, b), ("z",)))
        {(0, 1): 5}
    """
    edges = graph.edges
    sizes: dict[tuple[int, int], int] = {}
    for name, writer in edges.writer.items():
        size = graph.tensors[name].bytes
        for reader in edges.readers[name]:
            sizes[writer, reader] = sizes.get((writer, reader), 0) + size
    return sizes


def edge_communication_bytes(graph: OperatorGraph, groups: Sequence[Iterable[str]]) -> list[int]:
    """Return the bytes that edges bring into each of the `len(groups) - 1` groups behind the first.

    This is objective (3) of Yin et al., SEC 2022. Their equations 9 and 10, with s the stage of an operator and t_e the
    bytes of edge e from operator i to operator j:

        com_{k,k+1} = sum over edges e of t_e * alpha_e,    alpha_e = 1 where s_i != s_j and s_j = k + 1, else 0

    So an edge counts once, at the boundary in front of its reader's stage, however many stages it skips. A tensor with
    two readers in that stage counts twice. `handed_on_bytes` counts what devices in a chain move. (Equation 10 is
    printed with the index i in places where the text above it has j. The text is what is counted here.)

    Args:
        groups: names of operators; every operator of the graph is in one group, and the groups are in a legal order.

    Example:
        Group 1 receives x for two readers, and z skips it.

        >>> a = Operator("a", "split", (), (Tensor("x", (2,), "int8"), Tensor("z", (7,), "int8")))
        >>> b, c = (Operator(name, "relu", ("x",), (Tensor(f"{name}_out", (1,), "int8"),)) for name in "bc")
        >>> d = Operator("d", "concat", ("b_out", "c_out", "z"), (Tensor("y", (9,), "int8"),))
        >>> graph, groups = OperatorGraph("net", (), (a, b, c, d), ("y",)), [["a"], ["b", "c"], ["d"]]
        >>> edge_communication_bytes(graph, groups), handed_on_bytes(graph, groups)
        ([4, 9], [9, 9])
    """
    group, received = _group_of(graph, groups), [0] * len(groups)
    for (writer, reader), size in edge_bytes(graph).items():
        if group[writer] != group[reader]:
            received[group[reader]] += size
    return received[1:]


def _group_of(graph: OperatorGraph, groups: Sequence[Iterable[str]]) -> list[int]:
    """Return the group of each operator, in the graph's order."""
    group_of = {name: group for group, names in enumerate(groups) for name in names}
    return [group_of[operator.name] for operator in graph.operators]
