"""How large the integers of an ONNX graph can be: an engine that computes them in float32 is right for small ones only.

Indices and extents are small, whatever the frame is, and so is much of what a network computes from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tvm_pipeline.frontends.onnx_graph import OnnxGraph

_OF_TYPE = {"bool": 1, "int8": 1 << 7, "uint8": (1 << 8) - 1, "int16": 1 << 15, "uint16": (1 << 16) - 1}
_FOLLOWED = ("int32", "int64")
# The numbers that they give are no larger than those of the first input, or than those of all.
_AS_FIRST = frozenset(
    [
        *("Abs", "Cast", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Neg", "Relu"),
        *("Reshape", "ReverseSequence", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
    ]
)
_AS_ANY = frozenset(("Clip", "Concat", "Max", "Min", "Range", "Where"))


def magnitudes(file: OnnxGraph, known: Mapping[str, float]) -> dict[str, float]:
    """Return bounds on the absolute values of tensors of int32 and int64; tensors without a bound are left out.

    The graph is walked once, from its inputs to its outputs (interval arithmetic, with intervals around 0: R. E. Moore,
    "Interval Analysis", 1966). A number that overflows is smaller than its bound.

    Args:
        known: bounds of inputs of the graph.
    """
    found = dict(known)

    def most(name: str) -> float:
        if name not in found and file.dtype(name) in _FOLLOWED and (array := file.constant(name)) is not None:
            found[name] = float(np.abs(array.astype(np.float64)).max(initial=0))
        return found.get(name, _OF_TYPE.get(file.dtype(name), math.inf))

    for label in file.indices:
        for node in file.nodes(label):
            bound = _bound(node, file, most) if node.domain in ("", "ai.onnx") else math.inf
            for name in node.output[1:] if node.op_type == "TopK" else node.output:
                if bound < math.inf and file.dtype(name) in _FOLLOWED:
                    found[name] = bound
    return found


def _bound(node: Any, file: OnnxGraph, most: Callable[[str], float]) -> float:
    """Return a bound on the integers that a node gives; infinite where there is none."""
    kind, numbers = str(node.op_type), [most(name) for name in node.input if name]
    shape = file.shape(node.input[kind == "NonMaxSuppression"]) if numbers else ()
    match kind:
        case "ArgMax" | "ArgMin" | "NonMaxSuppression" | "NonZero" | "Shape" | "TopK" if shape:
            return max(shape)
        case "Add" | "Sub":
            return sum(numbers)
        case "Mul":
            return math.prod(numbers)
        case "Div" | "Mod" if (divisor := file.constant(node.input[1])) is not None and divisor.all():
            return numbers[kind == "Mod"]
        case "ReduceMax" | "ReduceMin" if shape and 0 not in shape:
            return numbers[0]
        case "ReduceSum" if shape:
            return numbers[0] * math.prod(shape)
    if kind in _AS_FIRST:
        return numbers[0]
    return max(numbers) if kind in _AS_ANY else math.inf
