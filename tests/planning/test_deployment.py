"""Co-deployment against every pair of plans there is, and its judge against `evaluate` and by hand."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.brute_force import every_plan, verdict
from tests.support.examples import examples
from tests.support.graphs import Traits, random_problem
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.core.platform import Device, Link, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile, SegmentProfile, unmeasured
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, NoPlanError, OptionError, PlanError
from tvm_pipeline.planning.deployment import Demand, deploy, judge_deployment


def row(name: str, operators: int, platform: Platform, seconds: float | None, param_bytes: int = 1) -> Problem:
    """Operators in a row, each so many seconds on every device; None where devices have models."""
    tensors = [Tensor(f"{name}{i}", (1,), "int8") for i in range(operators + 1)]
    graph = OperatorGraph(
        name,
        (tensors[0],),
        tuple(
            Operator(f"op{i}", "kind", (before.name,), (after,), param_bytes)
            for i, (before, after) in enumerate(itertools.pairwise(tensors))
        ),
        (tensors[-1].name,),
    )
    if seconds is None:
        return Problem(graph, platform, unmeasured(graph))
    devices = {device.name: DeviceProfile.in_order(graph, (seconds,) * operators) for device in platform.devices}
    return Problem(graph, platform, Profile(name, graph.fingerprint, devices))


def two_demands(rng: random.Random, traits: Traits) -> list[Demand]:
    """Two models on one platform, measured on the same devices."""
    first = random_problem(rng, operators=(1, 4), devices=(2, 3), traits=traits, children_together=rng.random() < 0.2)
    graph = random_problem(rng, operators=(1, 3)).graph
    measured = {
        name: DeviceProfile.in_order(
            graph, tuple(rng.randint(1, 20) / 1000 for _ in graph.operators), busy_factor=device.busy_factor
        )
        for name, device in first.profile.devices.items()
    }
    profile = Profile(graph.name, graph.fingerprint, measured, first.profile.links)
    second = Problem(graph, first.platform, profile, activations=False)
    return [Demand(problem, float(rng.choice((1, 10, 30)))) for problem in (first, second)]


def least_utilisation(demands: list[Demand]) -> float | None:
    plans = [
        [stages for stages in every_plan(d.problem, d.problem.stages) if verdict(d.problem, stages)] for d in demands
    ]
    best = math.inf
    for pair in itertools.product(*plans):
        try:
            best = min(best, max(judge_deployment(demands, pair).values()))
        except PlanError:
            continue
    return None if best == math.inf else best


def holds_a_shared_cache(demands: list[Demand]) -> bool:
    models = [device.model for device in demands[0].problem.platform.devices]
    return any(model is not None and model.spill_s_per_byte > 0 for model in models)


@given(
    rng=st.randoms(use_true_random=False),
    traits=st.sampled_from([Traits(), Traits(modelled=True, buses=True, copies=True)]),
)
@examples(48)
def test_the_busiest_device_is_as_idle_as_can_be(rng: random.Random, traits: Traits) -> None:
    demands = two_demands(rng, traits)
    best = least_utilisation(demands)
    try:
        found = deploy(demands)
    except NoPlanError:
        assert best is None
        return
    assert best is not None
    most = max(found.utilisation.values())
    assert found.utilisation == judge_deployment(demands, [plan.stages for plan in found.plans])
    assert found.bound <= best * (1 + 1e-7)
    if found.status == "optimal" or not holds_a_shared_cache(demands):
        assert found.status == "optimal"
        assert most == pytest.approx(best, rel=1e-6)
    assert found.reachable_fps == tuple(demand.rate_fps / max(1.0, most) for demand in demands)


@given(rng=st.randoms(use_true_random=False))
def test_one_model_on_calm_devices_is_judged_as_evaluate_does(rng: random.Random) -> None:
    """Where devices do not slow one another down, the rate at which one model is just met is its throughput."""
    problem = random_problem(rng, operators=(1, 5), traits=Traits(busy=False, modelled=True, buses=True))
    for stages in itertools.islice(every_plan(problem, problem.stages), 40):
        predicted = verdict(problem, stages)
        if predicted is not None and predicted.throughput_fps is not None:
            shares = judge_deployment([Demand(problem, 7.0)], [stages])
            if any(device.concurrent_copies for device in problem.platform.devices):  # copies count as work here
                assert max(shares.values()) >= 7.0 / predicted.throughput_fps * (1 - 1e-9)
            else:
                assert max(shares.values()) == pytest.approx(7.0 / predicted.throughput_fps)


def test_a_stage_measured_whole_counts_as_measured() -> None:
    """By its operators stage 0 takes 2 ms; measured whole it took 0.5 s, which makes 2 fps: half of it at 1 fps."""
    platform = Platform("box", (Device("a"), Device("b")))
    problem = row("net", 4, platform, 0.001)
    stages = (Stage(("a",), ("op0", "op1")), Stage(("b",), ("op2", "op3")))
    assert evaluate(problem, stages).predicted.throughput_fps == pytest.approx(500)
    measured = SegmentProfile("a", stages[0].operators, 0.5)
    problem = replace(problem, profile=replace(problem.profile, segments=(measured,)))
    assert evaluate(problem, stages).predicted.throughput_fps == pytest.approx(2)
    assert judge_deployment([Demand(problem, 1.0)], [stages]) == {"a": pytest.approx(0.5), "b": pytest.approx(0.002)}


def test_two_models_share_what_one_leaves() -> None:
    """10 ms at 60 fps and 4 x 10 ms at 30 fps are 1.8 seconds a second: two devices at 0.9 each."""
    platform = Platform("box", (Device("a"), Device("b")))
    demands = [Demand(row("small", 1, platform, 0.01), 60.0), Demand(row("big", 4, platform, 0.01), 30.0)]
    found = deploy(demands)
    assert found.utilisation == {"a": pytest.approx(0.9), "b": pytest.approx(0.9)}
    assert found.reachable_fps == found.rates_fps == (60.0, 30.0)
    assert (found.status, found.bound) == ("optimal", pytest.approx(0.9))
    assert "all rates are met" in found.why


def test_rates_that_cannot_be_met_are_scaled_and_the_cause_is_named() -> None:
    """The one operator of `slow` takes 50 ms: 20 fps on the best of days."""
    platform = Platform("box", (Device("a"), Device("b")))
    demands = [Demand(row("slow", 1, platform, 0.05), 40.0), Demand(row("quick", 1, platform, 0.01), 10.0)]
    found = deploy(demands)
    assert max(found.utilisation.values()) == pytest.approx(2.0)
    assert found.reachable_fps == (pytest.approx(20.0), pytest.approx(5.0))
    assert "slow alone cannot make more than 20 of 40 fps" in found.why
    assert "quick alone" not in found.why


def test_memory_holds_all_models() -> None:
    """Two models of 2 bytes of parameters; device `a` would be the faster for both, but has 3 bytes for them."""
    platform = Platform("box", (Device("a", memory_bytes=3), Device("b")))
    problems = [row(name, 1, platform, 0.01, param_bytes=2) for name in ("one", "two")]
    seconds = {
        "a": DeviceProfile.in_order(problems[0].graph, (0.01,)),
        "b": DeviceProfile.in_order(problems[0].graph, (0.1,)),
    }
    demands = [
        Demand(replace(p, profile=replace(p.profile, devices=seconds), activations=False), 1.0) for p in problems
    ]
    assert {plan.devices for plan in deploy(demands).plans} == {("a",), ("b",)}
    both_on_a = [(Stage(("a",), ("op0",)),)] * 2
    with pytest.raises(PlanError, match="a would hold 4 bytes"):
        judge_deployment(demands, both_on_a)
    small = Platform("box", (Device("a", memory_bytes=3),))
    with pytest.raises(InfeasibleError, match="no deployment exists of one, two"):
        deploy([Demand(row(name, 1, small, 0.01, param_bytes=2), 1.0) for name in ("one", "two")])


def test_devices_that_share_cores_are_not_used_both() -> None:
    platform = Platform("box", (Device("all", cores=(0, 1)), Device("half", cores=(1,))))
    demands = [Demand(row(name, 1, platform, 0.01), 1.0) for name in ("one", "two")]
    assert len({plan.devices for plan in deploy(demands).plans}) == 1
    with pytest.raises(PlanError, match="share cores"):
        judge_deployment(demands, [(Stage(("all",), ("op0",)),), (Stage(("half",), ("op0",)),)])


def test_a_shared_cache_overflows_in_proportion() -> None:
    """30 and 10 bytes in a cache of 20: 20 beyond, 15 and 5 a frame at 1000 bytes/s; alone only 10 of the 30."""
    model = DeviceModel(cached_bytes=20, refill_bytes_per_s=1000.0)
    platform = Platform("box", (Device("tpu", model=model),))
    problems = [row("big", 1, platform, None, param_bytes=30), row("small", 1, platform, None, param_bytes=10)]
    plans = [(Stage(("tpu",), ("op0",)),)] * 2
    demands = [Demand(problem, rate) for problem, rate in zip(problems, (2.0, 4.0), strict=True)]
    assert judge_deployment(demands, plans) == {"tpu": pytest.approx(2 * 0.015 + 4 * 0.005)}
    assert judge_deployment(demands[:1], plans[:1]) == {"tpu": pytest.approx(2 * 0.010)}
    found = deploy(demands)
    assert found.bound <= 0.05
    same_rate = deploy([replace(demand, rate_fps=2.0) for demand in demands])
    assert (same_rate.status, same_rate.bound) == ("optimal", pytest.approx(0.04))


def test_a_latency_limit_of_one_model_is_kept() -> None:
    """Split, each frame of `big` takes 3 ms more; its limit leaves it whole, though that is the slower way."""
    platform = Platform("box", (Device("a"), Device("b")))
    big = row("big", 2, platform, 0.01)
    links = tuple(Link(a.name, b.name, 0.003) for a, b in itertools.permutations(platform.devices, 2))
    big = replace(big, platform=replace(platform, links=links))
    assert len(_only(deploy([Demand(big, 50.0)]).plans).stages) == 2
    assert len(_only(deploy([Demand(replace(big, max_latency_s=0.02), 50.0)]).plans).stages) == 1


def _only(plans: tuple[Plan, ...]) -> Plan:
    (plan,) = plans
    return plan


def test_what_cannot_be_deployed_is_named() -> None:
    platform = Platform("box", (Device("a", active_w=1.0),))
    problem = row("net", 1, platform, 0.01)
    with pytest.raises(OptionError, match="at least one model"):
        deploy([])
    for rate in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(OptionError, match="the rate of net"):
            deploy([Demand(problem, rate)])
    elsewhere = row("far", 1, Platform("else", platform.devices), 0.01)
    with pytest.raises(OptionError, match="far is planned on platform else, others on box"):
        deploy([Demand(problem, 1.0), Demand(elsewhere, 1.0)])
    with pytest.raises(OptionError, match="the objective of net is latency"):
        deploy([Demand(replace(problem, objective="latency"), 1.0)])
