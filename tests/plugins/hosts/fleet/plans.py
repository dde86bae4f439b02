"""Small plans of fleets for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm_pipeline_hosts.fleet.messages import FleetPlan

HOSTS = ("attic", "barn", "cellar")


def plan_of(
    host_of: Mapping[str, str],
    hosts: Sequence[str] = HOSTS,
    *,
    reach: Mapping[str, Sequence[str]] | None = None,
    models: Mapping[str, Sequence[str]] | None = None,
    work_s: Mapping[str, float] | None = None,
    bundle: str = "1",
    source: str = "synthetic:64x64@10",
    results: str = "",
) -> FleetPlan:
    """Return a plan of cameras at 10 fps; a frame takes 10 ms of each host unless `work_s` says otherwise."""
    models = models or {}
    every = sorted({"faces", *(model for some in models.values() for model in some)})
    return FleetPlan(
        {camera: (source, dict.fromkeys(models.get(camera, ("faces",)), 10.0)) for camera in host_of},
        {camera: host for camera, host in host_of.items() if host},
        {camera: tuple((reach or {}).get(camera, hosts)) for camera in host_of},
        {host: dict.fromkeys(every, (work_s or {}).get(host, 0.01)) for host in hosts},
        {host: {model: f"{model}-{host}-{bundle}" for model in every} for host in hosts},
        results=results,
    )
