"""The network that predicts the seconds of segments: its features, its formula, its weights."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.fake_backend import chain_model
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.errors import ModelError, OptionError
from tvm_pipeline_papers.learned.segment_features import FAMILIES, KINDS, SegmentBatch, graph_features
from tvm_pipeline_papers.learned.segment_predictor import (
    PURPOSE,
    VERSION,
    predicted_seconds,
    read_predictor,
    segment_predictor,
    shapes,
)
from tvm_pipeline_papers.learned.weights import Weights, WeightsNote, write_weights

CACHE = 1000


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
    # The paper names no more than the output shape of a node, and input, output and parameters of the segment.
    paper = graph_features(graph, CACHE, extended=False).batch([(0, 5)])
    told = np.round(2 ** (10 * paper.numbers[0].astype(float)) - 1)
    assert told.tolist() == [[8, 6, 4], [8, 6, 4], [8, 6, 4], [8, 6, 4], [1, 1, 10]]
    told = 2 ** (10 * paper.segment[0].astype(float)) - 1
    assert told.tolist() == pytest.approx([144, 10, 1100], rel=1e-3)


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


@pytest.mark.thorough
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
