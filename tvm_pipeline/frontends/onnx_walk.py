"""A walk over an ONNX file that says what TVM 0.19 cannot take of it: operator, node, why, and what to do.

It needs no TVM, so that a message names the file's own operator before minutes are spent. What is told here is no
error yet: another engine may take the model. Next: `onnx_control_flow.py`, which takes out what can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from onnx import TensorProto

from tvm_pipeline.frontends.onnx_control_flow import MOST_COPIES, MOST_IN_BRANCHES, MOST_NODES
from tvm_pipeline.frontends.onnx_inlining import all_nodes, named

# Operators of ONNX 1.16 that TVM's importer lacks, and those of other domains that it has; a test asks TVM.
LACKING = frozenset(
    [
        *("AffineGrid", "BlackmanWindow", "CenterCropPad", "Col2Im", "DeformConv", "Det", "GroupNormalization"),
        *("HammingWindow", "HannWindow", "ImageDecoder", "LpNormalization", "MelWeightMatrix", "RegexFullMatch"),
        *("STFT", "SequenceMap", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer"),
    ]
)
OF_OTHER_DOMAINS = frozenset(
    [
        *("ATen", "Adagrad", "Adam", "Affine", "Attention", "BiasGelu", "EmbedLayerNormalization", "FC", "FastGelu"),
        *("LinearRegressor", "MatMulInteger16", "Momentum", "ParametricSoftplus", "QAttention", "QGemm", "QLinearAdd"),
        *("QLinearAveragePool", "QLinearConcat", "QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearMul"),
        *("QLinearSigmoid", "QLinearSoftmax", "Scale", "ScaledTanh", "SkipLayerNormalization", "SpatialBN"),
    ]
)
_STRANGE_TYPES = ("STRING", "COMPLEX", "BFLOAT16", "FLOAT8", "FLOAT4", "INT4", "UINT4", "INT2", "UINT2")
_ELSE = "run it on another engine, or export the model without it"
_ADVICE = {
    "ai.onnx.ml": "it is classical machine learning and no network; run the model with onnxruntime",
    "com.microsoft": "onnxruntime has put it there; take the file from before onnxruntime optimised or quantised it",
}


def obstacles(model: Any) -> list[str]:
    """Return a line for each kind of operator or tensor that TVM's importer cannot take.

    A line names the operator, its first node by name (or by its first output) and how many more there are, why it will
    not work, and what to do.
    """
    found: dict[tuple[str, str], list[str]] = {}
    settings = _settings(model)
    for node in model.graph.node:
        why = _why(node, settings)
        if why:
            found.setdefault((node.op_type, why), []).append(named(node))
    lines = []
    for (kind, why), nodes in found.items():
        more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        lines.append(f"operator {kind} ({nodes[0]}{more}): {why}")
    return [*lines, *_types(model)]


def _why(node: Any, settings: Mapping[str, str]) -> str:
    """Return why TVM cannot take a node, and what to do; empty where it can."""
    kind = node.op_type
    if node.domain not in ("", "ai.onnx"):
        return (
            ""
            if kind in OF_OTHER_DOMAINS
            else f"TVM has none of the domain {node.domain}; {_ADVICE.get(node.domain, _ELSE)}"
        )
    if kind == "If":
        return _why_if(node, settings)
    if kind in ("Loop", "Scan"):
        turns = "its number of turns" if kind == "Loop" else "the extent of what it scans"
        return (
            f"{turns} depends on data or is over {MOST_COPIES}, or the copies of its body would be over {MOST_NODES} "
            "nodes, and no graph is run in loops; export the model with a fixed, small number of steps, or without the "
            "loop" + _binding(settings, node.input[:2])
        )
    if kind in LACKING:
        return f"TVM's importer has none; {_ELSE}"
    if kind == "Dropout":
        return "it is in training mode, or its mask is used; export the model for inference (`model.eval()` in PyTorch)"
    if any(attribute.name == "block_size" and attribute.i for attribute in node.attribute):
        return "TVM has no scales for blocks of a tensor; quantise the model for each tensor or each channel"
    return ""


def _why_if(node: Any, settings: Mapping[str, str]) -> str:
    branches = sum(1 for attribute in node.attribute for _ in all_nodes(attribute.g))
    size = f", and its branches have {branches} nodes" if branches > MOST_IN_BRANCHES else ""
    return (
        f"its condition depends on data{size}; export the model without the branch (`torch.jit.trace`, not "
        "`torch.jit.script`, for instance)" + _binding(settings, node.input)
    )


def _binding(settings: Mapping[str, str], names: Iterable[str]) -> str:
    """Return advice to bind an input of one element that the tensors of these names depend on."""
    found = sorted(settings[name] for name in names if name in settings)
    return f', or make input {found[0]} a constant: `input_values` "{found[0]}=..."' if found else ""


def _settings(model: Any) -> dict[str, str]:
    """Return an input of one element, the first by name, for each tensor that depends on one."""
    weights = {tensor.name for tensor in model.graph.initializer}
    found = {
        value.name: value.name
        for value in model.graph.input
        if value.name not in weights and all(extent.dim_value == 1 for extent in value.type.tensor_type.shape.dim)
    }
    for node in model.graph.node:
        if read := sorted(found[name] for name in node.input if name in found):
            found |= {name: read[0] for name in node.output if name}
    return found


def _types(model: Any) -> Iterator[str]:
    """Yield a line for each type of weights, inputs and outputs that TVM has not."""
    kinds = {number: name for name, number in TensorProto.DataType.items()}
    seen = set()
    weights = ((f"weight {tensor.name}", tensor.data_type) for tensor in model.graph.initializer)
    tensors = [value for value in model.graph.output if value.type.HasField("tensor_type")]
    inputs = ((f"input {value.name}", value.type.tensor_type.elem_type) for value in model.graph.input)
    outputs = ((f"output {value.name}", value.type.tensor_type.elem_type) for value in tensors)
    for named_, number in (*weights, *inputs, *outputs):
        kind = kinds.get(number, str(number))
        what = named_.partition(" ")[0], kind
        if kind.startswith(_STRANGE_TYPES) and what not in seen:
            seen.add(what)
            yield f"{named_}: TVM has no {kind}; export the model in FLOAT, FLOAT16 or INT8, or run it on onnxruntime"
    for value in model.graph.output:
        if value not in tensors:
            yield f"output {value.name}: it is no tensor; export the model with an output for each tensor"
