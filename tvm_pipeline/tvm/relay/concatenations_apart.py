"""ConcatenationsApart: concatenations that a slice can do in place are kernels of their own.

FuseOps puts a concatenation into one kernel with what is computed element by element before and behind it. Such a
kernel holds everything that it reads and its result at the same time. Alone, the concatenation need not run: what is
concatenated can be written where it belongs (`tvm/shared_bytes.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tvm
from tvm import relay

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
        body = typed["main"].body
        typed["main"] = _Apart(body.fields if isinstance(body, relay.Tuple) else [body]).visit(typed["main"])
        return relay.transform.InferType()(typed)

    return keep_apart


class _Apart(relay.ExprMutator):
    def __init__(self, outputs: Sequence[relay.Expr]) -> None:
        super().__init__()
        self._outputs = list(outputs)

    def visit_call(self, call: relay.Call) -> relay.Expr:
        made = super().visit_call(call)
        if call.op != _CONCATENATE or call in self._outputs or not _is_of_whole_bytes(call):
            return made
        fields = [field if isinstance(field, (relay.Var, relay.Constant)) else _stop(field) for field in made.args[0]]
        return _stop(relay.Call(made.op, [relay.Tuple(fields)], made.attrs, made.type_args, made.span))


def _stop(expr: relay.Expr) -> relay.Expr:
    return relay.annotation.stop_fusion(expr)


def _is_of_whole_bytes(call: relay.Call) -> bool:
    shape = call.checked_type.shape
    axis = int(call.attrs.axis) % len(shape)
    return all(isinstance(extent, tvm.tir.IntImm) for extent in shape) and math.prod(map(int, shape[:axis])) == 1
