"""MemoryOrder: the bindings of a Relax module in the order that needs the least memory, which TVM keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op, transform

from tests.relax.scripts import TARGET, called, frame, lowered, module
from tvm_pipeline.errors import GraphError
from tvm_pipeline_tvm.relax import kernel_passes
from tvm_pipeline_tvm.relax.extraction import ExtractOperatorGraph, operator_graph
from tvm_pipeline_tvm.relax.memory_order import MemoryOrder, planned_bytes

TWO_TOWERS = """
@R.function
def main(x: R.Tensor((8, 64), "float32")):
    with R.dataflow():
        wide = R.exp(x)
        wider = R.concat((x, x), axis=1)
        narrow = R.sum(wide, axis=1)
        least = R.max(wider, axis=1)
        gv = R.add(narrow, least)
        R.output(gv)
    return gv
"""


def leaning() -> tvm.IRModule:
    """As written, all of `first` are made before one is read: last(1, last(2, ... last(7, 8))). Three could do."""
    draw = np.random.default_rng(0)
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((8, 16), "float32"))

    def dense(data: Any) -> Any:
        read = int(data.ty.shape[1])
        return builder.emit(op.matmul(data, relax.const((draw.standard_normal((read, 64)) / 8).astype("float32"))))

    with builder.function("main", [x]):
        with builder.dataflow():
            first = [builder.emit(op.nn.softmax(dense(x))) for _ in range(8)]
            last = first.pop()
            for other in reversed(first):
                last = dense(builder.emit(op.add(other, last)))
            output = builder.emit_output(relax.Tuple([last, first[3]]))
        builder.emit_func_output(output)
    passes = [transform.LegalizeOps(), transform.AnnotateTIROpPattern(), transform.FuseOps()]
    return tvm.transform.Sequential(passes)(builder.finalize())


FORMS: dict[str, Callable[[tvm.IRModule], tvm.IRModule]] = {
    "before FuseTIR": lambda mod: mod,
    "behind FuseTIR": lowered,
    "scheduled": lambda mod: kernel_passes.kernels(mod, TARGET),
}


def functions(main: relax.Function) -> list[str]:
    """Return the functions of TIR that are called, in the order of the calls."""
    return [
        binding.value.args[0].name_hint
        for block in main.body.blocks
        for binding in block.bindings
        if isinstance(binding.value, tvm.ir.Call)
    ]


def test_expected_module() -> None:
    """The wider tower first, and each tower to its end: no other order does without both wide tensors at once."""
    lines = {line.split()[0]: line for line in TWO_TOWERS.splitlines(keepends=True) if " = " in line}
    new = "".join(lines[name] for name in ("wider", "least", "wide", "narrow", "gv"))
    expected = module(TWO_TOWERS.replace("".join(lines.values()), new))
    legalised = transform.LegalizeOps()
    tvm.ir.assert_structural_equal(MemoryOrder()(legalised(module(TWO_TOWERS))), legalised(expected))


@pytest.mark.parametrize("form", FORMS)
def test_less_is_planned(form: str) -> None:
    mod = FORMS[form](leaning())
    ordered = MemoryOrder()(mod)
    size = 4 * 8 * 64  # of each tensor
    assert (planned_bytes(mod), planned_bytes(ordered)) == (10 * size, 5 * size)


def test_the_virtual_machine_allocates_what_is_planned_and_keeps_the_order() -> None:
    mod = lowered(leaning())
    ordered = MemoryOrder()(mod)
    results = []
    for one in (mod, ordered):
        executable = tvm.compile(one, target=TARGET)
        results.append(called(relax.VirtualMachine(executable, tvm.cpu()), "main", frame(8, 16)))
        calls = [line.split()[1] for line in str(executable.as_text()).splitlines() if line.startswith("  call")]
        assert calls.count("vm.builtin.alloc_storage") * 4 * 8 * 64 == planned_bytes(one)  # all are of one size
        assert [name for name in calls if not name.startswith("vm.")] == functions(one["main"])
    assert functions(mod["main"]) != functions(ordered["main"])
    for output, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(output, expected)


def test_a_module_that_does_not_get_smaller_stays() -> None:
    mod = transform.LegalizeOps()(module(TWO_TOWERS.replace("R.add(narrow, least)", "R.add(narrow, narrow)")))
    assert MemoryOrder()(mod).same_as(mod)


def test_a_graph_that_was_extracted_before_is_taken_off() -> None:
    ordered = MemoryOrder()(ExtractOperatorGraph("net")(leaning()))
    with pytest.raises(GraphError, match="run ExtractOperatorGraph first"):
        operator_graph(ordered)
