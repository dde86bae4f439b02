"""PredPar: its network against a slow formula, its two searches against brute force, and the schedulers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_backend import chain_model
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.platform import Device, Platform, read_platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import SegmentProfile, unmeasured
from tvm_pipeline.errors import InfeasibleError, ModelError, OptionError, PlatformError, ProfileError
from tvm_pipeline.planning import plan as decide
from tvm_pipeline.planning.baselines.segments import Partition
from tvm_pipeline.planning.learned.partition_search import Predict, pred_profpar_partition, predpar_partition
from tvm_pipeline.planning.learned.segment_features import FAMILIES, KINDS, SegmentBatch, graph_features
from tvm_pipeline.planning.learned.segment_predictor import (
    PURPOSE,
    VERSION,
    predicted_seconds,
    read_predictor,
    segment_predictor,
    shapes,
)
from tvm_pipeline.planning.learned.weights import Weights, WeightsNote, write_weights
from tvm_pipeline.profiling import stage_timer

CACHE = 1000
CORAL = Path(__file__).parents[2] / "profiles/platforms/coral-pcie-8.toml"


def branched() -> OperatorGraph:
    """A convolution that two read, and a sum of both."""

    def tensor(name: str, channels: int = 4) -> Tensor:
        return Tensor(name, (1, 8, 6, channels), "int8")

    image = tensor("image", 3)
    return OperatorGraph(
        "branched",
        (image,),
        (
            Operator("conv", "conv_2d", ("image",), (tensor("a"),), 600, 5000),
            Operator("left", "DepthwiseConv2D", ("a",), (tensor("b"),), 500, 900),
            Operator("pool", "max_pool_2d", ("a",), (tensor("c"),), 0, 200),
            Operator("add", "add", ("b", "c", "a"), (tensor("d"),), 0, 192),
            Operator("end", "fft", ("d",), (Tensor("e", (10,), "int8"),), 0, 7),
        ),
        ("e",),
    )


def random_weights(extended: bool, seed: int = 0, scale: float = 0.4) -> Weights:
    chance = np.random.default_rng(seed)
    wanted = shapes(extended=extended, layers=2, width=8, heads=2)
    return {name: chance.normal(0, scale, shape).astype(np.float32) for name, shape in wanted.items()}


# The features


def test_features_tell_what_the_paper_names():
    graph = branched()
    features = graph_features(graph, CACHE, extended=True)
    batch = features.batch([(1, 4), (4, 5)])
    names = [name for name, _ in FAMILIES]
    assert [names[kind] for kind in batch.kind[0]] == ["depthwise", "pool", "add"]
    assert batch.kind[1, 0] == KINDS - 1  # a kind that nobody knows
    assert batch.in_degree[0].tolist() == [1, 1, 3]
    # Only what the segment holds itself: the sum reads the two before it.
    assert np.argwhere(batch.reads[0]).tolist() == [[2, 0], [2, 1]]
    assert batch.present.tolist() == [[True] * 3, [True, False, False]]
    numbers = np.round(2 ** (10 * batch.numbers[0, 0].astype(float)) - 1, 1).tolist()
    assert numbers == pytest.approx([8, 6, 4, 192, 900, 500, 4], rel=1e-3)
    # It receives `a`, sends `d`, and its parameters fit the cache.
    told = 2 ** (10 * batch.segment[0].astype(float)) - 1
    assert told.tolist() == pytest.approx([192, 192, 500, 0, 1292, 3], rel=1e-3, abs=1e-3)
    whole = 2 ** (10 * features.batch([(0, 5)]).segment[0].astype(float)) - 1
    assert whole.tolist() == pytest.approx([144, 10, 1100, 100, 6299, 5], rel=1e-3)
    padded = features.batch([(1, 4), (0, 5)])
    assert np.argwhere(padded.reads[0]).tolist() == [[2, 0], [2, 1]]
    paper = graph_features(graph, CACHE, extended=False).batch([(0, 5)])
    assert paper.numbers.tolist() == features.batch([(0, 5)]).numbers[..., :4].tolist()
    assert paper.segment.tolist() == features.batch([(0, 5)]).segment[:, :4].tolist()


@pytest.mark.parametrize(
    ("kinds", "family"),
    [
        (("Conv2D", "conv_2d", "conv2d+add+relu", "transpose_conv"), "conv"),
        (("depthwise_conv_2d", "DepthwiseConv2D"), "depthwise"),
        (("SeparableConv2D", "sepconv"), "separable"),
        (("Dense", "fully_connected", "batch_matmul"), "dense"),
        (("GlobalAveragePooling2D", "mean"), "mean"),
        (("max_pool_2d", "AveragePooling2D"), "pool"),
        (("Concatenate", "concatenation"), "concat"),
        (("ZeroPadding2D", "pad"), "pad"),
        (("Add", "add+relu"), "add"),
        (("Mul", "multiply"), "multiply"),
        (("relu", "Softmax"), "activation"),
        (("strided_slice", "reshape"), "copy"),
    ],
)
def test_kinds_of_all_sources_have_one_family(kinds: tuple[str, ...], family: str):
    x, y = Tensor("x", (4,)), Tensor("y", (4,))
    for kind in kinds:
        graph = OperatorGraph("net", (x,), (Operator("o", kind, ("x",), (y,)),), ("y",))
        assert FAMILIES[graph_features(graph, 0, extended=False).kind[0]][0] == family, kind


@pytest.mark.parametrize("segment", [(2, 2), (-1, 2), (3, 6)])
def test_segments_that_are_none(segment: tuple[int, int]):
    with pytest.raises(OptionError, match="0 <= start < end <= 5"):
        segment_predictor(branched(), CACHE, random_weights(extended=True)).seconds(*segment)


# The network


def slow_seconds(weights: Weights, batch: SegmentBatch, index: int) -> float:
    """The docstring's formulas for one segment, number by number, in float64."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    count = int(batch.present[index].sum())
    heads, width = w["pair_bias"].shape[2], len(w["node_bias"])
    wide = width // heads

    def norm(row: npt.NDArray[np.float64], gain_and_shift: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        mean = sum(row) / width
        deviation = math.sqrt(sum((x - mean) ** 2 for x in row) / width + 1e-5)
        return np.array([(x - mean) / deviation for x in row]) * gain_and_shift[0] + gain_and_shift[1]

    def gelu(row: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.array([x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) for x in row])

    def bias(layer: int, head: int, i: int, j: int) -> float:
        reads, read, after, before, virtual = w["pair_bias"][layer, :, head]
        if i == 0 or j == 0:
            return float(virtual) if i != j else 0.0
        found = 0.0
        found += reads if batch.reads[index, i - 1, j - 1] else 0.0
        found += read if batch.reads[index, j - 1, i - 1] else 0.0
        found += after if i == j + 1 else 0.0
        found += before if j == i + 1 else 0.0
        return found

    h = [batch.segment[index] @ w["virtual"] + w["virtual_bias"]]
    for node in range(count):
        embedded = w["kind"][batch.kind[index, node]] + w["in_degree"][batch.in_degree[index, node]]
        h.append(embedded + batch.numbers[index, node] @ w["node"] + w["node_bias"])
    for layer in range(len(w["qkv"])):
        asked = [norm(row, w["attention_norm"][layer]) @ w["qkv"][layer] + w["qkv_bias"][layer] for row in h]
        q, k, v = ([row[part * width : (part + 1) * width] for row in asked] for part in range(3))
        told = []
        for i in range(count + 1):
            row = []
            for head in range(heads):
                its = slice(head * wide, (head + 1) * wide)
                scores = [q[i][its] @ k[j][its] / math.sqrt(wide) + bias(layer, head, i, j) for j in range(count + 1)]
                total = sum(map(math.exp, scores))
                row += list(sum(math.exp(score) / total * v[j][its] for j, score in enumerate(scores)))
            told.append(np.array(row))
        h = [x + y @ w["mixed"][layer] + w["mixed_bias"][layer] for x, y in zip(h, told, strict=True)]
        for i, row in enumerate(h):
            up = gelu(norm(row, w["mlp_norm"][layer]) @ w["up"][layer] + w["up_bias"][layer])
            h[i] = row + up @ w["down"][layer] + w["down_bias"][layer]
    units = [gelu(norm(row, w["last_norm"]) @ w["read"] + w["read_bias"]) @ w["units"] for row in h]
    return 1e-4 * sum(math.exp(min(unit + w["units_bias"][0], 14.0)) for unit in units)


@pytest.mark.parametrize("extended", [False, True])
def test_the_network_computes_the_formula(extended: bool):
    weights = random_weights(extended)
    batch = graph_features(branched(), CACHE, extended=extended).batch([(0, 5), (1, 4), (3, 4)])
    expected = [slow_seconds(weights, batch, index) for index in range(3)]
    assert predicted_seconds(weights, batch).tolist() == pytest.approx(expected, rel=1e-5)
    assert len({round(seconds / 1e-7) for seconds in expected}) == 3


def test_each_segment_is_asked_once_and_alone_as_in_company():
    weights = random_weights(extended=True)
    predictor = segment_predictor(branched(), CACHE, weights)
    table_s = predictor.table()
    assert len(predictor.known) == 15
    assert np.isfinite(table_s).sum() == 15
    alone = segment_predictor(branched(), CACHE, weights)
    for start, end in predictor.known:
        assert alone.seconds(start, end) == pytest.approx(float(table_s[start, end]), rel=1e-5)
    known = dict(predictor.known)
    assert predictor.predicted([(0, 3), (2, 4)]) == [known[0, 3], known[2, 4]]
    assert predictor.known == known


def test_a_table_with_a_limit_leaves_out_what_is_long():
    graph = chain_model(60).graph
    weights = random_weights(extended=True)
    whole_s = segment_predictor(graph, CACHE, weights).table()
    limit_s = float(np.median(whole_s[np.isfinite(whole_s)]))
    predictor = segment_predictor(graph, CACHE, weights)
    table_s = predictor.table(limit_s)
    asked = np.isfinite(table_s)
    assert asked.sum() == len(predictor.known) < np.isfinite(whole_s).sum()
    assert table_s[asked] == pytest.approx(whole_s[asked], rel=1e-4)
    assert asked[whole_s <= limit_s].all()


# The weights


def written(path: Path, weights: Weights, purpose: str = PURPOSE, version: int = VERSION) -> Path:
    write_weights(path, weights, WeightsNote(purpose, version, "a test", 0))
    return path


def test_weights_of_both_sets_of_features_are_read(tmp_path: Path):
    for extended in (False, True):
        weights = random_weights(extended)
        read, note = read_predictor(written(tmp_path / "weights.npz", weights))
        assert note.command == "a test"
        predictor = segment_predictor(branched(), CACHE, read)
        assert predictor.features.extended is extended
        exact = segment_predictor(branched(), CACHE, weights)
        assert predictor.seconds(0, 5) == pytest.approx(exact.seconds(0, 5), rel=0.01)


def test_weights_that_are_no_predictors(tmp_path: Path):
    path, good = tmp_path / "weights.npz", dict(random_weights(extended=True))
    with pytest.raises(ModelError, match="version 2; this is predpar, version 1"):
        read_predictor(written(path, good, version=VERSION + 1))
    with pytest.raises(ModelError, match="weights of respect"):
        read_predictor(written(path, good, purpose="respect"))
    with pytest.raises(ModelError, match="look at units_bias; train them again"):
        read_predictor(written(path, {name: good[name] for name in good if name != "units_bias"}))
    with pytest.raises(ModelError, match="look at more; train"):
        read_predictor(written(path, {**good, "more": np.zeros(1, np.float32)}))
    with pytest.raises(ModelError, match="look at node, virtual; train"):
        read_predictor(written(path, {**good, "node": np.zeros((5, 8), np.float32)}))
    with pytest.raises(ModelError, match=r"0 layers, 0 heads"):
        read_predictor(written(path, {"kind": good["kind"]}))
    wanted = shapes(extended=True, layers=1, width=8, heads=3)
    with pytest.raises(ModelError, match="3 heads and width 8: look at the width"):
        read_predictor(written(path, {name: np.zeros(shape, np.float32) for name, shape in wanted.items()}))


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
    with pytest.raises(OptionError, match="relaxing factor 1"):
        predpar_partition(told(table_s), 2, (1,), relaxing_factor=1)
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
    graph = branched()
    problem = Problem(graph, replace(read_platform(CORAL), links=()), unmeasured(graph), stages=3)
    plan = decide(problem, "predpar").plan
    assert plan.scheduler == "predpar"
    assert plan.devices == ("tpu0", "tpu1", "tpu2")
    assert [name for stage in plan.stages for name in stage.operators] == ["conv", "left", "pool", "add", "end"]
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
    graph = branched()
    first, second = alike(2, edge_tpu()).devices
    mixed = Platform("mixed", (first, replace(second, model=replace(edge_tpu(), call_s=0.5))))
    with pytest.raises(PlatformError, match="devices tpu0 and tpu1 differ"):
        decide(Problem(graph, mixed, unmeasured(graph), stages=2), "predpar")
