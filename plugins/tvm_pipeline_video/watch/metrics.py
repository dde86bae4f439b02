"""A snapshot as Prometheus metrics, taken at every scrape.

Names end in their unit, as https://prometheus.io/docs/practices/naming recommends; a metric that ends in `_total` never
falls, not even when plans are switched. `rate(tvm_pipeline_frames_total[1m])` is the rate over the last minute;
`throughput_fps` is that of the steady state, as a run reports it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tvm_pipeline.runtime import RunStatistics
from tvm_pipeline_video.watch.snapshot import Snapshot, WatchedPipeline

# Upper bounds of the latency histogram, in seconds: from the time of one small stage to far more than is usable.
BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def new_registry(watched: WatchedPipeline) -> CollectorRegistry:
    """Return a new registry with the metrics of the pipeline, and memory, CPU time and descriptors of the process."""
    registry = CollectorRegistry()
    registry.register(PipelineCollector(watched))
    ProcessCollector(registry=registry)
    return registry


class PipelineCollector(Collector):
    """Reads a snapshot at every scrape.

    Each scrape adds to the latency histogram the frames that came out since the previous one. Frames that left the
    run's window in between are not in it; `tvm_pipeline_frames_total` has counted them.
    """

    def __init__(self, watched: WatchedPipeline) -> None:
        self._watched = watched
        self._lock = threading.Lock()  # over what follows, if two requests come at the same time
        self._seen = 0
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            snapshot = self._watched.snapshot()
            latency = self._latency(snapshot)
        statistics = self._watched.statistics()
        yield from _run_metrics(snapshot, statistics)
        yield from _source_metrics(snapshot.sources)
        yield latency
        yield from _stage_metrics(snapshot, statistics)

    def _latency(self, snapshot: Snapshot) -> Metric:
        new = max(snapshot.frames - self._seen, 0)
        for latency_s in snapshot.latencies_s[-new:] if new else ():
            self._counts[bisect_left(BOUNDS_S, latency_s)] += 1  # a bound is the largest of its bucket
            self._sum_s += latency_s
        self._seen += new
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        return HistogramMetricFamily(
            "tvm_pipeline_latency_seconds",
            "Seconds from a frame's entry to the end of its last stage",
            buckets=list(zip(bounds, accumulate(self._counts), strict=True)),
            sum_value=self._sum_s,
        )


def _run_metrics(snapshot: Snapshot, statistics: RunStatistics) -> Iterator[Metric]:
    plan = snapshot.plan
    info = {"graph": plan.graph, "objective": snapshot.objective, "scheduler": plan.scheduler}
    yield InfoMetricFamily("tvm_pipeline", "What runs", value=info)
    yield CounterMetricFamily("tvm_pipeline_frames", "Frames that came out", value=snapshot.frames)
    dropped = CounterMetricFamily(
        "tvm_pipeline_frames_dropped", "Frames that a source gave and that did not enter", labels=("source", "reason")
    )
    for source, found in snapshot.sources.items():
        for reason, frames in found["dropped"].items():
            dropped.add_metric((source, reason), frames)
    yield dropped
    for name, what, value in (
        ("plan_version", "The plan that new frames take; grows by one with every switch", snapshot.plan_version),
        ("in_flight_frames", "Frames inside", snapshot.in_flight),
        ("since_last_frame_seconds", "Seconds since a frame came out", snapshot.since_last_frame_s),
        ("throughput_fps", "Frames a second in steady state", statistics.throughput_fps),
        ("throttled", "1 while the machine is slowed down because of heat or current", int(snapshot.throttled)),
        ("predicted_throughput_fps", "Frames a second that the plan promises", plan.predicted.throughput_fps),
        ("predicted_latency_seconds", "Latency that the plan promises", plan.predicted.latency_s),
        ("predicted_frame_energy_joules", "Joules of a frame that the plan promises", plan.predicted.energy_j),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"tvm_pipeline_{name}", what, value=value)
    if snapshot.energy_j is not None:
        what = "Joules that a sensor measured since the first frame, of all models of the run"
        yield CounterMetricFamily("tvm_pipeline_energy_joules", what, value=snapshot.energy_j)
    if (energy := snapshot.energy) is not None:
        by = {(energy.sensor or energy.by, energy.covers): energy.energy_j}
        yield _gauge("frame_energy_joules", "Joules of a frame, idle machine included", ("by", "covers"), by)
        if energy.active_j is not None:
            above = dict.fromkeys(by, energy.active_j)
            yield _gauge("frame_active_energy_joules", "Joules of a frame above idle", ("by", "covers"), above)


def _source_metrics(sources: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    for key, name, what in (
        ("read", "frames", "Frames that the source gave"),
        ("reconnects", "reconnects", "How often it was opened again, in vain or not"),
    ):
        counter = CounterMetricFamily(f"tvm_pipeline_source_{name}", what, labels=("source",))
        for source, found in sources.items():
            counter.add_metric((source,), found[key])
        yield counter
    waiting = {(source,): found["waiting"] for source, found in sources.items()}
    yield _gauge("source_waiting_frames", "Frames read that wait to enter", ("source",), waiting)
    problems = {(source,): float(bool(found["problem"])) for source, found in sources.items()}
    yield _gauge("source_problem", "1 while the source gives no frames", ("source",), problems)
    ages = {
        (source, quantile): found[key]
        for source, found in sources.items()
        for quantile, key in (("0.5", "age_p50_s"), ("0.99", "age_p99_s"))
        if found[key] is not None
    }
    what = "Age of the frames delivered lately, when they were: since they were decoded"
    yield _gauge("source_age_seconds", what, ("source", "quantile"), ages)


def _stage_metrics(snapshot: Snapshot, statistics: RunStatistics) -> Iterator[Metric]:
    depths = {(str(stage),): depth for stage, depth in enumerate(snapshot.queue_depths)}
    yield _gauge("queue_depth_frames", "Frames that wait in front of the stage", ("stage",), depths)
    factors = {(device,): factor for device, factor in snapshot.factors.items()}
    yield _gauge("device_slowdown_ratio", "How many times slower the device is than its profile", ("device",), factors)
    stand_ins = dict.fromkeys(snapshot.stand_ins.items(), 1.0)
    yield _gauge("device_stand_in", "1 where something stands in for a device", ("device", "stand_in"), stand_ins)
    for part, name, what in (
        ("compute_s", "compute_seconds", "Median seconds of computing, a frame"),
        ("transfer_s", "transfer_seconds", "Median seconds of receiving and sending, a frame"),
        ("wait_s", "wait_seconds", "Median seconds of waiting, a frame"),
        ("bubble_share", "bubble_ratio", "Share of the time in which the stage stood idle"),
    ):
        values = {(str(s.stage), s.device): getattr(s, part) for s in statistics.stages}
        yield _gauge(f"stage_{name}", what, ("stage", "device"), values)


def _gauge(name: str, what: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(f"tvm_pipeline_{name}", what, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
