"""Schedules of fused functions for CUDA devices: the counterpart of `schedules/` for CPU cores.

Convolutions and pools have rules of our own (`gpu_conv2d.py`), since dlight, TVM's collection for GPUs, has none.
Products of matrices, other reductions and all else are scheduled by dlight.

Functions come from TVM's own LegalizeOps, in NCHW and not in blocks; see `gpu_kernels`. Nothing of this was ever run on
a GPU: kernels are compiled, and run on the CPU by the tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax, s_tir, tirx
from tvm.s_tir import dlight

from tvm_pipeline.errors import ModelError
from tvm_pipeline.tvm.relax.gpu_conv2d import (
    FEWEST_ROWS,
    as_product,
    by_elements,
    by_threads,
    convolution_of,
    window_of,
)
from tvm_pipeline.tvm.relax.gpu_tiles import Gpu, gpu_of

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


def gpu_kernels(mod: tvm.IRModule, target: tvm.target.Target, rules: dict[str, str] | None = None) -> tvm.IRModule:
    """Return what `gpu_fused` gave as calls of scheduled kernels.

    Args:
        rules: is filled with the rule of each function.

    Raises:
        ModelError: a function has no schedule for GPUs.
    """
    with target:
        mod = tvm.transform.Sequential([relax.transform.FuseTIR(), relax.transform.DeadCodeElimination()])(mod)
    functions = {}
    for symbol, function in mod.functions.items():
        if isinstance(function, tirx.PrimFunc):
            try:
                function, rule = gpu_scheduled(function, target)
            except ModelError as error:
                raise ModelError(f"kernel {symbol.name_hint}: {error}") from error
            if rules is not None:
                rules[str(symbol.name_hint)] = rule
        functions[symbol] = function
    return tvm.IRModule(functions, attrs=mod.attrs)


def gpu_scheduled(function: tirx.PrimFunc, target: tvm.target.Target) -> tuple[tirx.PrimFunc, str]:
    """Return a function with its loops bound to blocks and threads, and the name of the rule that did it.

    Rules are `conv2d`, `conv2d_by_threads` and `window` of ours, and `matmul`, `gemv`, `reduction`, `general_reduction`
    and `fallback` of dlight's. `fallback` gives each thread one element, and is right for everything.

    Raises:
        ModelError: no rule schedules the function.
    """
    for rule in (_convolution, _window, *(_dlight(name, rule) for name, rule in _BY_DLIGHT)):
        scheduled = rule(function, target)
        if scheduled is not None:
            return scheduled
    raise ModelError(
        "it has no schedule for GPUs, not even dlight's fallback (it computes something in loops of its own); leave "
        "the GPU out of the platform, or simplify the model so that this operator is not in it"
    )


def _convolution(function: tirx.PrimFunc, target: tvm.target.Target) -> tuple[tirx.PrimFunc, str] | None:
    """Schedule a convolution; return None where there is none, or one whose form the rules do not know."""
    found = convolution_of(s_tir.Schedule(function))
    if found is None or found[1].columns == 1:  # one pixel is a sum for each output, which is a reduction of dlight's
        return None
    rules: list[tuple[str, Any]] = [("conv2d_by_threads", by_threads)]
    if found[1].outputs >= FEWEST_ROWS and found[1].terms > 1:
        rules.insert(0, ("conv2d", as_product))
    for name, rule in rules:
        s = s_tir.Schedule(function)
        anchor, extents = convolution_of(s) or found
        try:
            rule(s, anchor, extents, gpu_of_target(target))
            _bind_rest(s)
        except (s_tir.ScheduleError, tvm.error.InternalError):
            continue
        return s.mod["main"].with_attr("tirx.is_scheduled", True), name
    return None


def _window(function: tirx.PrimFunc, _target: tvm.target.Target) -> tuple[tirx.PrimFunc, str] | None:
    """Schedule a reduction over a small window, for which dlight's rules would take a warp or more for an element."""
    s = s_tir.Schedule(function)
    anchor = window_of(s)
    if anchor is None:
        return None
    try:
        by_elements(s, anchor)
        _bind_rest(s)
    except (s_tir.ScheduleError, tvm.error.InternalError):
        return None
    return s.mod["main"].with_attr("tirx.is_scheduled", True), "window"


def gpu_of_target(target: tvm.target.Target) -> Gpu:
    """Return the device that a CUDA target is for, by its architecture."""
    number = re.fullmatch(r"sm_(\d+)[af]?", str(target.attrs.get("arch", "")))
    if number is None:
        raise ModelError(f"the target {target} does not say which GPU it is for; give its architecture, such as sm_87")
    return gpu_of(int(number[1]))


def _bind_rest(s: s_tir.Schedule) -> None:
    """Give each element of what stays behind a convolution a thread, in a kernel of its own."""
    for block in s.get_child_blocks(s.get_sblock("root")):
        loops = s.get_loops(block)
        if not any(s.get(loop).thread_binding is not None for loop in loops):
            outer, thread = s.split(s.fuse(*loops), [None, 256])
            s.bind(outer, "blockIdx.x")
            s.bind(thread, "threadIdx.x")


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
