"""Edge TPUs inside `tvm.compile` of Relax, for users who work in Relax and not with plans; of Relay it is `byoc.py`.

    mod = partition_for_edgetpu(read_model("model.tflite"), device="usb:0")
    executable = tvm.compile(mod, "llvm")

Relax's importer refuses most int8 files, since it takes no PAD or SPLIT in 8 bits, and leaves no trace of the file's
operators. So the module is made of the file: a region is a run of operators in the file's order that an Edge TPU takes,
and `from_tflite` imports what lies between two regions from its slice. A region calls TFLite's interpreter with its
slice, a constant of the module. A process that runs an exported library must import this module first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

import tvm_pipeline_tvm  # noqa: F401 - before `import tvm`, since it sets TVM's environment up
from tvm_pipeline.errors import ModelError
from tvm_pipeline_edgetpu.compiler import compile_parts
from tvm_pipeline_edgetpu.interpreter import CPU
from tvm_pipeline_edgetpu.invoking import invoke
from tvm_pipeline_edgetpu.model import TfliteModel, file_ends
from tvm_pipeline_edgetpu.slicer import slice_operators
from tvm_pipeline_edgetpu.support import check_quantised, unsupported
from tvm_pipeline_edgetpu.versions import file_for_compiler

import tflite  # isort: skip
import tvm  # isort: skip
from tvm import relax  # isort: skip
from tvm.relax.frontend.tflite import from_tflite  # isort: skip

_INVOKE = "tvm_pipeline_edgetpu.byoc_relax.invoke"


def partition_for_edgetpu(source: TfliteModel, device: str = CPU) -> tvm.IRModule:
    """Return the module of a file, in which an Edge TPU computes the operators that it takes, and TVM all others.

        fn edgetpu_0(x) { R.call_dps_packed("tvm_pipeline_edgetpu.byoc_relax.invoke", (..., x)) }
        fn main(x) { lv = edgetpu_0(x); lv1 = tvm_1(lv); ... }

    Each function `edgetpu_N` has the attributes `edgetpu_device`, `edgetpu_operators` (their names in the graph of the
    file), `edgetpu_inputs` and `edgetpu_outputs` (the tensors that are its parameters and its results).

    Args:
        source: the file; its inputs, in order, are the parameters of `main`.
        device: `usb:0`, `pci:1` or whatever libedgetpu calls the Edge TPU; `cpu` is TFLite's CPU kernels.

    Raises:
        ModelError: nothing in the file is for an Edge TPU, or neither an Edge TPU nor Relax takes an operator.
        PlatformError: the regions are for an Edge TPU, and edgetpu_compiler is not here.
    """
    check_quantised(source, source.name)
    refused = unsupported(source)
    if len(refused) == len(source.graph):
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise ModelError(f"{source.name}: TVM keeps all its operators, so build it without partitioning ({reasons})")
    builder = relax.BlockBuilder()
    values = {tensor.name: _parameter(source, tensor.name) for tensor in source.graph.inputs}
    with builder.function("main", list(values.values())):
        runs = groupby(source.graph.operator_names, lambda name: name not in refused)
        for number, (is_region, names) in enumerate(runs):
            operators = list(names)
            content = slice_operators(source, operators).content
            inputs, outputs = file_ends(content)
            if is_region:
                function = _region(source, operators, content, device).with_attr("edgetpu_operators", operators)
            else:
                function = _imported(source.name, operators, content)
            called = builder.add_func(function, f"{'edgetpu' if is_region else 'tvm'}_{number}")
            made = builder.emit(relax.Call(called, [values[name] for name in inputs]))
            for index, name in enumerate(outputs):
                values[name] = made if len(outputs) == 1 else builder.emit(made[index])
        results = [values[name] for name in source.graph.outputs]
        builder.emit_func_output(results[0] if len(results) == 1 else relax.Tuple(results))
    return builder.finalize()


def _region(source: TfliteModel, operators: Sequence[str], content: bytes, device: str) -> relax.Function:
    """Return a function that calls `invoke` with the slice of a region."""
    inputs, outputs = file_ends(content)
    if device != CPU:
        [(content, _)] = compile_parts([file_for_compiler(source.name, content)], [source.name])
    parameters, given = [_parameter(source, name) for name in inputs], [_parameter(source, name) for name in outputs]
    reads, writes = file_ends(content)  # edgetpu_compiler may change the order
    texts = hashlib.sha256(content).hexdigest().encode(), device.encode(), content
    constants = [relax.const(np.frombuffer(text, np.uint8)) for text in texts]
    arguments = [parameters[inputs.index(name)] for name in reads]
    made = [given[outputs.index(name)].ty for name in writes]
    builder = relax.BlockBuilder()
    with builder.function("region", parameters, {"edgetpu_device": device, "edgetpu_inputs": inputs}, private=True):
        result = builder.emit(relax.call_dps_packed(_INVOKE, relax.Tuple([*constants, *arguments]), made))
        if writes != outputs:
            result = builder.emit(relax.Tuple([result[writes.index(name)] for name in outputs]))
        builder.emit_func_output(result)
    return builder.finalize()["region"].with_attr("edgetpu_outputs", outputs)


def _imported(name: str, operators: Sequence[str], content: bytes) -> relax.Function:
    """Return what Relax's importer makes of a slice."""
    try:
        mod = from_tflite(tflite.Model.GetRootAsModel(content, 0))
    except tvm.error.OpNotImplemented as error:
        raise ModelError(f"{name}: neither an Edge TPU nor Relax takes {', '.join(operators)}: {error}") from error
    return mod["main"].without_attr("global_symbol")


def _parameter(source: TfliteModel, name: str) -> relax.Var:
    tensor = source.graph.tensors[name]
    return relax.Var(name, relax.TensorType(tensor.shape, tensor.dtype))


def _invoke(digest: Any, device: Any, content: Any, *tensors: Any) -> None:
    """Run a region; Relax passes tensors alone, so texts are tensors of their bytes."""
    invoke(digest.numpy().tobytes().decode(), device.numpy().tobytes().decode(), content, *tensors)


tvm.register_global_func(_INVOKE, _invoke, override=True)
