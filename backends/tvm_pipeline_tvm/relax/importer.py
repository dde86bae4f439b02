"""Make a Relax module of a Model; no other file calls TVM's importer. Next: `onnx_importer.py`, `simplify.py`."""

from __future__ import annotations

import logging
from typing import Any

import tvm
from tvm import relax

from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.relax.dataflow import fields
from tvm_pipeline_tvm.relax.distinct_outputs import distinct_outputs
from tvm_pipeline_tvm.relax.numpy_table import static_shape
from tvm_pipeline_tvm.relax.onnx_functions import has_function
from tvm_pipeline_tvm.relax.onnx_importer import OnnxImporter, RefusedNode, converters, label
from tvm_pipeline_tvm.tvm_errors import on_shapes

_log = logging.getLogger(__name__)

# The lines of `frontends/onnx_walk.py` that hold for this TVM, too.
_OF_BOTH = ("operator If ", "operator Loop ", "operator Scan ", "input ", "output ")
_NEEDS_RELAY = (
    "needs TVM with Relay: run `pip install 'tvm-pipeline[relay]'` in an environment of its own, or export the model "
    "as ONNX"
)
# Operators of onnxruntime's that TVM's importer has, or that are those of ONNX under another domain.
_OF_MICROSOFT = frozenset(
    (
        *("BiasGelu", "FastGelu", "Gelu", "SkipLayerNormalization", "EmbedLayerNormalization", "MatMulInteger16"),
        *("QuantizeLinear", "DequantizeLinear"),
    )
)
_BRANCHES = frozenset(("If", "Loop", "Scan"))
_ELSE = "run it on another engine, or export the model without it"
_ADVICE = {
    "ai.onnx.ml": "it is classical machine learning and no network; run the model with onnxruntime",
    "com.microsoft": "onnxruntime has put it there; take the file from before onnxruntime optimised or quantised it",
}


def import_model(model: Model) -> tvm.IRModule:
    """Return the model as a module with one function `main`, a plain block of dataflow with weights as constants.

    Its parameters have the names of the model's inputs, and its attribute `output_names` those of its outputs.

    Raises:
        ModelError: the format needs Relay, or an operator cannot be imported; the message names the operator and its
            node.

    Examples:
        >>> main = import_model(load("squeezenet.onnx"))["main"]
        >>> [parameter.name for parameter in main.params], main.attrs["output_names"]
        (['data_0'], ['softmaxout_1'])
    """
    importers = {"onnx": _from_onnx, "relax.json": _from_relax, "tflite": _from_tflite}
    if model.format not in importers:
        raise ModelError(f"{model.name}: a model of the format {model.format} {_NEEDS_RELAY}")
    _log.info(f"importing {model.name}")
    mod = importers[model.format](model)
    if not mod["main"].params:
        raise ModelError(f"{model.name}: it has no inputs besides its parameters, so no frame could go through it")
    parts = zip(model.outputs, fields(mod["main"].body.body.ty), strict=False)
    ends = [*((each.name, each.ty) for each in mod["main"].params), *parts]
    if empty := [name for name, type_ in ends if 0 in (static_shape(type_) or ())]:
        raise ModelError(f"{model.name}: {empty[0]} has no elements, and TVM cannot run such an input or output")
    try:
        return distinct_outputs(mod, model.outputs)
    except ModelError as error:
        raise ModelError(f"{model.name}: {error}") from error


def _from_onnx(model: Model) -> tvm.IRModule:
    """Import an ONNX file; where TVM refuses it, once more as onnxslim simplifies it, if that is installed."""
    import onnx
    import onnx.inliner

    shapes = {tensor.name: list(tensor.shape) for tensor in model.inputs}
    proto = onnx.load_from_string(model.content)
    if proto.functions:
        proto = onnx.inliner.inline_local_functions(proto)
    lines = [line for line in model.obstacles if line.startswith(_OF_BOTH)] or obstacles(proto)
    if lines:
        more = [f"and {len(lines) - 3} kinds more"] if len(lines) > 3 else []
        raise ModelError(f"{model.name}: TVM cannot import it: {'; '.join([*lines[:3], *more])}")

    def imported(proto: Any) -> tvm.IRModule:
        return OnnxImporter(shapes, proto).module()

    try:
        return imported(proto)
    except RefusedNode as error:
        refused = error
    try:
        import onnxslim
    except ImportError:
        raise ModelError(
            f"{model.name}: TVM cannot import it: {refused}{on_shapes(model)}; simplified by onnxslim it may import: "
            "pip install 'tvm-pipeline[simplify]'"
        ) from refused
    for value in proto.graph.input:
        for extent, known in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False):
            extent.dim_value = known
    try:
        found = imported(onnxslim.slim(proto))
    except Exception:  # onnxslim raises any type; the first reason is that of the file as the user has it
        raise ModelError(f"{model.name}: TVM cannot import it: {refused}{on_shapes(model)}") from refused
    _log.warning("%s: imported as onnxslim simplifies it, since TVM refuses it: %s", model.name, refused)
    return found


def _from_tflite(model: Model) -> tvm.IRModule:
    from tvm_pipeline_tvm.relax.tflite_importer import imported_tflite  # loading TVM's part of it takes 0.4 s

    return imported_tflite(model)


def _from_relax(model: Model) -> tvm.IRModule:
    """Return a Relax module that a program made, as one block of dataflow."""
    mod = tvm.ir.load_json(model.content.decode())
    functions = {symbol.name_hint: function for symbol, function in mod.functions.items()}
    if not isinstance(functions.get("main"), relax.Function):
        found = ", ".join(functions) or "none"
        raise ModelError(
            f"{model.name}: the module needs a Relax function `main`, and its functions are {found}; give "
            'tvm.IRModule({"main": function.with_attr("global_symbol", "main")})'
        )
    if model.params:
        mod = relax.transform.BindParams("main", dict(tvm.runtime.load_param_dict(model.params)))(mod)
    main = mod["main"]
    inputs = main.attrs.get("num_input", len(main.params)) if main.attrs else len(main.params)
    if unbound := [parameter.name for parameter in main.params[inputs:]]:
        raise ModelError(
            f"{model.name}: the weights {', '.join(unbound[:3])} are parameters of `main`; give them as `params`, so "
            "that they become constants"
        )
    for parameter in main.params:
        if static_shape(parameter.ty) is None:
            raise ModelError(f"{model.name}: the input {parameter.name} is no tensor of a fixed shape")
    return relax.transform.ConvertToDataflow()(relax.transform.CanonicalizeBindings()(mod))


def obstacles(proto: Any) -> list[str]:
    """Return a line for each kind of operator that cannot be imported, with its first node and what to do."""
    has, opsets = converters(), {each.domain: each.version for each in proto.opset_import}
    found: dict[tuple[str, str], list[str]] = {}
    for node in proto.graph.node:
        why = _why(node, has)
        if why and not has_function(node.op_type, node.domain, opsets.get(node.domain, 1)):
            found.setdefault((node.op_type, why), []).append(label(node))
    return [
        f"{nodes[0]}{f' and {len(nodes) - 1} more' if len(nodes) > 1 else ''}: {why}"
        for (_, why), nodes in found.items()
    ]


def _why(node: Any, has: frozenset[str]) -> str:
    kind, domain = node.op_type, node.domain
    if kind in _BRANCHES:
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
