"""PartitionPipeline: a plan becomes a Relax module of stage functions that computes what the module did."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.relax.scripts import TARGET, Array, called, frame, lowered, machine, module, network, plan_of
from tests.support.stages import random_stages
from tvm_pipeline.errors import GraphError, ModelError, PipelineError, PlanError
from tvm_pipeline_tvm.relax import kernel_passes
from tvm_pipeline_tvm.relax.dataflow import Constant, name_of
from tvm_pipeline_tvm.relax.extraction import ExtractOperatorGraph, operator_graph
from tvm_pipeline_tvm.relax.partition_pipeline import PartitionPipeline

TINY = """
@R.function
def main(data: R.Tensor((1, 4), "float32"), w: R.Tensor((4, 4), "float32")) -> R.Tensor((1, 4), "float32"):
    with R.dataflow():
        lv = R.matmul(data, w)
        lv1 = R.nn.relu(lv)
        lv2 = R.tanh(lv1)
        gv = R.add(lv, lv2)
        R.output(gv)
    return gv
"""

TINY_IN_TWO = """
@R.function
def stage_0(
    data: R.Tensor((1, 4), "float32"), w: R.Tensor((4, 4), "float32")
) -> R.Tuple(R.Tensor((1, 4), "float32"), R.Tensor((1, 4), "float32")):
    R.func_attr({
        "pipeline_stage": 0,
        "device": "cpu0",
        "operators": ["matmul_0", "relu_1"],
        "inputs": ["data", "w"],
        "outputs": ["relu_1", "matmul_0"],
    })
    with R.dataflow():
        lv = R.matmul(data, w)
        lv1 = R.nn.relu(lv)
        gv = (lv1, lv)
        R.output(gv)
    return gv

@R.function
def stage_1(relu_1: R.Tensor((1, 4), "float32"), matmul_0: R.Tensor((1, 4), "float32")) -> R.Tensor((1, 4), "float32"):
    R.func_attr({
        "pipeline_stage": 1,
        "device": "cpu1 cpu2",
        "operators": ["tanh_2", "add_3"],
        "inputs": ["relu_1", "matmul_0"],
        "outputs": ["add_3"],
    })
    with R.dataflow():
        lv = R.tanh(relu_1)
        lv1 = R.add(matmul_0, lv)
        gv: R.Tensor((1, 4), "float32") = lv1
        R.output(gv)
    return gv

@R.function
def main(data: R.Tensor((1, 4), "float32"), w: R.Tensor((4, 4), "float32")) -> R.Tensor((1, 4), "float32"):
    with R.dataflow():
        lv = Module.stage_0(data, w)
        lv1: R.Tensor((1, 4), "float32") = lv[0]
        lv2: R.Tensor((1, 4), "float32") = lv[1]
        lv3 = Module.stage_1(lv1, lv2)
        gv: R.Tensor((1, 4), "float32") = lv3
        R.output(gv)
    return gv
