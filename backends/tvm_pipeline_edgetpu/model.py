"""Read a TFLite file, check it, and make its operator graph.

The graph has the operators of the file in the order of the file. The name of an operator is its kind and its index
(`conv_2d_7`). Tensors keep the names of the file, because stages hand tensors on by name. Float files are accepted as
well: they can be cut, although an Edge TPU does not run them. Next: `slicer.py`.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.errors import GraphError, ModelError
from tvm_pipeline.files import read_bytes
from tvm_pipeline_edgetpu.work import macs

KINDS: dict[int, str] = {
    number: name.lower() for name, number in vars(schema.BuiltinOperator).items() if name.isupper()
}
TYPES: dict[int, str] = {number: name.lower() for name, number in vars(schema.TensorType).items() if name.isupper()}
_DTYPES = {"bool", "float16", "float32", "float64", "complex64", "complex128"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
# edgetpu_compiler replaces the operators that it takes by one custom operator of this name.
_COMPILED = "edgetpu-custom-op"
_UNPACKING = ("dequantize", "densify")
_STATE = frozenset(("var_handle", "read_variable", "assign_variable"))
# The schema's classes check nothing; a damaged file makes them raise one of these errors.
_DAMAGE = (struct.error, IndexError, ValueError, TypeError, AttributeError, OverflowError)


@dataclass(frozen=True, slots=True)
class TfliteModel:
    """A TFLite file that can be cut.

    Attributes:
        name: the name of the file without its ending.
        parsed: the file as the schema's `ModelT`; not to be changed.
        graph: the operator graph, in the order of the file.
        stored: the index in `parsed` of each operator of the graph; none where `uncut` is.
        unpacking: the indices of the other operators: they unpack weights, and every slice that reads these has them.
        uncut: why the file is one operator, and no slice of it can be made; empty for the others.
    """

    name: str
    parsed: Any
    graph: OperatorGraph
    stored: tuple[int, ...] = ()
    unpacking: tuple[int, ...] = ()
    uncut: str = ""


def read_model(path: Path | str) -> TfliteModel:
    """Read a .tflite file.

    An open batch (converters write a first extent of -1) is read as the extent in the file, which is 1.

    Raises:
        ModelError: the file is damaged or no TFLite file, was compiled for the Edge TPU already, has several
            subgraphs, custom operators or variable tensors, leaves a shape open, or gives two tensors one name; the
            message names the file, the operator and the tensor.
    """
    return parse_model(Path(path), read_bytes(path, ModelError))


def parse_model(path: Path, content: bytes) -> TfliteModel:
    """Parse the content of a .tflite file as `read_model` does; `path` names the file in messages."""
    if content[4:8] != b"TFL3":
        raise ModelError(f"{path}: not a TFLite file (the identifier TFL3 is missing)")
    try:
        parsed = schema.ModelT.InitFromPackedBuf(content, 0)
        reader = _Reader(path, parsed)
        return TfliteModel(path.stem, parsed, reader.graph(), reader.stored, reader.unpacking)
    except _DAMAGE as error:
        raise ModelError(f"{path}: a damaged TFLite file, perhaps cut short: {error}") from error


def parse_for_kernels(path: Path, content: bytes) -> TfliteModel:
    """Parse a file that only TFLite's kernels are to run: one that cannot be cut is one operator.

    Such files have control flow, a state between frames, or tensors whose extents depend on data. The operator of a
    file with a state takes all frames in order.

    Raises:
        ModelError: the file is damaged, has custom operators, or outputs of open extents.
    """
    try:
        return parse_model(path, content)
    except ModelError as error:
        reason = str(error).partition(": ")[2]
        if content[4:8] != b"TFL3":
            raise
        try:
            parsed = schema.ModelT.InitFromPackedBuf(content, 0)
            return TfliteModel(path.stem, parsed, _Reader(path, parsed, whole=True).whole(), uncut=reason)
        except _DAMAGE:
            raise error from None


def described(model: TfliteModel, tensor: Tensor) -> dict[str, Any]:
    """Return a tensor for JSON, with the scale and the zero point that turn its integers into real numbers."""
    shown: dict[str, Any] = {"name": tensor.name, "shape": tensor.shape, "dtype": tensor.dtype}
    for stored in model.parsed.subgraphs[0].tensors:
        parameters = stored.quantization
        if stored.name.decode() == tensor.name and parameters is not None and parameters.scale is not None:
            scales, zeros = list(map(float, parameters.scale)), indices(parameters.zeroPoint)
            if len(scales) == 1:  # a computed tensor has one scale; only constants have one for each channel
                shown |= {"scale": scales[0], "zero_point": zeros[0] if zeros else 0}
    return shown


def indices(vector: Iterable[int] | None) -> list[int]:
    """Return a vector of tensor indices as a list; an absent vector is empty, and -1 is an absent optional input."""
    return [] if vector is None else [int(index) for index in vector]


def file_ends(content: bytes) -> tuple[list[str], list[str]]:
    """Return the names of the inputs and of the outputs of a sound file in its own order."""
    subgraph = schema.ModelT.InitFromPackedBuf(content, 0).subgraphs[0]
    inputs, outputs = (
        [subgraph.tensors[i].name.decode() for i in ends] for ends in (subgraph.inputs, subgraph.outputs)
    )
    return inputs, outputs


class _Reader:
    """Checks a parsed file and makes its operator graph."""

    def __init__(self, path: Path, parsed: Any, *, whole: bool = False) -> None:
        self.path, self.parsed = path, parsed
        if len(parsed.subgraphs) != 1 and not whole:
            raise ModelError(f"{path}: it has {len(parsed.subgraphs)} subgraphs; only models with one can be cut")
        subgraph = parsed.subgraphs[0]
        self.tensors, self.operators = subgraph.tensors, subgraph.operators or []
        self.names = [(tensor.name or b"").decode() for tensor in self.tensors]
        self.inputs, self.outputs = indices(subgraph.inputs), indices(subgraph.outputs)
        if not self.operators or not self.inputs or not self.outputs:
            raise ModelError(f"{path}: the graph has no operators, no inputs or no outputs; convert the model again")
        self.computed = {*self.inputs, *(index for op in self.operators for index in indices(op.outputs))}
        self.stored: tuple[int, ...] = ()
        self.unpacking: tuple[int, ...] = ()
        self.unpacked_bytes: dict[int, int] = {}  # of the constants, by what they are unpacked to
        self.open_batch = any(self._signature(index)[:1] == (-1,) for index in self.inputs)

    def graph(self) -> OperatorGraph:
        self._check_buffers()
        kinds = [self._kind(index) for index in range(len(self.operators))]
        self._find_unpacking(kinds)
        names = Counter(self.names[index] for index in self.computed)
        for name, count in names.items():
            if count > 1:
                raise ModelError(
                    f"{self.path}: {count} tensors are called {name!r}, and stages hand tensors on by name; give "
                    "each a name of its own"
                )
        inputs = tuple(self._tensor(index) for index in self.inputs)
        operators = tuple(self._operator(index, kinds[index]) for index in self.stored)
        try:
            return OperatorGraph(self.path.stem, inputs, operators, tuple(self.names[index] for index in self.outputs))
        except GraphError as error:
            raise ModelError(f"{self.path}: its operators cannot be run in their order: {error}") from error

    def _find_unpacking(self, kinds: list[str]) -> None:
        """Tell operators that unpack constants, such as weights in float16, from those that read what is computed."""
        for index, kind in enumerate(kinds):
            reads, writes = indices(self.operators[index].inputs), indices(self.operators[index].outputs)
            if kind in _UNPACKING and self.computed.isdisjoint(reads) and not set(writes).intersection(self.outputs):
                self.unpacking += (index,)
                self.computed.difference_update(writes)
                self.unpacked_bytes |= dict.fromkeys(writes, sum(map(self._constant_bytes, reads)))
            else:
                self.stored += (index,)

    def whole(self) -> OperatorGraph:
        """Return the file as one operator."""
        self._check_buffers()
        kinds = [self._kind(index) for index in range(len(self.operators))]
        inputs = tuple(self._tensor(index) for index in self.inputs)
        outputs = tuple(self._tensor(index, ", an output,") for index in self.outputs)
        weights = sum(0 if buffer.data is None else len(buffer.data) for buffer in self.parsed.buffers)
        has_state = any(tensor.isVariable for graph in self.parsed.subgraphs for tensor in graph.tensors)
        ordered = has_state or not _STATE.isdisjoint(kinds)
        names = tuple(tensor.name for tensor in inputs)
        operator = Operator(f"{self.path.stem}_whole", "tflite", names, outputs, weights, ordered=ordered)
        return OperatorGraph(self.path.stem, inputs, (operator,), tuple(tensor.name for tensor in outputs))

    def _kind(self, index: int) -> str:
        """Return the kind of an operator; raise ModelError where it is not a builtin operator."""
        code = self.parsed.operatorCodes[self.operators[index].opcodeIndex]
        # Older files have only the narrow field; newer files have both, or a number that fits only the wide field.
        number = max(code.builtinCode, code.deprecatedBuiltinCode)
        kind = KINDS.get(number)
        if kind is None:
            raise ModelError(
                f"{self.path}: operator {index} has the number {number}, which the installed ai-edge-litert does not "
                "know; upgrade that, or the file is damaged"
            )
        if kind != "custom":
            return kind
        custom = (code.customCode or b"").decode()
        if custom == _COMPILED:
            raise ModelError(
                f"{self.path}: operator {index} is {custom}: edgetpu_compiler has compiled this file already; give the "
                ".tflite that it was made from"
            )
        raise ModelError(
            f"{self.path}: operator {index} is the custom operator {custom!r}; convert the model without it, and "
            "compute that part outside"
        )

    def _operator(self, position: int, kind: str) -> Operator:
        name, operator = f"{kind}_{position}", self.operators[position]
        reads = [index for index in indices(operator.inputs) if index != -1]
        writes = indices(operator.outputs)
        # Python would count a negative index from the end.
        if min(*reads, *writes, 0) < 0 or any(index < 0 for index in indices(operator.intermediates)):
            raise ModelError(f"{self.path}: operator {name} names a tensor that is not there; the file is damaged")
        for index in (*reads, *writes):
            if self.tensors[index].isVariable:
                raise ModelError(
                    f"{self.path}: tensor {self.names[index]} of operator {name} keeps a state between runs; such a "
                    "model cannot be cut"
                )
        constants = dict.fromkeys(index for index in reads if index not in self.computed)
        for index in constants:
            if math.prod(self._shape(index)) and not self._constant_bytes(index):
                raise ModelError(
                    f"{self.path}: operator {name} reads tensor {self.names[index]}, which nothing writes; the file is "
                    "damaged"
                )
        options = operator.builtinOptions
        window = options.filterHeight * options.filterWidth if isinstance(options, schema.Pool2DOptionsT) else 1
        return Operator(
            name,
            kind,
            tuple(dict.fromkeys(self.names[index] for index in reads if index in self.computed)),
            tuple(self._tensor(index, f" of operator {name}") for index in writes),
            sum(self._constant_bytes(index) for index in constants),
            macs(kind, [self._shape(index) for index in reads], [self._shape(index) for index in writes], window),
        )

    def _tensor(self, index: int, where: str = ", an input,") -> Tensor:
        """Return a computed tensor or an input; raise ModelError where its extents or its type are not known."""
        name, shape, signature = self.names[index], self._shape(index), self._signature(index)
        inner = signature[1:] if self.open_batch else signature
        if any(extent < 1 for extent in shape) or any(extent < 0 for extent in inner):
            raise ModelError(
                f"{self.path}: tensor {name}{where} has the open shape {list(signature or shape)}; convert the model "
                "with a fixed one"
            )
        dtype = TYPES.get(self.tensors[index].type, "unknown")
        if dtype not in _DTYPES:
            raise ModelError(f"{self.path}: tensor {name}{where} is of type {dtype}, which cannot cross between stages")
        return Tensor(name, shape, dtype)

    def _shape(self, index: int) -> tuple[int, ...]:
        return tuple(indices(self.tensors[index].shape))

    def _signature(self, index: int) -> tuple[int, ...]:
        return tuple(indices(self.tensors[index].shapeSignature))

    def _constant_bytes(self, index: int) -> int:
        if index in self.unpacked_bytes:
            return self.unpacked_bytes[index]
        data = self.parsed.buffers[self.tensors[index].buffer].data
        return 0 if data is None else len(data)

    def _check_buffers(self) -> None:
        for index, buffer in enumerate(self.parsed.buffers):
            if buffer.offset > 1:
                raise ModelError(
                    f"{self.path}: buffer {index} lies outside the model's own structure, as in files of more than "
                    "2 GB; these cannot be cut"
                )
        for tensor, name in zip(self.tensors, self.names, strict=True):
            if tensor.externalBuffer:
                raise ModelError(f"{self.path}: the weights of tensor {name} lie in another file; make it one file")
