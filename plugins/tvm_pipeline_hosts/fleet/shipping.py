"""Bundles to hosts: of each bundle a host is sent what it lacks, by the sums of its files. Next: remote/parcels.py."""

from __future__ import annotations

from pathlib import Path

from tvm_pipeline_hosts.fleet.ray_actors import agent_name
from tvm_pipeline_hosts.fleet.ray_door import FleetClient
from tvm_pipeline_hosts.remote.parcels import manifest_of, parts_of

PUT_S, ASSEMBLE_S = 60.0, 120.0


def send_bundle(door: FleetClient, host: str, path: Path) -> tuple[str, int]:
    """Have a bundle on a host; return its id, and the bytes that were sent.

    Raises PipelineError where the host cannot take it.
    """
    manifest, agent, sent = manifest_of(path), agent_name(host), 0
    lacks = door.call(agent, "missing", manifest, kind=dict[str, int])
    for sum, offset, content, total in parts_of(path, lacks):
        door.call(agent, "put", sum, offset, content, total, limit_s=PUT_S, kind=type(None))
        sent += len(content)
    return door.call(agent, "assemble", manifest, limit_s=ASSEMBLE_S, kind=str), sent
