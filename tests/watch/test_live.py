"""A live pipeline, watched over HTTP across a change of plan."""

from __future__ import annotations

import json
import urllib.request

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from tests.support.fake_backend import chain_model, fake_platform, number
from tvm_pipeline import Plan, Problem
from tvm_pipeline.evaluate import judged
from tvm_pipeline.plan import Prediction, Stage
from tvm_pipeline.profile import DeviceProfile, Profile
from tvm_pipeline.runtime import Adaptation, LivePipeline
from tvm_pipeline.watch import LiveWatch, WatchServer


def plan_of(problem: Problem, *stages: tuple[str, ...]) -> Plan:
    made = tuple(Stage((f"d{index}",), operators) for index, operators in enumerate(stages))
    return judged(problem, Plan("chain", "hand", "throughput", made, Prediction()))


def test_what_others_see_of_it():
    model = chain_model(3)
    profile = Profile("chain", model.graph.fingerprint, {name: DeviceProfile((1e-3,) * 3) for name in ("d0", "d1")})
    problem = Problem(model.graph, fake_platform("d0", "d1"), profile)
    first, second = plan_of(problem, ("op0", "op1", "op2")), plan_of(problem, ("op0",), ("op1", "op2"))
    with LivePipeline(model, problem, first, adaptation=Adaptation()) as live:
        drops = {"camera:0": {"latest": 3}}
        with WatchServer(LiveWatch(live, lambda: drops), port=0) as server:

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
            assert state["drops"] == drops
            assert json.loads(get("/health")) is not None
            samples = {
                (s.name, tuple(s.labels.values())): s.value
                for family in text_string_to_metric_families(get("/metrics"))
                for s in family.samples
            }
            assert samples["tvm_pipeline_frames_total", ()] == 20
            bars = [event for event in json.loads(get("/trace?seconds=60"))["traceEvents"] if event["ph"] == "X"]
            frames = {event["args"]["frame"] for event in bars if "frame" in event.get("args", {})}
            assert frames >= set(range(20))  # over both plans, numbered as they came
        assert live.result().frame == 20
