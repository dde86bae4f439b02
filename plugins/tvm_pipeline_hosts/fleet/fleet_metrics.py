"""The state of a fleet as Prometheus metrics, taken at every scrape; what is of a host has the label `host`.

Counters of a camera have no label of a host, so that they never fall when it moves; `tvm_pipeline_fleet_camera_host`
tells where it is. Figures that agents send come with the names that they have there: numbers of a service under
`tvm_pipeline_fleet_service_` with its model, those of the host under `tvm_pipeline_fleet_host_`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tvm_pipeline_hosts.fleet.messages import FleetStatus

PREFIX = "tvm_pipeline_fleet"
STATES = ("alive", "late", "leaving", "spare", "unknown")
MOST_FIGURES = 64  # of a host: metrics that an agent can make


def new_registry(status: Callable[[], FleetStatus]) -> CollectorRegistry:
    """Return a new registry with the metrics of the fleet, and memory and CPU time of this process."""
    registry = CollectorRegistry()
    registry.register(FleetCollector(status))
    ProcessCollector(registry=registry)
    return registry


class FleetCollector(Collector):
    """Asks for the status at every scrape."""

    def __init__(self, status: Callable[[], FleetStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        yield from _host_metrics(status)
        yield from _camera_metrics(status)
        yield from _figures(status)
        yield _gauge(
            "results_problem", "1 while a file of the coordinator cannot be written", (), {(): bool(status.results)}
        )


def _host_metrics(status: FleetStatus) -> Iterator[Metric]:
    hosts = status.hosts
    states = {(name, state): float(host.state == state) for name, host in hosts.items() for state in STATES}
    yield _gauge("host_state", "1 for the state that the host is in", ("host", "state"), states)
    since = {(name,): host.since_beat_s for name, host in hosts.items() if host.since_beat_s is not None}
    yield _gauge("host_since_beat_seconds", "Seconds since the host was heard", ("host",), since)
    busy = {(name,): host.utilisation for name, host in hosts.items()}
    what = "Seconds of work of the host's busiest device in each second, by its profile"
    yield _gauge("host_utilisation_ratio", what, ("host",), busy)
    cameras = {(name,): len(host.cameras) for name, host in hosts.items()}
    yield _gauge("host_cameras", "Cameras of the host", ("host",), cameras)
    starve = {(name,): len(status.would_starve.get(name, ())) for name in hosts}
    yield _gauge("host_would_starve_cameras", "Cameras that nobody could take if the host were lost", ("host",), starve)
    problems = {(name,): len(host.problems) for name, host in hosts.items()}
    yield _gauge("host_problems", "Problems that the host tells of", ("host",), problems)


def _camera_metrics(status: FleetStatus) -> Iterator[Metric]:
    labels = ("camera", "model")
    lines = CounterMetricFamily(f"{PREFIX}_lines", "Lines of results that were taken", labels=labels)
    lost = CounterMetricFamily(f"{PREFIX}_lost_frames", "Frames without a line", labels=(*labels, "reason"))
    for duty in status.duties:
        lines.add_metric((duty.camera, duty.model), duty.lines)
        for reason, frames in duty.lost.items():
            lost.add_metric((duty.camera, duty.model, reason), frames)
    yield lines
    yield lost
    at = {(duty.camera, duty.model, duty.host): 1.0 for duty in status.duties if duty.host}
    yield _gauge("camera_host", "1 where the camera is", (*labels, "host"), at)
    for name, what, values in (
        (
            "camera_fps",
            "Lines a second of the last seconds",
            {(duty.camera, duty.model): duty.fps for duty in status.duties},
        ),
        (
            "camera_longest_gap_seconds",
            "The longest time between two lines",
            {(duty.camera, duty.model): duty.longest_gap_s for duty in status.duties},
        ),
        (
            "camera_problem",
            "1 while the camera has no host or gives no frames",
            {(duty.camera, duty.model): float(duty.host is None or bool(duty.problem)) for duty in status.duties},
        ),
    ):
        yield _gauge(name, what, labels, values)


def _figures(status: FleetStatus) -> Iterator[Metric]:
    """Yield the numbers among the figures of the hosts; the same figure of all hosts is one metric."""
    of_hosts: dict[str, dict[tuple[str, ...], float]] = {}
    of_services: dict[str, dict[tuple[str, ...], float]] = {}
    for name, host in status.hosts.items():
        if host.state in ("late", "unknown"):
            continue  # these are old
        for key, value in _numbers({k: v for k, v in host.figures.items() if k != "services"}):
            of_hosts.setdefault(key, {})[(name,)] = value
        services = host.figures.get("services")
        for service in services if isinstance(services, (list, tuple)) else ():
            if isinstance(service, Mapping):
                which = name, str(service.get("model", "")), str(service.get("bundle", ""))
                for key, value in _numbers({k: v for k, v in service.items() if k != "pid"}):
                    of_services.setdefault(key, {})[which] = value
    for key, values in sorted(of_hosts.items()):
        yield _gauge(f"host_{key}", "A figure that the agent of the host sends", ("host",), values)
    for key, values in sorted(of_services.items()):
        what = "A figure of a service, which the agent of its host sends"
        yield _gauge(f"service_{key}", what, ("host", "model", "bundle"), values)


def _numbers(figures: Mapping[str, Any], before: str = "") -> list[tuple[str, float]]:
    """Return the numbers with the names of metrics, those of objects inside under both names."""
    found: list[tuple[str, float]] = []
    for key, value in figures.items():
        name = before + re.sub(r"\W", "_", str(key), flags=re.ASCII)
        if isinstance(value, Mapping):
            found += _numbers(value, f"{name}_")
        elif isinstance(value, (bool, int, float)):
            found.append((name, float(value)))
    return found[:MOST_FIGURES]


def _gauge(name: str, what: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", what, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
