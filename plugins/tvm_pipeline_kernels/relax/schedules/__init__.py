"""Schedules of our own for CPU cores: a rule for each kind of anchor.

conv2d.py            convolutions in blocked layout: register tiles by `tiles.py`
conv2d_int8.py       convolutions of int8: several products of bytes at a time
conv2d_winograd.py   3x3 convolutions by Winograd's algorithm, within a tolerance
depthwise_int8.py    depthwise convolutions of int8: a group of kernel columns at a time
depthwise.py         depthwise convolutions: padding by rows
group_conv2d.py      grouped convolutions in blocks: of whole blocks, or whole groups in a block
group_pixels.py      the others, on plain images: vectors along the pixels
conv2d_transpose.py  transposed convolutions: a convolution for each phase of the stride
pooling.py           pooling in blocked layout: sums and maxima in registers
softmax.py           softmax and log_softmax: a row at a time
concatenate.py       concatenations: a pass of each input, with what is fused to them
dense.py             products of matrices: packed weights, and activations by activations
plain.py             the rule of whatever no other rule is for: in vectors and in parallel
epilogue.py          what is fused to an anchor
lowering.py          what no schedule can say: tiles in registers, weights fetched before they are needed
choice.py            what a convolution tells of tuning
cores.py             the vectors of a core
stored_weights.py    weights in 16 bits, and how kernels read them

An operator with a rule is made by the `compute` of the rule's module. Its main block has the annotation `RULE`, whose
value is the name of the module. FuseOps and FuseTIR keep it, so `scheduled` finds the rule of a fused function.
"""

from __future__ import annotations

import importlib
import math

from tvm import IRModule
from tvm.s_tir import Schedule
from tvm.tirx import PrimFunc, transform

from tvm_pipeline_kernels.choices import Workload
from tvm_pipeline_kernels.relax.schedules import choice, plain
from tvm_pipeline_kernels.relax.schedules.cores import Cores
from tvm_pipeline_kernels.relax.schedules.epilogue import RULE, blocks_of
from tvm_pipeline_tvm.tvm_errors import reason

__all__ = ["RULE", "RULES", "Cores", "scheduled", "workload_of"]

RULES = (
    "conv2d",
    "conv2d_int8",
    "conv2d_winograd",
    "depthwise",
    "depthwise_int8",
    "group_conv2d",
    "conv2d_transpose",
    "pooling",
    "softmax",
    "concatenate",
    "dense",
)


def scheduled(function: PrimFunc, cores: Cores) -> tuple[PrimFunc, str]:
    """Return a fused function scheduled for a core, and the name of the rule that did it.

    The name is "plain" where no rule is for the function, and "default" where the plain rule fails too; then the
    function is as it was. Behind the name stands which rule failed, and why: "plain (conv2d failed: ...)".
    """
    failed = ""
    try:
        s = Schedule(_narrow(function), error_render_level="none")
        blocks = blocks_of(s)
    except Exception:  # as of a scatter, or of a slice whose ends are known at run time
        return function, "default (loops without blocks, or of unknown extents)"
    for block in blocks:
        rule = str(s.get(block).annotations.get(RULE))
        if rule not in RULES:
            continue
        try:
            importlib.import_module(f"{__name__}.{rule}").schedule(s, block, cores)
            return s.mod["main"], rule
        except Exception as error:  # TVM raises whatever its authors had at hand, and a slow kernel is right
            failed = f" ({rule} failed: {reason(error)})"
            break
    s = Schedule(function, error_render_level="none")
    try:
        if plain.schedule(s, blocks_of(s), cores):
            return s.mod["main"], f"plain{failed}"
    except Exception as error:
        failed = failed or f" (plain failed: {reason(error)})"
    return function, f"default{failed}"


def workload_of(function: PrimFunc) -> Workload | None:
    """Return the workload of a fused function that has no schedule; None where tuning cannot make it faster."""
    try:
        s = Schedule(function, error_render_level="none")
        found = (choice.workload_in(s.get(block).annotations) for block in blocks_of(s))
        return next((workload for workload in found if workload is not None), None)
    except Exception:  # as in `scheduled`
        return None


def _narrow(function: PrimFunc) -> PrimFunc:
    """Return a function with indices of 32 bits, unless it computes with integers of 64.

    Relax makes them of 64 bits. TVM narrows them when it compiles, and forgets on the way which loops it was asked to
    part.
    """
    tensors = [*function.params, *function.body.block.alloc_buffers]
    sizes = [math.prod(int(extent) for extent in tensor.shape) for tensor in tensors]
    if max(sizes) >= 1 << 31 or any(tensor.dtype == "int64" for tensor in tensors):
        return function
    module = transform.ForceNarrowIndexToInt32()(IRModule({"main": function}))
    return module["main"]
