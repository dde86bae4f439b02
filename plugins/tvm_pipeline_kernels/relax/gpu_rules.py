"""Rules of our own for fused functions on GPUs: convolutions and pools, since dlight has none for them.

A convolution that is computed in tiles tells tuning its workload, in an attribute of the scheduled function.
"""

from __future__ import annotations

import json
import re
from functools import partial
from types import MappingProxyType
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import SBlockRV

from tvm_pipeline.errors import ModelError
from tvm_pipeline_kernels.choices import gpu_workload_of, possible_choices
from tvm_pipeline_kernels.gpu_tiles import FEWEST_THREADS, Extents, Gpu, GpuTile, gpu_of, opencl_gpu
from tvm_pipeline_kernels.relax.gpu_conv2d import (
    FEWEST_ROWS,
    as_product,
    by_elements,
    by_threads,
    convolution_of,
    window_of,
)
from tvm_pipeline_kernels.relax.schedules.choice import WORKLOAD
from tvm_pipeline_tvm.kernel_sets import Choices, hashable

BY_TILES = "conv2d"  # the rule of what tuning can make faster


def by_convolution(
    function: tirx.PrimFunc, target: tvm.target.Target, choices: Choices = MappingProxyType({})
) -> tuple[tirx.PrimFunc, str] | None:
    """Schedule a convolution; return None where there is none, or one whose form the rules do not know.

    Args:
        choices: of tuning; a tile that the device cannot have leaves that of the static rule.
    """
    s = s_tir.Schedule(function)
    found = convolution_of(s)
    if found is None or found[1].columns == 1:  # one pixel is a sum for each output, which is a reduction of dlight's
        return None
    gpu, workload = gpu_of_target(target), None
    rules: list[tuple[str, Any]] = [("conv2d_by_threads", by_threads)]
    if found[1].outputs >= FEWEST_ROWS and found[1].terms > 1 and gpu.block_threads >= FEWEST_THREADS:
        rules.insert(0, (BY_TILES, as_product))
        workload = _workload(s, *found)
        chosen = choices.get(workload)
        if chosen is not None and chosen in possible_choices(workload, gpu):
            rules.insert(0, (BY_TILES, partial(as_product, tile=GpuTile(*chosen))))
    for name, rule in rules:
        s = s_tir.Schedule(function)
        anchor, extents = convolution_of(s) or found
        try:
            rule(s, anchor, extents, gpu)
            _bind_rest(s, gpu)
        except (s_tir.ScheduleError, tvm.error.InternalError):
            continue
        made = s.mod["main"].with_attr("tirx.is_scheduled", True)
        is_tuned = name == BY_TILES and workload is not None
        return (made.with_attr(WORKLOAD, json.dumps(workload)) if is_tuned else made), name
    return None


def _workload(s: s_tir.Schedule, anchor: SBlockRV, extents: Extents) -> Any:
    """Return the workload of a convolution; None where it is not all float32."""
    block = s.get(anchor)
    image, *others = (region.source for region in (*block.reads, *block.writes))
    if any(str(array.dtype) != "float32" for array in (image, *others)):
        return None
    return gpu_workload_of(extents, list(map(int, image.shape)))


def workload_of(function: tirx.PrimFunc) -> Any | None:
    """Return the workload of a function that `by_convolution` has scheduled in tiles; None of any other."""
    text = function.attrs.get(WORKLOAD)
    return None if text is None else hashable(json.loads(str(text)))


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
