"""Relax functions run kernel by kernel, each scheduled as the library does it, for tests against numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.ir import Call
from tvm.relax import transform

from tvm_pipeline_tvm.kernel_sets import relax_kernels

Array = np.ndarray[Any, Any]

MCPU = {16: "x86-64-v4", 8: "x86-64-v3", 4: "x86-64-v2"}  # by the float32 numbers of a vector
_FLAGS = Path("/proc/cpuinfo").read_text().split()
_NEEDED = {"x86-64-v4": "avx512bw", "x86-64-v3": "avx2", "x86-64-v2": "sse4_2"}
TARGETS = [
    tvm.target.Target({"kind": "llvm", "mcpu": name}) for name, flag in _NEEDED.items() if flag in _FLAGS
]  # that this machine can run


def target_of(lanes: int) -> Any:
    """Return a target whose vectors have so many float32; skip the test where this machine cannot run it."""
    found = [target for target in TARGETS if str(target.attrs["mcpu"]) == MCPU[lanes]]
    if not found:
        pytest.skip(f"this machine has no vectors of {lanes} float32")
    return found[0]


def module_of(build: Callable[..., Any], *shapes: Sequence[int]) -> tvm.IRModule:
    """Return a function of float32 tensors as a module: `build(emit, *tensors)` gives its result."""
    builder = relax.BlockBuilder()
    inputs = [relax.Var(f"x{index}", relax.TensorType(shape, "float32")) for index, shape in enumerate(shapes)]
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit_output(build(builder.emit, *inputs))
        builder.emit_func_output(result)
    return builder.finalize()


def kernels(build: Callable[..., Any], arrays: list[Array], target: tvm.target.Target) -> tvm.IRModule:
    """Return a Relax function of arrays as kernels: `build` makes it of a block builder and the function's inputs."""
    builder = relax.BlockBuilder()
    inputs = [relax.Var(f"x{i}", relax.TensorType(array.shape, str(array.dtype))) for i, array in enumerate(arrays)]
    with builder.function("main", inputs):
        with builder.dataflow():
            output = builder.emit_output(build(builder, *inputs))
        builder.emit_func_output(output)
    passes = [
        transform.LegalizeOps(),
        transform.AnnotateTIROpPattern(),
        transform.FuseOps(),
        transform.FuseTIR(),
        transform.DeadCodeElimination(),
    ]
    with target:
        return tvm.transform.Sequential(passes)(builder.finalize())


def run(build: Callable[..., Any], arrays: list[Array], target: tvm.target.Target) -> tuple[Array, list[str]]:
    """Return what a Relax function gives for these arrays, and the rules of its kernels in the order of the calls."""
    _, result, rules = calls(build, arrays, target)
    return result, rules


def calls(
    build: Callable[..., Any], arrays: list[Array], target: tvm.target.Target
) -> tuple[list[tuple[Any, list[Any]]], Array, list[str]]:
    """Return the kernels of a Relax function with their tensors, what they give, and the rule of each."""
    module = kernels(build, arrays, target)
    functions, rules = {}, {}
    for name, function in module.functions_items():
        if isinstance(function, tirx.PrimFunc):
            function, rules[name.name_hint] = relax_kernels().scheduled(function, target)
            functions[name] = function.with_attr("global_symbol", name.name_hint)
    library = tvm.compile(tvm.IRModule(functions), target=target, tir_pipeline=relax_kernels().tir_pipeline).jit()

    values = dict(zip(module["main"].params, map(_tensor, arrays), strict=True))
    called, used = [], []

    def value(argument: Any) -> Any:
        return values[argument] if isinstance(argument, relax.Var) else _tensor(argument.value.numpy())

    (block,) = module["main"].body.blocks
    for binding in block.bindings:
        if isinstance(binding.value, Call):
            name, arguments = binding.value.args[0].name_hint, binding.value.args[1]
            (ty,) = binding.value.ty_args
            # What a kernel does not write would be seen.
            values[binding.var] = _tensor(np.full([int(extent) for extent in ty.shape], 99, str(ty.dtype)))
            tensors = [*map(value, arguments), values[binding.var]]
            library[name](*tensors)
            called.append((library[name], tensors))
            used.append(rules[name])
        else:
            values[binding.var] = values[binding.value]
    result: Array = values[module["main"].body.body].numpy()
    return called, result, used


def _tensor(array: Array) -> Any:
    """Return a tensor at an address that vectors are aligned to, as kernels take it."""
    return tvm.runtime.tensor(array)
