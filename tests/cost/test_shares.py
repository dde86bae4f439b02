"""Replicas that serve other stages as well: the rule by which they share frames, the judge, and the simulator."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.graphs import Traits, random_order, random_problem, randoms
from tests.support.simulation import push_frames
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Stage, calls_inside
from tvm_pipeline.core.platform import Device, Link, Platform, Transfer, disjoint_sets
from tvm_pipeline.core.problem import Problem, most_bytes
from tvm_pipeline.core.profile import DeviceProfile, Profile, unmeasured
from tvm_pipeline.cost.evaluate import check_stages, evaluate
from tvm_pipeline.cost.shares import shared_frames
from tvm_pipeline.cost.simulate import simulate
from tvm_pipeline.errors import PlanError

LOAD = st.tuples(st.integers(1, 30), st.integers(0, 30))
REPLICAS = st.lists(st.lists(LOAD, min_size=1, max_size=2), min_size=1, max_size=6)
Loads = list[list[tuple[float, float]]]


def least_period(replicas: Loads) -> float:
    """Return, by bisection, the least seconds between frames in which the replicas take all frames of the stage."""
    low, high = 0.0, 1e3
    for _ in range(200):
        middle = (low + high) / 2
        frames = sum(min(max(0.0, middle - fixed) / own for own, fixed in loads) for loads in replicas)
        low, high = (low, middle) if frames >= 1 else (middle, high)
    return high


@given(REPLICAS)
def test_shares_are_those_of_the_least_period(drawn: list[list[tuple[int, int]]]) -> None:
    """Of devices that do one thing at a time, and of devices that copy beside their computing."""
    replicas = [[(own / 1000, fixed / 1000) for own, fixed in loads] for loads in drawn]
    rate, shares = shared_frames(replicas)
    assert 1 / rate == pytest.approx(least_period(replicas), rel=1e-9)
    assert sum(shares) == pytest.approx(1.0)
    for loads, share in zip(replicas, shares, strict=True):
        assert share == pytest.approx(min(max(0.0, 1 / rate - fixed) / own for own, fixed in loads))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_without_other_stages_the_rates_add_up(seconds: list[int]) -> None:
    rate, shares = shared_frames([[(float(own), 0.0)] for own in seconds])
    assert rate == sum(1 / own for own in seconds)
    assert shares == [1 / own / rate for own in seconds]


def application(ordered: tuple[str, ...] = (), **figures: object) -> Problem:
    """Read 1, compute 10 and write 4 ms on either of two cores, with 1000 bytes from one to the next."""
    seconds = {"read": 0.001, "compute": 0.010, "write": 0.004}
    tensors = [Tensor(f"t{i}", (1000,), "int8") for i in range(4)]
    operators = tuple(
        Operator(name, "k", (tensors[i].name,), (tensors[i + 1],), 100, ordered=name in ordered)
        for i, name in enumerate(seconds)
    )
    graph = OperatorGraph("app", (tensors[0],), operators, ("t3",))
    devices = {name: DeviceProfile.in_order(graph, seconds.values()) for name in "ab"}
    platform = Platform("box", (Device("a", cores=(0,)), Device("b", cores=(1,))))
    return Problem(graph, platform, Profile("app", graph.fingerprint, devices), **figures)  # type: ignore[arg-type]


SHARED = (Stage(("a",), ("read",)), Stage(("a", "b"), ("compute",)), Stage(("b",), ("write",)))


def test_a_replica_takes_the_frames_that_its_time_allows_by_hand() -> None:
    """a has P - 1 ms for computing and b P - 4: together 10 with P = 7.5, 65 % of the frames on a."""
    found = evaluate(application(("read", "write")), SHARED)
    assert found.predicted.throughput_fps == pytest.approx(1 / 0.0075)
    assert found.bottleneck == 1
    assert [(cost.device, cost.share) for cost in found.costs] == [
        ("a", 1.0),
        ("a", pytest.approx(0.65)),
        ("b", pytest.approx(0.35)),
        ("b", 1.0),
    ]
    assert found.predicted.latency_s == pytest.approx(0.015)
    assert found.predicted.jitter_s == 0.0


def test_a_replica_takes_the_frames_that_its_copies_allow_by_hand() -> None:
    """Two replicas compute for 15 ms; b copies for 100 ms a frame, meanwhile. So b takes 3 frames while a takes 20.

    In a run with the default slots, b takes a frame when it computes the one before, and no earlier.
    """
    problem = application()
    slow = replace(problem.profile.devices["b"], receive=Transfer(0.1))
    devices = (Device("a", cores=(0,)), Device("b", cores=(1,), concurrent_copies=True))
    problem = replace(
        problem,
        platform=Platform("box", devices),
        profile=replace(problem.profile, devices={**problem.profile.devices, "b": slow}),
    )
    stages = (Stage(("a", "b"), ("read", "compute", "write")),)
    found = evaluate(problem, stages)
    assert found.predicted.throughput_fps == pytest.approx(1 / 0.015 + 1 / 0.1)
    assert [cost.share for cost in found.costs] == [pytest.approx(20 / 23), pytest.approx(3 / 23)]
    assert found.bus_s["copies of b"] == pytest.approx(1 / (found.predicted.throughput_fps or 0.0))
    run = simulate(problem, stages, 800)
    assert run.statistics.throughput_fps == pytest.approx(found.predicted.throughput_fps, rel=0.02)


def test_a_replica_without_time_takes_no_frames() -> None:
    """b writes for 40 ms; a alone reads and computes in 11 ms, so b sets the pace."""
    problem = application()
    slow = {"a": problem.profile.devices["a"], "b": DeviceProfile.in_order(problem.graph, (0.001, 0.010, 0.040))}
    found = evaluate(replace(problem, profile=replace(problem.profile, devices=slow)), SHARED)
    assert found.predicted.throughput_fps == pytest.approx(25.0)
    assert found.bottleneck == 2
    assert [cost.share for cost in found.costs] == [1.0, pytest.approx(1.0), 0.0, 1.0]


def test_frames_of_a_shared_device_stay_there() -> None:
    """Over a link of 2 ms: b receives its own share s of the frames and sends the others' results from a to itself.

    a: 1 + (1 - s) 10. b: s (10 + 2) + 4 + (1 - s) 2. Equal with s = 0.25, where P = 8.5 ms. Energy: 1 W each.
    """
    problem = application()
    devices = tuple(replace(device, active_w=1.0) for device in problem.platform.devices)
    links = (Link("a", "b", 0.002), Link("b", "a", 0.002))
    found = evaluate(replace(problem, platform=Platform("box", devices, links)), SHARED)
    period_s = 1 / (found.predicted.throughput_fps or 0.0)
    share = found.costs[2].share
    assert share == pytest.approx(0.25)
    assert period_s == pytest.approx(0.0085)
    assert found.costs[3].transfer_s == pytest.approx(0.75 * 0.002)
    # A frame that meets idle devices takes the same ways.
    assert found.predicted.energy_j == pytest.approx(2 * period_s)


def test_an_ordered_operator_has_no_replicas() -> None:
    problem = application(("write",))
    stages = (Stage(("a",), ("read",)), Stage(("a", "b"), ("compute", "write")))
    words = r"stage 1 holds the ordered operator write and runs on 2 devices \(a, b\).* give the stage one device"
    with pytest.raises(PlanError, match=words):
        evaluate(problem, stages)
    with pytest.raises(PlanError, match=words):
        check_stages(problem.graph, problem.platform, stages)
    assert evaluate(application(), stages).costs


def test_a_device_that_serves_once_does_not_share() -> None:
    problem = application(activations=False)
    most = most_bytes(problem.graph)
    limited, roomy = (
        replace(problem, platform=Platform("box", (Device("a", memory_bytes=size), Device("b"))))
        for size in (most - 1, most)
    )
    with pytest.raises(PlanError, match="device a is a replica of stage 1 and serves another stage; plans of"):
        evaluate(limited, SHARED)
    assert evaluate(roomy, SHARED) == evaluate(problem, SHARED)
    cached = DeviceModel(call_s=0.001, cached_bytes=10, refill_bytes_per_s=1e6)
    platform = Platform("box", tuple(Device(name, model=cached) for name in "ab"))
    with pytest.raises(PlanError, match="device a serves two stages, and its model does not say how they share"):
        evaluate(replace(problem, platform=platform, profile=unmeasured(problem.graph)), SHARED)


def shared_stages(rng: random.Random, problem: Problem) -> tuple[Stage, ...]:
    """Return stages of which one is replicated; the devices of the others may be its replicas."""
    order = random_order(rng, problem.graph)
    count = rng.randint(1, min(4, len(order)))
    cuts = sorted(rng.sample(range(1, len(order)), count - 1))
    devices = [device.name for device in rng.choice(list(disjoint_sets(problem.platform.devices)))]
    replicated = rng.randrange(count)
    return tuple(
        Stage(
            tuple(rng.sample(devices, rng.randint(1, len(devices)))) if i == replicated else (rng.choice(devices),),
            tuple(order[start:end]),
        )
        for i, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(order)], strict=True))
    )


@pytest.mark.thorough
@given(randoms())
@examples(12)
def test_simulated_runs_are_as_fast_as_predicted(rng: random.Random) -> None:
    """With the slots of a pipeline and without buses, within 2 %.

    The prediction is a limit in which frames are divided at will. In a run a device finishes the frame that it is at,
    so in the half of the run that is counted, 400 frames, a device may take a frame more or fewer.
    """
    traits = Traits(unsupported=False, memory=False, busy=False)
    problem = random_problem(rng, operators=(1, 6), devices=(2, 4), traits=traits)
    problem = replace(problem, platform=replace(problem.platform, links=()), profile=replace(problem.profile, links=()))
    stages = shared_stages(rng, problem)
    predicted = evaluate(problem, stages).predicted
    run = simulate(problem, stages, 800)
    done = sorted(passage.done_s for passage in run.passages)
    assert 400 / (done[600] - done[200]) == pytest.approx(predicted.throughput_fps, rel=0.02)
    naive = push_frames(problem, stages, 800, inside=calls_inside(stages, predicted))
    assert naive.steady_fps == pytest.approx(predicted.throughput_fps, rel=0.02)


def test_the_example_by_hand_is_simulated_with_the_slots_of_the_pipeline() -> None:
    run = simulate(application(), SHARED, 1000)
    assert run.statistics.throughput_fps == pytest.approx(1 / 0.0075, rel=0.02)


def test_an_ordered_stage_takes_frames_in_order() -> None:
    """c is ten times slower than a, so that frames overtake each other in the replicated stage."""
    problem = application(("read", "write"))
    graph = problem.graph
    seconds = {"a": (0.001, 0.010, 0.001), "b": (0.001, 0.100, 0.001)}
    devices = {name: DeviceProfile.in_order(graph, row) for name, row in seconds.items()}
    problem = replace(problem, profile=replace(problem.profile, devices=devices))
    run = simulate(problem, SHARED, 60)
    written = [event.frame for event in run.events if event.stage == 2]
    assert written == sorted(written)
    computed = [bar.frame for bar in sorted(run.events, key=lambda bar: bar.end_s) if bar.stage == 1]
    assert computed != sorted(computed)
    assert push_frames(problem, SHARED, 60).order[2] == tuple(range(60))