"""

FORMS: dict[str, Callable[[tvm.IRModule], tvm.IRModule]] = {
    "before FuseTIR": lambda mod: mod,
    "behind FuseTIR": lowered,
    "scheduled": lambda mod: kernel_passes.kernels(mod, TARGET),
}


def fused(form: str = "before FuseTIR") -> tuple[tvm.IRModule, list[str]]:
    """Return the network, and the names of its operators."""
    mod = ExtractOperatorGraph("net")(FORMS[form](kernel_passes.fused(network(), TARGET)))
    return mod, operator_graph(mod).operator_names


def stages_of(mod: tvm.IRModule) -> list[relax.Function]:
    names = sorted(symbol.name_hint for symbol in mod.get_global_vars() if symbol.name_hint.startswith("stage_"))
    return [mod[name] for name in names]


def crossing(function: relax.Function) -> tuple[list[str], list[str]]:
    return list(map(str, function.attrs["inputs"])), list(map(str, function.attrs["outputs"]))


def calls(function: relax.Function) -> list[tuple[Any, Any]]:
    """Return the variables that are bound to calls, and the calls."""
    bindings = (binding for block in function.body.blocks for binding in block.bindings)
    return [(binding.var, binding.value) for binding in bindings if isinstance(binding.value, tvm.ir.Call)]


def chained(vm: relax.VirtualMachine, mod: tvm.IRModule, outputs: tuple[str, ...], **tensors: Any) -> list[Array]:
    """Run the stages one by one, each by its attributes alone; return what they make of the outputs."""
    for number, function in enumerate(stages_of(mod)):
        read, given = crossing(function)
        made = called(vm, f"stage_{number}", *(tensors[name] for name in read))
        tensors.update(zip(given, made, strict=True))
    return [tensors[name] for name in outputs]


def test_expected_module() -> None:
    mod = relax.transform.LegalizeOps()(module(TINY))
    plan = plan_of([["matmul_0", "relu_1"], ["tanh_2", "add_3"]], [("cpu0",), ("cpu1", "cpu2")])
    made = PartitionPipeline(plan)(mod)
    expected = relax.transform.LegalizeOps()(module(TINY_IN_TWO))
    tvm.ir.assert_structural_equal(made, expected)


@pytest.mark.parametrize("form", ["before FuseTIR", "scheduled"])
def test_stages_chain_to_the_bits_of_the_module(form: str) -> None:
    mod, _ = fused(form)
    graph = operator_graph(mod)
    wanted = called(machine(lowered(mod)), "main", frame())
    cut = random_stages(graph, Random(len(form)), 4)
    made = PartitionPipeline(plan_of(cut))(mod)
    assert [list(map(str, function.attrs["operators"])) for function in stages_of(made)] == cut
    vm = machine(made)
    for outputs in (chained(vm, made, graph.outputs, x=frame()), called(vm, "main", frame())):
        for output, expected in zip(outputs, wanted, strict=True):
            np.testing.assert_array_equal(output, expected)


TOWERS = """
@R.function
def main(x: R.Tensor((2, 8), "float32")):
    with R.dataflow():
        a = R.exp(x)
        b = R.tanh(x)
        parts = R.split(a, 2, axis=1)
        c = R.concat((parts[1], parts[0]), axis=1)
        d = R.sigmoid(b)
        e = R.add(c, d)
        gv = (e, parts[0])
        R.output(gv)
    return gv
