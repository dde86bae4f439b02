"""The passes from an imported module to scheduled kernels, and the same as a pipeline of passes for `tvm.compile`."""

from __future__ import annotations

import math
from functools import partial
from types import MappingProxyType
from typing import Any

import tvm
from tvm import relax, te, tirx

from tvm_pipeline_tvm.kernel_sets import Choices, relax_kernels
from tvm_pipeline_tvm.relax.dataflow import one_block
from tvm_pipeline_tvm.relax.pad_channels import pad_channels
from tvm_pipeline_tvm.relax.simplify import simplified

NAME = "concatenate"  # of the functions that our legalisation makes
PATTERN = "op_pattern"
OPAQUE = 8  # FuseOps leaves functions of this pattern alone
IS_SCHEDULED = "tirx.is_scheduled"  # of a function; TVM's own schedules for GPUs write and heed it


def _extreme(kind: str, builder: Any, call: Any) -> Any:
    """Make a maximum or minimum whose identity is infinite: TVM's is the largest finite number."""
    data, attributes, rank = call.args[0], call.attrs, len(call.args[0].ty.shape)
    if not str(data.ty.dtype).startswith("float"):
        return tvm.ir.Op.get(f"relax.{kind}").get_attr("FLegalize")(builder, call)
    identity = float("inf" if kind == "min" else "-inf")
    either = tirx.Min if kind == "min" else tirx.Max
    combine = te.comm_reducer(lambda a, b: either(a, b), lambda dtype: tirx.const(identity, dtype), name=kind)
    axes = [int(axis) % rank for axis in (range(rank) if attributes.axis is None else attributes.axis)]

    def compute(x: Any) -> Any:
        ranges = {axis: te.reduce_axis((0, x.shape[axis]), f"k{axis}") for axis in axes}

        def element(*indices: Any) -> Any:
            rest = iter(indices)
            kept = [next(rest) if attributes.keepdims or axis not in ranges else None for axis in range(rank)]
            return combine(x(*(ranges.get(axis, index) for axis, index in enumerate(kept))), list(ranges.values()))

        return te.compute(list(map(int, call.ty.shape)), element, name=f"T_{kind}", tag="comm_reduce")

    return builder.call_te(compute, data, primfunc_name_hint=kind)


EXTREMES = {f"relax.{kind}": partial(_extreme, kind) for kind in ("max", "min")}


def fused(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    *,
    apart: bool = False,
    tolerance: float = 0.0,
    choices: Choices = MappingProxyType({}),
    storage: str = "float32",
) -> tvm.IRModule:
    """Return a simplified module as calls of fused functions, each of which FuseTIR will make a kernel.

    With `apart` concatenations that slices can do in place are kernels of their own; see `ConcatenationsApart`.
    `tolerance`, `choices` and `storage` are those of `RelaxKernels.layouts`.
    """
    installed = relax_kernels()
    with target:
        return tvm.transform.Sequential(
            [
                *installed.layouts(target, tolerance, choices, storage),
                relax.transform.LegalizeOps(EXTREMES | dict(installed.legalizations(target, storage))),
                relax.transform.AnnotateTIROpPattern(),
                *([ConcatenationsApart()] if apart else []),
                relax.transform.FuseOps(),
            ]
        )(mod)


@tvm.transform.module_pass(opt_level=0, name="FuseKernels")
class FuseKernels:
    """The pass: `main` as a frontend makes it -> calls of functions, each of which FuseTIR will make a kernel.

    It is `simplified`, `pad_channels` and `fused`: batch norms become part of convolutions, images are laid out as the
    installed kernels read them, and operators are legalised and fused. Weights must be constants
    (`relax.transform.BindParams`).

        before: main(x) { lv = conv2d(x, w); lv1 = batch_norm(lv, ..)[0]; lv2 = relu(lv1); gv = softmax(lv2) }
        after:  fused_conv2d_add_relu(x, w, b) { lv = call_tir(conv2d, (x, w)); .. }
                main(x) { lv = fused_conv2d_add_relu(x, w', b'); gv = call_tir(softmax, (lv,)) }

    Args:
        target: the CPU cores that are compiled for.
    """

    def __init__(self, target: tvm.target.Target | str | dict[str, Any]) -> None:
        self._target = tvm.target.Target(target) if isinstance(target, (str, dict)) else target

    def transform_module(self, mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
        return fused(pad_channels(simplified(one_block(mod))), self._target)


def kernels(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    rules: dict[str, str] | None = None,
    workloads: dict[str, Any] | None = None,
) -> tvm.IRModule:
    """Return what `fused` gave as calls of scheduled kernels; `rules` and `workloads` are those of ScheduleKernels."""
    schedule: Any = ScheduleKernels(target, rules, workloads)  # the decorator makes it a pass
    return schedule(unscheduled(mod, target))


def unscheduled(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Return what `fused` gave as calls of kernels that have no schedule yet."""
    with target:
        return tvm.transform.Sequential([relax.transform.FuseTIR(), relax.transform.DeadCodeElimination()])(mod)


@tvm.transform.module_pass(opt_level=0, name="ScheduleKernels")
class ScheduleKernels:
    """The pass: each function of TIR -> the same, scheduled by the rule of its anchor.

    A function that is scheduled already, by this pass or by another's hand, stays as it is.

    Args:
        target: the CPU cores that are compiled for.
        rules: is filled with the name of each function and of its rule.
        workloads: is filled with the names of functions that tuning can make faster, and what it calls them.
    """

    def __init__(
        self,
        target: tvm.target.Target,
        rules: dict[str, str] | None = None,
        workloads: dict[str, Any] | None = None,
    ) -> None:
        self._target, self._rules = target, {} if rules is None else rules
        self._workloads = {} if workloads is None else workloads

    def transform_module(self, mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
        functions, installed = {}, relax_kernels()
        for symbol, function in mod.functions.items():
            if isinstance(function, tirx.PrimFunc) and not function.attrs.get(IS_SCHEDULED):
                name, workload = str(symbol.name_hint), installed.workload_of(function)
                if workload is not None:
                    self._workloads[name] = workload
                function, self._rules[name] = installed.scheduled(function, self._target)
                function = function.with_attr(IS_SCHEDULED, True)
            functions[symbol] = function
        return tvm.IRModule(functions, attrs=mod.attrs)


@tvm.transform.module_pass(opt_level=0, name="ConcatenationsApart")
class ConcatenationsApart:
    """Makes each concatenation that a slice can do in place a separate kernel, as Relay does.

    The pass gives such a concatenation a pattern that FuseOps does not fuse. Its inputs are consecutive bytes of its
    result: it concatenates along the first axis of an extent above 1, such as the channels of one image.
    """

    def transform_module(self, mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
        functions = dict(mod.functions.items())
        for symbol, function in functions.items():
            is_named = isinstance(function, tirx.PrimFunc) and str(symbol.name_hint).startswith(NAME)
            if is_named and _is_of_whole_bytes(function):
                functions[symbol] = function.with_attr(PATTERN, OPAQUE)
        return tvm.IRModule(functions, attrs=mod.attrs)


def _is_of_whole_bytes(function: tirx.PrimFunc) -> bool:
    shapes = [tuple(map(int, param.shape)) for param in function.params]
    first, result = shapes[0], shapes[-1]
    along = [axis for axis in range(len(result)) if len(first) == len(result) and first[axis] != result[axis]]
    return len(along) == 1 and math.prod(result[: along[0]]) == 1
