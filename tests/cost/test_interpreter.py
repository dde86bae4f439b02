"""The lock of the interpreter, which operators hold one at a time, in the judge, the simulator and every search."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given

from tests.cost.test_evaluate import CAPABLE, random_stages
from tests.support.brute_force import verdict
from tests.support.examples import examples
from tests.support.graphs import random_problem, randoms
from tests.support.simulation import push_frames
from tvm_pipeline import planning
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.cost.simulate import simulate
from tvm_pipeline.errors import InfeasibleError
from tvm_pipeline.planning.deployment import Demand, deploy
from tvm_pipeline.planning.sat.cp_sat import cp_sat
from tvm_pipeline.planning.search.dynamic_programming import chain, hybrid, ideals
from tvm_pipeline.planning.search.revisits import revisits

SPLIT = (Stage(("a",), ("first", "second")), Stage(("b",), ("third",)))


def row(held_ms: tuple[float, float, float], **figures: object) -> Problem:
    """Three operators of 4 ms on either of two devices, which hold the lock for some of them."""
    names = ("first", "second", "third")
    tensors = [Tensor(f"t{i}", (1,)) for i in range(4)]
    operators = tuple(Operator(name, "k", (f"t{i}",), (tensors[i + 1],)) for i, name in enumerate(names))
    graph = OperatorGraph("row", (tensors[0],), operators, ("t3",))
    devices = {name: DeviceProfile.in_order(graph, (0.004,) * 3) for name in "ab"}
    lock_s = {name: ms / 1000 for name, ms in zip(names, held_ms, strict=True) if ms}
    profile = Profile("row", graph.fingerprint, devices, lock_s=lock_s)
    platform = Platform("box", tuple(Device(name, active_w=1.0) for name in "ab"))
    return Problem(graph, platform, profile, **figures)  # type: ignore[arg-type]


def test_the_lock_bounds_the_throughput_as_a_bus_does() -> None:
    """Stages of 8 and 4 ms; 3 + 3 + 4 ms of them with the lock, so 100 frames a second on any devices."""
    found = evaluate(row((3, 3, 4)), SPLIT)
    assert found.bus_s == {"interpreter": pytest.approx(0.010)}
    assert found.predicted.throughput_fps == pytest.approx(100.0)
    assert found.predicted.latency_s == pytest.approx(0.012)
    assert evaluate(row((1, 1, 1)), SPLIT).predicted.throughput_fps == pytest.approx(125.0)
    assert evaluate(row((0, 0, 0)), SPLIT).bus_s == {}


def test_simulated_replicas_take_turns_with_the_lock() -> None:
    """Each holds it for the first 9 of 12 ms a frame: a frame every 9 ms, and a lone frame waits for no other."""
    problem, stages = row((3, 3, 3)), (Stage(("a", "b"), ("first", "second", "third")),)
    assert evaluate(problem, stages).predicted.throughput_fps == pytest.approx(1000 / 9)
    assert simulate(problem, stages, 200).statistics.throughput_fps == pytest.approx(1000 / 9, rel=0.01)
    assert push_frames(problem, stages, 200).steady_fps == pytest.approx(1000 / 9, rel=0.01)
    assert simulate(problem, stages, 1).statistics.latency_p50_s == pytest.approx(0.012)


def test_simulated_turns_with_the_lock_may_fall_badly() -> None:
    """When a ends a frame, b asks for the lock and a waits with the next: 8 + 4 ms, not 10, and 8 + 1, not 8."""
    run = simulate(row((3, 3, 4)), SPLIT, 200)
    assert run.statistics.throughput_fps == pytest.approx(1000 / 12, rel=0.01)
    assert simulate(row((1, 1, 1)), SPLIT, 200).statistics.throughput_fps == pytest.approx(1000 / 9, rel=0.01)


@given(randoms())
@examples(40)
def test_no_run_is_faster_than_the_lock_allows(rng: random.Random) -> None:
    """Turns may fall badly, so it may be slower; the naive simulation agrees where nothing else is shared."""
    problem = random_problem(rng, operators=(1, 6), devices=(1, 4), traits=replace(CAPABLE, locks=True, busy=False))
    stages = random_stages(rng, problem, replicated=rng.choice(("", "first", "any")))
    predicted = verdict(problem, stages)
    assume(predicted is not None)
    assert predicted is not None
    assert push_frames(problem, stages, 200).steady_fps <= predicted.throughput_fps * 1.02
    assert (simulate(problem, stages, 200).statistics.throughput_fps or 0.0) <= predicted.throughput_fps * 1.02


@pytest.mark.parametrize("scheduler", [chain, ideals, hybrid, cp_sat])
def test_a_plan_that_the_lock_limits_is_proven(scheduler: Callable[[Problem], Plan]) -> None:
    """No plan makes more than 100 frames a second, and one of two stages does."""
    plan = scheduler(row((3, 3, 4)))
    assert (plan.status, plan.bound) == ("optimal", plan.value)
    assert plan.value == pytest.approx((100.0,))
    # Where the lock does not count, replicas make 166, pipelines 125.
    free = scheduler(row((1, 1, 1)))
    assert (free.status, free.value) == ("optimal", pytest.approx((1000 / 6 if scheduler is hybrid else 125.0,)))


def test_the_best_plan_is_the_simplest_that_the_lock_allows() -> None:
    """With 12 ms of the lock two devices are no faster than one."""
    decision = planning.plan(row((4, 4, 4)))
    assert decision.plan.devices in (("a",), ("b",))
    assert (decision.plan.status, decision.plan.value) == ("optimal", pytest.approx((1000 / 12,)))


def test_stages_that_come_again_are_bounded_too() -> None:
    plan = revisits(row((3, 3, 4)))
    assert (plan.status, plan.value) == ("optimal", pytest.approx((1000 / 10,)))


@pytest.mark.parametrize("objective", ["latency", "energy"])
@pytest.mark.parametrize("scheduler", ["best", "chain", "ideals", "hybrid", "cp-sat"])
def test_a_throughput_beyond_the_lock_is_refused_with_the_reason(scheduler: str, objective: str) -> None:
    problem = row((3, 3, 4), objective=objective, min_throughput_fps=110.0)
    words = "lock of the Python interpreter for 0.01 s of each frame.* no more than 100 frames.* asks for 110"
    with pytest.raises(InfeasibleError, match="no plan of row" if scheduler == "cp-sat" else words):
        planning.plan(problem, scheduler)
    reached = planning.plan(replace(problem, min_throughput_fps=100.0), scheduler).plan
    assert reached.predicted.throughput_fps == pytest.approx(100.0)


def test_models_that_run_together_share_the_lock() -> None:
    """Two models at 60 and 30 frames a second hold it for 0.9 s of each."""
    demands = [Demand(row((3, 3, 4)), 60.0), Demand(row((3, 3, 4)), 30.0)]
    found = deploy(demands)
    assert found.utilisation["interpreter"] == pytest.approx(0.9)
    faster = deploy([replace(demand, rate_fps=2 * demand.rate_fps) for demand in demands])
    assert faster.reachable_fps == pytest.approx((120 / 1.8, 60 / 1.8))
    assert "rates need 180.0% of interpreter" in faster.why
    assert faster.status == "optimal"