"""


def test_stages_that_are_not_along_the_order() -> None:
    """The second tower runs before the first, fields of a split cross and skip a stage."""
    mod = relax.transform.LegalizeOps()(module(TOWERS))
    graph = operator_graph(ExtractOperatorGraph("net")(mod))
    assert graph.operator_names == [*("exp_0", "tanh_1", "split_2", "concatenate_3", "sigmoid_4", "add_5")]
    wanted = called(machine(mod), "main", x := frame(2, 8))
    np.testing.assert_allclose(wanted[1], np.exp(x)[:, :4], rtol=1e-6)
    made = PartitionPipeline(plan_of([["tanh_1", "sigmoid_4"], ["exp_0", "split_2"], ["concatenate_3", "add_5"]]))(mod)
    assert [crossing(function) for function in stages_of(made)] == [
        (["x"], ["sigmoid_4"]),
        (["x"], ["split_2.0", "split_2.1"]),
        (["split_2.1", "split_2.0", "sigmoid_4"], ["add_5"]),
    ]
    vm = machine(made)
    for outputs in (chained(vm, made, graph.outputs, x=x), called(vm, "main", x)):
        for output, expected in zip(outputs, wanted, strict=True):
            np.testing.assert_array_equal(output, expected)


def test_a_result_that_is_read_inside_crosses_once() -> None:
    """The image is a result of main in plain layout: the stage behind reads that, and takes no transform of its own."""
    mod, names = fused()
    image = operator_graph(mod).outputs[1]
    last = names.index(image) + 1
    made = PartitionPipeline(plan_of([names[:last], names[last:]]))(mod)
    (_, given), (read, _) = map(crossing, stages_of(made))
    assert given == [image, names[0]]
    assert sorted(read) == sorted(given)
    called_there = [call.args[0].name_hint for _, call in calls(stages_of(made)[1]) if name_of(call)]
    assert "layout_transform" not in called_there


@pytest.mark.needs("kernels")
def test_a_result_that_is_read_in_blocks_crosses_under_two_names() -> None:
    mod = ExtractOperatorGraph("net")(kernel_passes.fused(network(image=0), TARGET))
    names = operator_graph(mod).operator_names
    made = PartitionPipeline(plan_of([names[:1], names[1:]]))(mod)
    (_, given), (read, _) = map(crossing, stages_of(made))
    assert sorted(given) == sorted(read) == [names[0], f"{names[0]}'"]
    types = {str(name): len(param.ty.shape) for name, param in zip(read, stages_of(made)[1].params, strict=True)}
    assert types == {names[0]: 4, f"{names[0]}'": 5}


def test_weights_and_kernels_of_several_stages_are_shared() -> None:
    """Two convolutions of one weight lie in two stages: one array and one compiled function serve both."""
    mod, names = fused("behind FuseTIR")
    made = PartitionPipeline(plan_of([names[:3], names[3:]]))(mod)
    held: list[dict[int, tuple[int, ...]]] = []
    for function in stages_of(made):
        held.append({})
        relax.analysis.post_order_visit(
            function,
            lambda expr, of=held[-1]: (
                of.update({expr.value.numpy().ctypes.data: expr.value.shape}) if isinstance(expr, Constant) else None
            ),
        )
    assert [held[0][address] for address in held[0].keys() & held[1].keys()]
    before = {symbol.name_hint for symbol in mod.get_global_vars()}
    assert {symbol.name_hint for symbol in made.get_global_vars()} == before | {"stage_0", "stage_1"}


def test_between_other_passes() -> None:
    mod, names = fused()
    before = mod.script(show_meta=True)
    passes = [
        PartitionPipeline(plan_of([names[:2], names[2:]])),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(),
        kernel_passes.ScheduleKernels(TARGET),
    ]
    made = tvm.transform.Sequential(passes)(mod)
    expected = PartitionPipeline(plan_of([names[:2], names[2:]]))(kernel_passes.kernels(mod, TARGET))
    tvm.ir.assert_structural_equal(made, expected)
    assert mod.script(show_meta=True) == before, "the module given stays as it was"
    with pytest.raises(PlanError, match="has a function stage_0 already"):
        PartitionPipeline(plan_of([["x"]]))(made)


BAD_PLANS = {
    "stage 0 names operator conv2d_77, which .* does not have": lambda n: [[*n, "conv2d_77"]],
    r"is in no stage \(1 missing in all\)": lambda n: [n[:-1]],
    "stands twice in the plan, last in stage 1": lambda n: [n, n[:1]],
    "which a later stage writes": lambda n: [n[4:], n[:4]],
    "no operators": lambda n: [n, []],
}


@pytest.mark.parametrize("message", BAD_PLANS)
def test_plans_that_do_not_fit(message: str) -> None:
    mod, names = fused()
    with pytest.raises(PlanError, match=message):
        PartitionPipeline(plan_of(BAD_PLANS[message](names)))(mod)


def test_a_result_that_no_stage_computes() -> None:
    mod = module(
        """
@R.function
def main(x: R.Tensor((1, 4), "float32")):
    with R.dataflow():
        lv = R.tanh(x)
        gv = (lv, x)
        R.output(gv)
    return gv
"""
    )
    with pytest.raises(PlanError, match="one of its inputs or a constant"):
        PartitionPipeline(plan_of([["tanh_0"]]))(relax.transform.LegalizeOps()(mod))


def test_our_errors_come_through_tvm() -> None:
    assert all(issubclass(kind, PipelineError) for kind in (GraphError, ModelError, PlanError))
    with pytest.raises(ModelError, match="has no kernel"):
        PartitionPipeline(plan_of([["conv2d_0"]]))(network())
