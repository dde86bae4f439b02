"""The Gantt chart of a plan: its bars by hand on small cases and possible on random ones, and the picture of them."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.parts import needs
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Plan, Prediction, Stage
from tvm_pipeline.core.platform import Device, Link, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.core.statistics import StageRecord
from tvm_pipeline.cost.evaluate import Evaluation, StageCost, evaluate
from tvm_pipeline.errors import OptionError, PipelineError
from tvm_pipeline.report import Bar, draw_gantt, first_frames, measured_frames


def line(*seconds: tuple[str, float], transfer_s: float = 0.0) -> tuple[Problem, tuple[Stage, ...]]:
    """A stage of one operator for each (devices joined by +, seconds); every transfer takes `transfer_s`."""
    tensors = [Tensor(f"t{index}", (1,)) for index in range(len(seconds) + 1)]
    operators = tuple(Operator(f"op{i}", "op", (tensors[i].name,), (tensors[i + 1],)) for i in range(len(seconds)))
    graph = OperatorGraph("chain", (tensors[0],), operators, (tensors[-1].name,))
    stages = tuple(Stage(tuple(names.split("+")), (f"op{i}",)) for i, (names, _) in enumerate(seconds))
    took: dict[str, dict[int, float]] = defaultdict(dict)
    for index, (names, figure) in enumerate(seconds):
        for name in names.split("+"):
            took[name][index] = figure
    devices = {
        n: DeviceProfile.in_order(graph, tuple(row.get(i, 1.0) for i in range(len(seconds)))) for n, row in took.items()
    }
    links = tuple(Link(a, b, transfer_s) for a in devices for b in devices if a != b)
    platform = Platform("p", tuple(map(Device, devices)), links)
    return Problem(graph, platform, Profile("chain", graph.fingerprint, devices)), stages


def spans(bars: Sequence[Bar], stage: int) -> list[tuple[int, float, float]]:
    return [(bar.frame, bar.start_s, bar.end_s) for bar in bars if bar.stage == stage]


def test_two_stages_wait_for_the_slower() -> None:
    bars = first_frames(*line(("a", 2.0), ("b", 3.0), transfer_s=1.0), 3)
    assert spans(bars, 0) == [(0, 0, 2), (1, 2, 4), (2, 4, 6)]
    assert spans(bars, 1) == [(0, 2, 6), (1, 6, 10), (2, 10, 14)]


def test_replicas_take_the_next_frame_when_free() -> None:
    problem, stages = line(("fast+slow", 1.0))
    devices = {**problem.profile.devices, "slow": DeviceProfile.in_order(problem.graph, (3.0,))}
    problem = replace(problem, profile=replace(problem.profile, devices=devices))
    found = [(bar.device, bar.frame, bar.start_s) for bar in first_frames(problem, stages, 5)]
    assert found == [("fast", 0, 0), ("slow", 1, 0), ("fast", 2, 1), ("fast", 3, 2), ("slow", 4, 3)]


def test_a_device_of_two_stages_prefers_the_earlier_frame() -> None:
    bars = first_frames(*line(("a", 1.0), ("b", 1.0), ("a", 1.0)), 3)
    order = [(bar.stage, bar.frame, bar.start_s) for bar in bars if bar.device == "a"]
    assert order[:4] == [(0, 0, 0), (0, 1, 1), (2, 0, 2), (2, 1, 3)]


def test_nothing_is_drawn_where_nothing_says_how_fast_the_devices_are() -> None:
    problem, stages = line(("a", 1.0), ("b", 1.0))
    unknown = replace(problem, profile=replace(problem.profile, devices={}), objective="memory,communication")
    assert first_frames(unknown, stages) == ()


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, tuple[Stage, ...]]:
    """A chain of operators, each a stage: on a device of its own, on one that serves others too, or on replicas."""
    count = draw(st.integers(1, 4))
    stages: list[Stage] = []
    for index in range(count):
        kind = draw(st.sampled_from(["own", "shared", "replicas"]))
        replicas = draw(st.integers(2, 3)) if kind == "replicas" else 1
        devices = ("shared",) if kind == "shared" else tuple(f"d{index}.{r}" for r in range(replicas))
        stages.append(Stage(devices, (f"op{index}",)))
    names = list(dict.fromkeys(name for stage in stages for name in stage.devices))
    tensors = [Tensor(f"t{index}", (draw(st.integers(0, 4)),)) for index in range(count + 1)]
    operators = tuple(Operator(f"op{i}", "op", (tensors[i].name,), (tensors[i + 1],)) for i in range(count))
    graph = OperatorGraph("chain", (tensors[0],), operators, (tensors[-1].name,))
    seconds = st.floats(0.5, 10.0)
    devices = {
        name: DeviceProfile.in_order(
            graph, tuple(draw(seconds) for _ in operators), busy_factor=draw(st.floats(1.0, 2.0))
        )
        for name in names
    }
    links = tuple(Link(a, b, draw(st.floats(0, 1)), 16.0) for a in names for b in names if a != b)
    platform = Platform("p", tuple(Device(name) for name in names), links)
    return Problem(graph, platform, Profile("chain", graph.fingerprint, devices)), tuple(stages)


@given(problems(), st.integers(1, 12))
@examples(60, deadline=None)
def test_what_is_drawn_is_possible(case: tuple[Problem, tuple[Stage, ...]], frames: int) -> None:
    """That a long run is as fast as predicted is tested with the simulator."""
    stages = case[1]
    costs = evaluate(*case).costs
    bars = first_frames(*case, frames)
    assert sorted((bar.frame, bar.stage) for bar in bars) == [
        (frame, stage) for frame in range(frames) for stage in range(len(stages))
    ]
    assert [bar.start_s for bar in bars] == sorted(bar.start_s for bar in bars)
    most_s = {(cost.stage, cost.device): (cost.transfer_s, cost.compute_s) for cost in costs}
    free_s: dict[str, float] = defaultdict(float)
    left_s: dict[tuple[int, int], float] = defaultdict(float)
    for bar in bars:
        transfer_s, compute_s = most_s[bar.stage, bar.device]  # of a full pipeline, which slows every device
        if bar.stage == 0 or len(stages[bar.stage - 1].devices) == 1:  # else it is the mean over the sources
            assert bar.transfer_s <= transfer_s * (1 + 1e-9)
        assert 0 < bar.compute_s <= compute_s * (1 + 1e-9)
        # The device was free and the frame was there.
        assert bar.start_s >= max(free_s[bar.device], left_s[bar.frame, bar.stage - 1]) - 1e-9
        free_s[bar.device] = left_s[bar.frame, bar.stage] = bar.end_s
    for index in range(len(stages)):
        if all(len(stage.devices) == 1 for stage in stages[: index + 1]):
            assert [bar.frame for bar in bars if bar.stage == index] == list(range(frames))


PLAN = Plan(
    "toy",
    "chain",
    "throughput",
    (Stage(("denver",), ("a",)), Stage(("a57", "gpu"), ("b",)), Stage(("denver",), ("c",))),
    Prediction(76.9, 0.029),
)
COSTS = (
    StageCost(0, "denver", 0.010, 0.0),
    StageCost(1, "a57", 0.012, 0.004),
    StageCost(1, "gpu", 0.009, 0.003),
    StageCost(2, "denver", 0.002, 0.001),
)
EVALUATION = Evaluation(PLAN.predicted, COSTS, 0)


def bars_of(frames: int) -> list[Bar]:
    """Every frame in every stage by itself, one after the other; the two replicas take turns."""
    bars: list[Bar] = []
    for frame in range(frames):
        for cost in (COSTS[0], COSTS[1 + frame % 2], COSTS[3]):
            start_s = bars[-1].end_s if bars else 0.0
            bars.append(Bar(cost.stage, cost.device, frame, start_s, cost.transfer_s, cost.compute_s))
    return bars


def test_picture_names_bottleneck_devices_and_figures(tmp_path: Path) -> None:
    needs("matplotlib")
    draw_gantt(EVALUATION, PLAN, bars_of(4), tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for shown in ("toy, chain (denver | a57 + gpu | denver)", "bottleneck: stage 0 on denver", "stages 0, 2"):
        assert f"<!-- {shown}" in text or shown in text
    assert "76.9 fps, latency 29.0 ms" in text


def test_picture_has_a_colour_for_each_frame(tmp_path: Path) -> None:
    needs("matplotlib")
    needs("PIL")
    from PIL import Image

    draw_gantt(EVALUATION, PLAN, bars_of(5), tmp_path / "plan.png")
    with Image.open(tmp_path / "plan.png") as picture:
        assert picture.format == "PNG"
        area = sorted((count for count, _ in picture.convert("RGB").getcolors(1 << 20)), reverse=True)
    # The ground and five frames, each far more than the letters of a label.
    assert area[5] > 2000


def test_what_cannot_be_drawn_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("matplotlib")
    with pytest.raises(OptionError, match=r"plan\.bmp: pictures are \.png or \.svg"):
        draw_gantt(EVALUATION, PLAN, bars_of(8), tmp_path / "plan.bmp")
    with pytest.raises(PipelineError, match=r"cannot write .*absent"):
        draw_gantt(EVALUATION, PLAN, bars_of(8), tmp_path / "absent" / "plan.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PipelineError, match=r"pip install 'tvm-pipeline\[plot\]'"):
        draw_gantt(EVALUATION, PLAN, bars_of(8), tmp_path / "plan.png")
    assert list(tmp_path.iterdir()) == []


def test_frames_of_a_run_are_shown_from_their_first_moment() -> None:
    records = StageRecord(0, "a"), StageRecord(1, "b")
    for frame in range(20):
        records[0].add(0.0, 0.1, 0.4, frame, 100.0 + frame)
        records[1].add(0.0, 0.0, 0.5, frame, 100.5 + frame)
    bars = measured_frames(records, frames=2)
    assert [(bar.device, bar.frame, bar.start_s) for bar in bars] == [
        ("a", 9, 0.0),
        ("b", 9, pytest.approx(0.5)),
        ("a", 10, pytest.approx(1.0)),
        ("b", 10, pytest.approx(1.5)),
    ]
    assert measured_frames([]) == []
