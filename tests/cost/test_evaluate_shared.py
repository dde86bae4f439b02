"""`evaluate` of what devices share: a bus, the frames of a stage (jitter, overtaking), and a problem's limits.

`test_evaluate.py` has what each costs alone; the simulation is the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given

from tests.cost.test_evaluate import random_stages
from tests.support.brute_force import every_plan, verdict
from tests.support.graphs import TIMED, Traits, lexicographic_problem, problems, random_chain, random_problem, randoms
from tests.support.simulation import push_frames
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Link, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile, unmeasured
from tvm_pipeline.cost.device_costs import require_energy
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import PlanError, ProfileError

# Two operators of 1000 MACs and 500 bytes of parameters; 1000 bytes into each and out of each.
GRAPH = OperatorGraph(
    "net",
    (Tensor("t0", (1000,), "int8"),),
    tuple(Operator(f"op{i}", "k", (f"t{i}",), (Tensor(f"t{i + 1}", (1000,), "int8"),), 500, 1000) for i in range(2)),
    ("t2",),
)
# 1 ms a call and 10 ms for each operator's MACs; 10 ms for 1000 bytes in or out; 200 bytes beyond the cache: 20 ms.
TPU = DeviceModel(1e5, 0.001, 0.0, 1e5, 1e5, 300, 1e4)


def problem_of(*devices: Device, links: tuple[Link, ...] = (), **figures: object) -> Problem:
    """GRAPH on devices with models, and on those without, where it takes 5 and 7 ms."""
    measured = {
        device.name: DeviceProfile.in_order(GRAPH, (0.005, 0.007)) for device in devices if device.model is None
    }
    profile = Profile("net", GRAPH.fingerprint, measured)
    return Problem(GRAPH, Platform("box", devices, links), profile, **figures)  # type: ignore[arg-type]


def split(*names: str) -> tuple[Stage, ...]:
    return tuple(Stage((name,), (f"op{i}",)) for i, name in enumerate(names))


def whole(*names: str) -> tuple[Stage, ...]:
    return (Stage(names, ("op0", "op1")),)


def test_a_modelled_device_by_hand() -> None:
    """In one piece 1 + max(20 of MACs, 70 of fetching) ms and 20 ms of copies; cut in two 1 + 20 and 20 ms each."""
    problem = problem_of(Device("t0", model=TPU, active_w=2.0), Device("t1", model=TPU, active_w=4.0))
    found = evaluate(problem, whole("t0"))
    assert [(cost.compute_s, cost.transfer_s) for cost in found.costs] == [(pytest.approx(0.071), pytest.approx(0.020))]
    assert found.predicted.throughput_fps == pytest.approx(1 / 0.091)
    assert found.predicted.energy_j == pytest.approx(0.182)

    found = evaluate(problem, split("t0", "t1"))
    assert [cost.seconds for cost in found.costs] == pytest.approx([0.041, 0.041])
    assert found.predicted.latency_s == pytest.approx(0.082)
    assert found.predicted.energy_j == pytest.approx(0.041 * 6)
    require_energy(problem)


def test_modelled_beside_measured_by_hand() -> None:
    """The CPU was measured; 4 ms of the link are the TPU's, beside its own copies."""
    problem = problem_of(Device("cpu"), Device("tpu", model=TPU), links=(Link("cpu", "tpu", 0.003, 1e6),))
    found = evaluate(problem, split("cpu", "tpu"))
    assert [(cost.compute_s, cost.transfer_s) for cost in found.costs] == [
        (pytest.approx(0.005), 0.0),
        (pytest.approx(0.021), pytest.approx(0.004 + 0.020)),
    ]
    assert found.predicted.latency_s == pytest.approx(0.050)
    with pytest.raises(ProfileError, match="nothing is known of the power of device cpu"):
        require_energy(problem)


def test_a_measurement_goes_before_the_model() -> None:
    devices = (Device("tpu", model=TPU),)
    profile = Profile("net", GRAPH.fingerprint, {"tpu": DeviceProfile.in_order(GRAPH, (0.5, 0.25))})
    problem = Problem(GRAPH, Platform("box", devices), profile)
    assert evaluate(problem, whole("tpu")).predicted.latency_s == pytest.approx(0.75)


def test_a_modelled_cache_serves_one_stage() -> None:
    problem = problem_of(Device("tpu", model=TPU), Device("cpu"))
    graph = random_chain(random.Random(0), 3)
    problem = replace(
        problem,
        graph=graph,
        profile=Profile("chain", graph.fingerprint, {"cpu": DeviceProfile.in_order(graph, (1,) * 3)}),
    )
    there_and_back = tuple(Stage((name,), (f"op{i}",)) for i, name in enumerate(("tpu", "cpu", "tpu")))
    with pytest.raises(PlanError, match="device tpu serves two stages, and its model does not say how they share"):
        evaluate(problem, there_and_back)
    uncached = replace(TPU, cached_bytes=None)
    platform = Platform("box", (Device("tpu", model=uncached), Device("cpu")))
    assert len(evaluate(replace(problem, platform=platform), there_and_back).costs) == 3


