"""A live pipeline, watched over HTTP across a change of plan."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest

from tests.support.parts import needs

needs("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families
from tvm_pipeline_video.watch import LiveWatch, WatchServer

from tests.plugins.video.watch.test_metrics import source
from tests.support.fake_backend import FakeModel, chain_model, fake_platform, number
from tvm_pipeline import Plan, Problem
from tvm_pipeline.core.plan import Prediction, Stage
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.power import Meter, Reading, Sensor
from tvm_pipeline.runtime import Adaptation, LivePipeline
from tvm_pipeline.runtime.metering import RunEnergy
from tvm_pipeline.testing import example_bundle, example_problem


def plan_of(problem: Problem, *stages: tuple[str, ...]) -> Plan:
    made = tuple(Stage((f"d{index}",), operators) for index, operators in enumerate(stages))
    return judged(problem, Plan("chain", "hand", "throughput", made, Prediction()))


def chain_problem(operators: int) -> tuple[FakeModel, Problem]:
    model = chain_model(operators)
    devices = {name: DeviceProfile.in_order(model.graph, (1e-3,) * operators) for name in ("d0", "d1")}
    profile = Profile("chain", model.graph.fingerprint, devices)
    return model, Problem(model.graph, fake_platform("d0", "d1"), profile)


def test_what_others_see_of_it():
    model, problem = chain_problem(3)
    first, second = plan_of(problem, ("op0", "op1", "op2")), plan_of(problem, ("op0",), ("op1", "op2"))
    with LivePipeline(model, problem, first, adaptation=Adaptation()) as live:
        sources = {"camera:0": source(read=23, dropped={"latest": 3}, age_p50_s=0.01, age_p99_s=0.2)}
        with WatchServer(LiveWatch(live, lambda: sources), port=0) as server:

            def get(path: str) -> str:
                return urllib.request.urlopen(server.url.rstrip("/") + path, timeout=10).read().decode()

            for index in range(20):
                if index == 10:
                    assert live.switch(second, "to be seen")
                live.submit(number(index))
                assert live.result().frame == index
            live.submit(number(20))
            state = json.loads(get("/state"))
            assert (state["plan_version"], state["frames"], state["in_flight"]) == (1, 20, 1)
            assert [event["kind"] for event in state["events"]] == ["start", "switch"]
            assert state["sources"] == sources
            assert json.loads(get("/health")) is not None
            samples = {
                (s.name, tuple(s.labels.values())): s.value
                for family in text_string_to_metric_families(get("/metrics"))
                for s in family.samples
            }
            assert samples["tvm_pipeline_frames_total", ()] == 20
            assert samples["tvm_pipeline_source_frames_total", ("camera:0",)] == 23
            assert samples["tvm_pipeline_source_age_seconds", ("0.99", "camera:0")] == 0.2
            bars = [event for event in json.loads(get("/trace?seconds=60"))["traceEvents"] if event["ph"] == "X"]
            frames = {event["args"]["frame"] for event in bars if "frame" in event.get("args", {})}
            assert frames >= set(range(20))  # over both plans, numbered as they came
        assert live.result().frame == 20


def test_health_counts_from_the_first_look_until_a_frame_came():
    """Opening cameras and devices takes its time; who asks meanwhile must not be told of frames missed since boot."""
    model, problem = chain_problem(2)
    live = LivePipeline(model, problem, plan_of(problem, ("op0", "op1")))
    watch = LiveWatch(live)
    assert watch.snapshot().health(5.0) == ""
    assert watch.snapshot().state(watch.statistics(), 5.0, picture=False).now_s < 5.0
    with live:
        assert watch.snapshot().health(5.0) == ""
        time.sleep(0.06)
        assert "no frame has come out for 0." in watch.snapshot().health(0.05)
        live.submit(number(0))
        live.result()
        assert watch.snapshot().health(0.05) == ""


@pytest.mark.parametrize(
    "spec",
    [
        "rtsp://user:secret@gate/1",
        "rtsp://user:sec/secret@gate/1",
        "rtsp://user:a@secret@gate/1",
        "rtsp://:secret@[fe80::1]:554/1",
        "http://gate:8080/video?usr=admin&pwd=secret&channel=1",
        "http://gate:8080/video?Access_Token=secret#t",
    ],
)
def test_nobody_is_told_a_password(spec):
    needs("av")
    from tvm_pipeline_video import LiveSource, Source
    from tvm_pipeline_video.decoding import Picture

    def opened(_: str) -> Source:
        picture = Picture(0.0, np.zeros((2, 2, 3), np.uint8))
        return Source("the camera", iter([picture]), fps=None, frames=1, limit=None)

    model, problem = chain_problem(2)
    live = LivePipeline(model, problem, plan_of(problem, ("op0", "op1")))
    with live, LiveSource(spec, open=opened) as camera:
        watch = LiveWatch(live, lambda: {camera.name: asdict(camera.statistics())})
        with WatchServer(watch) as server:
            for path in ("state", "metrics"):
                with urllib.request.urlopen(server.url + path, timeout=10) as answer:
                    told = answer.read().decode()
                assert "gate" in told or "fe80" in told
                assert "secret" not in told


class Steady(Sensor):
    """A sensor of 5 W."""

    name, covers, period_s = "steady", "the board", 0.01

    def read(self) -> Sequence[Reading]:
        now_s = time.perf_counter()
        return [Reading(now_s, 5.0 * now_s)]


def test_others_see_the_joules_of_a_frame_and_who_tells_them():
    model, problem = chain_problem(2)
    devices = tuple(replace(device, active_w=10.0) for device in problem.platform.devices)
    problem = replace(problem, platform=replace(problem.platform, devices=devices, idle_w=2.0))
    plan = plan_of(problem, ("op0", "op1"))
    with Meter(Steady()) as meter, LivePipeline(model, problem, plan) as live:
        energy = RunEnergy(meter, lambda: (live.frames, live.last_result_s), idle_w=2.0)
        for index in range(11):
            live.submit(number(index))
            live.result()
            energy.update()
            time.sleep(0.01)
        energy.finish()
        measured, unmeasured = LiveWatch(live, metering=lambda: energy).snapshot(), LiveWatch(live).snapshot()
    assert measured.energy is not None
    assert measured.energy.sensor == "steady"
    assert measured.energy_j == pytest.approx(10 * measured.energy.energy_j)  # between the first frame and the last
    assert measured.energy.active_j == pytest.approx(measured.energy.energy_j * 3 / 5)
    assert unmeasured.energy_j is None
    assert unmeasured.energy is not None
    assert not unmeasured.energy.is_measured
    state = measured.state(live.statistics(), 10.0, picture=False)
    assert state.energy == measured.energy


def test_throttling_is_watched() -> None:
    bundle, problem = example_bundle(), example_problem()
    with LivePipeline(bundle.compiled, problem, bundle.plan) as live:
        watch = LiveWatch(live)
        assert not watch.snapshot().throttled
        live.note("throttled", "it is hot")
        assert watch.snapshot().throttled
        live.note("unthrottled", "it has cooled down")
        assert not watch.snapshot().throttled
