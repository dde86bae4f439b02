"""Find the operators of a TFLite file that an Edge TPU takes, without a call of edgetpu_compiler.

The rules are Google's published ones: "TensorFlow models on the Edge TPU", https://coral.ai/docs/edgetpu/models-intro,
sections "Model requirements" and "Supported operations", read from copies of 2019 to 2024; where copies differ, the
newest is followed. The checks need nothing but the file. The page also says that the compiler may refuse large reshapes
and some resizings, but not which ones, so the compiler's report decides. Next: `compiler.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from tvm_pipeline.errors import ModelError
from tvm_pipeline_edgetpu.model import TYPES, TfliteModel, indices

_BYTES = frozenset(("int8", "uint8"))
# The types of constants: weights, biases, and axes, shapes or paddings.
_CONSTANTS = _BYTES | {"int32", "int64"}
_QUANTISE = "quantise the model to int8 (post-training, full integer)"


class _Tensor(NamedTuple):
    """A tensor of the file; `constant` holds a constant's bytes, and is None where the tensor is computed."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    zero_point: int
    constant: NDArray[np.uint8] | None

    @property
    def values(self) -> NDArray[Any]:
        """The values of a constant as a flat array, which is empty where the tensor is computed."""
        raw = np.zeros(0, np.uint8) if self.constant is None else self.constant
        return raw.view(np.dtype(self.dtype).newbyteorder("<"))


class _Operator(NamedTuple):
    """An operator of the file; `data` are its inputs that may be computed, `parameters` those that must be constant."""

    name: str
    kind: str
    options: Any
    data: list[_Tensor]
    parameters: list[_Tensor]
    writes: list[_Tensor]


def unsupported(model: TfliteModel) -> dict[str, str]:
    """Return the names of the operators that an Edge TPU does not take, each with the reason.

    The compiler may leave further operators to the CPU: it also looks at sizes and precision, and without its
    multi-subgraph mode it leaves all operators behind the first one that it refuses.
    """
    reasons = {operator.name: _reason(operator) for operator in _operators(model)}
    return {name: reason for name, reason in reasons.items() if reason}


def check_quantised(model: TfliteModel, path: Path | str) -> None:
    """Check that an Edge TPU can run some operator of this file; messages call the file `path`.

    Raises:
        ModelError: no operator computes in 8-bit integers, or one of those that an Edge TPU knows mixes int8 with
            uint8; the message says how to convert the model.
    """
    types = {tensor.dtype for operator in model.graph.operators for tensor in operator.outputs}
    if not types & _BYTES:
        raise ModelError(
            f"{path}: it computes in {', '.join(sorted(types))}, and an Edge TPU only in int8 or uint8; convert it "
            "with full integer quantisation (in tf.lite.TFLiteConverter: optimizations = [tf.lite.Optimize.DEFAULT], a "
            "representative_dataset, and target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8])"
        )
    for operator in _operators(model):
        if operator.kind in _CHECKS and (mixed := _mixed(operator)):
            raise ModelError(f"{path}: operator {operator.name}: {mixed}")


def _operators(model: TfliteModel) -> Iterator[_Operator]:
    """Yield the operators of a file with all that the checks read."""
    subgraph = model.parsed.subgraphs[0]
    computed = {*indices(subgraph.inputs), *(i for o in subgraph.operators for i in indices(o.outputs))}
    tensors = [_tensor(model.parsed, tensor, index in computed) for index, tensor in enumerate(subgraph.tensors)]
    for index, described in zip(model.stored, model.graph.operators, strict=True):
        operator = subgraph.operators[index]
        kind = described.kind
        data: list[_Tensor] = []
        parameters: list[_Tensor] = []
        for position, index in enumerate(indices(operator.inputs)):
            if index != -1:  # an absent optional input
                is_data = kind in _ALL_DATA or position == _DATA.get(kind, 0)
                (data if is_data else parameters).append(tensors[index])
        writes = [tensors[index] for index in indices(operator.outputs)]
        yield _Operator(described.name, kind, operator.builtinOptions, data, parameters, writes)


