"""Concatenations of a .tflite done in parts: the file is rewritten so that no operator has to make them.

    CONV_2D(CONCATENATION(x, y))            ->  ADD(CONV_2D(x), CONV_2D(y))            float32
    DEPTHWISE_CONV_2D(CONCATENATION(x, y))  ->  CONCATENATION(DEPTHWISE_CONV_2D(x), DEPTHWISE_CONV_2D(y))

Weights are cut along their channels. The last convolution has the bias, and the last ADD the fused activation.
Operators that compute each channel by itself may stand between. It is the rewriting of `memory/rewriting.py`, as
`concatenations.py` of TVM's backend has it for modules. An exact sum of int8 products needs int32, and TFLite has no
convolution with such an output, so convolutions in int8 stay whole. Next: `ordering.py`, which orders the new file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import OptionError
from tvm_pipeline.frontends.tflite_resizing import packed
from tvm_pipeline_edgetpu.model import TYPES, indices, parse_for_kernels
from tvm_pipeline_edgetpu.ordering import least_peak_bytes, memory_ordered

_Op, _Options, _Activation = schema.BuiltinOperator, schema.BuiltinOptions, schema.ActivationFunctionType
_ALONE = {  # of one input, and each output channel is computed from one channel of it
    *(_Op.RELU, _Op.RELU6, _Op.RELU_N1_TO_1, _Op.LOGISTIC, _Op.TANH, _Op.HARD_SWISH, _Op.ELU, _Op.LEAKY_RELU),
    *(_Op.MAX_POOL_2D, _Op.AVERAGE_POOL_2D),
}
_WITH_CONSTANT = {_Op.ADD, _Op.MUL, _Op.SUB}

_NARROW = ("int8", "uint8", "int16")
_NUMPY: dict[int, Any] = {
    schema.TensorType.FLOAT32: np.float32,
    schema.TensorType.INT8: np.int8,
    schema.TensorType.UINT8: np.uint8,
    schema.TensorType.INT32: np.int32,
}
# A tensor in parts: the index and the channels of each part.
_Parts = list[tuple[int, int]]


class TfliteRewriting:
    """A .tflite and its concatenations; see `backends.contract.Rewriting`.

    Raises:
        ModelError: the file is damaged.
        OptionError: it is no .tflite, or it cannot be cut.
    """

    def __init__(self, model: Model) -> None:
        if model.format != "tflite":
            raise OptionError(
                f"`memory_rewrite`: TFLite rewrites .tflite files, and {model.name} is {model.format}",
                option="memory_rewrite",
            )
        self._model = model
        read = parse_for_kernels(Path(f"{model.name}.tflite"), model.content)
        if read.uncut:
            raise OptionError(
                f"`memory_rewrite`: {model.name} is one operator, since it cannot be cut: {read.uncut}; compile "
                "without it",
                option="memory_rewrite",
            )
        reading = _Reading(read.parsed)
        self._chosen: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        for index, operator in enumerate(reading.operators):
            name = f"concatenation_{index}"
            if not reading.is_concatenation(operator) or not reading.can_part(operator.outputs[0]):
                continue
            if reason := reading.obstacle(operator):
                self.refused[name] = reason
            else:
                self._chosen[name] = index
        self.names = tuple(self._chosen)
        self.is_quantized = any(TYPES.get(reading.tensors[i].type) in _NARROW for i in reading.computed)

    def peak_bytes(self, chosen: Sequence[str]) -> int:
        return least_peak_bytes(self._content(chosen))

    def rewritten(self, chosen: Sequence[str]) -> Model:
        """Return the rewritten file, with its operators in the order of least memory."""
        return replace(self._model, content=memory_ordered(self._content(chosen)))

    def _content(self, chosen: Sequence[str]) -> bytes:
        if not chosen:
            return self._model.content
        parsed = schema.ModelT.InitFromPackedBuf(self._model.content, 0)
        _Writing(_Reading(parsed), {self._chosen[name] for name in chosen}).run()
        _drop_unused(parsed)
        return packed(parsed)


class _Reading:
    """The operators of a parsed file, the readers of each tensor, and what can be read in parts."""

    def __init__(self, parsed: Any) -> None:
        self.parsed, subgraph = parsed, parsed.subgraphs[0]
        self.subgraph, self.tensors, self.operators = subgraph, subgraph.tensors, subgraph.operators
        self.outputs = set(indices(subgraph.outputs))
        self.computed = {*indices(subgraph.inputs), *(i for o in self.operators for i in indices(o.outputs))}
        self.readers: dict[int, list[int]] = {}
        for index, operator in enumerate(self.operators):
            for tensor in dict.fromkeys(indices(operator.inputs)):
                self.readers.setdefault(tensor, []).append(index)

    def code(self, operator: Any) -> int:
        code = self.parsed.operatorCodes[operator.opcodeIndex]
        return int(max(code.builtinCode, code.deprecatedBuiltinCode))

    def shape(self, tensor: int) -> list[int]:
        return indices(self.tensors[tensor].shape)

    def data(self, tensor: int) -> Any | None:
        """Return the values of a constant in its shape; None where it is computed, or of another type."""
        stored = self.tensors[tensor]
        data = self.parsed.buffers[stored.buffer].data
        if tensor in self.computed or data is None or stored.type not in _NUMPY:
            return None
        values = np.frombuffer(bytes(data), _NUMPY[stored.type])
        return values.reshape(self.shape(tensor)) if values.size == math.prod(self.shape(tensor)) else None

    def is_concatenation(self, operator: Any) -> bool:
        """Return whether it concatenates computed tensors of four axes along their channels, and no more."""
        if self.code(operator) != _Op.CONCATENATION:
            return False
        options, reads = operator.builtinOptions, indices(operator.inputs)
        rank = len(self.shape(operator.outputs[0]))
        along_channels = rank == 4 and options.axis % rank == rank - 1
        plain = options.fusedActivationFunction == _Activation.NONE and self.computed.issuperset(reads)
        return along_channels and plain and len(reads) > 1

    def can_part(self, tensor: int) -> bool:
        """Return whether the tensor is no output and all its readers can read its channels in parts."""
        readers = [self.operators[index] for index in self.readers.get(tensor, [])]
        return tensor not in self.outputs and bool(readers) and all(self._reads_parts(o, tensor) for o in readers)

    def _reads_parts(self, operator: Any, tensor: int) -> bool:
        code, others = self.code(operator), [i for i in indices(operator.inputs) if i not in (tensor, -1)]
        if code == _Op.CONCATENATION:
            return self.is_concatenation(operator)
        if indices(operator.inputs).count(tensor) != 1:
            return False
        if code in _ALONE:
            return True
        constants = [self.data(index) for index in others]
        if not others or any(values is None for values in constants):
            return False
        channels, of_weights = self.shape(tensor)[3], self.shape(others[0])
        if code == _Op.CONV_2D:
            return len(of_weights) == 4 and of_weights[3] == channels
        if code == _Op.DEPTHWISE_CONV_2D:
            return len(of_weights) == 4 and of_weights[3] % channels == 0
        per_channel = all(
            values.size in (1, channels) and values.shape[-1:] in ((), (1,), (channels,))
            for values in constants
            if values is not None
        )
        return code in _WITH_CONSTANT and per_channel and self.shape(operator.outputs[0]) == self.shape(tensor)

    def obstacle(self, concatenation: Any) -> str:
        """Return why a concatenation of a quantized file cannot be done in parts exactly; empty where it can."""
        made = concatenation.outputs[0]
        if self.tensors[made].type == schema.TensorType.FLOAT32:
            return ""
        if any(_scale(self.tensors[made]) != _scale(self.tensors[index]) for index in indices(concatenation.inputs)):
            return "its inputs have other scales than its output, so that it changes their values"
        kind = TYPES.get(self.tensors[made].type, "unknown")
        if kind not in ("int8", "uint8"):
            return f"it is of type {kind}; those of float32, int8 and uint8 are done in parts"
        waiting = [made]
        while waiting:
            for index in self.readers.get(waiting.pop(), []):
                operator = self.operators[index]
                if self.code(operator) == _Op.CONV_2D:
                    return (
                        f"a convolution reads it, exact sums of {kind} in parts need int32, and TFLite has no "
                        f"convolution from {kind} to int32"
                    )
                if self.can_part(operator.outputs[0]):
                    waiting.append(operator.outputs[0])
        return ""


def _scale(tensor: Any) -> tuple[list[float], list[int]]:
    found = tensor.quantization
    if found is None or found.scale is None:
        return [], []
    return list(map(float, found.scale)), indices(found.zeroPoint)


class _Writing:
    """Rewrites a parsed file operator by operator, in the order of the file."""

    def __init__(self, reading: _Reading, chosen: set[int]) -> None:
        self.reading, self.chosen = reading, chosen
        self.tensors, self.buffers = reading.tensors, reading.parsed.buffers
        self.parts: dict[int, _Parts] = {}
        self.made: list[Any] = []

    def run(self) -> None:
        for index, operator in enumerate(list(self.reading.operators)):
            reads = indices(operator.inputs)
            if index in self.chosen:
                parts = [part for tensor in reads for part in self.parts.get(tensor, [(tensor, self.channels(tensor))])]
                self.parts[operator.outputs[0]] = parts
            elif self.reading.code(operator) == _Op.CONCATENATION and not self.parts.keys().isdisjoint(reads):
                operator.inputs = [part for tensor in reads for part, _ in self.parts.get(tensor, [(tensor, 0)])]
                self.made.append(operator)
            elif not self.parts.keys().isdisjoint(reads):
                self.in_parts(operator, next(tensor for tensor in reads if tensor in self.parts))
            else:
                self.made.append(operator)
        self.reading.subgraph.operators = self.made

    def channels(self, tensor: int) -> int:
        return self.reading.shape(tensor)[-1]

    def in_parts(self, operator: Any, source: int) -> None:
        """Write an operator that reads `source` once for each part of it."""
        parts, output = self.parts[source], int(operator.outputs[0])
        if self.reading.code(operator) == _Op.CONV_2D:
            self.summed(operator, parts, output)
            return
        ratio = self.channels(output) // self.channels(source)  # the multiplier of a depthwise convolution
        made, start = [], 0
        for number, (part, count) in enumerate(parts):
            ends = slice(start * ratio, (start + count) * ratio)
            tensor = self.like(output, f"[{number}]", count * ratio)
            own = [part if i == source else self.cut(i, ends, self.channels(output)) for i in indices(operator.inputs)]
            self.add(operator, own, tensor)
            made.append((tensor, count * ratio))
            start += count
        if self.reading.can_part(output):
            self.parts[output] = made
        else:
            options = schema.ConcatenationOptionsT(axis=3, fusedActivationFunction=_Activation.NONE)
            self.append(_Op.CONCATENATION, _Options.ConcatenationOptions, options, [t for t, _ in made], output)

    def summed(self, operator: Any, parts: _Parts, output: int) -> None:
        """Write a convolution as partial ones and their sum, the widest part first; bias and activation come last.

        The sum of the parts before is alive beside every part but the first, so the widest goes without it. TFLite
        demands a bias of every convolution of floats, so the others add zeros.
        """
        _, weights, *bias = indices(operator.inputs)
        activation = operator.builtinOptions.fusedActivationFunction
        starts = np.cumsum([0, *(count for _, count in parts)])
        order = sorted(range(len(parts)), key=lambda number: -parts[number][1])
        zeros = self.constant(weights, "[no bias]", np.zeros(self.reading.shape(weights)[0], np.float32))
        values, total = self.reading.data(weights), -1
        for number in order:
            (part, count), is_last = parts[number], number == order[-1]
            own = np.ascontiguousarray(values[..., starts[number] : starts[number] + count])  # type: ignore[index]
            reads = [part, self.constant(weights, f"[{number}]", own), *(bias if is_last else [zeros])]
            product = self.like(output, f"[{number}]", self.channels(output))
            one = copy(operator)
            one.builtinOptions = copy(operator.builtinOptions)
            one.builtinOptions.fusedActivationFunction = _Activation.NONE
            self.add(one, reads, product)
            if total < 0:
                total = product
                continue
            made = output if is_last else self.like(output, f"[sum {number}]", self.channels(output))
            options = schema.AddOptionsT(fusedActivationFunction=activation if is_last else _Activation.NONE)
            self.append(_Op.ADD, _Options.AddOptions, options, [total, product], made)
            total = made

    def cut(self, tensor: int, ends: slice, channels: int) -> int:
        """Return the channels `ends` of a constant; the constant itself where it has one value for all of them."""
        values = None if tensor == -1 else self.reading.data(tensor)
        if values is None or values.shape[-1:] != (channels,):
            return tensor
        made = self.constant(tensor, f"[{ends.start}]", np.ascontiguousarray(values[..., ends]))
        found = self.tensors[tensor].quantization
        if found is not None and found.scale is not None and len(found.scale) == channels > 1:
            own = copy(found)
            own.scale = found.scale[ends]
            own.zeroPoint = None if found.zeroPoint is None else found.zeroPoint[ends]
            self.tensors[made].quantization = own
        return made

    def constant(self, like: int, suffix: str, values: Any) -> int:
        self.buffers.append(schema.BufferT(data=np.frombuffer(values.tobytes(), np.uint8)))
        made = self.copied(like, suffix, list(values.shape))
        self.tensors[made].buffer = len(self.buffers) - 1
        return made

    def like(self, tensor: int, suffix: str, channels: int) -> int:
        """Return a new tensor that is to be computed, with so many channels."""
        made = self.copied(tensor, suffix, [*self.reading.shape(tensor)[:-1], channels])
        self.tensors[made].buffer = 0
        return made

    def copied(self, tensor: int, suffix: str, shape: list[int]) -> int:
        new = copy(self.tensors[tensor])
        new.name, new.shape, new.shapeSignature = (new.name or b"") + suffix.encode(), shape, None
        self.tensors.append(new)
        return len(self.tensors) - 1

    def add(self, operator: Any, reads: list[int], output: int) -> None:
        one = copy(operator)
        one.inputs, one.outputs = reads, [output]
        self.made.append(one)

    def append(self, code: int, kind: int, options: Any, reads: list[int], output: int) -> None:
        codes = self.reading.parsed.operatorCodes
        found = next((i for i, c in enumerate(codes) if max(c.builtinCode, c.deprecatedBuiltinCode) == code), None)
        if found is None:
            found = len(codes)
            codes.append(schema.OperatorCodeT(deprecatedBuiltinCode=code, builtinCode=code, version=1))
        operator = schema.OperatorT(
            opcodeIndex=found, inputs=reads, outputs=[output], builtinOptionsType=kind, builtinOptions=options
        )
        self.made.append(operator)


def _drop_unused(parsed: Any) -> None:
    """Drop the tensors that no operator touches, and the constants of these."""
    subgraph = parsed.subgraphs[0]
    ends = {*indices(subgraph.inputs), *indices(subgraph.outputs)}
    used = {i for o in subgraph.operators for i in (*indices(o.inputs), *indices(o.outputs), *indices(o.intermediates))}
    kept = sorted((used | ends) - {-1})
    position = {index: new for new, index in enumerate(kept)} | {-1: -1}
    subgraph.tensors = [subgraph.tensors[index] for index in kept]
    subgraph.inputs = [position[index] for index in indices(subgraph.inputs)]
    subgraph.outputs = [position[index] for index in indices(subgraph.outputs)]
    for operator in subgraph.operators:
        operator.inputs = [position[index] for index in indices(operator.inputs)]
        operator.outputs = [position[index] for index in indices(operator.outputs)]
        operator.intermediates = [position[index] for index in indices(operator.intermediates)]
    for signature in parsed.signatureDefs or ():
        for named in (*(signature.inputs or ()), *(signature.outputs or ())):
            named.tensorIndex = position[named.tensorIndex]
    of_metadata = {entry.buffer for entry in parsed.metadata or ()}
    buffers = sorted({0, *of_metadata, *(tensor.buffer for tensor in subgraph.tensors)})
    place = {index: new for new, index in enumerate(buffers)}
    parsed.buffers = [parsed.buffers[index] for index in buffers]
    parsed.metadataBuffer = None
    for holder in (*subgraph.tensors, *(parsed.metadata or ())):
        holder.buffer = place[holder.buffer]
