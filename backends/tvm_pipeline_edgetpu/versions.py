"""Give edgetpu_compiler the versions of operators that it knows.

A file has, for each operator, the version of TFLite's kernel that it needs. edgetpu_compiler 16.0 is of July 2021, and
refuses a whole file for one version that it does not know. Some converters write more than an operator needs; what it
needs, tensorflow/lite/tools/versioning/op_version.cc says. Next: `compiler.py`, which calls the program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from tvm_pipeline.errors import ModelError
from tvm_pipeline.frontends.tflite_resizing import packed
from tvm_pipeline_edgetpu.model import KINDS, TfliteModel, indices, parse_model

# The highest versions that TFLite itself knew half a year after the compiler was made, and which it cannot exceed
# (tensorflow/lite/kernels/register.cc in commit 222ed27e of emgucv/tensorflow, of early 2022). CONV_2D is one lower, by
# a log of 16.0 in google-coral/edgetpu issue 631; logs of TRANSPOSE_CONV (issue 845) and EXP (google-coral/libedgetpu
# issue 71) agree.
NEWEST = {
    "add": 4, "average_pool_2d": 3, "batch_matmul": 4, "cast": 4, "concatenation": 3, "conv_2d": 5,
    "depthwise_conv_2d": 6, "dequantize": 5, "div": 2, "exp": 1, "expand_dims": 1, "fully_connected": 9, "gather": 5,
    "hard_swish": 1, "l2_normalization": 2, "leaky_relu": 2, "log": 1, "logistic": 3, "max_pool_2d": 3, "maximum": 4,
    "mean": 3, "minimum": 4, "mul": 5, "pack": 3, "pad": 4, "padv2": 4, "prelu": 1, "quantize": 3, "reduce_max": 3,
    "reduce_min": 3, "relu": 3, "relu6": 3, "relu_n1_to_1": 1, "reshape": 1, "resize_bilinear": 4,
    "resize_nearest_neighbor": 4, "rsqrt": 2, "slice": 5, "softmax": 3, "space_to_depth": 2, "split": 4, "split_v": 2,
    "squared_difference": 2, "squeeze": 2, "strided_slice": 6, "sub": 5, "sum": 2, "tanh": 3, "transpose": 5,
    "transpose_conv": 3, "unidirectional_sequence_lstm": 3, "unpack": 4,
}  # fmt: skip
_REMEDY = "Let another device run it, or convert the model with TensorFlow 2.8 or an earlier one"


def for_compiler(model: TfliteModel, operators: Collection[str], content: bytes) -> bytes:
    """Return the slice `content` of these operators with versions that the compiler knows, if they mean the same.

    Raises:
        ModelError: an operator needs a newer version; with its name, and why.
    """
    graph = model.parsed.subgraphs[0]
    is_newer = False
    for index, described in zip(model.stored, model.graph.operators, strict=True):
        newest, operator = NEWEST.get(described.kind), graph.operators[index]
        version = model.parsed.operatorCodes[operator.opcodeIndex].version
        if described.name in operators and newest is not None and version > newest:
            needed = _needed(described.kind, operator, graph.tensors)
            if isinstance(needed, str):
                raise ModelError(
                    f"operator {described.name}: edgetpu_compiler 16.0 knows {described.kind.upper()} up to version "
                    f"{newest}, and {model.name} has version {version}, because {needed}"
                )
            is_newer = True
    return _lowered(content) if is_newer else content


def file_for_compiler(name: str, content: bytes) -> bytes:
    """Return a whole file as `for_compiler` does; `name` is for messages."""
    model = parse_model(Path(f"{name}.tflite"), content)
    return for_compiler(model, model.graph.operator_names, content)


def _lowered(content: bytes) -> bytes:
    parsed = schema.ModelT.InitFromPackedBuf(content, 0)
    graph = parsed.subgraphs[0]
    for index, code in enumerate(parsed.operatorCodes):
        kind = KINDS[max(code.builtinCode, code.deprecatedBuiltinCode)]
        if code.version > NEWEST.get(kind, code.version):
            own = [operator for operator in graph.operators if operator.opcodeIndex == index]
            code.version = max(needed for o in own if isinstance(needed := _needed(kind, o, graph.tensors), int))
    return packed(parsed)


def _needed(kind: str, operator: Any, tensors: list[Any]) -> int | str:
    """Return a version that has all that an operator in 8 bits needs, or why no version that the compiler knows has."""
    reads = [tensors[index] for index in indices(operator.inputs) if index != -1]
    types = {tensor.type for tensor in (*reads, tensors[indices(operator.outputs)[0]])}
    if kind not in _RULES or not types <= {schema.TensorType.INT8, schema.TensorType.UINT8, schema.TensorType.INT32}:
        return f"of its types or options. {_REMEDY}"
    return _RULES[kind](operator, reads)


def _conv_2d(operator: Any, reads: list[Any]) -> int | str:
    return 3 if reads[0].shape[3] == reads[1].shape[3] else f"its channels are in groups. {_REMEDY}"


def _fully_connected(operator: Any, reads: list[Any]) -> int | str:
    if len(reads[1].quantization.scale) > 1:
        return (
            "its weights have a scale for each channel. Convert the model with "
            "`converter._experimental_disable_per_channel_quantization_for_dense_layers = True`"
        )
    return 6 if len(reads) == 2 else 5 if operator.builtinOptions.keepNumDims else 4


def _transpose_conv(operator: Any, reads: list[Any]) -> int | str:
    if operator.builtinOptions.fusedActivationFunction != schema.ActivationFunctionType.NONE:
        return (
            "it has a fused activation. Make that an operator of its own, or convert it with TensorFlow 2.12 or earlier"
        )
    return 3 if len(reads) == 4 else 2


_RULES: dict[str, Callable[[Any, list[Any]], int | str]] = {
    "conv_2d": _conv_2d,
    "depthwise_conv_2d": lambda operator, reads: 3,
    "fully_connected": _fully_connected,
    "transpose_conv": _transpose_conv,
}
