"""`simulate` against hand-worked runs, queueing theory, `evaluate`, and a naive simulation that shares no code."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cost.test_evaluate import CAPABLE, judged_or_skipped, random_stages
from tests.support.examples import examples
from tests.support.graphs import Traits, random_chain, random_problem, randoms
from tests.support.simulation import push_frames
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.core.platform import Device, Link, Platform, Transfer, read_platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile, unmeasured
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.cost.simulate import SATURATED, Simulation, fixed_rate, poisson, simulate
from tvm_pipeline.cost.under_load import with_latencies
from tvm_pipeline.errors import OptionError, PlanError, ProfileError
from tvm_pipeline.planning import plan

PROFILES = Path(__file__).parents[2] / "profiles"
MODELLED = replace(CAPABLE, modelled=True)
SHARED = replace(MODELLED, buses=True)


def line(*seconds: float, links: tuple[Link, ...] = (), factor: float = 1.0) -> tuple[Problem, tuple[Stage, ...]]:
    """A stage of one operator on each of the devices a, b, c, ..., that takes so many seconds."""
    graph, names = random_chain(random.Random(0), len(seconds)), "abcdef"
    measured = {
        name: DeviceProfile.in_order(graph, (s,) * len(seconds), busy_factor=factor)
        for name, s in zip(names, seconds, strict=False)
    }
    platform = Platform("box", tuple(map(Device, measured)), links)
    stages = tuple(Stage((name,), (f"op{index}",)) for index, name in enumerate(measured))
    return Problem(graph, platform, Profile("chain", graph.fingerprint, measured)), stages


def replicas(*seconds: float) -> tuple[Problem, tuple[Stage, ...]]:
    """One stage of one operator on devices that take so many seconds for it."""
    graph = random_chain(random.Random(0), 1)
    measured = {name: DeviceProfile.in_order(graph, (s,)) for name, s in zip("abcdef", seconds, strict=False)}
    problem = Problem(graph, Platform("box", tuple(map(Device, measured))), Profile("c", graph.fingerprint, measured))
    return problem, (Stage(tuple(measured), ("op0",)),)


def steady_fps(run: Simulation) -> float:
    """Frames a second between the first and the third quarter of the run, as the naive simulation counts them."""
    done = sorted(passage.done_s for passage in run.passages)
    first, last = len(done) // 4, 3 * len(done) // 4
    return (last - first) / (done[last] - done[first])


def bars(run: Simulation) -> list[tuple[int, str, int, float, float]]:
    return [(e.stage, e.device, e.frame, e.start_s, e.end_s) for e in run.events]


@pytest.mark.parametrize(("seconds", "latency_s"), [((2.0, 1.0), 3.0), ((1.0, 2.0), 6.0)])
def test_the_latency_of_a_frame_that_the_first_stage_reads_counts_from_there(
    seconds: tuple[float, float], latency_s: float
) -> None:
    """Three slots: where the first stage is the slower one, the third frame is not read yet while it waits."""
    problem, stages = line(*seconds)
    first, *others = problem.graph.operators
    graph = replace(problem.graph, operators=(replace(first, ordered=True), *others))
    problem = replace(problem, graph=graph, profile=replace(problem.profile, fingerprint=graph.fingerprint))
    assert problem.graph.operators[0].is_host
    run = simulate(problem, stages, 20, in_flight=3)
    assert {p.done_s - p.entered_s for p in run.passages[3:]} == {latency_s}
    given = simulate(*line(*seconds), 20, in_flight=3)  # somebody else hands the frames in
    assert {p.done_s - p.entered_s for p in given.passages[3:]} == {6.0}


def test_a_pipeline_by_hand() -> None:
    """Stages of 1 and 2 s, two slots: b is never idle once it has a frame; frame 2 gets the slot of frame 0."""
    run = simulate(*line(1.0, 2.0), 4, in_flight=2)
    assert bars(run) == [
        (0, "a", 0, 0, 1),
        (1, "b", 0, 1, 3),
        (0, "a", 1, 1, 2),
        (1, "b", 1, 3, 5),
        (0, "a", 2, 3, 4),
        (1, "b", 2, 5, 7),
        (0, "a", 3, 5, 6),
        (1, "b", 3, 7, 9),
    ]
    assert [(p.arrived_s, p.entered_s, p.done_s, p.left_s) for p in run.passages] == [
        (0, 0, 3, 3),
        (0, 0, 5, 5),
        (0, 3, 7, 7),
        (0, 5, 9, 9),
    ]
    found = run.statistics
    assert found.frames == 4
    assert found.throughput_fps == pytest.approx(0.5)
    assert found.latency_max_s == pytest.approx(4.0)
    assert [(s.stage, s.device, s.frames, s.compute_s) for s in found.stages] == [(0, "a", 4, 1.0), (1, "b", 4, 2.0)]
    # Of the frames after the fill, a waits 1 of every 2 s, b never.
    assert [s.bubble_share for s in found.stages] == pytest.approx([0.5, 0.0])


def test_one_slot_is_one_frame_at_a_time() -> None:
    run = simulate(*line(1.0, 2.0), 5, in_flight=1)
    assert [passage.done_s for passage in run.passages] == [3, 6, 9, 12, 15]


def test_a_frame_that_is_done_early_waits_for_those_before_it() -> None:
    """a takes 5 s, b 1 s: b's frames 1, 2, 3 fill the slots, and nothing enters until frame 0 leaves."""
    run = simulate(*replicas(5.0, 1.0), 6, in_flight=4)
    assert [passage.frame for passage in run.passages] == list(range(6))
    assert [passage.done_s for passage in run.passages] == [5, 1, 2, 3, 6, 10]
    assert [passage.left_s for passage in run.passages] == [5, 5, 5, 5, 6, 10]


