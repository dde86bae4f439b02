"""SplitByIndices: splits that may stand between blocked layouts.

AlterOpLayout stores the channels of a convolution in blocks, as NCHW16c, and asks every operator behind it whether it
can read them so.  For a split into equal sections TVM 0.19 forgets to ask whether a block would be cut: 24 channels
in blocks of 24 cannot be split in three, and the build ends with "indices_or_sections need to be able to divide
input.shape[axis]".  For a split at given indices it does ask, and goes back to NCHW in front of the split where a
block would be cut.
"""

from __future__ import annotations

import tvm
from tvm import relay
from tvm.relay import dataflow_pattern


def SplitByIndices() -> tvm.transform.Pass:  # noqa: N802  a pass is named as its Relay siblings are
    """A pass that writes every split of `main` into equal sections as a split at indices.

        before: fn (%x: Tensor[(1, 24, 8, 8)]) { split(%x, indices_or_sections=3, axis=1) }
        after:  fn (%x: Tensor[(1, 24, 8, 8)]) { split(%x, indices_or_sections=[8, 16], axis=1) }

    Splits of dynamic extents, and those into one section, stay as they are.
    """

    @tvm.transform.module_pass(opt_level=0, name="SplitByIndices")
    def rewrite(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        if "main" not in mod or not _has_sections(mod["main"]):
            return mod
        typed = relay.transform.InferType()(mod)  # a copy, since a caller's module may have no types yet
        typed["main"] = dataflow_pattern.rewrite(_ByIndices(), typed["main"])
        return relay.transform.InferType()(typed)

    return rewrite


def _has_sections(main: relay.Function) -> bool:
    found = False

    def visit(expr: relay.Expr) -> None:
        nonlocal found
        found |= isinstance(expr, relay.Call) and expr.op == _SPLIT and _sections(expr) is not None

    relay.analysis.post_order_visit(main, visit)
    return found


def _sections(call: relay.Call) -> int | None:
    sections = call.attrs.indices_or_sections
    return int(sections) if isinstance(sections, (int, tvm.tir.IntImm)) else None


_SPLIT = relay.op.get("split")


class _ByIndices(dataflow_pattern.DFPatternCallback):
    def __init__(self) -> None:
        super().__init__(rewrite_once=True)
        self.pattern = dataflow_pattern.is_op("split")(dataflow_pattern.wildcard())

    def callback(self, pre: relay.Expr, post: relay.Expr, node_map: object) -> relay.Expr:
        sections = _sections(pre)
        shape = pre.args[0].checked_type.shape
        axis = int(pre.attrs.axis) % len(shape)
        if sections in (None, 1) or not isinstance(shape[axis], tvm.tir.IntImm):
            return post
        step = int(shape[axis]) // sections
        return relay.split(post.args[0], [step * part for part in range(1, sections)], axis).astuple()