BUSY = (Link("a", "b", 0.030, bus="usb"), Link("c", "d", 0.025, bus="usb"))


def four(links: tuple[Link, ...]) -> tuple[Problem, tuple[Stage, ...]]:
    """10 ms of work on each of four devices, one after the other."""
    graph = random_chain(random.Random(0), 4)
    measured = {name: DeviceProfile.in_order(graph, (0.010,) * 4) for name in "abcd"}
    platform = Platform("box", tuple(map(Device, measured)), links)
    problem = Problem(graph, platform, Profile("chain", graph.fingerprint, measured))
    return problem, tuple(Stage((name,), (f"op{i}",)) for i, name in enumerate("abcd"))


def test_a_bus_slower_than_every_stage_sets_the_pace() -> None:
    """Stages of 10, 40, 10 and 35 ms, and 55 ms of one bus a frame."""
    found = evaluate(*four(BUSY))
    assert found.bus_s == {"usb": pytest.approx(0.055)}
    assert found.predicted.throughput_fps == pytest.approx(1 / 0.055)
    assert found.predicted.latency_s == pytest.approx(0.095)
    assert max(cost.seconds for cost in found.costs) == pytest.approx(0.040)
    assert push_frames(*four(BUSY), 200).steady_fps == pytest.approx(1 / 0.055, rel=0.02)


def test_links_on_two_buses_or_on_none_do_not_wait_for_each_other() -> None:
    apart = (BUSY[0], replace(BUSY[1], bus="pcie"))
    found = evaluate(*four(apart))
    assert found.bus_s == {"usb": pytest.approx(0.030), "pcie": pytest.approx(0.025)}
    assert found.predicted.throughput_fps == pytest.approx(1 / 0.040)
    found = evaluate(*four(tuple(replace(link, bus="") for link in BUSY)))
    assert found.bus_s == {}
    assert found.predicted.throughput_fps == pytest.approx(1 / 0.040)


def test_what_caches_do_not_hold_is_fetched_over_the_shared_bus() -> None:
    """Each TPU fetches for 20 ms beside 10 ms of MACs. Their copies do not take the bus, and a cut link does."""
    model = replace(TPU, input_bytes_per_s=None, output_bytes_per_s=None)
    tpus = (Device("t0", model=model, bus="usb"), Device("t1", model=model, bus="usb"))
    found = evaluate(problem_of(*tpus), split("t0", "t1"))
    assert found.bus_s == {"usb": pytest.approx(0.040)}
    assert [cost.seconds for cost in found.costs] == pytest.approx([0.021, 0.021])
    assert found.predicted.throughput_fps == pytest.approx(25.0)
    problem = problem_of(*tpus, links=(Link("t0", "t1", 0.005, bus="usb"),))
    assert evaluate(problem, split("t0", "t1")).predicted.throughput_fps == pytest.approx(1 / 0.045)
    assert push_frames(problem, split("t0", "t1"), 200).steady_fps == pytest.approx(1 / 0.045, rel=0.02)
    # Replicas hold all 1000 bytes each and fetch 700, 70 ms a frame whoever takes it.
    replicas = evaluate(problem_of(*tpus), whole("t0", "t1"))
    assert replicas.bus_s == {"usb": pytest.approx(0.070)}
    assert replicas.predicted.throughput_fps == pytest.approx(1 / 0.070)


@given(randoms())
def test_no_order_on_the_buses_beats_the_predicted_pace(rng: random.Random) -> None:
    """Turns may fall badly, so a run may be slower; with slow links on one bus it is often what decides."""
    traits = Traits(unsupported=False, memory=False, busy=False, modelled=True, buses=True)
    problem = random_problem(rng, operators=(1, 6), devices=(2, 4), traits=traits)
    links = tuple(replace(link, latency_s=10 * link.latency_s, bus="usb") for link in problem.platform.links)
    problem = replace(problem, platform=replace(problem.platform, links=links))
    stages = random_stages(rng, problem)
    predicted = verdict(problem, stages)
    assume(predicted is not None)
    assert predicted is not None
    assert push_frames(problem, stages, 200).steady_fps <= predicted.throughput_fps * 1.02


@given(
    problems("throughput", operators=(1, 4), traits=Traits(modelled=True, buses=True, copies=True), choose_stages=False)
)
def test_the_pace_is_that_of_the_slowest_stage_or_bus(problem: Problem) -> None:
    for stages in list(every_plan(problem, replicas=True))[:200]:
        try:
            found = evaluate(problem, stages)
        except PlanError:
            continue
        rates = [sum(1 / c.loads_s[0] for c in found.costs if c.stage == i) for i in range(len(stages))]
        paces = [*rates, *(1 / seconds for seconds in found.bus_s.values() if seconds)]
        assert found.predicted.throughput_fps == pytest.approx(min(paces), rel=1e-9)
        assert rates[found.bottleneck] == pytest.approx(min(rates))
        assert found.predicted.jitter_s >= 0


