"""Applications: host work around a model, on devices that replicate the model and do the host work as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given

from tests.support.brute_force import every_sharing, figure, least
from tests.support.examples import examples
from tests.support.graphs import Traits, problems
from tvm_pipeline import planning
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Stage, describe
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem, most_bytes
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, OptionError
from tvm_pipeline.planning.baselines.whole_model import replicas
from tvm_pipeline.planning.search.dynamic_programming import hybrid, ideals

ORDERED = ("read", "decode", "draw", "write")


def application(
    model_ms: Sequence[float],
    *,
    ordered: tuple[str, ...] = ORDERED,
    devices: tuple[str, ...] = ("a", "b"),
    npu_ms: float | None = None,
    **figures: object,
) -> Problem:
    """Read 1, prepare 1, a model, decode 1, draw 1 and write 2 ms, the same on each device; draw reads the picture too.

    Args:
        npu_ms: the milliseconds of each operator of the model on a device `npu`, which runs nothing else.
    """
    layers = {f"layer{i}": ms for i, ms in enumerate(model_ms)}
    seconds = {"read": 1, "prepare": 1, **layers, "decode": 1, "draw": 1, "write": 2}
    names = list(seconds)
    reads = {name: (before,) for before, name in zip(["file", *names], names, strict=False)}
    reads["draw"] = ("decode", "read")
    operators = tuple(
        Operator(name, "k", reads[name], (Tensor(name, (4,)),), 10, ordered=name in ordered) for name in names
    )
    graph = OperatorGraph("app", (Tensor("file", (1,)),), operators, ("write",))
    rows: dict[str, list[float | None]] = {name: [ms / 1000 for ms in seconds.values()] for name in devices}
    if npu_ms is not None:
        rows["npu"] = [npu_ms / 1000 if name in layers else None for name in names]
    measured = {name: DeviceProfile.in_order(graph, row) for name, row in rows.items()}
    platform = Platform("box", tuple(Device(name, active_w=1.0) for name in rows))
    return Problem(graph, platform, Profile("app", graph.fingerprint, measured), **figures)  # type: ignore[arg-type]


def test_a_model_that_can_be_cut_in_the_middle_makes_a_pipeline() -> None:
    """16 ms of work on two cores: with layers of 2 ms it is 8 | 8, the simplest plan without an idle core."""
    decision = planning.plan(application([2.0] * 5))
    assert describe(decision.plan) in ("two-stage (a | b)", "two-stage (b | a)")
    assert decision.plan.stages[0].operators == ("read", "prepare", "layer0", "layer1", "layer2")
    assert (decision.plan.status, decision.plan.value) == ("optimal", pytest.approx((125.0,)))


def test_a_model_of_one_operator_is_replicated_beside_the_host_work() -> None:
    """The best pipelines: 12 | 4 ms, or 10 ms beside 6 of host work. Replicas that also do the host work: 8 ms."""
    problem = application([10.0])
    assert ideals(problem).value == pytest.approx((1000 / 12,))
    assert hybrid(problem).value == pytest.approx((1000 / 12,))
    assert planning.plan(problem, "revisits").plan.value == pytest.approx((100.0,))
    decision = planning.plan(problem)
    assert (decision.plan.scheduler, decision.plan.status) == ("replicas", "optimal")
    assert decision.plan.value == pytest.approx((125.0,))
    front, middle, back = decision.plan.stages
    assert front.operators == ("read",)
    assert middle == Stage(("a", "b"), ("prepare", "layer0"))
    assert back.operators == ("decode", "draw", "write")
    assert "+25.0% against revisits" in decision.why


def test_a_third_core_may_do_the_host_work_alone() -> None:
    """Two cores take 11 ms each for prepare and model; read, decode, draw and write are 5 ms: 5.33 if all share."""
    decision = planning.plan(application([10.0], devices=("a", "b", "c")))
    assert decision.plan.value == pytest.approx((3000 / 16,))
    assert decision.plan.status == "optimal"


def test_an_accelerator_replicates_the_model_although_it_cannot_prepare() -> None:
    """The npu takes the model in 4 ms, the cores in 8; b, with 4 ms of host work behind the model, sets the pace.

    With 40 ms on the npu, (P - 2) / 8 + (P - 4) / 8 + P / 40 = 1. On the cores alone, with `prepare`, it is 7 ms.
    """
    plan = replicas(application([4.0, 4.0], npu_ms=2.0))
    assert plan.stages[1] == Stage(("a", "b", "npu"), ("layer0", "layer1"))
    assert plan.stages[0].operators == ("read", "prepare")
    assert plan.value == pytest.approx((250.0,))
    slow = replicas(application([4.0, 4.0], npu_ms=20.0))
    assert slow.value == pytest.approx((1000 * 0.275 / 1.75,))
    assert planning.plan(application([4.0, 4.0], npu_ms=2.0)).plan.value == pytest.approx((250.0,))


def test_the_largest_part_between_ordered_operators_is_replicated() -> None:
    """Between `prepare` and `decode` there is the model, 10 ms; behind `decode` only drawing and writing."""
    plan = replicas(application([4.0, 6.0], ordered=("prepare", "decode")))
    assert [stage.operators for stage in plan.stages] == [
        ("read", "prepare"),
        ("layer0", "layer1"),
        ("decode", "draw", "write"),
    ]
    # With `write` alone ordered, nothing stands in front.
    plan = replicas(application([4.0, 6.0], ordered=("write",)))
    assert [stage.operators for stage in plan.stages][1] == ("write",)
    assert len(plan.stages) == 2
    assert replicas(application([4.0], ordered=("read",))).stages[0].operators == ("read",)
    # Without ordered operators the whole application is replicated.
    assert replicas(application([4.0], ordered=())).stages[0].devices == ("a", "b")


def test_ordered_operators_may_leave_nothing_to_replicate() -> None:
    everything = (*ORDERED, "prepare", "layer0")
    with pytest.raises(InfeasibleError, match="nothing of app can be replicated, because all its operators are"):
        replicas(application([10.0], ordered=everything))
    decision = planning.plan(application([10.0], ordered=everything))
    assert len(decision.plan.devices) > 1
    with pytest.raises(InfeasibleError, match="has no two devices that share no cores and can run and hold what is"):
        replicas(application([10.0], devices=("a",)))


def test_the_number_of_stages_is_that_of_the_plan() -> None:
    assert len(planning.plan(application([10.0], stages=3), "replicas").plan.stages) == 3
    with pytest.raises(InfeasibleError, match="`stages` 2: replicas of app make 3; leave `stages` out"):
        planning.plan(application([10.0], stages=2), "replicas")
    with pytest.raises(InfeasibleError, match="`stages` 3: replicas of app make 1"):
        planning.plan(application([10.0], ordered=(), stages=3), "replicas")
    with pytest.raises(OptionError, match="`stages` 4: the plans of scheduler replicas have 1 or 2 or 3"):
        planning.plan(application([10.0], stages=4), "replicas")
    assert planning.plan(application([10.0], stages=3)).plan.value == pytest.approx((125.0,))
    assert len(planning.plan(application([10.0], stages=2)).plan.stages) == 2


def test_a_device_with_a_memory_limit_does_host_work_or_replicates() -> None:
    """b holds one stage only; so a does the host work, 5 ms, beside its share of 11: P = 8 ms."""
    problem = application([10.0], activations=False)
    least = most_bytes(problem.graph) - 1
    limited = Platform("box", (Device("a"), Device("b", memory_bytes=least)))
    plan = replicas(replace(problem, platform=limited))
    assert [stage.devices for stage in plan.stages] == [("a",), ("a", "b"), ("a",)]
    assert plan.value == pytest.approx((125.0,))
    both = Platform("box", (Device("a", memory_bytes=least), Device("b", memory_bytes=least)))
    with pytest.raises(InfeasibleError, match="than its memory_bytes, so it serves one"):
        replicas(replace(problem, platform=both))
    decision = planning.plan(replace(problem, platform=both))
    assert (decision.plan.status, decision.plan.value) == ("optimal", pytest.approx((1000 / 12,)))


@pytest.mark.parametrize("objective", ["latency", "energy"])
def test_a_required_throughput_may_need_replicas_that_do_host_work(objective: str) -> None:
    """110 frames a second are more than any pipeline makes; a frame still takes 16 ms, and 16 mJ."""
    problem = application([10.0], objective=objective, min_throughput_fps=110.0)
    plan = planning.plan(problem).plan
    assert plan.scheduler == "replicas"
    assert plan.predicted.throughput_fps == pytest.approx(125.0)
    assert (plan.status, plan.value) == ("optimal", pytest.approx((0.016,)))
    with pytest.raises(InfeasibleError):
        planning.plan(replace(problem, min_throughput_fps=126.0))


def test_replicas_that_slow_each_other_down_share_the_frames_and_not_more() -> None:
    """Two cores take 10 ms and 10 mJ each, 12.5 ms side by side: 160 frames a second. The npu takes 11 mJ."""
    operator = Operator("model", "k", ("x",), (Tensor("y", (4,)),), 10)
    graph = OperatorGraph("net", (Tensor("x", (1,)),), (operator,), ("y",))
    devices = (Device("a", active_w=1.0), Device("b", active_w=1.0), Device("npu", active_w=2.2))
    measured = {
        name: replace(DeviceProfile.in_order(graph, [seconds]), busy_factor=factor)
        for name, seconds, factor in (("a", 0.010, 1.5), ("b", 0.010, 1.5), ("npu", 0.005, 1.0))
    }
    profile = Profile("net", graph.fingerprint, measured)
    problem = Problem(graph, Platform("box", devices), profile, objective="energy", min_throughput_fps=120.0)
    plan = hybrid(problem)
    assert plan.stages == (Stage(("a", "b"), ("model",)),)
    assert plan.predicted.throughput_fps == pytest.approx(160.0)
    assert (plan.status, plan.value) == ("optimal", pytest.approx((0.010,)))


def test_bytes_are_planned_with_ordered_operators_too() -> None:
    problem = application([10.0], objective="memory,communication", stages=2)
    assert planning.plan(problem).plan.status == "optimal"


def test_a_modelled_device_replicates_the_model_and_does_no_host_work() -> None:
    """An Edge TPU cannot decode video: what its model says holds for operators of networks."""
    problem = application([10.0])
    measured = problem.platform.devices[0]
    platform = Platform("box", (measured, Device("tpu", model=DeviceModel(operator_s=0.001))))
    devices = {measured.name: problem.profile.devices[measured.name]}
    problem = replace(problem, platform=platform, profile=replace(problem.profile, devices=devices))
    plan = replicas(problem)
    assert [stage.devices for stage in plan.stages] == [(measured.name,), (measured.name, "tpu"), (measured.name,)]
    assert plan.value == pytest.approx((1000 / 5,))  # the ordered operators alone fill the device
    best = planning.plan(problem).plan
    assert {n for s in best.stages if "tpu" in s.devices for n in s.operators} <= set(plan.stages[1].operators)


@examples(40, deadline=None)
@given(problems("throughput", operators=(2, 4), devices=(2, 3), traits=Traits(ordered=True), choose_stages=False))
def test_replicas_are_legal_and_never_better_than_all_plans(problem: Problem) -> None:
    if not any(operator.ordered for operator in problem.graph.operators):
        return
    try:
        plan = replicas(problem)
    except InfeasibleError:
        return
    assert plan.predicted == evaluate(problem, plan.stages).predicted
    replicated = [stage for stage in plan.stages if len(stage.devices) > 1]
    assert len(replicated) == 1
    best = least(problem, every_sharing(problem))
    assert figure(problem, plan.predicted) >= best * (1 + 1e-9)