def _tensor(parsed: Any, tensor: Any, computed: bool) -> _Tensor:
    data = parsed.buffers[tensor.buffer].data
    constant = None if computed else np.asarray([] if data is None else data, np.uint8)
    zero_points = indices(tensor.quantization.zeroPoint) if tensor.quantization else []
    name, shape = (tensor.name or b"").decode(), tuple(indices(tensor.shape))
    return _Tensor(name, shape, TYPES.get(tensor.type, "unknown"), zero_points[0] if zero_points else 0, constant)


def _reason(operator: _Operator) -> str | None:
    if operator.kind not in _CHECKS:
        return f"{operator.kind} is not among the operators that an Edge TPU takes"
    try:
        for check in (_types, _mixed, _parameters, _extents, _CHECKS[operator.kind]):
            if check is not None and (reason := check(operator)):
                return reason
    except (IndexError, AttributeError, ValueError, ZeroDivisionError):
        return f"it lacks an input or an option of a {operator.kind}; the file is damaged"
    return None


# The checks that hold for every operator.


def _types(operator: _Operator) -> str | None:
    others = sorted({tensor.dtype for tensor in (*operator.data, *operator.writes)} - _BYTES)
    if others:
        return f"its tensors are {', '.join(others)}; {_QUANTISE}"
    for tensor in operator.parameters:
        if tensor.dtype not in _CONSTANTS:
            return f"its parameter {tensor.name} is {tensor.dtype}; {_QUANTISE}"
    return None


def _mixed(operator: _Operator) -> str | None:
    tensors = (*operator.data, *operator.parameters, *operator.writes)
    if operator.kind != "quantize" and {tensor.dtype for tensor in tensors} >= _BYTES:
        return "it mixes int8 and uint8; convert the model with one of the two, or with a quantize operator between"
    return None


def _parameters(operator: _Operator) -> str | None:
    for tensor in operator.parameters:
        if tensor.constant is None:
            return f"its parameter {tensor.name} is computed, and has to be a constant"
    return None


def _extents(operator: _Operator) -> str | None:
    for tensor in (*operator.data, *operator.writes):
        if math.prod(tensor.shape[:-3]) != 1:
            return f"tensor {tensor.name} is {list(tensor.shape)}; only the three innermost extents may exceed 1"
    return None


# The checks of single operators; each docstring has the rule of the page.


def _activation(operator: _Operator) -> str | None:
    """Require that there is no fused activation function."""
    if getattr(operator.options, "fusedActivationFunction", 0) != schema.ActivationFunctionType.NONE:
        return "it has a fused activation; make that an operator of its own"
    return None


def _concatenation(operator: _Operator) -> str | None:
    """Require that an operator with a constant input has two inputs, and that the constant is all zeros."""
    constants = [tensor for tensor in operator.data if tensor.constant is not None]
    if constants and len(operator.data) > 2:
        return "it joins a constant with more than one other tensor"
    if any(np.any(tensor.values != tensor.zero_point) for tensor in constants):
        return "it joins a constant that is not all zeros"
    return _activation(operator)


def _dilation(operator: _Operator) -> str | None:
    """Require the same dilation in x and y."""
    height, width = operator.options.dilationHFactor, operator.options.dilationWFactor
    return None if height == width else f"it is dilated by {height} x {width}; both have to be equal"


def _fully_connected(operator: _Operator) -> str | None:
    """Require weights in the default format and a one-dimensional output."""
    if operator.options.weightsFormat != schema.FullyConnectedOptionsWeightsFormat.DEFAULT:
        return "its weights are in a shuffled format; convert the model with the default one"
    return _one_dimensional(operator.writes[0])


def _softmax(operator: _Operator) -> str | None:
    """Require one dimension of at most 16,000 elements."""
    tensor = operator.data[0]
    if math.prod(tensor.shape) > 16_000:
        return f"tensor {tensor.name} has {math.prod(tensor.shape)} elements; 16,000 are the most"
    return _one_dimensional(tensor)


