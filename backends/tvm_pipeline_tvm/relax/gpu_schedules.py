"""Schedules of fused functions for GPUs: by rules of the kernels that are installed, else by dlight.

dlight, TVM's collection for GPUs, has rules of products of matrices and reductions, and one that is right for all.

Functions come from TVM's own LegalizeOps, in NCHW and not in blocks; see `gpu_kernels`. CUDA's kernels ran on an H100,
and those of OpenCL on PoCL only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from types import MappingProxyType
from typing import Any

import tvm
from tvm import relax, s_tir, tirx
from tvm.s_tir import dlight

from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.kernel_sets import Choices, relax_kernels
from tvm_pipeline_tvm.relax.kernel_passes import unscheduled

_BY_DLIGHT = (
    ("matmul", dlight.gpu.Matmul),
    ("gemv", dlight.gpu.GEMV),
    ("reduction", dlight.gpu.Reduction),
    ("general_reduction", dlight.gpu.GeneralReduction),
    ("fallback", dlight.gpu.Fallback),
)


def gpu_fused(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Return a simplified module as calls of fused functions, each of which FuseTIR will make a kernel.

    Its inputs have names of their own: TVM 0.27 writes a name such as `input.1` into the source of kernels as it is.
    """
    main = mod["main"]
    inputs = [relax.Var(f"input_{index}", param.ty) for index, param in enumerate(main.params)]
    bound = main.bind_params(dict(zip(main.params, inputs, strict=True)))
    functions = dict(mod.functions.items())
    functions[mod.get_global_var("main")] = relax.Function(inputs, bound.body, main.ret_ty, main.is_pure, main.attrs)
    with target:
        return tvm.transform.Sequential(
            [
                relax.transform.LegalizeOps(),
                relax.transform.AnnotateTIROpPattern(),
                relax.transform.FuseOps(),
            ]
        )(tvm.IRModule(functions, attrs=mod.attrs))


def gpu_kernels(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    rules: dict[str, str] | None = None,
    choices: Choices = MappingProxyType({}),
    workloads: dict[str, Any] | None = None,
) -> tvm.IRModule:
    """Return what `gpu_fused` gave as calls of scheduled kernels.

    Args:
        rules: is filled with the rule of each function.
        choices: of tuning.
        workloads: is filled with the names of functions that tuning can make faster, and what it calls them.

    Raises:
        ModelError: a function has no schedule for GPUs.
    """
    functions, installed = {}, relax_kernels()
    mod = unscheduled(mod, target)
    for symbol, function in mod.functions.items():
        if isinstance(function, tirx.PrimFunc):
            name = str(symbol.name_hint)
            try:
                function, rule = gpu_scheduled(function, target, choices)
            except ModelError as error:
                raise ModelError(f"kernel {name}: {error}") from error
            if rules is not None:
                rules[name] = rule
            workload = installed.workload_of(function)
            if workloads is not None and workload is not None:
                workloads[name] = workload
        functions[symbol] = function
    return tvm.IRModule(functions, attrs=mod.attrs)


def gpu_scheduled(
    function: tirx.PrimFunc, target: tvm.target.Target, choices: Choices = MappingProxyType({})
) -> tuple[tirx.PrimFunc, str]:
    """Return a function with its loops bound to blocks and threads, and the name of the rule that did it.

    Rules are those of the installed kernels, and `matmul`, `gemv`, `reduction`, `general_reduction` and `fallback` of
    dlight's. `fallback` gives each thread one element, and is right for everything.

    A rule of dlight's may give a block more threads than a small OpenCL device has (Mali); then it does not count.

    Raises:
        ModelError: no rule schedules the function.
    """
    most = int(target.attrs.get("max_num_threads", 1024))
    for rule in (*relax_kernels().gpu_rules(choices), *(_dlight(name, rule) for name, rule in _BY_DLIGHT)):
        scheduled = rule(function, target)
        if scheduled is not None and max(_threads(scheduled[0]), default=1) <= most:
            return scheduled
    raise ModelError(
        "it has no schedule for GPUs, not even dlight's fallback (it computes something in loops of its own); leave "
        "the GPU out of the platform, or simplify the model so that this operator is not in it"
    )


def _threads(function: tirx.PrimFunc) -> Iterator[int]:
    """Yield the threads of the blocks of threads that compute each block of a scheduled function."""
    s = s_tir.Schedule(function)
    waiting = [s.get_sblock("root")]
    while waiting:
        block = waiting.pop()
        waiting += s.get_child_blocks(block)
        bound = [loop for loop in map(s.get, s.get_loops(block)) if loop.thread_binding is not None]
        extents = {str(loop.thread_binding.thread_tag): int(loop.extent) for loop in bound}
        yield prod(extent for tag, extent in extents.items() if tag.startswith("threadIdx"))


def _dlight(name: str, rule: Any) -> Callable[[tirx.PrimFunc, Any], tuple[tirx.PrimFunc, str] | None]:
    def schedule(function: tirx.PrimFunc, target: tvm.target.Target) -> tuple[tirx.PrimFunc, str] | None:
        with target:
            try:
                found = rule().apply(function, target, False)
            except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, AssertionError):
                return None  # rules of dlight raise of functions that they were not made for
        if found is None:
            return None
        s = found[0] if isinstance(found, list) else found
        return s.mod["main"].with_attr("tirx.is_scheduled", True), name

    return schedule
