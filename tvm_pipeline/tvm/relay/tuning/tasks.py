"""The fused functions of a network that hold a convolution of ours: tuning measures it with all that is fused to it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relay

from tvm_pipeline.tvm.relay.fold import building
from tvm_pipeline.tvm.relay.macs import macs
from tvm_pipeline.tvm.relay.schedules.choices import CONV2D, DEPTHWISE, Workload, plain_workload, winograd_workload
from tvm_pipeline.tvm.relay.splits import SplitByIndices

_WINOGRAD = "nn.contrib_conv2d_winograd_without_weight_transform"
_TEMPLATES = {_WINOGRAD: CONV2D, "nn.contrib_conv2d_NCHWc": CONV2D, "nn.contrib_depthwise_conv2d_NCHWc": DEPTHWISE}


@dataclass(slots=True)
class Task:
    """One workload of a network.

    Attributes:
        macs: multiply-accumulates of one call.
        functions: the fused functions that hold it, which differ in what follows, each with its calls in the network.
    """

    workload: Workload
    macs: int
    functions: list[tuple[relay.Function, int]] = field(default_factory=list)

    @property
    def calls(self) -> int:
        return sum(calls for _, calls in self.functions)


def optimized(mod: tvm.IRModule, target: Any, params: dict[str, Any] | None = None) -> tvm.IRModule:
    """Return the module as `fold.fast_build` lowers it: what becomes one kernel is a fused function."""
    with building():
        return relay.optimize(SplitByIndices()(mod), target, params=params)[0]


def tasks_of(mod: tvm.IRModule) -> list[Task]:
    """Return the workloads of an optimized module (`optimized`)."""
    functions: dict[int, relay.Function] = {}
    calls: Counter[int] = Counter()

    def visit(expr: relay.Expr) -> None:
        if isinstance(expr, relay.Function) and workload_of(expr) is not None:
            key = tvm.ir.structural_hash(expr)
            functions.setdefault(key, expr)
            calls[key] += 1

    relay.analysis.post_order_visit(mod["main"], visit)
    tasks: dict[Workload, Task] = {}
    for key, function in functions.items():
        found = _convolution(function)
        workload = workload_of(function)
        if found is not None and workload is not None:
            task = tasks.setdefault(workload, Task(workload, macs(found)))
            task.functions.append((function, calls[key]))
    return list(tasks.values())


def workload_of(function: relay.Function) -> Workload | None:
    """Return the workload of a fused function, as TOPI asks for it; None where a schedule of ours does not serve it."""
    call = _convolution(function)
    if call is None:
        return None
    data, kernel = (argument.checked_type for argument in call.args)
    result, attrs = call.checked_type, call.attrs
    is_stored_as_computed = tvm.ir.structural_equal(result, function.body.checked_type)
    is_blocked = len(data.shape) == 5
    if {data.dtype, kernel.dtype, result.dtype} != {"float32"} or not is_blocked or not is_stored_as_computed:
        return None
    shapes = [[int(extent) for extent in type_.shape] for type_ in (data, kernel)]
    window = [[int(extent) for extent in numbers] for numbers in (attrs.strides, attrs.padding, attrs.dilation)]
    if call.op.name == _WINOGRAD:
        return winograd_workload(*shapes, *window)
    workload: Workload = plain_workload((_TEMPLATES[call.op.name], *shapes, *window, "float32"))
    return workload


def _convolution(function: relay.Function) -> relay.Call | None:
    """Return the convolution in a fused function; fusion puts no two into one."""
    found: list[relay.Call] = []

    def visit(expr: relay.Expr) -> None:
        if isinstance(expr, relay.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name in _TEMPLATES:
            found.append(expr)

    if function.attrs is None or "Primitive" not in function.attrs.keys():  # noqa: SIM118 - no mapping
        return None
    relay.analysis.post_order_visit(function.body, visit)
    return found[0] if len(found) == 1 else None
