"""What TVM 0.27's importer of ONNX cannot take of a file, told before anything is imported. Next: `importer.py`."""

from __future__ import annotations

from typing import Any

from tvm_pipeline.tvm.relax.onnx_importer import converters, label

# Operators of onnxruntime's that TVM's importer has, or that are those of ONNX under another domain.
_OF_MICROSOFT = frozenset(
    (
        *("BiasGelu", "FastGelu", "Gelu", "SkipLayerNormalization", "EmbedLayerNormalization", "MatMulInteger16"),
        *("QuantizeLinear", "DequantizeLinear"),
    )
)
_CONTROL_FLOW = frozenset(("If", "Loop", "Scan"))
_ELSE = "run it on another engine, or export the model without it"
_ADVICE = {
    "ai.onnx.ml": "it is classical machine learning and no network; run the model with onnxruntime",
    "com.microsoft": "onnxruntime has put it there; take the file from before onnxruntime optimised or quantised it",
}


def obstacles(proto: Any) -> list[str]:
    """Return a line for each kind of operator that cannot be imported, with its first node and what to do."""
    has = converters()
    found: dict[tuple[str, str], list[str]] = {}
    for node in proto.graph.node:
        why = _why(node, has)
        if why:
            found.setdefault((node.op_type, why), []).append(label(node))
    return [
        f"{nodes[0]}{f' and {len(nodes) - 1} more' if len(nodes) > 1 else ''}: {why}"
        for (_, why), nodes in found.items()
    ]


def _why(node: Any, has: frozenset[str]) -> str:
    kind, domain = node.op_type, node.domain
    if kind in _CONTROL_FLOW:
        return "it hangs on data, and a model is cut as a plain graph; export it without control flow"
    if domain not in ("", "ai.onnx") and not (domain == "com.microsoft" and kind in _OF_MICROSOFT):
        return f"TVM has none of the domain {domain}; {_ADVICE.get(domain, _ELSE)}"
    if kind not in has:
        return f"TVM's importer has none; {_ELSE}"
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    if kind == "BatchNormalization" and (attributes.get("training_mode") or len([o for o in node.output if o]) > 1):
        return "it is in training mode; export the model for inference (`model.eval()` in PyTorch)"
    if kind == "Dropout":
        return "it is in training mode, or its mask is used; export the model for inference (`model.eval()` in PyTorch)"
    if attributes.get("block_size"):
        return "TVM has no scales for blocks of a tensor; quantise the model for each tensor or each channel"
    return ""