def test_uneven_replicas_need_slots_for_the_frames_that_overtake() -> None:
    """`evaluate` promises 1 + 1/10 a second; four slots stand full behind the slow frame, by default there are more."""
    problem, stages = replicas(10.0, 1.0)
    promised = evaluate(problem, stages).predicted.throughput_fps
    assert promised == pytest.approx(1.1)
    assert steady_fps(simulate(problem, stages, 400, in_flight=4)) < 0.5 * promised
    assert steady_fps(simulate(problem, stages, 400)) == pytest.approx(promised, rel=0.02)


def test_a_device_that_comes_again_takes_the_earlier_frame_first() -> None:
    problem, (first, second, third) = line(1.0, 1.5, 1.0)
    run = simulate(problem, (first, second, replace(third, devices=("a",))), 2)
    assert bars(run) == [
        (0, "a", 0, 0, 1),
        (1, "b", 0, 1, 2.5),
        (0, "a", 1, 1, 2),
        (2, "a", 0, 2.5, 3.5),
        (1, "b", 1, 2.5, 4),
        (2, "a", 1, 4, 5),
    ]


def test_a_bus_serves_one_at_a_time_first_come_first_served() -> None:
    """Two transfers of 3 s meet on one bus at second 3; on links of their own they do not."""
    links = (Link("a", "b", 3.0, bus="usb"), Link("b", "c", 3.0, bus="usb"))
    run = simulate(*line(1.0, 1.0, 1.0, links=links), 2)
    received = {(e.stage, e.frame): (e.start_s, e.transfer_s) for e in run.events if e.stage}
    # Stage 2 asks for frame 0 at second 5, stage 1 for frame 1 at the same; the one that waited longest idle is c.
    assert received == {(1, 0): (1, 3), (2, 0): (5, 3), (1, 1): (5, 6), (2, 1): (12, 3)}
    apart = simulate(*line(1.0, 1.0, 1.0, links=tuple(replace(link, bus=link.source) for link in links)), 2)
    assert {(e.stage, e.frame): (e.start_s, e.transfer_s) for e in apart.events if e.stage} == {
        (1, 0): (1, 3),
        (2, 0): (5, 3),
        (1, 1): (5, 3),
        (2, 1): (9, 3),
    }


