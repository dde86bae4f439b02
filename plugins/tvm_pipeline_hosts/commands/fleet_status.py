"""`tvm-pipeline fleet status`: the hosts and cameras of a fleet as they are now."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tvm_pipeline.cli.options import JsonOption
from tvm_pipeline.cli.output import print_json, show
from tvm_pipeline_hosts.commands.fleet_run import KeyOption
from tvm_pipeline_hosts.commands.fleet_up import AddressOption
from tvm_pipeline_hosts.fleet.messages import FleetStatus
from tvm_pipeline_hosts.fleet.status_tables import fleet_view


def command(key: KeyOption = Path("fleet.key"), address: AddressOption = None, json: JsonOption = False) -> None:
    """Show the hosts and cameras of a fleet. Run it on the head or on a host that has joined.

    Example: tvm-pipeline fleet status --key fleet.key
    """
    from tvm_pipeline_hosts.fleet.credentials import read_key
    from tvm_pipeline_hosts.fleet.ray_actors import COORDINATOR
    from tvm_pipeline_hosts.fleet.ray_door import connected

    with connected(read_key(key), address or "") as door:
        status = door.call(COORDINATOR, "status", kind=FleetStatus)
    if json:
        print_json(msgspec.to_builtins(status))
    else:
        show(fleet_view(status), json)
