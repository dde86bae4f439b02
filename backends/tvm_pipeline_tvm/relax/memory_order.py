"""MemoryOrder: the pass that gives a module the order of kernels that needs the least memory.

`kernel_order.py` finds the order, for a slice as well. Slices plan their arena by that order; Relax's own planner
does so for a TVM script, and its virtual machine runs the kernels in the order that `main` states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tvm
from tvm import relax

from tvm_pipeline_tvm.kernel_order import kernel_order
from tvm_pipeline_tvm.kernels import tensor_bytes
from tvm_pipeline_tvm.relax.dataflow import plain_main
from tvm_pipeline_tvm.relax.extraction import ATTRIBUTE, flat_main


@tvm.transform.module_pass(opt_level=0, name="MemoryOrder")
class MemoryOrder:
    """The pass that puts the bindings of `main` into the order that needs the least memory.

    It works on a module behind `relax.transform.FuseOps` and on one behind `relax.transform.FuseTIR`, scheduled or
    not. Relax keeps the order from there on.

        before: lv = wide_a(x); lv1 = wide_b(x); lv2 = narrow_a(lv); lv3 = narrow_b(lv1); gv = add(lv2, lv3)
        after:  lv = wide_a(x); lv2 = narrow_a(lv); lv1 = wide_b(x); lv3 = narrow_b(lv1); gv = add(lv2, lv3)

    The order has the least peak of bytes. Relax's planner takes more than that, since it hands whole storages on:
    where its plan does not get smaller, the module stays as it is (`planned_bytes` gives its size). An operator graph
    that is attached is taken off, since the names of operators follow the order: extract it behind this pass.

    Raises:
        ModelError: `main` is no dataflow graph with fixed shapes.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        flat = flat_main(mod)
        order = kernel_order(dict(enumerate(flat.kernels)), flat.is_view.__getitem__, flat.heads)
        if order == list(range(len(order))):
            return mod
        ordered = _in_order(mod, order)
        return ordered if planned_bytes(ordered) < planned_bytes(mod) else mod


def planned_bytes(mod: tvm.IRModule) -> int:
    """Return the bytes that Relax's own plan allocates for what `main` computes, its results among them.

    Args:
        mod: a module behind FuseOps, or behind FuseTIR; it stays as it is.
    """
    transform = relax.transform
    lowered = tvm.transform.Sequential(
        [
            transform.FuseTIR(),
            transform.RewriteDataflowReshape(),
            transform.ToNonDataflow(),
            transform.RemovePurityChecking(),
            transform.CallTIRRewrite(),
            transform.StaticPlanBlockMemory(),
        ]
    )(mod)
    allocated = 0
    for block in lowered["main"].body.blocks:
        for binding in block.bindings:
            name = str(getattr(getattr(binding.value, "op", None), "name", ""))
            if name == "relax.memory.alloc_storage":
                allocated += math.prod(map(int, binding.value.args[0].values))
            elif name == "relax.builtin.alloc_tensor":
                allocated += tensor_bytes(binding.var.ty.shape, str(binding.var.ty.dtype))
    return allocated


def _in_order(mod: tvm.IRModule, order: Sequence[int]) -> tvm.IRModule:
    """Return the module with the calls of `main` in another order; each other binding follows what it reads."""
    main = mod["main"]
    bindings, result = plain_main(main)
    calls = [binding for binding in bindings if isinstance(binding.value, tvm.ir.Call)]
    waiting = {
        binding.var: (binding, set(relax.analysis.free_vars(binding.value)))
        for binding in bindings
        if not isinstance(binding.value, tvm.ir.Call)
    }
    known, made = set(main.params), []

    def bind_what_is_ready() -> None:
        for var, (binding, reads) in list(waiting.items()):  # in the old order, so that one pass meets all
            if reads <= known:
                made.append(binding)
                known.add(var)
                del waiting[var]

    for number in order:
        bind_what_is_ready()
        made.append(calls[number])
        known.add(calls[number].var)
    bind_what_is_ready()
    body = relax.SeqExpr([relax.DataflowBlock(made)], result)
    attributes = {key: value for key, value in (mod.attrs or {}).items() if key != ATTRIBUTE}
    ordered = tvm.IRModule(dict(mod.functions.items()), attrs=attributes)
    ordered["main"] = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    return relax.transform.Normalize()(ordered)
