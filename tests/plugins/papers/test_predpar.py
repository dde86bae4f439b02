"""PredPar's two searches against brute force, and its schedulers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_backend import chain_model
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.platform import Device, Platform, read_platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import SegmentProfile, unmeasured
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, ModelError, OptionError, PlatformError, ProfileError
from tvm_pipeline.planning import plan as decide
from tvm_pipeline.planning.baselines.segments import Partition
from tvm_pipeline.profiling import stage_timer
from tvm_pipeline_papers.learned.partition_search import Predict, pred_profpar_partition, predpar_partition

CORAL = Path(__file__).parents[3] / "profiles/platforms/coral-pcie-8.toml"


# The searches


def told(table_s: Sequence[Sequence[float]]) -> Predict:
    return lambda segments: [float(table_s[start][end]) for start, end in segments]


def tables(
    operators: st.SearchStrategy[int], seconds: st.SearchStrategy[float]
) -> st.SearchStrategy[list[list[float]]]:
    """Seconds of segments that have nothing to do with each other."""
    return operators.flatmap(
        lambda n: st.lists(st.lists(seconds, min_size=n + 1, max_size=n + 1), min_size=n + 1, max_size=n + 1)
    )


def additive(seconds: Sequence[float]) -> list[list[float]]:
    places = range(len(seconds) + 1)
    return [[math.fsum(seconds[start:end]) for end in places] for start in places]


def partitions(operators: int, segments: int) -> list[list[tuple[int, int]]]:
    return [
        list(itertools.pairwise((0, *cuts, operators)))
        for cuts in itertools.combinations(range(1, operators), segments - 1)
    ]


def bottleneck(table_s: Sequence[Sequence[float]], found: Sequence[tuple[int, int]]) -> float:
    return max(table_s[start][end] for start, end in found)


def least(table_s: Sequence[Sequence[float]], segments: int) -> float:
    return min(bottleneck(table_s, found) for found in partitions(len(table_s) - 1, segments))


def even(operators: int, segments: int) -> list[int]:
    return [operators * index // segments for index in range(1, segments)]


def spans(found: Partition, operators: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise((0, *found.cuts, operators)))


POSITIVE = st.floats(0.01, 10.0)


@given(st.lists(POSITIVE, min_size=1, max_size=9), st.integers(1, 4))
def test_where_operators_add_up_the_searches_find_the_best(seconds: list[float], segments: int):
    segments = min(segments, len(seconds))
    table_s = additive(seconds)
    best_s = least(table_s, segments)
    found = predpar_partition(told(table_s), len(seconds), even(len(seconds), segments))
    assert found.bottleneck_s <= best_s / 0.98
    assert list(found.seconds) == [table_s[start][end] for start, end in spans(found, len(seconds))]

    asked: list[tuple[int, int]] = []

    def measure(start: int, end: int) -> float:
        asked.append((start, end))
        return table_s[start][end]

    profiled = pred_profpar_partition(told(table_s), measure, len(seconds), even(len(seconds), segments))
    assert profiled.bottleneck_s <= best_s / 0.98
    assert len(set(asked)) == len(asked) == profiled.evaluations


@given(tables(st.integers(1, 7), st.floats(0.0, 10.0)), st.integers(1, 4))
def test_whatever_is_predicted_predpar_is_no_worse_than_its_first_partition(table_s: list[list[float]], segments: int):
    operators = len(table_s) - 1
    segments = min(segments, operators)
    first = even(operators, segments)
    found = predpar_partition(told(table_s), operators, first)
    first_s = bottleneck(table_s, list(itertools.pairwise((0, *first, operators))))
    assert least(table_s, segments) <= found.bottleneck_s <= first_s
    assert found.found == (found.bottleneck_s < first_s)
    assert found.bottleneck_s == bottleneck(table_s, spans(found, operators))


def test_the_search_is_not_exact_where_longer_segments_take_less():
    # The first segment takes all that meets the target, and leaves the last one what is slow without the second.
    table_s = additive([1.0, 1.0, 1.0, 1.0])
    table_s[1][4], table_s[2][4], table_s[3][4] = 1.5, 4.0, 4.0
    found = predpar_partition(told(table_s), 4, (2,))
    assert least(table_s, 2) == 1.5
    assert found.bottleneck_s > 1.5


def test_a_segment_behind_a_stuck_one_is_reached_by_stepping_back():
    # The fourth operator alone is slow, so the first segment, which may take three, must leave the third to the second.
    table_s = additive([1.0, 1.0, 1.0, 1.0, 1.0])
    table_s[3][4] = 9.0
    found = predpar_partition(told(table_s), 5, (3, 4))
    assert found.found
    assert found.bottleneck_s == least(table_s, 3) == 2.0


@given(
    tables(st.integers(1, 7), st.floats(0.0, 10.0)),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
    st.sampled_from([0.0, 0.2]),
)
def test_pred_profpar_returns_what_it_measured(table_s: list[list[float]], segments: int, rng, refused: float):
    operators = len(table_s) - 1
    segments = min(segments, operators)
    taken: dict[tuple[int, int], float] = {}

    def measure(start: int, end: int) -> float:
        assert (start, end) not in taken, "a segment is measured once"
        taken[start, end] = math.inf if rng.random() < refused else rng.uniform(0.1, 10)
        if math.isinf(taken[start, end]) and rng.random() < 0.5:
            raise ModelError("the compiler failed")
        return taken[start, end]

    try:
        found = pred_profpar_partition(told(table_s), measure, operators, even(operators, segments))
    except InfeasibleError:
        assert any(map(math.isinf, taken.values()))
        return
    assert list(found.seconds) == [taken[segment] for segment in spans(found, operators)]
    assert found.evaluations == len(taken)
    assert math.isfinite(found.bottleneck_s)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_a_prediction_wrong_by_a_factor_still_gives_a_better_partition(factor: float):
    seconds = [4.0, 1.0, 3.0, 1.0, 2.0, 2.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    table_s = additive(seconds)
    predicted = additive([factor * taken for taken in seconds])
    first = (1, 2, 3)
    found = pred_profpar_partition(told(predicted), lambda start, end: table_s[start][end], len(seconds), first)
    assert found.bottleneck_s < 0.6 * bottleneck(table_s, list(itertools.pairwise((0, *first, len(seconds)))))


def test_a_failed_compilation_leaves_the_others():
    table_s = additive([1.0] * 6)
    asked: list[tuple[int, int]] = []

    def measure(start: int, end: int) -> float:
        asked.append((start, end))
        if (start, end) == (0, 3):
            raise ModelError("it is too large")
        return table_s[start][end]

    found = pred_profpar_partition(told(table_s), measure, 6, (1,))
    assert found.bottleneck_s == 4.0
    assert asked.count((0, 3)) == 1
    with pytest.raises(InfeasibleError, match="the device refused 1 of the 1 segments that were compiled") as caught:
        pred_profpar_partition(told(table_s), lambda *_: math.inf, 6, ())
    assert caught.value.__cause__ is None


def test_what_the_searches_refuse():
    table_s = additive([1.0, 2.0])
    with pytest.raises(InfeasibleError, match="3 segments need as many operators, the chain has 2"):
        predpar_partition(told(table_s), 2, (1, 1))
    with pytest.raises(ProfileError, match="operators 0 to 0 are predicted to take nan s"):
        predpar_partition(lambda segments: [math.nan] * len(segments), 2, (1,))
    with pytest.raises(ProfileError, match="took -1"):
        pred_profpar_partition(told(table_s), lambda *_: -1.0, 2, (1,))
    with pytest.raises(InfeasibleError, match="first partition is impossible"):
        predpar_partition(lambda segments: [math.inf] * len(segments), 2, (1,))
    assert predpar_partition(told(additive([3.0])), 1, ()).seconds == (3.0,)


# The schedulers


def alike(count: int, model: DeviceModel | None) -> Platform:
    return Platform("boards", tuple(Device(f"tpu{index}", "fake", model=model) for index in range(count)))


def edge_tpu() -> DeviceModel:
    model = read_platform(CORAL).devices[0].model
    assert model is not None
    return model


def test_predpar_plans_edge_tpus():
    graph = chain_model(5).graph
    problem = Problem(graph, replace(read_platform(CORAL), links=()), unmeasured(graph), stages=3)
    plan = decide(problem, "predpar").plan
    assert plan.scheduler == "predpar"
    assert plan.devices == ("tpu0", "tpu1", "tpu2")
    assert [name for stage in plan.stages for name in stage.operators] == graph.operator_names
    assert plan.predicted == evaluate(problem, plan.stages).predicted
    best = decide(problem, "chain").plan.predicted.throughput_fps
    assert best is not None
    assert plan.predicted.throughput_fps <= best * (1 + 1e-9)
    whole = decide(replace(problem, stages=1), "predpar").plan
    assert len(whole.stages) == 1
    with pytest.raises(OptionError, match="does not plan for objective latency, only for throughput"):
        decide(replace(problem, objective="latency"), "predpar")


def test_pred_profpar_plans_by_what_it_measures():
    # By the predictor all operators are alike; in truth the first two take nearly all the time.
    graph = chain_model(8).graph
    problem = Problem(graph, alike(2, edge_tpu()), unmeasured(graph), stages=2)

    def timed(operators: Sequence[str], device: Device) -> SegmentProfile:
        slow = len({"op0", "op1"}.intersection(operators))
        return SegmentProfile(device.name, tuple(operators), 1e-3 * (10 * slow + len(operators)))

    decision = decide(problem, "pred-profpar", measure=timed)
    assert [stage.operators[0] for stage in decision.plan.stages] == ["op0", "op1"]
    assert decision.plan.scheduler == "pred-profpar"
    assert {segment.operators for segment in decision.segments} == {stage.operators for stage in decision.plan.stages}
    assert decision.plan.predicted.throughput_fps == pytest.approx(1 / max(s.seconds for s in decision.segments))
    with pytest.raises(OptionError, match="scheduler pred-profpar compiles and measures stages; give a model"):
        decide(problem, "pred-profpar")


@pytest.mark.parametrize("scheduler", ["predpar", "pred-profpar"])
def test_devices_that_the_predictor_does_not_know(scheduler: str):
    model = chain_model(4)
    measure = stage_timer(model)

    def planned(platform: Platform) -> object:
        return decide(Problem(model.graph, platform, unmeasured(model.graph), stages=2), scheduler, measure=measure)

    with pytest.raises(PlatformError, match=r"device tpu0 has no model with `cached_bytes`"):
        planned(alike(2, DeviceModel(operator_s=1e-3)))


def test_predpar_plans_for_equal_devices():
    graph = chain_model(5).graph
    first, second = alike(2, edge_tpu()).devices
    mixed = Platform("mixed", (first, replace(second, model=replace(edge_tpu(), call_s=0.5))))
    with pytest.raises(PlatformError, match="devices tpu0 and tpu1 differ"):
        decide(Problem(graph, mixed, unmeasured(graph), stages=2), "predpar")
