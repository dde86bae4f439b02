"""MemoryOrder: the pass that gives a TVM script's module the order of kernels that needs the least memory.

`kernel_order.py` finds the order, for a slice as well. `slicing.py` plans the arena of a slice by that order; the
graph executor's own planner does so for a TVM script.
"""

from __future__ import annotations

from collections.abc import Collection

import tvm
from tvm import relay

from tvm_pipeline_tvm.kernel_order import kernel_order
from tvm_pipeline_tvm.kernels import tensor_bytes
from tvm_pipeline_tvm.relay.kernel_walkers import kernels_of_module


def MemoryOrder(params: Collection[str] = ()) -> tvm.transform.Pass:  # noqa: N802
    """Return a pass that makes the graph executor run the kernels of `main` in the order that needs the least memory.

    It fuses operators, and binds each kernel with a `let` in that order: the graph executor's code generator and its
    memory planner follow it. A `let` stops fusion and every other rewriting, so run `relay.optimize` before it:

        mod, params = relay.optimize(mod, target, params=params)
        library = relay.build(MemoryOrder(params)(mod), target, params=params)

        before: fn (%data) { %0 = wide_a(%data); %1 = wide_b(%data); add(narrow_a(%0), narrow_b(%1)) }
        after:  fn (%data) { let %k0 = wide_a(%data); let %k1 = narrow_a(%k0); let %k2 = wide_b(%data);
                             let %k3 = narrow_b(%k2); let %k4 = add(%k1, %k3); %k4 }

    The order has the least peak of bytes. The graph executor's planner takes more than that, since it hands whole
    storages on: where its plan does not get smaller, the module stays as it is (`planned_bytes` gives its size). The
    arena of `tvm-pipeline compile --memory-order` has no such loss.

    Args:
        params: names of parameters of `main` that are weights; none where they are bound as constants.

    Raises:
        ModelError: `main` is no dataflow graph.
    """

    @tvm.transform.module_pass(opt_level=0, name="MemoryOrder", required=["InferType"])
    def order(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        fused = tvm.transform.Sequential([relay.transform.FuseOps(), relay.transform.InferType()])(mod)
        ordered = tvm.IRModule(fused.functions, fused.type_definitions, attrs=fused.attrs)
        ordered["main"] = _in_lets(fused, params)
        ordered = relay.transform.InferType()(ordered)
        return ordered if planned_bytes(ordered) < planned_bytes(fused) else mod

    return order


def planned_bytes(mod: tvm.IRModule) -> int:
    """Return the bytes that the graph executor's own plan allocates for the results of a fused, typed module."""
    # `relay.optimize` puts devices on the parameters alone, and the planner takes devices on all variables or on none.
    given = {var: relay.Var(var.name_hint, var.checked_type) for var in mod["main"].params}
    bare = relay.Function(list(given.values()), relay.bind(mod["main"].body, given))
    main = relay.transform.InferType()(tvm.IRModule.from_expr(bare))["main"]
    plan = tvm.get_global_func("relay.backend.GraphPlanMemory")(main)
    outside = set(main.params)  # inputs and weights have storages of their own
    sizes: dict[int, int] = {}
    for expr, storage_info in plan.expr_to_storage_info.items():
        if expr in outside or isinstance(expr, relay.Constant):
            continue
        type_ = expr.checked_type
        fields = type_.fields if isinstance(type_, relay.TupleType) else [type_]
        # The plan's own sizes are those of each storage's first tensor, and later tensors may be larger.
        for storage, field in zip(storage_info.storage_ids, fields, strict=True):
            sizes[storage] = max(sizes.get(storage, 0), tensor_bytes(field.shape, field.dtype))
    return sum(sizes.values())


def _in_lets(mod: tvm.IRModule, params: Collection[str]) -> relay.Function:
    main = mod["main"]
    inputs = [var for var in main.params if var.name_hint not in params]
    kernels, calls, heads = kernels_of_module(mod, inputs)
    order = kernel_order(dict(enumerate(kernels)), lambda index: _is_view(calls[index]), heads)
    names = {calls[index]: relay.Var(f"k{step}", calls[index].checked_type) for step, index in enumerate(order)}

    def named(expr: relay.Expr) -> relay.Expr:
        if isinstance(expr, relay.Tuple):
            return relay.Tuple([named(part) for part in expr.fields], expr.span)
        if isinstance(expr, relay.TupleGetItem):
            return relay.TupleGetItem(named(expr.tuple_value), expr.index, expr.span)
        return names.get(expr, expr)

    body = named(main.body)
    for index in reversed(order):
        call = calls[index]
        made = relay.Call(call.op, [named(argument) for argument in call.args], call.attrs, call.type_args, call.span)
        body = relay.Let(names[call], made, body)
    return relay.Function(main.params, body, main.ret_type, main.type_params, main.attrs)


def _is_view(call: relay.Call) -> bool:
    """Return whether the graph executor runs nothing for the call; FuseOps marks such functions."""
    attributes = call.op.attrs if isinstance(call.op, relay.Function) else None
    return attributes is not None and "relay.reshape_only" in attributes.keys()  # noqa: SIM118 - no mapping