def test_overflow_of_modelled_devices_takes_turns_on_their_bus() -> None:
    """Two replicas compute for 1 s and fetch for 3 s a frame over one bus: a frame every 3 s, by turns."""
    graph = OperatorGraph(
        "net", (Tensor("t0", (1,)),), (Operator("op0", "k", ("t0",), (Tensor("t1", (1,)),), 400, 100),), ("t1",)
    )
    model = DeviceModel(macs_per_s=100.0, cached_bytes=100, refill_bytes_per_s=100.0)
    platform = Platform("box", tuple(Device(name, model=model, bus="usb") for name in "ab"))
    run = simulate(Problem(graph, platform, unmeasured(graph)), (Stage(("a", "b"), ("op0",)),), 6)
    assert [(p.frame, p.done_s) for p in run.passages] == [(f, 3.0 * (f + 1)) for f in range(6)]
    alone = replace(platform, devices=tuple(replace(device, bus="") for device in platform.devices))
    run = simulate(Problem(graph, alone, unmeasured(graph)), (Stage(("a", "b"), ("op0",)),), 6)
    assert [p.done_s for p in run.passages] == [3, 3, 6, 6, 9, 9]
    # Calls of 2 s go before the fetching, and beside that of the other: only the first frame sees them.
    calling = tuple(replace(device, model=replace(model, call_s=2.0)) for device in platform.devices)
    platform = replace(platform, devices=calling)
    run = simulate(Problem(graph, platform, unmeasured(graph)), (Stage(("a", "b"), ("op0",)),), 6)
    assert [p.done_s for p in run.passages] == [2 + 3.0 * (f + 1) for f in range(6)]


def test_devices_are_slow_while_the_pipeline_is_full_and_not_for_a_lone_frame() -> None:
    problem, stages = line(1.0, 1.0, factor=2.0)
    assert steady_fps(simulate(problem, stages, 100)) == pytest.approx(0.5)
    assert simulate(problem, stages, 1).statistics.latency_p50_s == pytest.approx(2.0)
    apart = simulate(problem, stages, 20, fixed_rate(0.1))
    assert {passage.done_s - passage.entered_s for passage in apart.passages} == {2.0}


