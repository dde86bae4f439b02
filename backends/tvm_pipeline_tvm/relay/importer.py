"""Make a Relay module of a Model; no other file calls TVM's importers. Next: `build.py`."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import tvm
from tvm import relay
from tvm.relay.frontend.tflite import ExprTable

from tvm_pipeline.core.deadline import Deadline
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline.processes import how_ended, status_of_copy
from tvm_pipeline_tvm.relay.distinct_outputs import distinct_outputs
from tvm_pipeline_tvm.relay.import_folding import faster_importer
from tvm_pipeline_tvm.relay.output_names import with_output_names
from tvm_pipeline_tvm.relay.tflite_repairs import RepairedConverter
from tvm_pipeline_tvm.relay.work_done import WorkDone
from tvm_pipeline_tvm.tflite_walk import obstacles
from tvm_pipeline_tvm.tvm_errors import on_shapes, reason

Params = dict[str, Any]

LONGEST_S = 120.0  # of processor time, for the nodes of a file; recurrent networks have a copy for each step
READ_S = 120.0  # that reading Relay JSON may take
_UNCASTABLE = "float64", "float16"  # TVM emulates it by a function that LLVM calls in another way
_NODES = 0.7  # the share of an import of ONNX in which nodes are converted

_log = logging.getLogger(__name__)


def import_model(model: Model) -> tuple[tvm.IRModule, Params]:
    """Return the model as a type-checked Relay module and its parameters.

    The log says which share of an ONNX file is done.

    Raises:
        ModelError: the importer does not take the model; the message names the operator if TVM names it.
    """
    if model.obstacles:
        more = [f"and {len(model.obstacles) - 3} kinds more"] if len(model.obstacles) > 3 else []
        raise ModelError(f"{model.name}: TVM cannot import it: {'; '.join([*model.obstacles[:3], *more])}")
    importers: dict[str, Callable[[Model], tuple[tvm.IRModule, Params]]] = {
        "onnx": partial(_from_onnx),
        "tflite": _from_tflite,
        "relay": _from_relay_text,
        "relay.json": _from_relay_json,
        "relay.testing": _from_testing,
    }
    try:
        mod, params = importers[model.format](model)
        return _checked(model, mod, params)
    except ModelError:
        raise
    except Exception as error:  # TVM's importers raise any type of error
        raise ModelError(f"{model.name}: TVM cannot import it: {reason(error)}{on_shapes(model)}") from error


def _checked(model: Model, mod: tvm.IRModule, params: Params) -> tuple[tvm.IRModule, Params]:
    """Return a module with types, and one tensor for each output; raise ModelError where no stage could run it."""
    if not isinstance(mod["main"], relay.Function):
        raise ModelError(f"{model.name}: its `main` is no function; write it again with tvm.ir.save_json")
    mod = relay.transform.InferType()(mod)
    if model.outputs:
        mod = with_output_names(mod, model)
    _check_static(model, mod)
    if all(parameter.name_hint in params for parameter in mod["main"].params):
        raise ModelError(f"{model.name}: it has no inputs besides its parameters, so no frame could go through it")
    try:
        return distinct_outputs(mod, params), params
    except ModelError as error:
        raise ModelError(f"{model.name}: {error}") from error


def _from_onnx(model: Model) -> tuple[tvm.IRModule, Params]:
    """Import an ONNX file; where TVM refuses it, once more as onnxslim simplifies it, if that is installed."""
    import onnx

    shapes = {tensor.name: list(tensor.shape) for tensor in model.inputs}
    dtypes = {tensor.name: tensor.dtype for tensor in model.inputs}

    remedy = "run it on another engine, or export it with fewer steps of its loops and recurrent layers"
    deadline = Deadline(f"{model.name}: importing it into TVM", LONGEST_S, remedy)

    def imported(proto: Any) -> tuple[tvm.IRModule, Params]:
        for node in proto.graph.node:
            node.name = node.name or f"of {next(iter(node.output), '?')}"  # errors name it
        done, count = WorkDone(f"importing {model.name}"), itertools.count(1)

        def converting(operator: str) -> None:
            deadline.check(operator)
            done.reach(_NODES * min(1.0, next(count) / len(proto.graph.node)))

        with faster_importer(converting):
            mod, params = relay.frontend.from_onnx(proto, shapes, dtypes, freeze_params=True)
        return relay.transform.DynamicToStatic()(mod), params

    try:
        return imported(onnx.load_from_string(model.content))
    except ModelError:
        raise
    except Exception as error:  # TVM's importers raise any type of error
        refused = error
    try:
        import onnxslim
    except ImportError:
        raise ModelError(
            f"{model.name}: TVM cannot import it: {reason(refused)}{on_shapes(model)}; simplified by onnxslim it may "
            "import: pip install 'tvm-pipeline[simplify]'"
        ) from refused
    proto = onnx.load_from_string(model.content)
    for value in proto.graph.input:
        for extent, known in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False):
            extent.dim_value = known
    try:
        found = imported(onnxslim.slim(proto))
    except Exception:  # the first reason is that of the file as the user has it
        raise refused from None
    _log.warning("%s: imported as onnxslim simplifies it, since TVM refuses it: %s", model.name, reason(refused))
    return found


def _from_tflite(model: Model) -> tuple[tvm.IRModule, Params]:
    import tflite

    parsed = tflite.Model.GetRootAsModel(model.content, 0)
    known = RepairedConverter(parsed, parsed.Subgraphs(0), ExprTable()).convert_map
    if obstacle := obstacles(parsed, known):
        raise ModelError(f"{model.name}: TVM cannot import it: {obstacle}")
    shapes = {tensor.name: list(tensor.shape) for tensor in model.inputs}
    dtypes = {tensor.name: tensor.dtype for tensor in model.inputs}
    return relay.frontend.from_tflite(parsed, shapes, dtypes, RepairedConverter)


def _from_relay_text(model: Model) -> tuple[tvm.IRModule, Params]:
    return tvm.relay.fromtext(model.content.decode()), _saved_params(model)


def _from_relay_json(model: Model) -> tuple[tvm.IRModule, Params]:
    # TVM ends the process where a file is damaged, when it reads the file or when it looks at the module.
    check_readable(model.name, model.content, _looked_at)
    return tvm.ir.load_json(model.content.decode()), _saved_params(model)


def _looked_at(mod: tvm.IRModule) -> None:
    _checked(Model("copy", "relay.json", b""), mod, {})


def _saved_params(model: Model) -> Params:
    return dict(tvm.runtime.load_param_dict(model.params)) if model.params else {}


def _from_testing(model: Model) -> tuple[tvm.IRModule, Params]:
    from tvm.relay import testing

    name, _, layers = model.name.partition("-")
    arguments: dict[str, Any] = {"batch_size": 1}
    if name.startswith("squeezenet"):
        name, arguments["version"] = "squeezenet", name.removeprefix("squeezenet") or "1.0"
    network = getattr(testing, name)
    if layers:
        key = {"densenet": "densenet_size"}.get(name, "num_layers")
        arguments[key] = int(layers)
    if model.inputs:
        arguments["batch_size"], *image_shape = model.inputs[0].shape
        arguments["image_shape"] = tuple(image_shape)
    return network.get_workload(**arguments)


def _check_static(model: Model, mod: tvm.IRModule) -> None:
    for parameter in mod["main"].params:
        if isinstance(parameter.checked_type, relay.TupleType):
            raise ModelError(f"{model.name}: input {parameter.name_hint} is a tuple; make an input of each tensor")
        if _is_open(parameter.checked_type):
            raise ModelError(f"{model.name}: input {parameter.name_hint} has no fixed shape; give `input_shapes`")
    open_: list[str] = []
    refused: list[str] = []

    def visit(expr: relay.Expr) -> None:
        if isinstance(expr, relay.Call) and isinstance(expr.op, tvm.ir.Op):
            named = f"{expr.op.name.removeprefix('dyn.')}{_node(expr)}"
            if _is_open(expr.checked_type):
                open_.append(named)
            elif any(_is_empty(one.checked_type) for one in (expr, *expr.args)):
                refused.append(f"operator {named} has a tensor without elements, which TVM cannot run")
            elif "cast" in expr.op.name and tuple(e.checked_type.dtype for e in (expr.args[0], expr)) == _UNCASTABLE:
                refused.append(f"operator {named}: TVM casts no float64 to float16; cast it to float32 first")

    relay.analysis.post_order_visit(mod["main"], visit)
    if open_:
        raise ModelError(
            f"{model.name}: operator {open_[0]} has a shape that depends on its data; export the model with fixed "
            "shapes and without what follows it (a selection of boxes, for instance), or fold its constants first"
            + on_shapes(model)
        )
    if refused:
        raise ModelError(f"{model.name}: {refused[0]}")


def _node(expr: relay.Expr) -> str:
    """Return the node of the file that a call comes from, where the importer has told."""
    name = expr.span.source_name.name if isinstance(expr.span, relay.Span) else ""
    return f" (node {name})" if name else ""


def _is_open(type_: Any) -> bool:
    if isinstance(type_, relay.TupleType):
        return any(_is_open(field) for field in type_.fields)
    return any(not isinstance(extent, tvm.tir.IntImm) for extent in type_.shape)


def _is_empty(type_: Any) -> bool:
    return isinstance(type_, relay.TensorType) and 0 in type_.concrete_shape


@lru_cache(maxsize=64)
def check_readable(name: str, content: bytes, use: Callable[[tvm.IRModule], object]) -> None:
    """Read a module, and use it, in a copy of this process: TVM's reader checks no reference, and dies of some.

    A copy by `fork` takes milliseconds where a new interpreter takes seconds. It does with the module what its import
    does, because TVM dies of some modules only when they are looked at.

    Args:
        name: of the model, for messages.
        content: the module, as `tvm.ir.save_json` writes it.
        use: what this process does with the module afterwards.

    Raises:
        ModelError: that process died of it, or does not end. What it raises is left to the reader in this process.
    """
    status = status_of_copy(lambda: use(tvm.ir.load_json(content.decode())), READ_S)
    if status == 0:
        return
    how = f"does not end in {READ_S:g} s" if status is None else how_ended(status)
    raise ModelError(
        f"{name}: a process in which TVM read this Relay JSON {how}: the file is damaged, or of another version of "
        "TVM; write it again with tvm.ir.save_json"
    )
