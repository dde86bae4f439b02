"""`tvm-pipeline fleet up`: the head of a fleet, kept running on this machine."""

from __future__ import annotations

import ipaddress
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from tvm_pipeline.cli.output import say, steps_to
from tvm_pipeline.errors import OptionError
from tvm_pipeline.signals import Requests, ending, handling

FolderOption = Annotated[
    Path | None, typer.Option("--folder", help="What this machine keeps of the fleet; by default in ~/.local/state.")
]
PortBaseOption = Annotated[
    int, typer.Option("--port-base", help="The first of 30 ports; docs/fleet-running.md lists what they are for.")
]
SystemdOption = Annotated[
    bool, typer.Option("--systemd", help="Print a unit of systemd that runs this command at every start, and end.")
]
AddressOption = Annotated[str | None, typer.Option("--address", help="The IP of this machine that the others reach.")]
LAST_BASE = 65500
ANYWHERE = "192.0.2.1"  # an address that no machine has, for the question by which of its own this one leaves


def command(
    head: Annotated[
        bool, typer.Option("--head", help="This machine is the head; it may be a host, too: `join`.")
    ] = False,
    address: AddressOption = None,
    port_base: PortBaseOption = 19100,
    folder: FolderOption = None,
    key: Annotated[Path, typer.Option("--key", help="The key to write, which hosts need to join.")] = Path("fleet.key"),
    systemd: SystemdOption = False,
) -> None:
    """Start the head of a fleet and keep it running, until Ctrl-C. Cameras go on while it is away.

    The first time it makes a token and a certificate authority. Whoever has fleet.key can run code on every host.

    Example: tvm-pipeline fleet up --head
    """
    from tvm_pipeline_hosts.fleet.credentials import make_key, own_address, unpack, write_key
    from tvm_pipeline_hosts.fleet.node_keeper import NodeKeeper, identity_of, kept_alone, state_folder
    from tvm_pipeline_hosts.fleet.ray_door import ActorTask
    from tvm_pipeline_hosts.fleet.ray_node import RayNode, head_arguments, head_environment

    if not head:
        raise OptionError("a fleet begins with one machine that is its head: `fleet up --head`; others `fleet join`")
    if systemd:
        print_unit("the head of a fleet", str(key), str(key.resolve()))
        return
    address = checked_address(address) or own_address(ANYWHERE)
    check_ports(port_base)
    folder = (folder or state_folder("fleet-head")).resolve()
    requests = Requests()
    with kept_alone(folder), handling(ending(requests.request_stop)), steps_to(say):
        made = make_key(folder, f"{address}:{port_base}")
        write_key(key, made)
        credentials = unpack(made, folder / "credentials", address)
        node = RayNode(folder, head_arguments(address, port_base), head_environment(folder, credentials))
        keeper = NodeKeeper(node, ActorTask(made, address, "coordinator", str(folder), identity_of(folder)))
        keeper.begin()
        say(
            f"the head runs at {made.address}, and keeps its state in {folder}. Give {key} to each host, by scp: who "
            "has it can run code on all of them. There:"
        )
        say(f"    tvm-pipeline fleet join {key.name} --name NAME")
        try:
            keeper.keep(lambda: requests.stop)
        finally:
            node.forget()
    say("the head has ended; hosts go on with their cameras, and look for it")


def checked_address(address: str | None) -> str | None:
    """Return an IP that Ray takes; raise OptionError where it is none."""
    if address is None:
        return None
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        raise OptionError(f"--address {address}: this is no IP; give one such as 10.0.0.2") from None
    if address in ("127.0.0.1", "::1") or found.is_unspecified:
        raise OptionError(
            f"--address {address}: Ray takes another address of this machine in its place; for a fleet on this machine "
            "alone give 127.0.0.2, and each host another one of 127.0.0.*"
        )
    return str(found)


def check_ports(port_base: int) -> None:
    """Raise OptionError where the ports from a base on are no ports of a user."""
    if not 1024 <= port_base <= LAST_BASE:
        raise OptionError(f"--port-base {port_base}: it must be from 1024 to {LAST_BASE}")


def print_unit(what: str, key: str, absolute: str) -> None:
    """Print a unit of systemd that runs this command, with the absolute path of the key."""
    given = [absolute if word == key else word for word in sys.argv[1:] if word != "--systemd"]
    if absolute not in given:
        given += ["--key", absolute]
    command = shlex.join([sys.executable, "-m", "tvm_pipeline.cli", *given])
    typer.echo(
        f"""# /etc/systemd/system/tvm-pipeline-fleet.service: {what}
[Unit]
Description=tvm-pipeline: {what}
Wants=network-online.target
After=network-online.target

[Service]
ExecStart={command}
Restart=always
RestartSec=2
# Services outlive what keeps them, and the next one adopts them; a stop ends them all the same.
KillMode=process
TimeoutStopSec=30

[Install]
WantedBy=multi-user.target"""
    )
