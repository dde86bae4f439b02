"""The fused functions of a network that hold what is tuned: tuning measures it with all that is fused to it.

For CPU cores these are the convolutions of our own schedules, for GPUs what TOPI has a template of AutoTVM's for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import tvm
from tvm import autotvm, relay, te
from tvm.relay.backend import te_compiler

from tvm_pipeline_kernels.choices import CONV2D, DEPTHWISE, Workload
from tvm_pipeline_kernels.relay.lowered_int8 import lowered_int8
from tvm_pipeline_kernels.relay.schedules.choice_context import plain_workload, winograd_workload
from tvm_pipeline_kernels.relay.schedules.conv2d_winograd import WINOGRAD
from tvm_pipeline_kernels.relay.schedules.device_choices import DeviceWorkload, text_of
from tvm_pipeline_kernels.tuning.candidates import Task, W
from tvm_pipeline_tvm.relay.fold import building
from tvm_pipeline_tvm.relay.macs import macs
from tvm_pipeline_tvm.relay.splits import SplitByIndices

_TEMPLATES = {WINOGRAD: CONV2D, "nn.contrib_conv2d_NCHWc": CONV2D, "nn.contrib_depthwise_conv2d_NCHWc": DEPTHWISE}
_ON_DEVICES = {"nn.conv2d", "nn.conv2d_transpose", "nn.dense", "nn.batch_matmul"}


def optimized(mod: tvm.IRModule, target: Any, params: dict[str, Any] | None = None) -> tvm.IRModule:
    """Return the module as `fold.fast_build` lowers it: what becomes one kernel is a fused function."""
    with building():
        lowered = lowered_int8(SplitByIndices()(mod), target, params)
        return relay.optimize(lowered, target, params=params)[0]


def tasks_of(mod: tvm.IRModule) -> list[Task[Workload]]:
    """Return the workloads of an optimized module (`optimized`) for CPU cores."""
    return _tasks(mod, workload_of)


def device_tasks_of(mod: tvm.IRModule, target: tvm.target.Target) -> list[Task[DeviceWorkload]]:
    """Return the workloads of an optimized module (`optimized`) for a GPU."""
    return _tasks(mod, partial(device_workload_of, target=target))


def _tasks(mod: tvm.IRModule, find: Callable[[relay.Function], W | None]) -> list[Task[W]]:
    functions: dict[int, tuple[relay.Function, W]] = {}
    calls: Counter[int] = Counter()

    def visit(expr: relay.Expr) -> None:
        if isinstance(expr, relay.Function):
            key = tvm.ir.structural_hash(expr)
            workload = functions[key][1] if key in functions else find(expr)
            if workload is not None:
                functions[key] = expr, workload
                calls[key] += 1

    relay.analysis.post_order_visit(mod["main"], visit)
    tasks: dict[W, Task[W]] = {}
    for key, (function, workload) in functions.items():
        [anchor] = _anchors(function, _TEMPLATES.keys() | _ON_DEVICES)
        task = tasks.setdefault(workload, Task(workload, macs(anchor)))
        task.functions.append((function, calls[key]))
    return list(tasks.values())


def workload_of(function: relay.Function) -> Workload | None:
    """Return the workload of a fused function, as TOPI asks for it; None where a schedule of ours does not serve it."""
    anchors = _anchors(function, _TEMPLATES)
    if len(anchors) != 1:
        return None
    [call] = anchors
    data, kernel = (argument.checked_type for argument in call.args)
    result, attrs = call.checked_type, call.attrs
    is_stored_as_computed = tvm.ir.structural_equal(result, function.body.checked_type)
    is_blocked = len(data.shape) == 5
    if {data.dtype, kernel.dtype, result.dtype} != {"float32"} or not is_blocked or not is_stored_as_computed:
        return None
    shapes = [[int(extent) for extent in type_.shape] for type_ in (data, kernel)]
    window = [[int(extent) for extent in numbers] for numbers in (attrs.strides, attrs.padding, attrs.dilation)]
    if call.op.name == WINOGRAD:
        return winograd_workload(*shapes, *window)
    workload: Workload = plain_workload((_TEMPLATES[call.op.name], *shapes, *window, "float32"))
    return workload


def is_winograd(function: relay.Function) -> bool:
    """Return whether a fused function is a convolution by Winograd's algorithm."""
    return bool(_anchors(function, {WINOGRAD}))


def device_workload_of(function: relay.Function, target: tvm.target.Target) -> DeviceWorkload | None:
    """Return the workload of a fused function as TOPI's default for a GPU has it; None where it cannot be tuned."""
    anchors = _anchors(function, _ON_DEVICES)
    if len(anchors) != 1:
        return None
    [call] = anchors
    types = [argument.checked_type for argument in call.args]
    arguments = [te.placeholder([int(extent) for extent in type_.shape], type_.dtype) for type_ in types]
    with target, building():
        _, outputs = te_compiler.select_implementation(call.op, call.attrs, arguments, call.checked_type, target)
    workload = autotvm.task.get_workload(outputs)
    return text_of(workload) if workload else None


def _anchors(function: relay.Function, names: Collection[str]) -> list[relay.Call]:
    """Return the calls of these operators in a fused function; fusion puts no two into one."""
    found: list[relay.Call] = []

    def visit(expr: relay.Expr) -> None:
        if isinstance(expr, relay.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name in names:
            found.append(expr)

    if function.attrs is not None and "Primitive" in function.attrs.keys():  # noqa: SIM118 - no mapping
        relay.analysis.post_order_visit(function.body, visit)
    return found
