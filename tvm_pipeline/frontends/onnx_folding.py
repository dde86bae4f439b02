"""ONNX files with what is known before they run as weights: constants, and values that depend on shapes alone.

Exported files compute shapes in nodes. Engines fold these away, so they are no work; as operators of a plan they would
tie together what has nothing to do with each other. Next: `onnx_known.py`, which finds the values.
"""

from __future__ import annotations

from dataclasses import replace

from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline.frontends.onnx_graph import with_fixed_inputs


def folded(model: Model) -> Model:
    """Return an ONNX model whose nodes depend on its inputs, without functions; raise ModelError for no ONNX file."""
    from onnx import inliner, numpy_helper

    from tvm_pipeline.frontends.onnx_inlining import prune, replace_nodes
    from tvm_pipeline.frontends.onnx_known import KnownTensors

    proto = with_fixed_inputs(model)
    has_functions = bool(proto.functions)
    if has_functions:
        proto = inliner.inline_local_functions(proto)
    known, kept, outputs = KnownTensors(proto), [], {value.name for value in proto.graph.output}
    try:
        for node in proto.graph.node:
            values = {attribute.name: attribute.t for attribute in node.attribute if attribute.HasField("t")}
            if node.op_type == "Constant" and "value" in values and node.output[0] not in outputs:
                values["value"].name = node.output[0]
                proto.graph.initializer.append(values["value"])
                known.add(values["value"])
                continue
            known.learn(node)
            if any(name not in known.values or name in outputs for name in node.output if name):
                kept.append(node)
                continue
            proto.graph.initializer.extend(
                numpy_helper.from_array(known.values[name], name) for name in node.output if name
            )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ModelError(f"{model.name}: its constants cannot be read: {error}") from error
    if len(kept) == len(proto.graph.node) and not has_functions:
        return model
    replace_nodes(proto.graph, kept)
    prune(proto.graph)
    return replace(model, content=proto.SerializeToString())
