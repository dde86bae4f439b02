"""The QNN operators that an Edge TPU takes, as Relay patterns: each matches one whole operator of a .tflite file.

TVM's importer makes a short chain of Relay calls of most TFLite operators, and `_CHAINS` says which. Next: `byoc.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tvm import relay
from tvm.relay.dataflow_pattern import DFPattern, is_constant, is_op, is_tuple, wildcard
from tvm.relay.op.contrib.register import register_pattern_table

COMPILER = "edgetpu"
_BYTES = ("int8", "uint8")

# The calls that the importer makes of each kind of operator, first call first; those with a `?` may be absent.
# Some kinds are missing: the importer does not take the int8 forms of l2_normalization and LSTMs, ignores the scales of
# PReLU, and makes as many calls of pack as there are inputs.
_CHAINS = {
    "add": "qnn.add clip?",
    "average_pool_2d": "cast nn.avg_pool2d cast clip?",
    "concatenation": "qnn.concatenate clip?",
    "conv_2d": "qnn.conv2d nn.bias_add? qnn.requantize clip?",
    "depthwise_conv_2d": "qnn.conv2d nn.bias_add? qnn.requantize clip?",
    "expand_dims": "expand_dims",
    "fully_connected": "reshape qnn.dense nn.bias_add? qnn.requantize clip? reshape?",
    "logistic": "qnn.dequantize sigmoid qnn.quantize",
    "max_pool_2d": "nn.max_pool2d clip?",
    "maximum": "maximum",
    "mean": "cast mean qnn.requantize",
    "minimum": "minimum",
    "mul": "qnn.mul clip?",
    "pad": "nn.pad",
    "quantize": "qnn.requantize",
    "reduce_max": "cast max qnn.requantize",
    "reduce_min": "cast min qnn.requantize",
    "relu": "clip qnn.requantize",
    "relu6": "clip qnn.requantize",
    "relu_n1_to_1": "clip qnn.requantize",
    "reshape": "reshape",
    "resize_bilinear": "qnn.dequantize image.resize2d qnn.quantize",
    "resize_nearest_neighbor": "image.resize2d",
    "slice": "strided_slice",
    "softmax": "qnn.dequantize nn.softmax qnn.quantize",
    "space_to_depth": "nn.space_to_depth",
    "split": "split",
    "squeeze": "squeeze",
    "strided_slice": "strided_slice reshape?",
    "sub": "qnn.subtract clip?",
    "sum": "cast sum qnn.requantize",
    "tanh": "qnn.dequantize tanh qnn.quantize",
    "transpose": "transpose",
    "transpose_conv": "qnn.conv2d_transpose nn.bias_add? qnn.requantize",
}
# The number of constants that follow the data of a call: weights, scales and zero points.
_CONSTANTS = {
    "nn.bias_add": 1,
    "nn.pad": 1,
    "qnn.add": 6,
    "qnn.concatenate": 2,
    "qnn.conv2d": 5,
    "qnn.conv2d_transpose": 5,
    "qnn.dense": 5,
    "qnn.dequantize": 2,
    "qnn.mul": 6,
    "qnn.quantize": 2,
    "qnn.requantize": 4,
    "qnn.subtract": 6,
}
_TWO_SIDES = ("maximum", "minimum", "qnn.add", "qnn.mul", "qnn.subtract")

# A name, a pattern, and a check of the last call of a match.
Entry = tuple[str, DFPattern, Callable[[relay.Expr], bool]]


def pattern_table(takes: Callable[[str, relay.Call], bool] = lambda kind, call: True) -> list[Entry]:
    """Return the table for MergeComposite; a composite's name is `edgetpu.` and the kind of operator of the .tflite.

    Args:
        takes: returns whether to take a match, given that kind and the last call of a match that computes in 8 bits.
            The table that TVM knows as `edgetpu` takes every match: without the file the ends of an operator are not
            known, so the longest chains come first.
    """

    def check(kind: str) -> Callable[[relay.Expr], bool]:
        return lambda last: _in_bytes(last.checked_type) and takes(kind, last)

    kinds = sorted(_CHAINS, key=lambda kind: -len(_CHAINS[kind].split()))
    return [(f"{COMPILER}.{kind}", _pattern(_CHAINS[kind].split()), check(kind)) for kind in kinds]


def fits(kind: str, calls: list[str]) -> bool:
    """Return whether the pattern of that kind takes Relay calls of all these operators."""
    return Counter(calls) <= Counter(_CHAINS[kind].replace("?", "").split())


def _pattern(chain: list[str]) -> DFPattern:
    pattern = _first(chain[0])
    for link in chain[1:]:
        name = link.rstrip("?")
        pattern = pattern.optional(_after(name)) if link.endswith("?") else _after(name)(pattern)
    return pattern


def _first(name: str) -> DFPattern:
    if name == "qnn.concatenate":
        return is_op(name)(is_tuple(None), is_tuple(None), is_tuple(None), *_constants(name))
    data = [wildcard() for _ in range(2 if name in _TWO_SIDES else 1)]
    return is_op(name)(*data, *_constants(name))


def _after(name: str) -> Callable[[DFPattern], DFPattern]:
    return lambda before: is_op(name)(before, *_constants(name))


def _constants(name: str) -> list[DFPattern]:
    # A pattern that occurs twice in another one matches the same expression twice, so each constant has its own.
    return [is_constant() for _ in range(_CONSTANTS.get(name, 0))]


def _in_bytes(type_: relay.Type) -> bool:
    fields = type_.fields if isinstance(type_, relay.TupleType) else [type_]
    return all(field.dtype in _BYTES for field in fields)


# TVM calls the function here, so all functions that it calls must be defined above.
register_pattern_table(COMPILER, pattern_table)
