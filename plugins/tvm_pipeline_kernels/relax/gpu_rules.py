"""Rules of our own for fused functions on GPUs: convolutions and pools, since dlight has none for them."""

from __future__ import annotations

import re
from typing import Any

import tvm
from tvm import s_tir, tirx

from tvm_pipeline.errors import ModelError
from tvm_pipeline_kernels.gpu_tiles import FEWEST_THREADS, Gpu, gpu_of, opencl_gpu
from tvm_pipeline_kernels.relax.gpu_conv2d import (
    FEWEST_ROWS,
    as_product,
    by_elements,
    by_threads,
    convolution_of,
    window_of,
)


def by_convolution(function: tirx.PrimFunc, target: tvm.target.Target) -> tuple[tirx.PrimFunc, str] | None:
    """Schedule a convolution; return None where there is none, or one whose form the rules do not know."""
    found = convolution_of(s_tir.Schedule(function))
    if found is None or found[1].columns == 1:  # one pixel is a sum for each output, which is a reduction of dlight's
        return None
    gpu = gpu_of_target(target)
    rules: list[tuple[str, Any]] = [("conv2d_by_threads", by_threads)]
    if found[1].outputs >= FEWEST_ROWS and found[1].terms > 1 and gpu.block_threads >= FEWEST_THREADS:
        rules.insert(0, ("conv2d", as_product))
    for name, rule in rules:
        s = s_tir.Schedule(function)
        anchor, extents = convolution_of(s) or found
        try:
            rule(s, anchor, extents, gpu)
            _bind_rest(s, gpu)
        except (s_tir.ScheduleError, tvm.error.InternalError):
            continue
        return s.mod["main"].with_attr("tirx.is_scheduled", True), name
    return None


def by_window(function: tirx.PrimFunc, target: tvm.target.Target) -> tuple[tirx.PrimFunc, str] | None:
    """Schedule a reduction over a small window, for which dlight's rules would take a warp or more for an element."""
    s = s_tir.Schedule(function)
    anchor = window_of(s)
    if anchor is None:
        return None
    gpu = gpu_of_target(target)
    try:
        by_elements(s, anchor, gpu)
        _bind_rest(s, gpu)
    except (s_tir.ScheduleError, tvm.error.InternalError):
        return None
    return s.mod["main"].with_attr("tirx.is_scheduled", True), "window"


def gpu_of_target(target: tvm.target.Target) -> Gpu:
    """Return the device that a target is for: by its architecture, or by the work-groups of an OpenCL target."""
    if target.kind.name == "opencl":
        return opencl_gpu(int(target.attrs["max_num_threads"]))
    number = re.fullmatch(r"sm_(\d+)[af]?", str(target.attrs.get("arch", "")))
    if number is None:
        raise ModelError(f"the target {target} does not say which GPU it is for; give its architecture, such as sm_87")
    return gpu_of(int(number[1]))


def _bind_rest(s: s_tir.Schedule, gpu: Gpu) -> None:
    """Give each element of what stays behind a convolution a thread, in a kernel of its own."""
    for block in s.get_child_blocks(s.get_sblock("root")):
        loops = s.get_loops(block)
        if not any(s.get(loop).thread_binding is not None for loop in loops):
            outer, thread = s.split(s.fuse(*loops), [None, gpu.block_threads])
            s.bind(outer, "blockIdx.x")
            s.bind(thread, "threadIdx.x")
