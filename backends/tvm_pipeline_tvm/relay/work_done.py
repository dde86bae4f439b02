"""How much of an import or a compile is done, and how long the rest may take.

TVM does not say how far it is, but it says which pass begins. The passes always come in the same order, and the share
of the time that is over when one begins differs little between networks.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import tvm
from tvm import relay

_log = logging.getLogger(__name__)

# The share that is over when a pass begins: medians of the CPU time of squeezenet, mobilenet and resnet-18.
_BEGINS = {
    "FoldScaleAxis": 0.04,
    "AlterOpLayout": 0.17,
    "SimplifyExprPostAlterOp": 0.24,
    "FuseOps": 0.34,
    "LowerTE": 0.37,
    "tir.LowerCustomDatatypes": 0.70,  # the last one before LLVM makes code
}
_ONCE_A_FUNCTION = "tir.CommonSubexprElimTIR"
LINKING = 0.85  # the share that is over when LLVM has made the code


class WorkDone:
    """Tells which share of a piece of work is done, and the seconds that the rest takes at this speed.

    Args:
        line: what is being done.
    """

    def __init__(self, line: str) -> None:
        self._line = line
        self._began_s = time.monotonic()
        self._percent = 0

    def reach(self, share: float) -> None:
        """Tell that `share` of the work is done, from 0 to 1; a share that was told before is ignored."""
        percent = int(100 * share)
        if percent <= self._percent:
            return
        self._percent = percent
        rest_s = (time.monotonic() - self._began_s) * (1 / share - 1)
        left = f"{rest_s:.0f} s" if rest_s < 100 else f"{rest_s / 60:.0f} min"
        _log.info(f"{self._line}: {percent} %, about {left} left")


@tvm.instrument.pass_instrument
class CompileProgress:
    """Tells how much of `relay.build` is done; an instrument for a `PassContext`."""

    def __init__(self, done: WorkDone) -> None:
        self._done = done
        self._functions = self._lowered = 0

    def run_before_pass(self, mod: tvm.IRModule, info: Any) -> None:
        """Take the share of the pass that begins; while functions are lowered, count them."""
        if info.name == "LowerTE":
            self._functions = distinct_kernels(mod)
        if info.name in _BEGINS:
            self._done.reach(_BEGINS[info.name])
        elif info.name == _ONCE_A_FUNCTION and self._functions:
            self._lowered += 1
            began, ends = _BEGINS["LowerTE"], _BEGINS["tir.LowerCustomDatatypes"]
            self._done.reach(began + (ends - began) * min(1.0, self._lowered / self._functions))


def distinct_kernels(mod: tvm.IRModule) -> int:
    """Return how many different kernels a fused module has: TVM lowers equal functions once."""
    found: set[int] = set()

    def visit(expr: relay.Expr) -> None:
        if isinstance(expr, relay.Call) and isinstance(expr.op, relay.Function):
            found.add(tvm.ir.structural_hash(expr.op))

    for _, function in mod.functions_items():
        if isinstance(function, relay.Function):
            relay.analysis.post_order_visit(function, visit)
    return len(found)
