"""ConcatenationsApart: concatenations that a slice can do in place are kernels of their own.

FuseOps puts a concatenation into one kernel with what is computed element by element before and behind it. Such a
kernel holds everything that it reads and its result at the same time. Alone, the concatenation need not run: what is
concatenated can be written where it belongs (`shared_bytes.py`).
"""

from __future__ import annotations

import math

import tvm
from tvm import relay

from tvm_pipeline_tvm.relay.kernel_walkers import outer_expressions, rebuilt

_CONCATENATE = relay.op.get("concatenate")


def ConcatenationsApart() -> tvm.transform.Pass:  # noqa: N802  a pass is named as its Relay siblings are
    """Return a pass that keeps FuseOps away from the concatenations of `main` whose parts are consecutive bytes.

    They are those along the first axis of an extent above 1, such as the channels of one image. An output of `main`
    stays: a change of its layout is part of the kernel that makes it, and parts cannot be written through that.

        before: fn (%x, %y) { relu(concatenate((relu(%x), %y), axis=1)) }
        after:  fn (%x, %y) { %0 = stop_fusion(relu(%x)); relu(stop_fusion(concatenate((%0, %y), axis=1))) }
    """

    @tvm.transform.module_pass(opt_level=0, name="ConcatenationsApart")
    def keep_apart(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        typed = relay.transform.InferType()(mod)  # a copy, since a caller's module may have no types yet
        main = typed["main"]
        outputs = list(main.body.fields) if isinstance(main.body, relay.Tuple) else [main.body]
        new: dict[relay.Expr, relay.Expr] = {}
        for expr in outer_expressions(main.body):
            made = rebuilt(expr, new)
            is_inside = isinstance(expr, relay.Call) and expr.op == _CONCATENATE and expr not in outputs
            new[expr] = _apart(made) if is_inside and _is_of_whole_bytes(expr) else made
        typed["main"] = relay.Function(main.params, new[main.body], None, main.type_params, main.attrs)
        return relay.transform.InferType()(typed)

    return keep_apart


def _apart(call: relay.Call) -> relay.Expr:
    fields = [field if isinstance(field, (relay.Var, relay.Constant)) else _stop(field) for field in call.args[0]]
    return _stop(relay.Call(call.op, [relay.Tuple(fields)], call.attrs, call.type_args, call.span))


def _stop(expr: relay.Expr) -> relay.Expr:
    return relay.annotation.stop_fusion(expr)


def _is_of_whole_bytes(call: relay.Call) -> bool:
    if not isinstance(call.args[0], relay.Tuple):  # all fields of another operator, as a split gives them
        return False
    shape = call.checked_type.shape
    axis = int(call.attrs.axis) % len(shape)
    return all(isinstance(extent, tvm.tir.IntImm) for extent in shape) and math.prod(map(int, shape[:axis])) == 1
