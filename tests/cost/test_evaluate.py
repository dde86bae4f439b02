"""`evaluate` against a simulation that pushes frames through queues, and its refusals."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, reject

from tests.support.brute_force import verdict
from tests.support.graphs import Traits, random_order, random_problem, randoms
from tests.support.simulation import push_frames, single_frame, single_frames, slowdown
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Plan, Prediction, Stage
from tvm_pipeline.core.platform import Device, Link, Platform, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, IdlePower, Profile, SegmentProfile
from tvm_pipeline.cost.device_costs import busy_factor, require_energy
from tvm_pipeline.cost.evaluate import evaluate, judged
from tvm_pipeline.errors import PlanError, ProfileError
from tvm_pipeline.memory import stage_memory

CAPABLE = Traits(unsupported=False, memory=False)
MODELLED = replace(CAPABLE, modelled=True)
# Some of the devices were measured, some have a model instead, and some have both.
MEASURED_OR_NOT = pytest.mark.parametrize("traits", [CAPABLE, MODELLED], ids=["measured", "modelled"])


def random_stages(rng: random.Random, problem: Problem, *, replicated: str = "") -> tuple[Stage, ...]:
    """Any legal plan: devices come again as they like, and `first` or `any` stages have replicas."""
    order = random_order(rng, problem.graph)
    count = rng.randint(1, len(order))
    cuts = sorted(rng.sample(range(1, len(order)), count - 1))
    devices = [device.name for device in rng.choice(list(disjoint_sets(problem.platform.devices)))]
    rng.shuffle(devices)
    spare = devices[1:] if replicated else []
    stages = []
    for index, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(order)], strict=True)):
        chosen = (devices[0],) if replicated else (rng.choice(devices),)
        if spare and (replicated == "any" or not index):
            chosen = tuple(spare.pop() for _ in range(rng.randint(1, len(spare))))
        stages.append(Stage(chosen, tuple(order[start:end])))
    return tuple(stages)


def judged_or_skipped(problem: Problem, stages: tuple[Stage, ...]) -> Prediction:
    """What `evaluate` says; no example where a model does not say how two stages share its cache."""
    predicted = verdict(problem, stages)
    if predicted is None:
        with pytest.raises(PlanError, match="does not say how they share its cache"):
            evaluate(problem, stages)
        reject()
    return predicted


@MEASURED_OR_NOT
@given(rng=randoms())
def test_without_replicas_the_figures_are_those_of_the_simulated_queue(traits: Traits, rng: random.Random) -> None:
    problem = random_problem(rng, operators=(1, 7), devices=(1, 4), traits=replace(traits, idle=True))
    stages = random_stages(rng, problem)
    predicted = judged_or_skipped(problem, stages)
    assert push_frames(problem, stages, 200).steady_fps == pytest.approx(predicted.throughput_fps, rel=0.02)
    latency_s, joules = single_frame(problem, stages)
    assert predicted.latency_s == pytest.approx(latency_s, rel=1e-9)
    measured = problem.profile.idle
    idle_w = (problem.platform.idle_w or 0.0) if measured is None else measured.power_w
    assert predicted.energy_j == pytest.approx(joules + idle_w / (predicted.throughput_fps or 0.0), rel=1e-9)
    assert predicted.jitter_s == 0.0


@pytest.mark.thorough
@MEASURED_OR_NOT
@given(rng=randoms())
def test_replicas_in_front_share_frames_and_feed_the_rest_by_their_rates(traits: Traits, rng: random.Random) -> None:
    """The first stage never waits, so each of its replicas takes frames at its own rate, whatever the links.

    A replica takes whole frames, so there are enough of them for 40 on the slowest.
    """
    problem = random_problem(rng, operators=(1, 5), devices=(2, 4), traits=replace(traits, busy=False))
    stages = random_stages(rng, problem, replicated="first")
    predicted = judged_or_skipped(problem, stages)
    frames = max(400, round(40 / min(cost.share for cost in evaluate(problem, stages).costs)))
    run = push_frames(problem, stages, frames)
    assert run.steady_fps == pytest.approx(predicted.throughput_fps, rel=0.05)
    assert run.joules / frames == pytest.approx(predicted.energy_j, rel=0.05)


@MEASURED_OR_NOT
@given(rng=randoms())
def test_replicas_anywhere_where_links_depend_on_the_receiver_alone(traits: Traits, rng: random.Random) -> None:
    problem = random_problem(rng, operators=(1, 5), devices=(2, 4), traits=traits)
    names = [device.name for device in problem.platform.devices]
    into = {name: (rng.randint(0, 3) / 1000, rng.choice((None, 1e5))) for name in names}
    links = tuple(Link(a, b, *into[b]) for a in names for b in names if a != b)
    problem = replace(problem, platform=replace(problem.platform, links=links))
    stages = random_stages(rng, problem, replicated="any")
    predicted = judged_or_skipped(problem, stages)
    assert push_frames(problem, stages, 400).steady_fps == pytest.approx(predicted.throughput_fps, rel=0.05)
    ways = [run.done_s[0] for run in single_frames(problem, stages)]
    assert predicted.latency_s == pytest.approx(max(ways), rel=1e-9)
    assert predicted.jitter_s == pytest.approx(max(ways) - min(ways), abs=1e-12)


@given(randoms())
def test_devices_slow_each_other_down_in_proportion(rng: random.Random) -> None:
    problem = random_problem(rng, devices=(1, 4))
    for device in problem.platform.devices:
        largest = max(len(group) for group in disjoint_sets(problem.platform.devices) if device in group)
        for working in range(1, largest + 1):
            expected = slowdown(problem, device.name, working)
            assert busy_factor(problem, device.name, working) == pytest.approx(expected)


def two_devices(**figures: object) -> Problem:
    """Three operators of 10, 20 and 30 ms on `a`, twice as long on `b`; 4000 bytes from one to the next."""
    tensors = [Tensor(f"t{i}", (1000,)) for i in range(4)]
    operators = tuple(Operator(f"op{i}", "kind", (f"t{i}",), (tensors[i + 1],), 100) for i in range(3))
    graph = OperatorGraph("net", (tensors[0],), operators, ("t3",))
    platform = Platform(
        "box",
        (Device("a", cores=(0,), active_w=2.0), Device("b", cores=(1,), active_w=1.0), Device("all", cores=(0, 1))),
        (Link("a", "b", 0.001, 4e6),),
    )
    profile = Profile(
        "net",
        graph.fingerprint,
        {
            "a": DeviceProfile.in_order(graph, (0.01, 0.02, 0.03)),
            "b": DeviceProfile.in_order(graph, (0.02, 0.04, 0.06)),
            "all": DeviceProfile.in_order(graph, (0.01, 0.01, 0.01)),
        },
    )
    return Problem(graph, platform, profile, **figures)  # type: ignore[arg-type]


def test_figures_by_hand() -> None:
    """a: 10+20 ms. b: 60 ms and 1 ms + 4000 B / 4 MB/s = 62 ms. One frame: 92 ms and 2 x 30 + 1 x 62 mJ."""
    found = evaluate(two_devices(), (Stage(("a",), ("op0", "op1")), Stage(("b",), ("op2",))))
    assert found.predicted.throughput_fps == pytest.approx(1 / 0.062)
    assert found.predicted.latency_s == pytest.approx(0.092)
    assert found.predicted.energy_j == pytest.approx(0.122)
    assert found.bottleneck == 1
    assert [(cost.device, cost.compute_s, cost.transfer_s) for cost in found.costs] == [
        ("a", pytest.approx(0.03), 0.0),
        ("b", pytest.approx(0.06), pytest.approx(0.002)),
    ]


def test_the_model_s_own_input_costs_no_transfer_and_skipped_tensors_pay_at_every_hop() -> None:
    tensor = [Tensor("x", (1000,), "int8"), Tensor("y", (10,), "int8"), Tensor("z", (10,), "int8")]
    graph = OperatorGraph(
        "skip",
        (tensor[0],),
        (
            Operator("first", "k", ("x",), (tensor[1],)),
            Operator("second", "k", ("y",), (tensor[2],)),
            Operator("third", "k", ("x", "y", "z"), (Tensor("out", (1,), "int8"),)),
        ),
        ("out",),
    )
    names = ("a", "b", "c")
    links = tuple(Link(s, d, 0.0, 1000.0) for s in names for d in names if s != d)
    profile = Profile(
        "skip", graph.fingerprint, {name: DeviceProfile.in_order(graph, (1.0, 1.0, 1.0)) for name in names}
    )
    problem = Problem(graph, Platform("box", tuple(map(Device, names)), links), profile)
    stages = tuple(Stage((n,), (o.name,)) for n, o in zip(names, graph.operators, strict=True))
    received = [cost.transfer_s for cost in evaluate(problem, stages).costs]
    assert received == pytest.approx([0.0, 1.010, 1.020])  # nothing; x and y; x, y and z


def test_a_receiver_pays_for_each_upstream_replica_as_often_as_that_sends() -> None:
    """a sends three frames while b sends one, and only b is far away: 40 ms / 4 for the mean frame, 30 ms of work."""
    graph = OperatorGraph(
        "net",
        (Tensor("x", (1,)),),
        (Operator("front", "k", ("x",), (Tensor("y", (1,)),)), Operator("back", "k", ("y",), (Tensor("z", (1,)),))),
        ("z",),
    )
    seconds = {
        "a": DeviceProfile.in_order(graph, (0.01, 1.0)),
        "b": DeviceProfile.in_order(graph, (0.03, 1.0)),
        "c": DeviceProfile.in_order(graph, (1.0, 0.03)),
    }
    platform = Platform("box", tuple(map(Device, seconds)), (Link("b", "c", 0.04),))
    problem = Problem(graph, platform, Profile("net", graph.fingerprint, seconds))
    stages = (Stage(("a", "b"), ("front",)), Stage(("c",), ("back",)))
    found = evaluate(problem, stages)
    assert found.costs[-1].transfer_s == pytest.approx(0.01)
    assert found.predicted.throughput_fps == pytest.approx(25.0)
    assert push_frames(problem, stages, 400).steady_fps == pytest.approx(25.0, rel=0.02)


def test_the_idle_power_counts_for_the_seconds_between_frames() -> None:
    """The stages of 30 and 62 ms take 122 mJ; 0.5 W for the 62 ms between frames are 31 mJ, measured or not."""
    problem = two_devices()
    stages = Stage(("a",), ("op0", "op1")), Stage(("b",), ("op2",))
    stated = replace(problem, platform=replace(problem.platform, idle_w=0.5))
    assert evaluate(stated, stages).predicted.energy_j == pytest.approx(0.153)
    measured = replace(problem.profile, idle=IdlePower("sensor", "the board", 1.0))
    assert evaluate(replace(stated, profile=measured), stages).predicted.energy_j == pytest.approx(0.184)


def test_transfers_draw_the_mean_power_of_the_operators_where_none_is_stated() -> None:
    """b: 5 mJ in op2; 6 + 1 + 5 mJ in 120 ms are 0.1 W, so the 2 ms over the link take 0.2 mJ. a takes 60 mJ."""
    problem = two_devices()
    platform = replace(
        problem.platform,
        devices=tuple(replace(d, active_w=None) if d.name == "b" else d for d in problem.platform.devices),
    )
    joules = dict(zip(("op0", "op1", "op2"), (0.006, 0.001, 0.005), strict=True))
    devices = problem.profile.devices
    profile = replace(problem.profile, devices={**devices, "b": replace(devices["b"], joules=joules)})
    problem = replace(problem, platform=platform, profile=profile)
    stages = Stage(("a",), ("op0", "op1")), Stage(("b",), ("op2",))
    assert evaluate(problem, stages).predicted.energy_j == pytest.approx(0.0652)
    # As a whole, with its transfers, stage 1 took 90 ms instead of 60; it draws what its operators draw.
    whole = SegmentProfile("b", ("op2",), 0.09)
    problem = replace(problem, profile=replace(profile, segments=(whole,)))
    assert evaluate(problem, stages).predicted.energy_j == pytest.approx(0.06 + 0.0075 + 0.0002)


def test_energy_is_unknown_where_no_power_is() -> None:
    problem = two_devices()
    assert evaluate(problem, (Stage(("all",), ("op0", "op1", "op2")),)).predicted.energy_j is None
    with pytest.raises(ProfileError, match=r"device all; give `active_w`"):
        require_energy(problem)


def test_judging_replaces_a_plan_s_own_claim() -> None:
    problem = two_devices()
    plan = Plan("net", "liar", "throughput", (Stage(("a",), ("op0", "op1", "op2")),), Prediction(1e9, 0.0))
    assert judged(problem, plan).predicted.throughput_fps == pytest.approx(1 / 0.06)


BAD: dict[str, tuple[tuple[Stage, ...], str]] = {
    "no stages": ((), "no stages"),
    "an empty stage": ((Stage(("a",), ("op0", "op1", "op2")), Stage(("b",), ())), "stage 1 has no operators"),
    "a stage nowhere": ((Stage((), ("op0", "op1", "op2")),), "stage 0 has no operators or no devices"),
    "an unknown operator": ((Stage(("a",), ("op0", "op9")),), "stage 0 names operator op9, which net does not have"),
    "a missing operator": ((Stage(("a",), ("op0", "op2")),), r"operator op1 is in no stage \(1 missing"),
    "an operator twice": (
        (Stage(("a",), ("op0", "op1", "op2")), Stage(("b",), ("op1",))),
        "operator op1 stands twice in the plan, last in stage 1",
    ),
    "a cycle": (
        (Stage(("a",), ("op0", "op2")), Stage(("b",), ("op1",))),
        "cycle or stand in the wrong order: operator op2 of stage 0 reads t2",
    ),
    "the wrong order": ((Stage(("a",), ("op1", "op2")), Stage(("b",), ("op0",))), "wrong order: operator op1"),
    "an unknown device": ((Stage(("gpu",), ("op0", "op1", "op2")),), "stage 0: box has no device gpu"),
    "shared cores": (
        (Stage(("a",), ("op0", "op1")), Stage(("all",), ("op2",))),
        "devices all and a share cores",
    ),
    "replicas that share cores": ((Stage(("b", "all"), ("op0", "op1", "op2")),), "devices all and b share cores"),
    "a replica of two stages": (
        (Stage(("a", "b"), ("op0", "op1")), Stage(("b", "a"), ("op2",))),
        "device b of stage 1 is a replica of stage 0 already",
    ),
    "a replica of itself": ((Stage(("a", "a"), ("op0", "op1", "op2")),), "device a of stage 0 is a replica of stage 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_plan_that_does_not_fit_is_refused_with_the_place(case: str) -> None:
    stages, message = BAD[case]
    with pytest.raises(PlanError, match=message):
        evaluate(two_devices(), stages)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda p: replace(
                p,
                profile=replace(
                    p.profile, devices={**p.profile.devices, "a": DeviceProfile.in_order(p.graph, (0.1, None, 0.1))}
                ),
            ),
            "device a cannot run operator op1 of stage 0",
        ),
        (
            lambda p: replace(p, platform=Platform("box", (Device("a", memory_bytes=299), Device("b")))),
            "device a would hold 300 bytes of parameters and has 299",
        ),
    ],
)
def test_a_device_is_not_asked_for_more_than_it_can(spoil: Callable[[Problem], Problem], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        evaluate(spoil(two_devices()), (Stage(("a",), ("op0", "op1", "op2")),))


def test_memory_counts_all_stages_of_a_device() -> None:
    problem = two_devices()
    # Parameters of both stages on a; 4000 bytes in and 4000 out are the activations of either.
    problem = replace(problem, platform=Platform("box", (Device("a", memory_bytes=8200), Device("b"))))
    back_and_forth = (Stage(("a",), ("op0",)), Stage(("b",), ("op1",)), Stage(("a",), ("op2",)))
    assert evaluate(problem, back_and_forth).predicted.latency_s > 0
    small = replace(problem, platform=Platform("box", (Device("a", memory_bytes=8199), Device("b"))))
    refused = "stage 0 does not fit on device a: 200 bytes of parameters and 8000 of activations.* its 8199"
    with pytest.raises(PlanError, match=refused):
        evaluate(small, back_and_forth)
    assert evaluate(replace(small, activations=False), back_and_forth).predicted.latency_s > 0
    problem = replace(problem, platform=Platform("box", (Device("a", memory_bytes=199), Device("b"))))
    with pytest.raises(PlanError, match="device a would hold 200 bytes"):
        evaluate(problem, back_and_forth)


def test_the_verdict_on_memory_does_not_depend_on_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge searches for no order, so a clock that runs a day ahead at each look changes no verdict."""
    back_and_forth = (Stage(("a",), ("op0",)), Stage(("b",), ("op1",)), Stage(("a",), ("op2",)))

    def verdict_with(memory_bytes: int) -> Prediction | str:
        platform = Platform("box", (Device("a", memory_bytes=memory_bytes), Device("b")))
        try:
            return evaluate(replace(two_devices(), platform=platform), back_and_forth).predicted
        except PlanError as error:
            return str(error)

    capacities = (199, 200, 8199, 8200)
    calm = [verdict_with(memory_bytes) for memory_bytes in capacities]
    assert [isinstance(found, str) for found in calm] == [True, True, True, False]

    def no_search(*arguments: object, **options: object) -> None:
        raise AssertionError("the judge searched for an order")

    days = itertools.count(step=86400)
    with monkeypatch.context() as patch:
        patch.setattr(stage_memory, "TIME_LIMIT_S", 0.0)
        patch.setattr(stage_memory, "minimum_peak", no_search)
        for clock in ("monotonic", "perf_counter", "time"):
            patch.setattr(time, clock, lambda: float(next(days)))
        hurried = [verdict_with(memory_bytes) for memory_bytes in capacities]
    assert hurried == calm
