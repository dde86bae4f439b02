"""What Prometheus's own parser reads is what the run measured; what counts up never falls."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.openmetrics import exposition, parser
from prometheus_client.parser import text_string_to_metric_families

from tests.plugins.video.watch.watched import WHOLE, Watching, watching
from tvm_pipeline.core.frame_energy import FrameEnergy
from tvm_pipeline_video.watch import Snapshot
from tvm_pipeline_video.watch.metrics import BOUNDS_S, new_registry

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


class Told:
    """Something watched that says what it is told to."""

    def __init__(self, watched: Watching) -> None:
        self.now, self.statistics, self.bars = watched.snapshot(), watched.statistics, watched.bars
        self.graph = watched.graph
        self.registry = new_registry(self)

    def snapshot(self) -> Snapshot:
        return self.now

    def scrape(self) -> Samples:
        return parsed(generate_latest(self.registry).decode())


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"tvm_pipeline_{name}", frozenset(labels.items())


def source(**known: Any) -> dict[str, Any]:
    """What a source that lives tells of itself."""
    none = {"read": 0, "delivered": 0, "waiting": 0, "dropped": {}, "reconnects": 0, "damaged": 0, "problem": ""}
    return {**none, "fps": None, "age_p50_s": None, "age_p99_s": None, **known}


@pytest.fixture(scope="module")
def watched() -> Watching:
    return watching()


def test_throttling_is_a_gauge(watched: Watching) -> None:
    told = Told(watched)
    assert told.scrape()[key("throttled")] == 0
    told.now = dataclasses.replace(told.now, throttled=True)
    assert told.scrape()[key("throttled")] == 1


def scrape(watched: Watching) -> Samples:
    return parsed(generate_latest(new_registry(watched)).decode())


def test_metrics_say_what_the_run_measured(watched):
    watched.more = {"factors": {"d1": 1.5}, "stand_ins": {"d1": "a CPU"}, "in_flight": 3, "energy_j": 2.5}
    found = scrape(watched)
    assert found[key("frames_total")] == 30
    assert found[key("throughput_fps")] == watched.measured.throughput_fps
    assert found[key("predicted_throughput_fps")] == 1.0
    assert found[key("plan_version")] == 1
    assert found[key("in_flight_frames")] == 3
    assert found[key("device_slowdown_ratio", device="d1")] == 1.5
    assert found[key("device_stand_in", device="d1", stand_in="a CPU")] == 1
    assert found[key("energy_joules_total")] == 2.5
    assert found[key("info", graph="chain", objective="throughput", scheduler="by hand")] == 1
    for stage in watched.measured.stages:
        labels = {"stage": str(stage.stage), "device": stage.device}
        assert found[key("stage_compute_seconds", **labels)] == stage.compute_s
        assert found[key("stage_bubble_ratio", **labels)] == stage.bubble_share
    assert found[("process_resident_memory_bytes", frozenset())] > 1e6


def test_joules_of_a_frame_say_who_tells_them():
    watched = watching()
    watched.more = {"energy": FrameEnergy(0.25, 0.2, "VDD_IN", "the board")}
    labels = {"by": "VDD_IN", "covers": "the board"}
    assert scrape(watched)[key("frame_energy_joules", **labels)] == 0.25
    assert scrape(watched)[key("frame_active_energy_joules", **labels)] == 0.2
    watched.more = {"energy": FrameEnergy(0.25, 0.2)}
    assert scrape(watched)[key("frame_energy_joules", by="the platform's watts", covers="")] == 0.25
    watched.more = {}
    assert not [name for name, _ in scrape(watched) if "energy" in name]


def test_latency_histogram_is_that_of_the_results(watched):
    found = scrape(watched)
    latencies = np.array(watched.latencies_s)
    for bound in BOUNDS_S:
        assert found[key("latency_seconds_bucket", le=str(bound))] == (latencies <= bound).sum()
    assert found[key("latency_seconds_bucket", le="+Inf")] == found[key("latency_seconds_count")] == len(latencies)
    assert found[key("latency_seconds_sum")] == pytest.approx(latencies.sum())


def test_nothing_unknown_is_said():
    watched = watching(1)
    watched.plan = dataclasses.replace(
        watched.plan, predicted=dataclasses.replace(watched.plan.predicted, latency_s=None)
    )
    found = scrape(watched)
    for name in ("energy_joules_total", "predicted_latency_seconds", "throughput_fps"):
        assert key(name) not in found


def test_counters_never_fall_over_a_switch_of_plans():
    watched = watching()
    watched.sources = {"door": source(read=10, dropped=Counter(latest=2), reconnects=1)}
    watched.sources["hall"] = source(problem="the cable was pulled")
    registry = new_registry(watched)
    before = parsed(generate_latest(registry).decode())
    watched.run(20, WHOLE)
    watched.sources["door"]["dropped"]["latest"] += 1
    after = parsed(generate_latest(registry).decode())
    rising = [name for name in before if name[0].endswith(("_total", "_bucket", "_count", "_sum"))]
    assert all(after[name] >= before[name] for name in rising)
    assert key("stage_compute_seconds", stage="1", device="d1") not in after
    assert (after[key("plan_version")], after[key("frames_total")]) == (2, 50)
    assert after[key("frames_dropped_total", source="door", reason="latest")] == 3
    assert after[key("latency_seconds_count")] == 50
    assert [after[key("source_problem", source=name)] for name in ("door", "hall")] == [0, 1]


@given(
    st.lists(st.lists(st.one_of(st.sampled_from(BOUNDS_S), st.floats(1e-6, 100)), max_size=6), max_size=8),
    st.integers(1, 20),
)
def test_histogram_takes_each_frame_once_as_far_as_the_window_holds_it(watched, batches, window):
    told, out, taken = Told(watched), [], []
    for batch in batches:
        out += batch
        taken += batch[-window:]
        told.now = dataclasses.replace(watched.snapshot(), frames=len(out), latencies_s=out[-window:])
        found = told.scrape()
        for bound in BOUNDS_S:
            expected = sum(latency <= bound for latency in taken)
            assert found[key("latency_seconds_bucket", le=str(bound))] == expected
        assert found[key("latency_seconds_count")] == len(taken)


@given(st.dictionaries(st.text(), st.dictionaries(st.text(), st.integers(0, 1 << 40), max_size=3), max_size=3))
def test_any_name_of_a_source_survives(watched, drops):
    told = Told(watched)
    sources = {name: source(dropped=reasons) for name, reasons in drops.items()}
    told.now = dataclasses.replace(told.now, sources=sources)
    found = told.scrape()
    for name, reasons in drops.items():
        assert found[key("source_frames_total", source=name)] == 0
        for reason, frames in reasons.items():
            assert found[key("frames_dropped_total", source=name, reason=reason)] == frames


def test_openmetrics_is_valid(watched):
    text = exposition.generate_latest(new_registry(watched)).decode()
    names = {family.name for family in parser.text_string_to_metric_families(text)}  # a strict parser
    assert {"tvm_pipeline_frames", "tvm_pipeline_latency_seconds", "tvm_pipeline"} <= names
