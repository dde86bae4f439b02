"""What a .tflite must have before TFLite's kernels see it: they end the process where it is not so.

A kernel reads its inputs and its options by their positions and types, which nothing checks. Next: `tflite.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tvm_pipeline.core.graph_limits import MOST_OPERATORS
from tvm_pipeline.errors import ModelError

# The inputs without which a kernel cannot run; those behind them, such as a bias, may be left out. Others need one.
_REQUIRED = {
    **dict.fromkeys(("ADD", "SUB", "MUL", "DIV", "MAXIMUM", "MINIMUM", "POW", "SQUARED_DIFFERENCE", "FLOOR_DIV"), 2),
    **dict.fromkeys(("FLOOR_MOD", "EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL"), 2),
    **dict.fromkeys(("LOGICAL_AND", "LOGICAL_OR", "BATCH_MATMUL", "PRELU", "GATHER", "GATHER_ND", "TOPK_V2"), 2),
    **dict.fromkeys(("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "CONV_3D", "EMBEDDING_LOOKUP"), 2),
    **dict.fromkeys(("PAD", "MIRROR_PAD", "TRANSPOSE", "MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD"), 2),
    **dict.fromkeys(("REDUCE_ANY", "REDUCE_ALL", "ARG_MAX", "ARG_MIN", "SPLIT", "TILE", "EXPAND_DIMS", "FILL"), 2),
    **dict.fromkeys(("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR", "BROADCAST_TO", "REVERSE_V2", "CUMSUM"), 2),
    **dict.fromkeys(("PADV2", "SLICE", "SPLIT_V", "SELECT", "SELECT_V2", "SPACE_TO_BATCH_ND", "BATCH_TO_SPACE_ND"), 3),
    **dict.fromkeys(("TRANSPOSE_CONV", "RANGE", "SCATTER_ND"), 3),
    **dict.fromkeys(("STRIDED_SLICE", "ONE_HOT", "SVDF"), 4),
    **dict.fromkeys(("VAR_HANDLE", "CALL_ONCE"), 0),
}
# Operators whose options are called otherwise than themselves.
_POOL = dict.fromkeys(("AVERAGE_POOL_2D", "MAX_POOL_2D", "L2_POOL_2D"), "Pool2DOptions")
_REDUCER = {name: "ReducerOptions" for name in _REQUIRED if name in ("MEAN", "SUM") or name.startswith("REDUCE_")}
_OPTIONS = {**_POOL, **_REDUCER}
_LARGEST_BYTES = 1 << 40  # of a tensor
_LONGEST_NAME = 1 << 16
_FOLD = 4  # how often the lists and names of a file may be as long as the file; they are shorter than it in honest ones


def check_lengths(path: Path, parsed: Any, size: int) -> None:
    """Check that the parts of a file do not lie on each other: a few bytes could be any number of operators.

    Args:
        path: the file, for messages alone.
        parsed: the file, as `tflite.Model`.
        size: bytes of the file.

    Raises:
        ModelError: they do, or the name of a tensor is too long. Damaged offsets raise what the schema raises.
    """
    left = _FOLD * size

    def take(length: int) -> None:
        nonlocal left
        left -= length
        if left < 0:
            raise ModelError(
                f"{path}: its lists and names are longer than the file, so they lie on each other; the file is "
                "damaged: convert or download the model again"
            )

    for place in range(parsed.SubgraphsLength()):
        graph = parsed.Subgraphs(place)
        count = graph.TensorsLength()
        if graph.OperatorsLength() > MOST_OPERATORS:
            raise ModelError(
                f"{path}: it has {graph.OperatorsLength()} operators, and up to {MOST_OPERATORS} are planned for; "
                "convert the model in parts"
            )
        take(4 * (count + graph.OperatorsLength() + graph.InputsLength() + graph.OutputsLength()))
        names = []
        for index in range(count):
            tensor = graph.Tensors(index)
            names.append(len(tensor.Name() or b""))
            take(4 * (tensor.ShapeLength() + tensor.ShapeSignatureLength()) + names[-1])
            if names[-1] > _LONGEST_NAME:
                raise ModelError(
                    f"{path}: the name of tensor {index} has {names[-1]} bytes, of up to {_LONGEST_NAME}; the file is "
                    "damaged: convert or download the model again"
                )
        for index in range(graph.OperatorsLength()):
            operator = graph.Operators(index)
            take(4 * (operator.InputsLength() + operator.OutputsLength()))
        for end in (*_numbers(graph, "Inputs"), *_numbers(graph, "Outputs")):
            take(names[end] if 0 <= end < count else 0)


def check_operators(tflite: Any, path: Path, parsed: Any) -> None:
    """Check what operators refer to and have.

    Args:
        tflite: the package of that name.
        path: the file, for messages alone.
        parsed: the file, as `tflite.Model`.

    Raises:
        ModelError: an operator names a tensor or an operator code that is not there, lacks an input, or has the options
            of another operator; a tensor has an unknown type or buffer. Damaged offsets raise what the schema raises.
    """
    kinds = {value: key for key, value in vars(tflite.BuiltinOperator).items() if key.isupper()}
    option_names = {value: key for key, value in vars(tflite.BuiltinOptions).items() if not key.startswith("_")}
    own_options = {_plain(key): key for key in option_names.values()}
    types = {value for key, value in vars(tflite.TensorType).items() if key.isupper()}

    def fault(reason: str) -> ModelError:
        return ModelError(f"{path}: {reason}; the file is damaged: convert or download the model again")

    codes = [parsed.OperatorCodes(index) for index in range(parsed.OperatorCodesLength())]
    numbers = [max(code.BuiltinCode(), code.DeprecatedBuiltinCode()) for code in codes]
    for number in numbers:
        if number not in kinds:
            raise ModelError(
                f"{path}: it has an operator of number {number}, which the installed package tflite does not know; "
                "upgrade that, or the file is damaged"
            )
    expected = [
        (kind.lower(), _REQUIRED.get(kind, 1), _OPTIONS.get(kind) or own_options.get(_plain(kind)))
        for kind in map(kinds.__getitem__, numbers)
    ]
    for place in range(parsed.SubgraphsLength()):
        graph = parsed.Subgraphs(place)
        count = graph.TensorsLength()
        for index in range(count):
            tensor = graph.Tensors(index)
            if tensor.Type() not in types:
                raise fault(f"tensor {index} has the type {tensor.Type()}, which does not exist")
            if tensor.Buffer() >= parsed.BuffersLength():
                raise fault(f"tensor {index} lies in buffer {tensor.Buffer()}, of {parsed.BuffersLength()}")
            _check_size(_numbers(tensor, "Shape"), index, fault)
        if any(not 0 <= index < count for index in (*_numbers(graph, "Inputs"), *_numbers(graph, "Outputs"))):
            raise fault(f"an input or output of it is a tensor that is not there (it has {count})")
        for index in range(graph.OperatorsLength()):
            operator = graph.Operators(index)
            if operator.OpcodeIndex() >= len(numbers):
                raise fault(f"operator {index} has the operator code {operator.OpcodeIndex()}, of {len(numbers)}")
            kind, required, wanted = expected[operator.OpcodeIndex()]
            reads, writes = _numbers(operator, "Inputs"), _numbers(operator, "Outputs")
            if any(not -1 <= read < count for read in reads) or any(not -1 <= write < count for write in writes):
                raise fault(f"operator {index} ({kind}) names a tensor that is not there (it has {count})")
            if len(reads) < required or -1 in reads[:required]:
                raise fault(f"operator {index} ({kind}) lacks one of the {required} inputs that it needs")
            given = option_names.get(operator.BuiltinOptionsType())
            if wanted and given not in ("NONE", wanted):
                raise fault(f"operator {index} ({kind}) has the options of another operator ({given})")


def _numbers(table: Any, field: str) -> list[int]:
    """Return a list of integers of a table."""
    found: list[int] = getattr(table, f"{field}AsNumpy")().tolist() if getattr(table, f"{field}Length")() else []
    return found


def _plain(name: str) -> str:
    return name.removesuffix("Options").replace("_", "").lower()


def _check_size(shape: list[int], index: int, fault: Any) -> None:
    size = 1
    for extent in shape:
        size *= max(extent, 1)
    if size > _LARGEST_BYTES:
        raise fault(f"tensor {index} has the shape {shape}")
