"""`tvm-pipeline fleet join`: this machine as a host of a fleet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from tvm_pipeline.cli.output import say, steps_to
from tvm_pipeline.errors import OptionError
from tvm_pipeline.signals import Requests, ending, handling
from tvm_pipeline_hosts.commands.fleet_up import (
    AddressOption,
    FolderOption,
    PortBaseOption,
    SystemdOption,
    check_ports,
    checked_address,
    print_unit,
)


def command(
    key: Annotated[Path, typer.Argument(help="The fleet.key that `fleet up` has written.")],
    name: Annotated[str, typer.Option("--name", help="The name of this host in fleet.toml.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the devices of this host as a platform file.")
    ] = None,
    address: AddressOption = None,
    port_base: PortBaseOption = 19200,
    folder: FolderOption = None,
    systemd: SystemdOption = False,
) -> None:
    """Take part in a fleet with this machine, until Ctrl-C, which ends its services; the others take its cameras.

    If this process is killed, the services go on, and the next `join` adopts them.

    Example: tvm-pipeline fleet join fleet.key --name attic -o attic.toml
    """
    from tvm_pipeline_hosts.fleet.credentials import own_address, read_key, unpack
    from tvm_pipeline_hosts.fleet.node_keeper import NodeKeeper, identity_of, kept_alone, run_apart, state_folder
    from tvm_pipeline_hosts.fleet.ray_door import ActorTask
    from tvm_pipeline_hosts.fleet.ray_node import RayNode, host_arguments, host_environment

    if name.split() != [name] or not name.isprintable() or not set(name).isdisjoint("@+/"):
        raise OptionError(f"--name {name!r}: it must be one word without @, + and /")
    read = read_key(key)
    if systemd:
        print_unit(f"host {name} of a fleet", str(key), str(key.resolve()))
        return
    check_ports(port_base)
    address = checked_address(address) or own_address(read.host)
    folder = (folder or state_folder(f"fleet-host-{name}")).resolve()
    requests = Requests()
    with kept_alone(folder), handling(ending(requests.request_stop)), steps_to(say):
        run_apart(ActorTask(read, address, "look"))
        if output:
            subprocess.run([sys.executable, "-m", "tvm_pipeline.cli", "devices", "-o", str(output)], check=True)
        credentials = unpack(read, folder / "credentials", address)
        node = RayNode(folder, host_arguments(address, port_base, read.address), host_environment(credentials))
        keeper = NodeKeeper(node, ActorTask(read, address, "agent", str(folder), identity_of(folder), name))
        keeper.begin()
        say(f"host {name} is in the fleet of {read.address}, at {address}; its state and its logs are in {folder}")
        try:
            keeper.keep(lambda: requests.stop)
        finally:
            if requests.stop:
                keeper.leave()
            else:
                node.end()
    say(f"host {name} has left the fleet")
