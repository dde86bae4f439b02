"""Seconds predicted from shapes: what is fitted, what is left out of a fit, and how far it may be off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.profile import DeviceProfile
from tvm_pipeline.cost.shapes import OperatorWork, operator_work
from tvm_pipeline.errors import ProfileError
from tvm_pipeline.profiling.layer_times import (
    UNSEEN,
    DeviceNote,
    LayerTimes,
    _non_negative,
    layer_times,
    read_layer_times,
    write_layer_times,
)

SHIPPED = sorted((Path(__file__).parents[2] / "profiles/layer_times").glob("*.json"))


def network(name: str, draw: np.random.Generator, count: int = 12) -> OperatorGraph:
    """Return a chain of convolutions of 1x1 and of 3x3, and of pools, of random channels and a random side."""
    side, channels, read = int(draw.integers(4, 40)), 16, "image"
    operators = []
    for index in range(count):
        tensor = f"t{index}"
        if index % 3 == 2:
            made = Operator(
                tensor, "max_pool2d", (read,), (image(tensor, channels, side),), macs=9 * channels * side**2
            )
        else:
            kernel, wider = (1, 9)[index % 3], int(draw.integers(2, 40)) * 4
            weights, elements = kernel * channels * wider, wider * side**2
            made = Operator(
                tensor, "conv2d+relu", (read,), (image(tensor, wider, side),), 4 * weights, weights * side**2 + elements
            )
            channels = wider
        operators.append(made)
        read = tensor
    return OperatorGraph(name, (image("image", 16, side),), tuple(operators), (read,))


def image(name: str, channels: int, side: int = 8) -> Tensor:
    return Tensor(name, (1, channels, side, side))


def lawful(graph: OperatorGraph, slower: float = 1.0) -> DeviceProfile:
    """Return the seconds by a law of the kind that is fitted."""
    seconds = []
    for operator in graph.operators:
        work = operator_work(operator, graph.tensors)
        taken = 2e-6 + work.macs / 5e10 + work.moved_bytes / 2e10 + work.lost_macs / 6e10
        seconds.append(slower * taken)
    return DeviceProfile.in_order(graph, seconds)


def several(count: int) -> list[OperatorGraph]:
    return [network(f"net{index}", np.random.default_rng(index)) for index in range(count)]


def times_of(*graphs: OperatorGraph, slower: float = 1.0) -> LayerTimes:
    return LayerTimes(DeviceNote("x"), {graph.name: layer_times(graph, lawful(graph, slower)) for graph in graphs})


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1)], ids=["channels first", "channels last"])
@pytest.mark.parametrize(
    ("read", "written", "weights", "inner", "kind", "lost"),
    [
        ((64, 8, 8), (32, 8, 8), 64 * 32, 64, "conv2d 1x1", 0),
        ((64, 8, 8), (24, 8, 8), 9 * 64 * 24, 9 * 64, "conv2d kxk", 64 * 8 * 9 * 64),
        ((3, 16, 16), (32, 8, 8), 49 * 3 * 32, 49 * 3, "conv2d kxk", 0),
        ((24, 8, 8), (24, 8, 8), 9 * 24, 9, "conv2d depthwise", 0),
        ((64, 8, 8), (32, 8, 8), 9 * 16 * 32, 9 * 16 // 1, "conv2d grouped", 0),
    ],
)
def test_convolutions_are_told_apart_in_any_layout(order, read, written, weights, inner, kind, lost):
    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        full = (1, *shape)
        return Tensor(name, tuple(full[axis] for axis in order))

    source, result = tensor("x", read), tensor("y", written)
    elements = int(np.prod(written))
    if kind == "conv2d grouped":
        inner = 9 * 16  # of 64 channels in four groups
    conv = Operator("y", "conv2d+add+relu", ("x",), (result,), 4 * weights, elements * inner + 2 * elements)
    work = operator_work(conv, {"x": source})
    assert (work.kind, work.macs, work.lost_macs) == (kind, elements * inner, lost)
    assert (work.input_bytes, work.output_bytes, work.param_bytes) == (source.bytes, result.bytes, 4 * weights)


@pytest.mark.parametrize(
    ("kind", "known_as", "multiplies"),
    [
        ("add+relu", "elementwise", False),
        ("max_pool2d+add+relu", "max_pool2d", False),
        ("add+concatenate", "copy", False),
        ("strided_slice", "copy", False),
        ("softmax", "softmax", False),
        ("relu+dense+add", "dense", True),
    ],
)
def test_fused_operators_are_known_by_what_takes_their_time(kind, known_as, multiplies):
    operator = Operator("y", kind, ("x",), (Tensor("y", (1, 16)),), macs=1024)
    work = operator_work(operator, {"x": Tensor("x", (1, 16))})
    assert (work.kind, work.multiplies) == (known_as, multiplies)


def test_a_law_is_found_again_from_other_networks():
    known, asked = several(4), network("asked", np.random.default_rng(9))
    predicted, truth = times_of(*known).predict(asked, "board.json"), lawful(asked)
    assert predicted.predicted_from == "board.json"
    for name, seconds in truth.seconds.items():
        assert predicted.seconds[name] == pytest.approx(seconds, rel=1e-3)
        assert predicted.uncertainty[name] < 0.01


@given(st.integers(1, 5), st.integers(0, 10_000))
def test_coefficients_are_the_best_that_are_not_negative(size, seed):
    draw = np.random.default_rng(seed)
    matrix, weights = draw.uniform(-0.5, 1, (12, size)), draw.uniform(0.1, 3, 12)
    found = _non_negative(matrix, weights)
    slope = matrix.T @ (weights * (matrix @ found - 1))  # of half the weighted squares, along each coefficient
    assert (found >= 0).all()
    assert (slope > -1e-5).all(), "a larger coefficient would be better"
    assert np.abs(slope * found).max() < 1e-5, "a smaller coefficient would be better"


def test_a_network_says_nothing_of_itself():
    *others, slow = several(6)
    times = LayerTimes(DeviceNote(), {**times_of(*others).networks, **times_of(slow, slower=4.0).networks})
    for layer, seconds in times.left_out[slow.name]:
        assert seconds == pytest.approx(layer.seconds / 4, rel=0.05)
    conv = times.errors["conv2d kxk float32"]
    assert conv.operators == 6 * 4
    assert conv.worst == pytest.approx(0.75, rel=0.05)
    assert conv.half_width == pytest.approx(3, rel=0.05)
    assert conv.median < 0.05
    assert times.median_error < 0.05


def test_a_kind_that_no_network_has_is_predicted_from_its_like_and_doubted():
    known = several(5)
    conv = Operator("odd", "conv2d", ("image",), (image("odd", 64),), 4 * 64 * 2 * 9, 64 * 64 * 2 * 9)
    relu = Operator("relu", "relu", ("odd",), (image("relu", 64),), macs=64 * 64)
    graph = OperatorGraph("new", known[0].inputs, (conv, relu, *known[0].operators), ("relu", "t11"))
    times = times_of(*known)
    predicted = times.predict(graph)
    assert times.unseen(graph) == 2
    assert predicted.uncertainty["odd"] == predicted.uncertainty["relu"] == UNSEEN
    assert predicted.seconds["odd"] == pytest.approx(lawful(graph).seconds["odd"], rel=0.5)
    assert predicted.uncertainty["t0"] < 0.05


def test_a_few_operators_of_a_kind_set_its_pace():
    """One softmax is too little to fit three coefficients, and enough to say how slow its kind is."""
    known = several(2)

    def with_softmax(name: str, channels: int) -> OperatorGraph:
        scores = image("scores", channels, 16)
        soft = Operator("soft", "softmax", ("scores",), (image("soft", channels, 16),), macs=3 * channels * 256)
        return OperatorGraph(name, (*known[0].inputs, scores), (*known[0].operators, soft), ("soft",))

    small, large = with_softmax("small", 64), with_softmax("large", 640)
    truth = {name: 40 * seconds if name == "soft" else seconds for name, seconds in lawful(small).seconds.items()}
    networks = {"small": layer_times(small, DeviceProfile(truth)), **times_of(known[1]).networks}
    times = LayerTimes(DeviceNote(), networks)
    assert times.predict(small).seconds["soft"] == pytest.approx(truth["soft"], rel=1e-6)
    assert times.predict(large).seconds["soft"] == pytest.approx(40 * lawful(large).seconds["soft"], rel=0.2)
    assert times.predict(large).uncertainty["soft"] == UNSEEN  # no other network has one


def test_what_was_measured_badly_or_not_at_all_is_left_out():
    graph = network("net", np.random.default_rng(0))
    measured = lawful(graph)
    seconds = {**measured.seconds, "t0": None, "t1": 0.0}
    uncertainty = {name: 0.5 if name == "t2" else 0.05 for name in seconds}
    assert len(layer_times(graph, DeviceProfile(seconds, uncertainty=uncertainty))) == len(graph) - 3


def test_predicted_seconds_are_not_fitted_again():
    known = several(2)
    with pytest.raises(ProfileError, match=r"predicted from board\.json; only measured"):
        layer_times(known[0], times_of(*known).predict(known[0], "board.json"))


def test_the_work_of_an_application_is_not_predicted():
    known = several(2)
    host = Operator("read", "decode", (), known[0].inputs, ordered=True)
    graph = OperatorGraph("app", (), (host, *known[0].operators), known[0].outputs)
    predicted = times_of(*known).predict(graph)
    assert predicted.seconds["read"] is None
    assert predicted.seconds["t0"] is not None


def test_another_dtype_is_not_taken_for_a_known_one():
    pixels, result = Tensor("x", (1, 16, 8, 8), "int8"), Tensor("y", (1, 16, 8, 8), "int8")
    graph = OperatorGraph("int8", (pixels,), (Operator("y", "conv2d", ("x",), (result,), 256, 16 * 1024),), ("y",))
    with pytest.raises(ProfileError, match="knows no operator like those of int8: it has conv2d 1x1 float32"):
        times_of(*several(2)).predict(graph)


def test_a_file_reads_back_and_a_damaged_one_is_named(tmp_path):
    times = times_of(*several(2))
    file = tmp_path / "board.json"
    write_layer_times(file, times)
    assert read_layer_times(file) == times
    file.write_text(file.read_text().replace('"networks"', '"nets"'))
    with pytest.raises(ProfileError, match=r"board\.json: .*nets.*; `tvm-pipeline layer-times` writes one"):
        read_layer_times(file)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e12])
def test_impossible_seconds_are_refused(seconds):
    layer = times_of(*several(1)).networks["net0"][0]
    work = OperatorWork("relu", "float32", False, 1, 0, 4, 4, 0)
    with pytest.raises(ProfileError, match="layer times of net: a relu takes"):
        LayerTimes(DeviceNote(), {"net": [layer, type(layer)(work, seconds)]})
    with pytest.raises(ProfileError, match="has a negative size"):
        LayerTimes(DeviceNote(), {"net": [type(layer)(OperatorWork("conv2d", "float32", True, 1, -1, 4, 4, 4), 1.0)]})
    with pytest.raises(ProfileError, match="at least one operator"):
        LayerTimes(DeviceNote(), {"net": []})


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_files_predict_networks_that_they_do_not_know(file):
    times = read_layer_times(file)
    assert times.device.processor
    assert times.device.cores
    assert len(times.networks) >= 8
    assert times.median_error < 0.2


def test_a_file_is_shipped():
    assert SHIPPED
