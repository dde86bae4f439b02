"""Figures of calls of several frames: as the same calls planned as frames, told for each frame."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.graphs import random_chain
from tvm_pipeline.backends.batched import of_one_frame
from tvm_pipeline.core.graph_files import merge_graphs
from tvm_pipeline.core.plan import Plan, Prediction, Stage
from tvm_pipeline.core.platform import Device, Link, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.cost.batches import of_calls
from tvm_pipeline.cost.evaluate import evaluate, judged
from tvm_pipeline.cost.frame_time import IDLE, frame_time
from tvm_pipeline.cost.simulate import fixed_rate, simulate
from tvm_pipeline.cost.under_load import with_latencies
from tvm_pipeline.errors import GraphError, InfeasibleError, OptionError, PlanError
from tvm_pipeline.planning import plan
from tvm_pipeline.planning.certificate import check_certifiable
from tvm_pipeline.planning.deployment import Demand, deploy
from tvm_pipeline.planning.search.pareto import pareto
from tvm_pipeline.runtime.replanning import quick_plan

PIPELINE = Stage(("a",), ("op0",)), Stage(("b",), ("op1",))


def problem_of(seed: int, batch: int, operators: int = 6) -> Problem:
    """Return a chain on two devices with a link that costs time; the seconds are those of calls."""
    rng = random.Random(seed)
    graph = replace(random_chain(rng, operators), batch=batch)
    devices = {
        name: DeviceProfile.in_order(
            graph,
            [rng.uniform(1e-3, 9e-3) for _ in range(operators)],
            joules=[rng.uniform(1e-3, 9e-3) for _ in range(operators)],
        )
        for name in "ab"
    }
    links = Link("a", "b", 1e-4, 1e6), Link("b", "a", 2e-4, 2e6)
    platform = Platform("box", tuple(map(Device, devices)), links, idle_w=2.0)
    return Problem(graph, platform, Profile("chain", graph.fingerprint, devices))


def worked() -> Problem:
    """Return a problem whose calls of four frames take 20 and 10 ms on a, 30 and 20 ms on b."""
    graph = replace(random_chain(random.Random(0), 2), batch=4)
    devices = {name: DeviceProfile.in_order(graph, s) for name, s in {"a": (0.02, 0.01), "b": (0.03, 0.02)}.items()}
    return Problem(graph, Platform("box", tuple(map(Device, devices))), Profile("chain", graph.fingerprint, devices))


def pipelined() -> Plan:
    """Return the pipeline of `worked`: 50 calls a second."""
    return judged(worked(), Plan("chain", "hand", "throughput", PIPELINE, Prediction()))


@examples(40)
@given(seed=st.integers(0, 2**32), batch=st.integers(2, 8), objective=st.sampled_from(["throughput", "energy"]))
def test_a_plan_is_that_of_the_calls_with_the_figures_of_frames(seed: int, batch: int, objective: str) -> None:
    problem = replace(problem_of(seed, batch), objective=objective)
    found, calls = plan(problem).plan, plan(of_calls(problem)).plan
    assert (found.stages, found.batch, found.status) == (calls.stages, batch, calls.status)
    assert found.predicted.throughput_fps == pytest.approx(batch * calls.predicted.throughput_fps)
    assert found.predicted.energy_j == pytest.approx(calls.predicted.energy_j / batch)
    assert found.predicted.latency_s == calls.predicted.latency_s
    assert found.gap == pytest.approx(calls.gap)
    assert judged(problem, found) == replace(found, predicted=evaluate(problem, found.stages).predicted)
    assert quick_plan(problem).predicted.throughput_fps <= found.predicted.throughput_fps * (1 + 1e-9) or (
        objective == "energy"
    )


@examples(40)
@given(seed=st.integers(0, 2**32), batch=st.integers(2, 8))
def test_a_limit_of_throughput_counts_frames(seed: int, batch: int) -> None:
    problem = replace(problem_of(seed, batch), objective="latency")
    fastest = plan(replace(problem, objective="throughput")).plan
    floor_fps = 0.5 * fastest.predicted.throughput_fps
    kept = plan(replace(problem, min_throughput_fps=floor_fps)).plan
    assert kept.predicted.throughput_fps >= floor_fps
    with pytest.raises(PlanError, match="`min_throughput_fps`"):
        evaluate(replace(problem, min_throughput_fps=1.01 * fastest.predicted.throughput_fps), fastest.stages)
    with pytest.raises(InfeasibleError, match=f"the figures are of calls, which compute {batch} frames each"):
        plan(replace(problem, min_throughput_fps=2 * fastest.predicted.throughput_fps))


def test_bytes_are_those_of_a_call() -> None:
    problem = problem_of(0, 4)
    alone = replace(problem, graph=replace(problem.graph, batch=1))
    stages = Stage(("a",), ("op0", "op1", "op2")), Stage(("b",), ("op3", "op4", "op5"))
    found, one = evaluate(problem, stages), evaluate(alone, stages)
    assert found.predicted.communication_bytes == 4 * one.predicted.communication_bytes
    assert found.costs[1].transfer_s - 1e-4 == pytest.approx(4 * (one.costs[1].transfer_s - 1e-4))


def test_the_plan_of_a_batch_is_read_as_it_is_written() -> None:
    found = pipelined()
    assert "batch 4" in str(found)
    assert Plan.parse(str(found)) == found
    assert (found.calls_inside, found.frames_inside) == (4, 16)
    assert found.loaded_latency_s == pytest.approx(found.frames_inside / found.predicted.throughput_fps)


def test_the_time_of_a_frame_is_its_share_of_the_call() -> None:
    parts = frame_time(worked(), PIPELINE)
    assert parts["a"]["model"] == pytest.approx(0.005)
    assert parts["b"][IDLE] == pytest.approx(0.0)


def test_simulated_calls_take_the_frames_that_have_come() -> None:
    """At first a frame goes alone; while it is at work four come, and so on: 20 ms a call in the slower stage."""
    run = simulate(worked(), PIPELINE, 400)
    assert run.statistics.throughput_fps == pytest.approx(200.0)
    slow = simulate(worked(), PIPELINE, 50, fixed_rate(10.0))
    assert {round(p.done_s - p.arrived_s, 6) for p in slow.passages} == {0.04}  # nobody waits for others
    some = simulate(worked(), PIPELINE, 400, fixed_rate(100.0))
    frames = [bar for bar in some.events if bar.stage == 0]
    assert 180 <= len(frames) <= 220  # two frames come in the 20 ms of a call
    assert max(p.done_s - p.arrived_s for p in some.passages) <= 0.061


def test_frames_that_a_stage_reads_itself_wait_for_the_call_to_fill() -> None:
    problem = worked()
    first, *others = problem.graph.operators
    graph = replace(problem.graph, operators=(replace(first, ordered=True), *others))
    problem = replace(problem, graph=graph, profile=replace(problem.profile, fingerprint=graph.fingerprint))
    run = simulate(problem, PIPELINE, 40, fixed_rate(100.0))
    assert [round(p.done_s - p.arrived_s, 6) for p in run.passages[:4]] == [0.07, 0.06, 0.05, 0.04]
    assert len([bar for bar in run.events if bar.stage == 0]) == 10


def test_latencies_under_load_are_of_frames() -> None:
    problem = worked()
    times_s = ((0.02,) * 50, (0.02,) * 50)
    found = pipelined()
    full = with_latencies(problem, found, times_s).predicted
    assert full.latency_p50_s == pytest.approx(found.calls_inside * 0.02)
    assert with_latencies(problem, found, times_s, 10.0).predicted.latency_p50_s == pytest.approx(0.04)


def test_fronts_and_deployments_are_of_frames() -> None:
    problem = problem_of(5, 4)
    front, calls = pareto(problem), pareto(of_calls(problem))
    assert [plan.stages for plan in front] == [plan.stages for plan in calls]
    assert [p.predicted.throughput_fps for p in front] == pytest.approx([4 * p.predicted.throughput_fps for p in calls])
    found = deploy([Demand(problem, 40.0), Demand(problem, 20.0)])
    expected = deploy([Demand(of_calls(problem), 10.0), Demand(of_calls(problem), 5.0)])
    assert found.utilisation == pytest.approx(expected.utilisation)
    assert found.rates_fps == (40.0, 20.0)
    assert found.reachable_fps == pytest.approx([4 * fps for fps in expected.reachable_fps])
    assert {plan.batch for plan in found.plans} == {4}


def test_what_takes_no_batch_refuses_it() -> None:
    problem = worked()
    with pytest.raises(GraphError, match="its calls compute 4 frames"):
        merge_graphs([problem.graph], "one")
    with pytest.raises(OptionError, match="no certificate: a call computes several frames"):
        check_certifiable(problem, "ideals")


def test_the_graph_of_one_frame_is_that_of_the_call_in_parts() -> None:
    graph = replace(random_chain(random.Random(3), 4), batch=3)
    calls = of_calls(Problem(graph, *_machine(graph))).graph
    assert of_one_frame(calls, 3) == graph


def _machine(graph) -> tuple[Platform, Profile]:
    devices = {"a": DeviceProfile.in_order(graph, (0.01,) * len(graph))}
    return Platform("box", (Device("a"),)), Profile("chain", graph.fingerprint, devices)
