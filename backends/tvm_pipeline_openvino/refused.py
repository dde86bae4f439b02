"""What OpenVINO computes otherwise than ONNX says, without a word: operators that it is not given, with the reason.

Found on the CPU by ONNX's own tests, and by numbers beyond 2**24, of OpenVINO 2026.4. What it computes of int32 and
int64 in float32 was right wherever operands and results were within 2**23: in a million divisions and remainders for
each pair of signs, most of them at a multiple of the divisor, also fused with other operators, and in 30 thousand
numbers of each operator that has a bound (`frontends/onnx_magnitudes.py`). Up to 2**24 `Mod` was wrong where the signs
differ, since it computes x - floor(x / y) * y, and beyond that all are. Next: `openvino_model.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tvm_pipeline.frontends.onnx_graph import OnnxGraph
from tvm_pipeline.frontends.onnx_inlining import all_nodes, named

_TYPES = {"float64": "float32", "uint32": "int32", "uint64": "int32"}  # in which it computes these
_BYTES = ("int8", "uint8")
_SATURATING = frozenset(("Abs", "Add", "Gemm", "MatMul", "Mean", "Mul", "Neg", "Pow", "Sub", "Sum"))
_INTEGERS = ("int32", "int64")
_IN_FLOAT32 = frozenset(
    [
        *("Clip", "Div", "Einsum", "Gemm", "MatMul", "MaxPool", "Mean", "Mod", "Pow", "PRelu", "Relu", "Resize"),
        *("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"),
        *("ReduceSumSquare", "ReverseSequence"),
    ]
)
_LARGEST = 1 << 23  # of integers that it computes in float32, and rightly
_LONGEST = (1 << 24) // 255**2  # sum of products of bytes, of those that float32 holds in any case


def refusals(file: OnnxGraph) -> dict[str, str]:
    """Return the operators of the graph that are not given to OpenVINO, each with the node and the reason.

    The types of tensors inside of control flow are not known, so only settings are looked at there.
    """
    found: dict[str, str] = {}
    for label in file.indices:
        for node in file.nodes(label):
            for inner in (node, *(each for attribute in node.attribute for each in all_nodes(attribute.g))):
                for reason in _reasons(inner, file):
                    found.setdefault(label, f"operator {inner.op_type} ({named(inner)}): OpenVINO {reason}")
    return found


def _reasons(node: Any, file: OnnxGraph) -> Iterator[str]:
    kind, first = node.op_type, node.input[0] if node.input else ""
    dtype, shape = file.dtype(first), file.shape(first)
    for name in (*node.input, *node.output):
        if file.dtype(name) in _TYPES:
            yield f"computes {file.dtype(name)} in {_TYPES[file.dtype(name)]}"
    if kind in _SATURATING and dtype in _BYTES:
        yield f"gives the largest {dtype} where ONNX's numbers wrap around"
    if kind in _IN_FLOAT32 and dtype in _INTEGERS:
        largest = max(file.magnitudes.get(name, math.inf) for name in (*node.input, *node.output) if name)
        if largest > _LARGEST:
            yield f"computes {dtype} in float32, and these may be larger than 2**23"
    if kind in ("MatMulInteger", "ConvInteger"):
        length = math.prod(file.shape(node.input[1])[1:] if kind == "ConvInteger" else shape[-1:])
        if length > _LONGEST:
            yield f"adds up {length} products in float32, which is exact up to 2**24"
    yield from _settings(node, file)


def _settings(node: Any, file: OnnxGraph) -> Iterator[str]:
    """Yield reasons that are in the kind and the attributes of a node, and in which inputs it has."""
    from onnx import helper

    settings = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}

    def has(index: int) -> bool:
        return len(node.input) > index and bool(node.input[index])

    match node.op_type:
        case "Attention":
            if settings.get("left_window_size", -1) >= 0 or settings.get("right_window_size", -1) >= 0:
                yield "ignores the window"
            if settings.get("is_causal") and has(4):
                yield "lays the causal mask otherwise where there are keys of the past"
        case "BitShift":
            yield "shifts by a product in float32"
        case "DFT" if has(2):
            yield "ignores an axis that is an input"
        case "LSTM" if has(7):
            yield "ignores the weights of peepholes"
        case "ReduceMax" | "ReduceMin" if 0 in file.shape(node.input[0]):
            yield "gives a finite number for the extreme of nothing"
        case "Resize":
            for name in ("antialias", "exclude_outside"):
                if settings.get(name):
                    yield f"computes {name} otherwise"
            if settings.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
                yield "reads behind the input with keep_aspect_ratio_policy"
            aligned = settings.get("coordinate_transformation_mode") == b"align_corners"
            if aligned and has(2) and not _is_whole(node, file):
                yield "computes align_corners otherwise where a scale gives no whole extent"
        case "RoiAlign" if settings.get("mode") == b"max":
            yield "computes mode max otherwise"
        case "SpaceToDepth" if settings.get("mode") == b"CRD":
            yield "ignores mode CRD"
        case "Tile" if file.constant(node.input[1]) is None:
            yield "reads other memory where the repeats are no constant"


def _is_whole(node: Any, file: OnnxGraph) -> bool:
    """Whether the scales of a Resize are constants that give whole extents."""
    scales, shape = file.constant(node.input[2]), file.shape(node.input[0])
    return scales is not None and len(scales) == len(shape) and all((shape * scales) % 1 == 0)
