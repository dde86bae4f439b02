"""Operators that ONNX defines by others, such as Attention: the nodes that one stands for. Next: `onnx_importer.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import FunctionProto, NodeProto, defs


def has_function(kind: str, domain: str, opset: int) -> bool:
    """Return whether ONNX defines an operator by others."""
    schema = _schema(kind, domain, opset)
    return bool(schema and (schema.has_function or schema.has_context_dependent_function))


def expanded(node: Any, opset: int, types: Sequence[Any]) -> list[Any]:
    """Return the nodes that a node stands for; none where ONNX does not define it by others, or by a loop.

        before: y = Swish(x, alpha=2)
        after:  y/X_Alpha = Mul(2, x);  y/X_Sigmoid = Sigmoid(y/X_Alpha);  y = Mul(x, y/X_Sigmoid)

    Args:
        opset: the version of the operators of the node's domain.
        types: of its inputs, as ONNX writes them.
    """
    schema = _schema(node.op_type, node.domain, opset)
    if schema is None:
        return []
    if versions := schema.function_opset_versions:
        content = schema.get_function_with_opset_version(_latest(versions, opset))
    elif versions := schema.context_dependent_function_opset_versions:
        given = node.SerializeToString(), [each.SerializeToString() for each in types]
        content = schema.get_context_dependent_function_with_opset_version(_latest(versions, opset), *given)
    else:
        return []
    function = FunctionProto.FromString(content)
    if any(inner.op_type in ("Loop", "Scan") for inner in function.node):  # TVM has none
        return []
    names = {name: f"{node.output[0]}/{name}" for inner in function.node for name in inner.output if name}
    names |= {inner: outer for inner, outer in zip(function.output, node.output, strict=False) if outer}
    names |= dict.fromkeys(function.input, "") | dict(zip(function.input, node.input, strict=False))
    values = {name: each.default_value for name, each in schema.attributes.items() if each.default_value.name}
    values |= {attribute.name: attribute for attribute in node.attribute}
    for inner in function.node:
        _settle(inner, names, values)
    return list(function.node)


def _schema(kind: str, domain: str, opset: int) -> Any | None:
    try:
        return defs.get_schema(kind, opset, "" if domain == "ai.onnx" else domain)
    except defs.SchemaError:
        return None


def _latest(versions: Sequence[int], opset: int) -> int:
    return max((version for version in versions if version <= opset), default=max(versions))


def _settle(node: NodeProto, names: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Give tensors their names, and attributes that stand for those of the function their values, or leave them out."""
    for field in (node.input, node.output):
        field[:] = [names.get(name, name) for name in field]
    attributes = list(node.attribute)
    del node.attribute[:]
    for attribute in attributes:
        value = values.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
        if value is not None:
            node.attribute.add().CopyFrom(value)
            node.attribute[-1].name = attribute.name
    for graph in (attribute.g for attribute in node.attribute if attribute.HasField("g")):
        for inner in graph.node:
            _settle(inner, names, values)
        for output in graph.output:
            output.name = names.get(output.name, output.name)
