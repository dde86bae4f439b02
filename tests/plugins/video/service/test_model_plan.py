"""A model file runs a video before it is measured; the frames of a long one wait once until it is."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from tests.plugins.video.service.test_model_files import Heard
from tests.support.tiny_yolo import write_tiny_yolo
from tvm_pipeline import Problem
from tvm_pipeline import plan as planned
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import PipelineError
from tvm_pipeline.testing import example_bundle, example_graph, example_model
from tvm_pipeline.workflow.predicted import plan_from_shapes
from tvm_pipeline.workflow.steps import opened_bundle
from tvm_pipeline_video.application import host_graph
from tvm_pipeline_video.service import model_bundle, model_plan, running_model
from tvm_pipeline_video.service.inputs import HeldFrames
from tvm_pipeline_video.service.model_plan import begins_at_once, pays
from tvm_pipeline_video.service.running import Service
from tvm_pipeline_video.service.settings import Settings

CORES = Platform("box", (Device("cpu0", cores=(0,)), Device("cpu1", cores=(1,)), Device("cpu", cores=(0, 1))))
GPU = Device("gpu", model=DeviceModel(macs_per_s=1e12))


@pytest.mark.parametrize(
    ("frames", "seconds", "left", "platform", "expected"),
    [
        (60, 2.0, 300, CORES, False),  # ten seconds are left
        (60, 2.0, 30_000, CORES, True),
        (60, 2.0, 3000, CORES, False),
        (60, 2.0, 3000, Platform("box", (*CORES.devices, GPU)), True),  # which may be some times as fast
        (0, 2.0, 1000, CORES, True),
        (60, 2.0, float("inf"), CORES, True),
    ],
)
def test_measuring_pays_for_long_files(frames, seconds, left, platform, expected):
    assert pays(frames, seconds, left, platform) is expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"plan_first": True}, False),
        ({"fresh": True}, False),
        ({"max_latency": 0.1}, False),
        ({"rate": 10.0}, False),
        ({"adapt": "off"}, False),
        ({"device": "cpu"}, False),
        ({"wait": True}, False),
        ({"source": ["camera:0"]}, False),
        ({"source": ["a.mp4", "b.mp4"]}, False),
    ],
)
def test_what_is_asked_of_a_plan_takes_measuring(options, expected):
    settings = Settings(**{"bundle": [Path("net.onnx")], "source": ["a.mp4"], **options})
    assert begins_at_once(settings) is expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"platform": Platform("box", (*CORES.devices, GPU))}, False),
        ({"decision": None}, False),  # it was compiled with a plan
        ({"plan": "latency"}, False),
        ({"application": {"source": "a.mp4"}}, False),
    ],
)
def test_what_was_asked_of_a_bundle_is_kept(change, expected):
    bundle = example_bundle()
    decision = planned(Problem(bundle.graph, bundle.platform, bundle.profile))
    assert len(decision.candidates) > 1
    if "plan" in change:
        change = {"plan": replace(bundle.plan, objective=change["plan"])}
    bundle = replace(bundle, **{"platform": CORES, "decision": decision, **change})
    assert model_plan._is_left_open(bundle) is expected


def test_each_core_runs_whole_frames():
    graph = host_graph(example_graph(), 640, 360, draws=False, writes=True)
    problem, plan = plan_from_shapes(example_model(), Platform("box", (*CORES.devices, GPU)), graph)
    assert [device.name for device in problem.platform.devices] == ["cpu0", "cpu1"]
    both = [set(stage.devices) for stage in plan.stages if "double" in stage.operators]
    assert both == [{"cpu0", "cpu1"}]
    assert plan.predicted.throughput_fps is None  # nothing was measured
    assert plan_from_shapes(example_model(), Platform("box", (GPU,)), graph) is None
    engines = (Device("cpu0", cores=(0,)), Device("ort0", "onnxruntime", cores=(0,)))
    assert plan_from_shapes(example_model(), Platform("box", engines), graph) is None  # either may be the faster one
    small = Platform("box", (Device("cpu0", cores=(0,), memory_bytes=1),))
    assert plan_from_shapes(example_model(), small, graph) is None
    one, alone = plan_from_shapes(example_model(), Platform("box", CORES.devices[:1]), graph)
    assert (len(one.platform.devices), alone.devices) == (1, ("cpu0",))


def test_frames_wait_while_they_are_held():
    frames, given = HeldFrames(range(100), 100), []
    with frames.held():
        reader = threading.Thread(target=lambda: given.extend(islice(frames, 10)))
        reader.start()
        time.sleep(0.05)
        assert (given, frames.given, frames.left) == ([], 0, 100)
        assert frames.awaited_s >= time.perf_counter() - 0.01
    reader.join(10)
    assert (given, frames.given, frames.left) == (list(range(10)), 10, 90)
    assert 0 < frames.awaited_s < time.perf_counter()


@pytest.fixture(scope="module")
def net(tmp_path_factory, empty_cache):
    """Give a model file, its bundle in a separate cache, and the bytes of the bundle: compiled, but not measured."""
    folder = tmp_path_factory.mktemp("begins")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVM_PIPELINE_CACHE", str(empty_cache(folder / "cache")))
        path, heard = write_tiny_yolo(folder / "tiny.onnx"), Heard()
        with model_bundle.opened_model(path, Settings(), heard, measured=False) as (kept, bundle):
            assert model_bundle.is_unmeasured(bundle)
        yield path, kept, kept.read_bytes()


@pytest.fixture
def run(net, tmp_path, monkeypatch):
    """Give a function that runs the model on a film of that length.

    It returns the report, the frame numbers in the results, and the lines that the listener heard.
    """
    path, kept, unmeasured = net
    kept.write_bytes(unmeasured)
    monkeypatch.setenv("TVM_PIPELINE_CACHE", str(kept.parents[1]))

    def run(frames, **options):
        heard, lines = Heard(), tmp_path / "lines.jsonl"
        film = [f"synthetic:128x96@30:{frames}"]
        settings = Settings(bundle=[path], source=film, results=str(lines), verify=0.0, **options)
        [report] = Service(settings, listener=heard).run()
        return report, [json.loads(line)["frame"] for line in lines.read_text().splitlines()], heard.lines

    return run


def test_a_short_film_is_through_before_anything_is_measured(run, net):
    report, frames, heard = run(12)
    assert frames == list(range(12))
    assert (report.chosen_by, report.events) == (running_model.BY_SHAPES, ())
    assert report.plan.predicted.throughput_fps is None
    assert not any(line.startswith("plan:") for line in heard)
    with opened_bundle(net[1]) as bundle:
        assert model_bundle.is_unmeasured(bundle)


@pytest.fixture
def pays_soon(monkeypatch):
    monkeypatch.setattr(running_model, "SEEN_S", 0.0)
    monkeypatch.setattr(model_plan, "PAYS_S", 1e-9)


@pytest.mark.thorough
def test_the_frames_of_a_long_film_wait_until_it_is_measured(run, net, pays_soon):
    report, frames, heard = run(3000)
    assert frames == list(range(3000))  # none is lost, repeated or out of order
    assert report.events[0].kind == "measured"  # a busy machine may have it planned anew later
    assert 0 < report.events[0].frame < 3000
    assert report.chosen_by.startswith("prediction")  # `verify` is 0
    assert (report.statistics.frames, any(line.startswith("plan: ") for line in heard)) == (3000, True)
    with opened_bundle(net[1]) as bundle:
        assert not model_bundle.is_unmeasured(bundle)
    again, frames, heard = run(3000)
    assert any("planned for this bundle, source and decoder before" in line for line in heard)
    assert (frames, again.chosen_by) == (list(range(3000)), "prediction")


@pytest.mark.parametrize("does", ["fails", "is interrupted"])
def test_what_goes_wrong_while_frames_wait_costs_none(run, pays_soon, monkeypatch, does):
    def measured(path):
        if does == "fails":
            raise PipelineError("the device is gone")
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
        raise AssertionError("the signal did not end it")

    monkeypatch.setattr(model_plan, "measured_bundle", measured)
    report, frames, heard = run(2000)
    assert frames == list(range(len(frames)))
    assert report.chosen_by == running_model.BY_SHAPES
    if does == "fails":
        assert len(frames) == 2000
        assert "the device is gone; it runs on as before" in heard
    else:
        assert 0 < len(frames) < 2000
        assert any(line.startswith("draining") for line in heard)


def test_a_bundle_without_figures_is_measured_where_they_are_needed(net, monkeypatch):
    path, kept, unmeasured = net
    kept.write_bytes(unmeasured)
    monkeypatch.setenv("TVM_PIPELINE_CACHE", str(kept.parents[1]))
    asked = []

    def measured(where):
        asked.append(where)
        with opened_bundle(where) as bundle:
            return bundle

    monkeypatch.setattr(model_bundle, "measured_bundle", measured)
    monkeypatch.setattr(model_bundle, "host_devices", lambda *_: [object()])
    with model_bundle.opened_model(path, Settings(source=["a.mp4"]), Heard()):
        assert asked == [kept]