def replicas_of(*seconds: int) -> tuple[Problem, tuple[Stage, ...]]:
    """One operator that takes so many seconds on replicas a, b, ...; whole seconds, so that sums are exact."""
    graph = random_chain(random.Random(0), 1)
    measured = {name: DeviceProfile.in_order(graph, (float(s),)) for name, s in zip("abcd", seconds, strict=False)}
    problem = Problem(graph, Platform("box", tuple(map(Device, measured))), Profile("c", graph.fingerprint, measured))
    return problem, (Stage(tuple(measured), ("op0",)),)


def most_overtaken(seconds: Sequence[int]) -> int:
    """Return how many frames the other replicas finish while the slowest is at one."""
    *others, slowest = sorted(seconds)
    return sum(math.ceil(slowest / other) - 1 for other in others)


@pytest.mark.parametrize(
    ("seconds", "jitter_s", "overtaking"),
    [((5,), 0.0, 0), ((5, 5), 0.0, 0), ((8, 4), 4.0, 1), ((9, 4), 5.0, 2), ((10, 4, 3), 7.0, 5), ((8, 8, 1), 7.0, 7)],
)
def test_jitter_and_overtaking_by_hand(seconds: tuple[int, ...], jitter_s: float, overtaking: int) -> None:
    """While the slowest is at a frame of 9 s, one of 4 s finishes two later ones; at one of 8 s only one."""
    problem, stages = replicas_of(*seconds)
    found = evaluate(problem, stages)
    assert found.predicted.latency_s == max(seconds)
    assert found.predicted.jitter_s == jitter_s
    assert most_overtaken(seconds) == overtaking
    # The slowest comes first by name, and so takes the first frame.
    assert push_frames(problem, stages, 50).overtaken(0) == overtaking


@given(randoms())
def test_no_frame_is_overtaken_by_more_than_the_replicas_allow(rng: random.Random) -> None:
    seconds = [rng.randint(1, 12) for _ in range(rng.randint(1, 4))]
    assert push_frames(*replicas_of(*seconds), 100).overtaken(0) <= most_overtaken(seconds)


def test_limits_by_hand() -> None:
    """5 and 7 ms on one device: 1/12 ms a frame, 12 ms long; cut in two 1/7 ms."""
    problem = problem_of(Device("a", active_w=1.0), Device("b", active_w=1.0))
    slow = replace(problem, objective="energy", min_throughput_fps=100.0)
    with pytest.raises(PlanError, match=r"makes 83\.3333 frames a second, `min_throughput_fps` asks for 100"):
        evaluate(slow, whole("a"))
    assert evaluate(slow, split("a", "b")).predicted.throughput_fps == pytest.approx(1 / 0.007)
    evaluate(replace(slow, min_throughput_fps=1 / 0.012), whole("a"))  # to the last frame

    far = replace(problem, platform=replace(problem.platform, links=(Link("a", "b", 0.001),)), max_latency_s=0.0125)
    with pytest.raises(PlanError, match=r"a frame takes 0\.013 s, `max_latency_s` allows 0\.0125"):
        evaluate(far, split("a", "b"))
    evaluate(far, split("b", "a"))
    evaluate(replace(far, max_latency_s=0.013), split("a", "b"))


@pytest.mark.parametrize("objective", TIMED)
@given(rng=randoms())
def test_limits_refuse_the_plans_beyond_them_and_change_no_others(objective: str, rng: random.Random) -> None:
    free = random_problem(rng, objective, operators=(1, 4), choose_stages=False)  # type: ignore[arg-type]
    plans = list(every_plan(free))
    judged = [(stages, predicted) for stages in plans for predicted in [verdict(free, stages)] if predicted]
    assume(judged)
    _, edge = rng.choice(judged)
    if objective == "throughput":
        limited = replace(free, max_latency_s=edge.latency_s)
        kept = [p.latency_s <= edge.latency_s * (1 + 1e-9) for _, p in judged]
    else:
        limited = replace(free, min_throughput_fps=edge.throughput_fps)
        kept = [p.throughput_fps >= edge.throughput_fps * (1 - 1e-9) for _, p in judged]
    assert [verdict(limited, stages) for stages, _ in judged] == [
        predicted if fits else None for (_, predicted), fits in zip(judged, kept, strict=True)
    ]


def test_without_seconds_a_plan_is_judged_by_its_bytes_alone() -> None:
    problem = lexicographic_problem(random.Random(2), devices=(2, 2))
    names = tuple(problem.graph.operator_names)
    found = evaluate(problem, (Stage(("dev0",), names),))
    assert (found.costs, found.bus_s) == ((), {})
    predicted = found.predicted
    assert (predicted.throughput_fps, predicted.latency_s, predicted.energy_j, predicted.jitter_s) == (None,) * 4
    assert problem.profile == unmeasured(problem.graph)
    assert predicted.memory_bytes == sum(operator.param_bytes for operator in problem.graph.operators)