def _one_dimensional(tensor: _Tensor) -> str | None:
    if math.prod(tensor.shape[:-1]) != 1:
        return f"tensor {tensor.name} is {list(tensor.shape)}; only the innermost extent may exceed 1"
    return None


def _axes(tensor: _Tensor, rank: int) -> set[int]:
    """Return the axes that a constant names, counted from the outermost."""
    return {int(axis) % rank for axis in tensor.values}


def _batch(axes: set[int], rank: int) -> str | None:
    return "it works along the batch axis" if rank > 1 and 0 in axes else None


def _reduction(operator: _Operator) -> str | None:
    """Refuse the batch axis; the page says so of ReduceMax, ReduceMin, Mean and Split, and Sum is treated alike."""
    rank = len(operator.data[0].shape)
    return _batch(_axes(operator.parameters[0], rank), rank)


def _mean(operator: _Operator) -> str | None:
    """Refuse the batch axis, and z where its extent is no multiple of 4."""
    shape = operator.data[0].shape
    if len(shape) - 1 in _axes(operator.parameters[0], len(shape)) and shape[-1] % 4:
        return f"it averages over {shape[-1]} channels, which is no multiple of 4"
    return _reduction(operator)


def _pack(operator: _Operator) -> str | None:
    """Refuse the batch axis."""
    rank = len(operator.writes[0].shape)
    return _batch({operator.options.axis % rank}, rank)


def _pad(operator: _Operator) -> str | None:
    """Refuse the batch axis."""
    padded = operator.parameters[0].values[:2].any()
    return _batch({0} if padded else set(), len(operator.data[0].shape))


def _prelu(operator: _Operator) -> str | None:
    """Require a one-dimensional alpha."""
    return _one_dimensional(operator.parameters[0])


def _squeeze(operator: _Operator) -> str | None:
    """Require that only leading extents of 1 are removed, so that the other extents keep their order in memory."""
    before, after = operator.data[0].shape, operator.writes[0].shape
    if _without_leading_ones(before) != _without_leading_ones(after):
        return f"it takes inner extents from {list(before)}; only leading ones can go"
    return None


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return next((shape[index:] for index, extent in enumerate(shape) if extent != 1), ())


def _strided_slice(operator: _Operator) -> str | None:
    """Require strides of 1, no ellipsis and no new axis."""
    strides = operator.parameters[2].values
    if np.any(strides != 1):
        return f"it strides by {strides.tolist()}; all have to be 1"
    if operator.options.ellipsisMask or operator.options.newAxisMask:
        return "it has an ellipsis or adds an axis"
    return None


# All inputs of these operators may be computed. Of other operators one input may: that of `_DATA`, or else the first.
_ALL_DATA = frozenset(
    ("add", "concatenation", "maximum", "minimum", "mul", "pack", "squared_difference", "sub"),
)
_DATA = {"split": 1, "transpose_conv": 2}

_CHECKS: dict[str, Callable[[_Operator], str | None] | None] = {
    "add": None,
    "average_pool_2d": _activation,
    "concatenation": _concatenation,
    "conv_2d": _dilation,
    "depthwise_conv_2d": _dilation,
    "expand_dims": None,
    "fully_connected": _fully_connected,
    "l2_normalization": None,
    "logistic": None,
    "max_pool_2d": _activation,
    "maximum": None,
    "mean": _mean,
    "minimum": None,
    "mul": None,
    "pack": _pack,
    "pad": _pad,
    "prelu": _prelu,
    "quantize": None,
    "reduce_max": _reduction,
    "reduce_min": _reduction,
    "relu": None,
    "relu6": None,
    "relu_n1_to_1": None,
    "reshape": None,
    "resize_bilinear": None,
    "resize_nearest_neighbor": None,
    "rsqrt": None,
    "slice": None,
    "softmax": _softmax,
    "space_to_depth": None,
    "split": _reduction,
    "squared_difference": None,
    "squeeze": _squeeze,
    "strided_slice": _strided_slice,
    "sub": None,
    "sum": _reduction,
    "tanh": None,
    "transpose": None,
    "transpose_conv": None,
    "unidirectional_sequence_lstm": None,
}
