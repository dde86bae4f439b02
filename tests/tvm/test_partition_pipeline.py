"""PartitionPipeline: a plan becomes a Relay module of stage functions that computes what the module did."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")

from tests.support.networks import Weights, module_of, relay_module
from tests.support.stages import random_frame, random_stages
from tvm_pipeline.core.plan import Plan, Prediction, Stage
from tvm_pipeline.errors import GraphError, PipelineError, PlanError
from tvm_pipeline_tvm.relay.extraction import ExtractOperatorGraph, operator_graph
from tvm_pipeline_tvm.relay.fold import FoldConstantFast, fast_build
from tvm_pipeline_tvm.relay.partition_pipeline import PartitionPipeline

import tvm  # isort: skip
from tvm import relay  # isort: skip
from tvm.contrib import graph_executor  # isort: skip

TINY = """
#[version = "0.0.5"]
def @main(%data: Tensor[(1, 4), float32], %w: Tensor[(4, 4), float32]) {
  %0 = nn.dense(%data, %w, units=4);
  %1 = nn.relu(%0);
  %2 = tanh(%1);
  add(%0, %2)
}
"""

TINY_IN_TWO = """
#[version = "0.0.5"]
def @stage_0(%a: Tensor[(1, 4), float32], %b: Tensor[(4, 4), float32], Inline=1, device="cpu0", pipeline_stage=0)
    -> (Tensor[(1, 4), float32], Tensor[(1, 4), float32]) {
  %0 = nn.dense(%a, %b, units=4);
  %1 = nn.relu(%0);
  (%1, %0)
}
def @stage_1(%a: Tensor[(1, 4), float32], %b: Tensor[(1, 4), float32], Inline=1, device="cpu1 cpu2", pipeline_stage=1)
    -> Tensor[(1, 4), float32] {
  %2 = tanh(%a);
  add(%b, %2)
}
def @main(%data: Tensor[(1, 4), float32], %w: Tensor[(4, 4), float32]) -> Tensor[(1, 4), float32] {
  %3 = @stage_0(%data, %w);
  %4 = %3.0;
  %5 = %3.1;
  @stage_1(%4, %5)
}
"""


def plan_of(stages: Sequence[Sequence[str]], devices: Sequence[tuple[str, ...]] = ()) -> Plan:
    named = devices or [(f"cpu{index}",) for index in range(len(stages))]
    made = tuple(Stage(device, tuple(part)) for device, part in zip(named, stages, strict=True))
    return Plan("net", "by-hand", "throughput", made, Prediction(1.0, 1.0))


def splits() -> tuple[tvm.IRModule, dict[str, Any]]:
    """Two outputs and an operator of three, which is less to build than `splitting`."""
    weights = Weights()
    x = weights.dense(relay.var("data", shape=(1, 12)), 12)
    first, second, third = relay.split(relay.tanh(x), 3, axis=1)
    joined = relay.concatenate([relay.exp(third), weights.dense(second, 4), first], axis=1)
    return module_of(relay.Tuple([joined, relay.sigmoid(first)])), weights.params


def fused(name: str) -> tuple[tvm.IRModule, list[str]]:
    """A network with its parameters bound, fused, and the names of its operators."""
    mod, params = splits() if name == "splits" else relay_module(name)
    mod["main"] = relay.build_module.bind_params_by_name(mod["main"], params)
    passes = [
        relay.transform.SimplifyInference(),
        relay.qnn.transform.CanonicalizeOps(),
        FoldConstantFast(),
        *([relay.transform.FuseOps(2)] if name != "int8" else []),  # TVM cannot lay out fused int8 convolutions
        relay.transform.InferType(),
        ExtractOperatorGraph("net"),
    ]
    with tvm.transform.PassContext(opt_level=3):
        mod = tvm.transform.Sequential(passes)(mod)
    return mod, operator_graph(mod).operator_names


def run(
    mod: tvm.IRModule, target: str, frame: dict[str, Any], params: dict[str, Any] | None = None
) -> list[np.ndarray]:
    executor = graph_executor.GraphModule(fast_build(mod, target, params)["default"](tvm.cpu()))
    executor.set_input(**frame)
    executor.run()
    return [executor.get_output(index).numpy() for index in range(executor.get_num_outputs())]


def frame_of(mod: tvm.IRModule) -> dict[str, np.ndarray]:
    return random_frame(operator_graph(mod).inputs)


def stage_functions(mod: tvm.IRModule) -> dict[str, relay.Function]:
    return {var.name_hint: mod[var] for var in mod.get_global_vars() if var.name_hint != "main"}


def test_expected_module() -> None:
    mod = ExtractOperatorGraph("net", params={"w"})(relay.transform.InferType()(relay.fromtext(TINY)))
    plan = plan_of([["dense_0", "relu_1"], ["tanh_2", "add_3"]], [("cpu0",), ("cpu1", "cpu2")])
    made = PartitionPipeline(plan, params={"w"})(mod)
    expected = relay.transform.InferType()(relay.fromtext(TINY_IN_TWO))
    assert set(stage_functions(made)) == {"stage_0", "stage_1"}
    for symbol in ("stage_0", "stage_1", "main"):
        tvm.ir.assert_structural_equal(made[symbol], expected[symbol], map_free_vars=True)


def test_one_function_a_stage_called_in_order() -> None:
    mod, names = fused("branching")
    cut = [names[:2], names[2:5], names[5:]]
    made = PartitionPipeline(plan_of(cut))(mod)
    functions = stage_functions(made)
    assert sorted(functions) == ["stage_0", "stage_1", "stage_2"]
    for index in range(3):
        attributes = functions[f"stage_{index}"].attrs
        assert (str(attributes["device"]), int(attributes["pipeline_stage"])) == (f"cpu{index}", index)
    called: list[str] = []

    def visit(expr: relay.Expr) -> None:
        if isinstance(expr, relay.Call):
            called.append(expr.op.name_hint)

    relay.analysis.post_order_visit(made["main"].body, visit)
    assert called == ["stage_0", "stage_1", "stage_2"]


def test_built_by_relay_it_computes_the_same_bits(target: str) -> None:
    mod, _ = fused("splits")
    frame = frame_of(mod)
    cut = random_stages(operator_graph(mod), Random(4), 4)
    made = PartitionPipeline(plan_of(cut))(mod)
    for output, expected in zip(run(made, target, frame), run(mod, target, frame), strict=True):
        np.testing.assert_array_equal(output, expected)


@pytest.mark.thorough
def test_stock_relay_build_takes_it_with_parameters_that_are_not_bound(target: str) -> None:
    mod = ExtractOperatorGraph("net", params={"w"})(relay.transform.InferType()(relay.fromtext(TINY)))
    made = PartitionPipeline(plan_of([["dense_0", "relu_1"], ["tanh_2", "add_3"]]), params={"w"})(mod)
    data, w = (np.random.default_rng(1).standard_normal(shape).astype("float32") for shape in ((1, 4), (4, 4)))
    with tvm.transform.PassContext(opt_level=3):
        library = relay.build(made, target, params={"w": tvm.nd.array(w)})
    executor = graph_executor.GraphModule(library["default"](tvm.cpu()))
    executor.run(data=data)
    y = data @ w.T
    np.testing.assert_allclose(executor.get_output(0).numpy(), y + np.tanh(np.maximum(y, 0)), rtol=1e-5, atol=1e-6)


def test_several_tensors_cross_and_skip_stages() -> None:
    mod, names = fused("splitting")
    split = next(index for index, name in enumerate(names) if name.startswith("split"))
    made = PartitionPipeline(plan_of([names[: split + 1], names[split + 1 : -2], names[-2:]]))(mod)
    first, middle, last = (stage_functions(made)[f"stage_{index}"] for index in range(3))
    assert len(first.checked_type.ret_type.fields) == 3  # what the split gives
    assert len(middle.params) == 3
    assert len(last.params) <= 2


def test_between_other_passes() -> None:
    mod, names = fused("mobile")
    seen = []

    @tvm.transform.module_pass(opt_level=0)
    def look(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        seen.append(sorted(stage_functions(mod)))
        return mod

    passes = [PartitionPipeline(plan_of([names[:3], names[3:]])), look, relay.transform.Inline(), look]
    result = tvm.transform.Sequential(passes)(mod)
    assert seen[0] == ["stage_0", "stage_1"]
    assert isinstance(result["main"], relay.Function)
    assert PartitionPipeline(plan_of([names])).info.name == "PartitionPipeline"


@pytest.mark.thorough
def test_glue_that_is_given_tensors_of_several_operators(target: str) -> None:
    """It shows the second field of a tuple, and the stage that takes it in must have the first one, too."""
    x = relay.var("x", shape=(1, 4))
    one, other = relay.exp(x), relay.tanh(x)
    types = relay.TupleType([relay.TensorType((2, 2)), relay.TensorType((1, 4))])

    def second(fields: relay.Expr) -> relay.Expr:
        given = relay.var("fields", types)
        shown = relay.Function([given], relay.reshape(relay.TupleGetItem(given, 1), (4,)))
        return relay.Call(shown.with_attr("Primitive", tvm.tir.IntImm("int32", 1)), [fields])

    glued = second(relay.Tuple([relay.reshape(one, (2, 2)), other]))
    body = relay.Tuple([relay.sigmoid(glued), second(relay.Tuple([relay.reshape(one, (2, 2)), other]))])
    mod = relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function([x], body)))
    mod = ExtractOperatorGraph("net")(mod)
    graph = operator_graph(mod)
    read = {operator.name: operator.inputs for operator in graph.operators}
    assert read["sigmoid_2"] == ("exp_0", "tanh_1")
    assert "exp_0" in read["tanh_1"], "the second output, which tanh computes, is given exp's as well"
    frame = random_frame(graph.inputs)
    expected = run(mod, target, frame)
    for cut in ([["exp_0"], ["tanh_1", "sigmoid_2"]], [["exp_0", "tanh_1"], ["sigmoid_2"]]):
        for array, wanted in zip(run(PartitionPipeline(plan_of(cut))(mod), target, frame), expected, strict=True):
            np.testing.assert_array_equal(array, wanted)


def test_the_module_given_is_left_as_it_was() -> None:
    mod, names = fused("branching")
    before = mod.astext()
    PartitionPipeline(plan_of([names[:4], names[4:]]))(mod)
    assert mod.astext() == before


BAD_PLANS = {
    "no operator conv2d_77|stage 0 names operator conv2d_77, which .* does not have": lambda n: [[*n, "conv2d_77"]],
    r"is in no stage \(1 missing in all\)": lambda n: [n[:-1]],
    "stands twice in the plan, last in stage 1": lambda n: [n, n[:1]],
    "which a later stage writes": lambda n: [n[4:], n[:4]],
    "no operators": lambda n: [n, []],
}


@pytest.mark.parametrize("message", BAD_PLANS)
def test_plans_that_do_not_fit(message: str) -> None:
    mod, names = fused("branching")
    with pytest.raises(PlanError, match=message):
        PartitionPipeline(plan_of(BAD_PLANS[message](names)))(mod)


def test_no_graph_attached() -> None:
    with pytest.raises(GraphError, match="run ExtractOperatorGraph first"):
        operator_graph(relay.fromtext(TINY))
    assert issubclass(GraphError, PipelineError)