@pytest.mark.parametrize("traits", [CAPABLE, MODELLED], ids=["measured", "modelled"])
@given(rng=randoms())
@examples(40)
def test_without_buses_a_saturated_run_is_as_fast_as_predicted(traits: Traits, rng: random.Random) -> None:
    """With slots enough: by default, a device that comes again waits now and then for a frame to come back to it."""
    problem = random_problem(rng, operators=(1, 6), devices=(1, 4), traits=traits)
    stages = random_stages(rng, problem)
    predicted = judged_or_skipped(problem, stages)
    run = simulate(problem, stages, 200, in_flight=200)
    assert steady_fps(run) == pytest.approx(predicted.throughput_fps, rel=0.02)
    assert steady_fps(run) == pytest.approx(push_frames(problem, stages, 200).steady_fps, rel=0.02)
    assert simulate(problem, stages, 1).statistics.latency_p50_s == pytest.approx(predicted.latency_s, rel=1e-9)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_edge_tpus_on_one_bus_run_as_in_the_naive_simulation(count: int) -> None:
    """ResNet50, cut evenly: each stage overflows its cache, or none, and they take turns on the bus."""
    graph = read_graph(PROFILES / "keras" / "ResNet50.json")
    platform = read_platform(PROFILES / "platforms" / f"coral-usb-{count}.toml")
    names = graph.operator_names
    edges = [len(names) * index // count for index in range(count + 1)]
    stages = tuple(
        Stage((device.name,), tuple(names[start:end]))
        for device, (start, end) in zip(platform.devices, pairwise(edges), strict=True)
    )
    problem = Problem(graph, platform, unmeasured(graph))
    fps = steady_fps(simulate(problem, stages, 200))
    assert fps == pytest.approx(push_frames(problem, stages, 200).steady_fps, rel=0.01)
    assert fps <= evaluate(problem, stages).predicted.throughput_fps * 1.01


@given(randoms())
@examples(40)
def test_replicas_with_slots_enough_are_as_fast_as_in_the_naive_simulation(rng: random.Random) -> None:
    problem = random_problem(rng, operators=(1, 5), devices=(2, 4), traits=MODELLED)
    stages = random_stages(rng, problem, replicated="any")
    judged_or_skipped(problem, stages)
    run = simulate(problem, stages, 400, in_flight=400)
    assert steady_fps(run) == pytest.approx(push_frames(problem, stages, 400).steady_fps, rel=0.05)


def senders_are_alike(problem: Problem, stages: tuple[Stage, ...]) -> bool:
    """Return whether no device pays more for a tensor that one replica sends than for one that another sends."""
    return all(
        len({problem.link(source, name).transfer for source in before.devices}) == 1
        for before, after in pairwise(stages)
        for name in after.devices
    )


@given(randoms(), st.integers(1, 30))
@examples(60)
def test_no_run_is_faster_than_predicted_and_none_loses_a_frame(rng: random.Random, in_flight: int) -> None:
    """Whatever the buses, replicas and slots: frames come out once, in order, and a device does one thing at a time.

    Where links behind replicas differ, the speed depends on which replica takes how many frames. Replicas that wait for
    slots may share them otherwise than by their rates, as the prediction has it.
    """
    problem = random_problem(rng, operators=(1, 6), devices=(1, 4), traits=replace(SHARED, busy=False))
    stages = random_stages(rng, problem, replicated=rng.choice(("", "first", "any")))
    predicted = judged_or_skipped(problem, stages)
    run = simulate(problem, stages, 200, in_flight=in_flight)
    if senders_are_alike(problem, stages):
        assert steady_fps(run) <= predicted.throughput_fps * 1.02
    conserved(run, problem, stages, 200, in_flight)
    if not predicted.jitter_s:
        assert min(p.done_s - p.entered_s for p in run.passages) >= predicted.latency_s * (1 - 1e-9)


@given(randoms(), st.booleans(), st.floats(1, 500), st.sampled_from((0.0, 0.3)), st.integers(1, 8))
@examples(60)
def test_frames_come_out_once_in_order_or_are_counted_as_dropped(
    rng: random.Random, drop: bool, rate_fps: float, jitter: float, in_flight: int
) -> None:
    problem = random_problem(rng, operators=(1, 6), devices=(1, 4), traits=SHARED)
    stages = random_stages(rng, problem, replicated=rng.choice(("", "first", "any")))
    judged_or_skipped(problem, stages)
    arrivals = rng.choice((fixed_rate(rate_fps), poisson(rate_fps, 1)))
    run = simulate(problem, stages, 60, arrivals, in_flight=in_flight, drop=drop, jitter=jitter, seed=2)
    assert drop or not run.dropped
    conserved(run, problem, stages, 60, in_flight)
    if drop:
        assert all(passage.entered_s == passage.arrived_s for passage in run.passages)


def conserved(run: Simulation, problem: Problem, stages: tuple[Stage, ...], frames: int, in_flight: int) -> None:
    out = [passage.frame for passage in run.passages]
    assert out == sorted(out)
    assert sorted([*out, *run.dropped]) == list(range(frames))
    assert run.statistics.frames == len(out)
    assert sorted((e.stage, e.frame) for e in run.events) == [(s, f) for s in range(len(stages)) for f in out]
    left = [passage.left_s for passage in run.passages]
    assert left == sorted(left)
    for passage in run.passages:
        assert 0 <= passage.arrived_s <= passage.entered_s <= passage.done_s <= passage.left_s
        inside = sum(p.entered_s <= passage.entered_s < p.left_s for p in run.passages)
        assert inside <= in_flight
    free_s = {device.name: [0.0] * (2 if device.concurrent_copies else 1) for device in problem.platform.devices}
    for event in sorted(run.events, key=lambda e: (e.start_s, e.end_s)):
        assert event.device in stages[event.stage].devices
        worker = free_s[event.device].index(min(free_s[event.device]))
        assert event.start_s >= free_s[event.device][worker] - 1e-9
        free_s[event.device][worker] = event.end_s
    ends = {(event.stage, event.frame): event.end_s for event in run.events}
    assert all(e.start_s >= ends[e.stage - 1, e.frame] - 1e-9 for e in run.events if e.stage)


@pytest.mark.parametrize(
    ("copies_s", "period_s", "left_s"),
    [
        # The first frame is there after 1 s, each takes 3 s to compute, and the last copy takes 1 s.
        ((1.0, 1.0), 3.0, [5.0, 8.0, 11.0, 14.0]),
        # The copies are slower. Frame 0 is received until 3 s, and frame 1 until 6 s; frame 0 is sent, frame 2 received
        # from 7 to 10 s, and only then frame 1 sent.
        ((3.0, 1.0), 4.0, [7.0, 11.0, 15.0, 19.0]),
    ],
)
def test_copies_beside_computing_by_hand(copies_s: tuple[float, float], period_s: float, left_s: list[float]) -> None:
    problem, stages = line(3.0)
    device = replace(problem.platform.devices[0], concurrent_copies=True)
    receive, send = (Transfer(seconds) for seconds in copies_s)
    measured = {"a": replace(problem.profile.devices["a"], receive=receive, send=send)}
    apart = replace(problem, profile=replace(problem.profile, devices=measured))
    problem = replace(apart, platform=replace(apart.platform, devices=(device,)))
    found, alone = evaluate(problem, stages), evaluate(apart, stages)
    assert found.predicted.latency_s == alone.predicted.latency_s == 3.0 + sum(copies_s)
    assert found.predicted.throughput_fps == pytest.approx(1 / period_s)
    assert alone.predicted.throughput_fps == pytest.approx(1 / (3.0 + sum(copies_s)))
    assert found.bus_s == {"copies of a": sum(copies_s)}
    run = simulate(problem, stages, 400)
    assert [p.left_s for p in run.passages[:4]] == left_s
    assert steady_fps(run) == pytest.approx(1 / period_s, rel=0.01)


def test_a_camera_that_is_too_fast_loses_what_the_pipeline_cannot_take() -> None:
    """4 frames a second into a stage of 1 s, two slots: of four frames one is taken, once the slots are full."""
    problem, stages = line(1.0)
    run = simulate(problem, stages, 400, fixed_rate(4.0), drop=True)
    assert run.statistics.throughput_fps == pytest.approx(1.0)
    assert len(run.dropped) == pytest.approx(300, abs=3)
    waiting = simulate(problem, stages, 400, fixed_rate(4.0))
    assert not waiting.dropped
    assert waiting.statistics.latency_max_s == pytest.approx(2.0)  # of which one for the frame before it
    assert waiting.passages[-1].entered_s - waiting.passages[-1].arrived_s > 290


def test_a_camera_that_is_slow_enough_sets_the_pace() -> None:
    run = simulate(*line(1.0, 2.0), 100, fixed_rate(0.25), drop=True)
    assert run.statistics.throughput_fps == pytest.approx(0.25)
    assert run.statistics.latency_p99_s == pytest.approx(3.0)
    assert not run.dropped
    assert [stage.bubble_share for stage in run.statistics.stages] == pytest.approx([0.75, 0.5])


@pytest.mark.thorough
def test_a_queue_with_poisson_arrivals_waits_as_theory_says() -> None:
    """M/D/1 (Pollaczek and Khinchine): at load r a frame waits r / (2 (1 - r)) service times in the mean."""
    run = simulate(*line(1.0), 40_000, poisson(0.6, seed=3), in_flight=1000)
    waits = [passage.done_s - passage.arrived_s - 1.0 for passage in run.passages]
    assert statistics.mean(waits) == pytest.approx(0.6 / (2 * 0.4), rel=0.05)


def test_jitter_has_the_mean_and_the_spread_that_were_asked_for() -> None:
    """And a pipeline of two equal stages that vary is slower than one of two that do not."""
    problem, stages = line(1.0, 1.0)
    run = simulate(problem, stages, 5000, jitter=0.3, seed=4)
    seconds = [event.compute_s for event in run.events]
    assert statistics.mean(seconds) == pytest.approx(1.0, rel=0.02)
    assert statistics.stdev(seconds) == pytest.approx(0.3, rel=0.05)
    assert 0.8 < steady_fps(run) < 0.99


def test_measured_times_are_replayed_and_frames_wait_as_lindley_says() -> None:
    """D. V. Lindley, 1952: a frame waits max(0, wait + service - gap) of the frame before it."""
    rng = random.Random(1)
    measured = [rng.choice((0.5, 0.7, 2.5)) for _ in range(100)]
    run = simulate(*line(1.0), 500, fixed_rate(1.0), in_flight=100, times_s=[measured], seed=3)
    served = [event.compute_s for event in sorted(run.events, key=lambda event: event.frame)]
    taken = [min(measured, key=lambda one: abs(one - seconds)) for seconds in served]
    assert served == pytest.approx(taken)
    first = served[:32]
    assert any(first == pytest.approx((measured * 2)[begin : begin + 32]) for begin in range(100))
    wait_s = 0.0
    for passage, seconds in zip(run.passages, served, strict=True):
        assert passage.done_s - passage.arrived_s == pytest.approx(wait_s + seconds)
        wait_s = max(0.0, wait_s + seconds - 1.0)


def test_the_latency_under_load_is_that_of_the_measured_times() -> None:
    """A stage alone that frames reach one by one takes what it was measured to take."""
    problem, stages = line(1.0)
    measured = [index / 100 for index in range(1, 101)]
    found = Plan("net", "single", "throughput", stages, evaluate(problem, stages).predicted)
    predicted = with_latencies(problem, found, [measured], rate_fps=0.5).predicted
    assert predicted.latency_p50_s == pytest.approx(0.50, abs=0.02)
    assert predicted.latency_p99_s == pytest.approx(0.99, abs=0.02)
    assert with_latencies(problem, found, ()) == found  # nothing tells how its seconds vary
    full = with_latencies(problem, found, [measured]).predicted
    seen = with_latencies(problem, found, [measured], full_p50_s=3.0).predicted
    assert seen.latency_p50_s == pytest.approx(3.0)
    assert seen.latency_p99_s == pytest.approx(full.latency_p99_s * 3.0 / full.latency_p50_s)
    paced = with_latencies(problem, found, [measured], rate_fps=0.5, full_p50_s=3.0).predicted
    assert paced == predicted  # a pipeline that is not full was not measured


def test_the_seed_decides_all() -> None:
    problem, stages = line(1.0, 2.0)

    def run(seed: int) -> Simulation:
        return simulate(problem, stages, 50, poisson(0.4, seed), jitter=0.2, seed=seed)

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_recorded_arrivals_are_replayed() -> None:
    run = simulate(*line(1.0), 10, [0.0, 0.5, 7.0])
    assert [(passage.arrived_s, passage.done_s) for passage in run.passages] == [(0, 1), (0.5, 2), (7, 8)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"frames": 0}, "0 frames"),
        ({"in_flight": 0}, "in_flight is 0"),
        ({"jitter": -0.1}, "jitter is -0.1"),
        ({"times_s": [[1.0], [1.0]]}, "2 lists for 1"),
        ({"times_s": [[]]}, "each needs some"),
        ({"jitter": float("nan")}, "jitter is nan"),
        ({"arrivals": [1.0, 0.5]}, "ascending order"),
        ({"arrivals": [-1.0]}, "from 0 on"),
        ({"arrivals": [float("inf")]}, "seconds from 0 on"),
        ({"arrivals": [float("nan")]}, "seconds from 0 on"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        simulate(*line(1.0), **{"frames": 2, **arguments})


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_that_cannot_be(rate: float) -> None:
    for arrivals in (fixed_rate, poisson):
        with pytest.raises(OptionError, match="frames cannot arrive at"):
            arrivals(rate)


def test_plans_that_cannot_be() -> None:
    problem, stages = line(1.0, 2.0)
    with pytest.raises(PlanError, match="in no stage"):
        simulate(problem, stages[:1], 1)
    bytes_alone = replace(problem, profile=unmeasured(problem.graph), objective="memory,communication")
    with pytest.raises(ProfileError, match="nothing says how fast"):
        simulate(bytes_alone, stages, 1, SATURATED)


@pytest.mark.parametrize("inside", [2, 3, 4, 6])
def test_a_full_pipeline_keeps_littles_law(inside: int) -> None:
    problem, stages = line(0.020, 0.016)
    found = simulate(problem, stages, 400, SATURATED, in_flight=inside)
    predicted = evaluate(problem, stages).predicted.loaded_latency_s(inside)
    assert found.statistics.latency_p50_s == pytest.approx(predicted, rel=0.01)


def test_a_plan_with_a_limit_keeps_it_under_load() -> None:
    problem, _ = line(0.020, 0.016)
    limited = replace(problem, max_latency_s=0.045)
    chosen = plan(limited).plan
    assert chosen.in_flight is not None
    found = simulate(limited, chosen.stages, 400, SATURATED, in_flight=chosen.in_flight)
    assert found.statistics.latency_p99_s <= 0.045 * (1 + 1e-9)
    assert chosen.loaded_latency_s <= 0.045 * (1 + 1e-9)
    assert plan(problem).plan.in_flight is None
