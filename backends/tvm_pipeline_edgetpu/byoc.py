"""Edge TPUs inside `relay.build`: the external compiler `edgetpu`, for users who work in Relay and not with plans.

    mod, params = relay.frontend.from_tflite(...)
    mod = partition_for_edgetpu(mod, params, read_model("model.tflite"), device="usb:0")
    library = relay.build(mod, "llvm", params=params)

A region of the partitioned module is a slice of the .tflite that the module was imported from. It carries that slice,
and TFLite's kernels run it, not Relay's. The importer writes the names of the file's tensors into the span of every
call, so a span tells the operator of the file. A process that runs an exported library must import this module first.

TVM 0.19 accepts such a compiler from Python alone, as the function `relay.ext.edgetpu`, with these limits:

- It gets one region at a time, so regions on one Edge TPU are not co-compiled to share the parameter cache.
- It does not get the target, so `partition_for_edgetpu` takes the target as an argument.
- No code of this package runs while a library is loaded. A missing Edge TPU shows in the executor's first run, so
  `load_executor` makes that run.
- `relay.build` fails in its InlineGlobals ("Cannot find global function") where TVM adds a tensor to itself and a
  region that computes the tensor has another reader, because SimplifyExpr copies the call of the region;
  `PassContext(disabled_pass=["SimplifyExpr"])` helps.

Next: `patterns.py`, then `slicer.py`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

import tvm_pipeline_tvm  # noqa: F401 - before `import tvm`, since it sets TVM's environment up
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.core.graph import Operator, OperatorGraph, readers_of
from tvm_pipeline.errors import ModelError, RunError
from tvm_pipeline_edgetpu.compiler import compile_parts
from tvm_pipeline_edgetpu.interpreter import CPU
from tvm_pipeline_edgetpu.invoking import invoke
from tvm_pipeline_edgetpu.model import TfliteModel, file_ends
from tvm_pipeline_edgetpu.patterns import COMPILER, fits, pattern_table
from tvm_pipeline_edgetpu.slicer import slice_operators
from tvm_pipeline_edgetpu.support import check_quantised, unsupported
from tvm_pipeline_edgetpu.versions import file_for_compiler
from tvm_pipeline_tvm.tvm_errors import reason

import tvm  # isort: skip
from tvm import relay, tir  # isort: skip
from tvm.contrib import graph_executor  # isort: skip

_INVOKE = "tvm_pipeline_edgetpu.byoc.invoke"
# PartitionGraph gives this attribute to a region, and relay.build requires it.
_INLINE = {"Inline": tir.IntImm("int32", 1)}


def partition_for_edgetpu(
    mod: tvm.IRModule, params: Mapping[str, Any] | None, source: TfliteModel, device: str = CPU, target: str = "llvm"
) -> tvm.IRModule:
    """Put the operators that an Edge TPU takes into external functions, which `relay.build` compiles for it.

        before: fn main(%x) { %0 = qnn.conv2d(%x, ...); ...; softmax(%9) }
        after:  fn tvmgen_default_edgetpu_main_0(%i0) { ... }    Compiler="edgetpu" edgetpu_device="usb:0"
                fn main(%x) { softmax(@tvmgen_default_edgetpu_main_0(%x)) }

    Each such function has the attributes `edgetpu_device`, `edgetpu_operators` (their names in the file's graph),
    `edgetpu_inputs` and `edgetpu_outputs` (the tensors that are its parameters and its results), and `edgetpu_tflite`
    (the file that computes them). All other operators stay with TVM.

    Args:
        mod: the module that `relay.frontend.from_tflite` made of the file; passes that keep the spans may have run.
        params: its parameters; None where they are bound already.
        source: the file.
        device: `usb:0`, `pci:1` or whatever libedgetpu calls the Edge TPU; `cpu` is TFLite's CPU kernels.
        target: the CPU that calls it, as it is given to `relay.build`; another one shows when the library is linked.

    Raises:
        ModelError: nothing in the file is for an Edge TPU, or the module was not imported from this file.
    """
    check_quantised(source, source.name)
    main = relay.build_module.bind_params_by_name(mod["main"], dict(params or {}))
    bound = tvm.IRModule(mod.functions, mod.type_definitions, attrs=mod.attrs)
    bound["main"] = main
    bound = relay.transform.InferType()(bound)
    kinds = {f"{COMPILER}.{operator.kind}" for operator in source.graph.operators}
    table = [entry for entry in pattern_table(_whole_operators(bound["main"], source)) if entry[0] in kinds]
    passes = tvm.transform.Sequential(
        [
            relay.transform.MergeComposite(table),
            relay.transform.AnnotateTarget(COMPILER),
            relay.transform.MergeCompilerRegions(),
            relay.transform.PartitionGraph(),
        ]
    )
    return _with_slices(passes(bound), source, device, target)


def _whole_operators(main: relay.Function, source: TfliteModel) -> Callable[[str, relay.Call], bool]:
    """Return a check whether a match is exactly one operator of the file that an Edge TPU takes."""
    written_by = _written_by(source.graph)
    calls = Counter(_span(call) for call in _calls(main))
    if not calls.keys() & written_by.keys():
        raise ModelError(
            f"{source.name}: no call of the Relay module bears the span of one of the file's operators; import this "
            "very file with relay.frontend.from_tflite, and run no passes before that drop spans"
        )
    refused = unsupported(source)

    def takes(kind: str, last: relay.Call) -> bool:
        operator = written_by.get(_span(last))
        if operator is None or operator.kind != kind or operator.name in refused:
            return False
        chain = _chain(last)
        return len(chain) == calls[_span(last)] and fits(kind, chain)

    return takes


def _written_by(graph: OperatorGraph) -> dict[str, Operator]:
    """Return the operators by the spans that TVM's importer gives to their calls."""
    return {", ".join(tensor.name for tensor in operator.outputs): operator for operator in graph.operators}


def _span(expr: relay.Expr) -> str:
    return str(expr.span.source_name.name) if expr.span else ""


def _calls(function: relay.Function) -> list[relay.Call]:
    found: list[relay.Call] = []
    relay.analysis.post_order_visit(function, lambda expr: found.append(expr) if isinstance(expr, relay.Call) else None)
    return found


def _chain(last: relay.Call) -> list[str]:
    """Return the names of the calls that lead to `last` under the same span."""
    found, waiting = {last}, [last]
    while waiting:
        for before in waiting.pop().args:
            if isinstance(before, relay.Call) and _span(before) == _span(last) and before not in found:
                found.add(before)
                waiting.append(before)
    return [call.op.name for call in found]


def _with_slices(mod: tvm.IRModule, source: TfliteModel, device: str, target: str) -> tvm.IRModule:
    """Give each region its slice of the file."""
    written_by = _written_by(source.graph)
    mod = _without_glue(mod)
    regions = {symbol.name_hint: function for symbol, function in mod.functions_items() if _is_region(function)}
    if not regions:
        reasons = "; ".join(f"{name}: {why}" for name, why in unsupported(source).items()) or "no pattern fits one"
        raise ModelError(f"{source.name}: TVM keeps all its operators, so build it without partitioning ({reasons})")
    outputs = {name: _tensors(function, written_by, {})[function.body] for name, function in regions.items()}
    tensors = _tensors(mod["main"], written_by, outputs)
    weights = {_histogram(buffer.data) for buffer in source.parsed.buffers if buffer.data is not None}
    for call in _calls(mod["main"]):
        if not isinstance(call.op, relay.GlobalVar) or call.op.name_hint not in regions:
            continue
        function = regions[call.op.name_hint]
        spans = {_span(inner) for inner in _calls(function) if isinstance(inner.op, tvm.ir.Op)}
        inside = {written_by[span].name for span in spans}
        operators = [operator.name for operator in source.graph.operators if operator.name in inside]
        _check_closed(source, operators)
        _check_weights(function, weights, source.name)
        inputs = [name for argument in call.args for name in tensors[argument]]
        content = _slice(function, source, operators, inputs, outputs[call.op.name_hint])
        attributes = {
            "edgetpu_device": device,
            "edgetpu_target": target,
            "edgetpu_operators": operators,
            "edgetpu_inputs": inputs,
            "edgetpu_outputs": outputs[call.op.name_hint],
            "edgetpu_tflite": tvm.nd.array(np.frombuffer(content, np.uint8)),
        }
        mod.update_func(call.op, function.with_attr(attributes | _INLINE))
    return relay.transform.InferType()(mod)


def _without_glue(mod: tvm.IRModule) -> tvm.IRModule:
    """Inline the regions that TVM makes of single tuples and their fields, because these compute nothing."""
    for symbol, function in mod.functions_items():
        if _is_region(function):
            glue = relay.Function(function.params, function.body, function.ret_type).with_attr(_INLINE)
            mod.update_func(symbol, function.without_attr("Inline") if _calls(function) else glue)
    return relay.transform.Inline()(mod)


def _is_region(function: relay.Function) -> bool:
    return bool(function.attrs) and function.attrs.get("Compiler") == COMPILER


def _tensors(
    function: relay.Function,
    written_by: Mapping[str, Operator],
    regions: Mapping[str, Sequence[str]],
) -> dict[relay.Expr, list[str]]:
    """Return the tensors of the file that each expression of a function stands for; none for a constant."""
    found: dict[relay.Expr, list[str]] = {}

    def visit(expr: relay.Expr) -> None:
        if isinstance(expr, relay.Var):
            found[expr] = [expr.name_hint]
        elif isinstance(expr, relay.Tuple):
            found[expr] = [name for field in expr.fields for name in found[field]]
        elif isinstance(expr, relay.TupleGetItem):
            found[expr] = found[expr.tuple_value][expr.index : expr.index + 1]
        elif isinstance(expr, relay.Call) and isinstance(expr.op, relay.GlobalVar):
            found[expr] = list(regions.get(expr.op.name_hint, ()))
        elif isinstance(expr, relay.Call) and isinstance(expr.op, relay.Function):
            found[expr] = found[expr.op.body]
        else:
            operator = written_by.get(_span(expr)) if isinstance(expr, relay.Call) else None
            found[expr] = [tensor.name for tensor in operator.outputs] if operator else []

    relay.analysis.post_order_visit(function, visit)
    return found


def _check_closed(source: TfliteModel, operators: Sequence[str]) -> None:
    """Check that no path in the file leaves the operators and comes back to them."""
    inside, readers = frozenset(operators), readers_of(source.graph)
    left: set[str] = set()
    for operator in source.graph.operators:
        for reader in readers[operator.name]:
            if reader not in inside and (operator.name in inside or operator.name in left):
                left.add(reader)
            elif reader in inside and operator.name in left:
                raise ModelError(
                    f"{source.name}: operator {operator.name} of the file lies between operators of one region and is "
                    "not in it; a pass has taken it out of the Relay module, so partition the module as it was imported"
                )


def _check_weights(function: relay.Function, weights: Set[bytes], name: str) -> None:
    """Check that the file has a region's weights; histograms are compared, because the importer changes the order."""
    constants: list[Array] = []
    relay.analysis.post_order_visit(
        function, lambda expr: constants.append(expr.data.numpy()) if isinstance(expr, relay.Constant) else None
    )
    for values in constants:
        if values.dtype.itemsize == 1 and values.size > 1 and _histogram(values.view(np.uint8)) not in weights:
            raise ModelError(
                f"{name}: the Relay module has weights of shape {values.shape} that the file has not; give the file "
                "that the module was imported from"
            )


def _histogram(values: Array) -> bytes:
    return np.bincount(values.ravel(), minlength=256).tobytes()


def _slice(
    function: relay.Function, source: TfliteModel, operators: list[str], inputs: list[str], outputs: list[str]
) -> bytes:
    """Return the slice of the file that a region stands for; check that both have the same inputs and outputs."""
    part = slice_operators(source, operators)
    tensors = {tensor.name: (tensor.shape, tensor.dtype) for tensor in (*part.inputs, *part.outputs)}
    types = [_shape_and_dtype(type_) for type_ in _arguments(function)]
    if [tensors.get(name) for name in (*inputs, *outputs)] != types or len(set(inputs)) != len(part.inputs):
        raise ModelError(
            f"{source.name}: the region of {operators[0]} to {operators[-1]} reads or writes other tensors in the "
            "Relay module than in the file; give the file that the module was imported from, with its own shapes"
        )
    return part.content


def _arguments(function: relay.Function) -> list[relay.TensorType]:
    """Return the types of the arguments of a compiled region: its inputs, then its outputs."""
    types = [*(parameter.checked_type for parameter in function.params), function.ret_type]
    return [field for type_ in types for field in (type_.fields if isinstance(type_, relay.TupleType) else [type_])]


def _shape_and_dtype(type_: relay.TensorType) -> tuple[tuple[int, ...], str]:
    return tuple(int(extent) for extent in type_.shape), str(type_.dtype)


def _compile(function: relay.Function) -> tvm.runtime.Module:
    """Compile a region to a kernel that contains its .tflite and calls `invoke` with it; TVM calls this function.

    Raises:
        ModelError: the module was not partitioned by `partition_for_edgetpu`, or edgetpu_compiler refuses the region.
        PlatformError: the region is for an Edge TPU, and edgetpu_compiler is not here.
    """
    name, attributes = str(function.attrs["global_symbol"]), function.attrs
    if "edgetpu_tflite" not in attributes:
        raise ModelError(f"{name}: no .tflite is known for this region; partition with partition_for_edgetpu")
    content, device = attributes["edgetpu_tflite"].numpy().tobytes(), str(attributes["edgetpu_device"])
    if device != CPU:
        [(content, _)] = compile_parts([file_for_compiler(name, content)], [name])
    inputs, outputs = file_ends(content)  # edgetpu_compiler may change the order
    types = _arguments(function)
    read_index = {tensor: index for index, tensor in enumerate(attributes["edgetpu_inputs"])}
    reads = [read_index[tensor] for tensor in inputs]
    write_index = {tensor: len(inputs) + index for index, tensor in enumerate(attributes["edgetpu_outputs"])}
    writes = [write_index.get(tensor) for tensor in outputs]
    kernel = _kernel(name, content, device, types, reads, writes)
    return tvm.build(kernel, target=str(attributes["edgetpu_target"]), name=name)


def _no_constants(function: relay.Function, name: str) -> dict[str, Any]:
    """Return no constants: the .tflite has the weights, and TVM would put Relay's copy into the library as well."""
    return {}


def _kernel(
    name: str,
    content: bytes,
    device: str,
    types: Sequence[relay.TensorType],
    reads: Sequence[int],
    writes: Sequence[int | None],
) -> tir.PrimFunc:
    """Return a kernel that calls `invoke` with the file as a constant, and with the arguments in the file's order."""
    buffers = [tir.decl_buffer(type_.shape, type_.dtype, f"t{number}") for number, type_ in enumerate(types)]
    parameters = [tir.Var(f"p{number}", "handle") for number in range(len(types))]
    file = tir.decl_buffer((len(content),), "uint8", "tflite")
    null = tir.reinterpret("handle", tir.const(0, "uint64"))
    arrays = [null if index is None else _array(buffers[index]) for index in (*reads, *writes)]
    digest = hashlib.sha256(content).hexdigest()
    call = tir.call_packed(_INVOKE, digest, device, _array(file), *arrays)
    constant = tvm.nd.array(np.frombuffer(content, np.uint8))
    body = tir.AllocateConst(file.data, "uint8", file.shape, constant, tir.Evaluate(call))
    function = tir.PrimFunc(parameters, body, buffer_map=dict(zip(parameters, buffers, strict=True)))
    return function.with_attr("global_symbol", name)


def _array(buffer: tir.Buffer) -> tir.PrimExpr:
    """Return an expression that makes the DLTensor of a buffer on the stack."""
    shape = tir.call_intrin("handle", "tir.tvm_stack_make_shape", *buffer.shape)
    strides, rank, of_type = tir.const(0, "uint64"), len(buffer.shape), tir.const(0, buffer.dtype)
    return tir.call_intrin("handle", "tir.tvm_stack_make_array", buffer.data, shape, strides, rank, of_type, 0)


def load_executor(path: Path | str) -> graph_executor.GraphModule:
    """Return the CPU graph executor of a library that `export_library` wrote, with its Edge TPUs open.

    Raises:
        RunError: the first run fails, for instance because an Edge TPU is missing; the message has the cause.
    """
    library = tvm.runtime.load_module(str(path))
    executor = graph_executor.GraphModule(library["default"](tvm.cpu()))
    try:
        executor.run()
    except Exception as error:  # TVM turns a Python error into an error of its own
        raise RunError(f"{path}: its first run failed: {reason(error)}") from error
    return executor


tvm.register_func(f"relay.ext.{COMPILER}", _compile, override=True)
tvm.register_func(f"relay.ext.{COMPILER}.constant_updater", _no_constants, override=True)
tvm.register_func(_INVOKE, invoke, override=True)
