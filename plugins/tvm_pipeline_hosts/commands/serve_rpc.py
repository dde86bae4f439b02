"""`tvm-pipeline serve-rpc`: this machine is a board that a workstation measures and runs models on."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import msgspec
import typer

from tvm_pipeline.cli.output import say, steps_to, warn
from tvm_pipeline.core.platform import core_ranges
from tvm_pipeline.files import cache_folder
from tvm_pipeline.processes import Child
from tvm_pipeline_hosts.remote.address import PORT, Address, parse_address
from tvm_pipeline_hosts.remote.methods import Description
from tvm_pipeline_hosts.remote.serving import BoardServer


def command(
    listen: Annotated[
        str, typer.Option(help="Where to listen, as HOST:PORT; only this machine reaches the default, so use ssh -L.")
    ] = f"127.0.0.1:{PORT}",
    allow_others: Annotated[
        bool,
        typer.Option(
            "--allow-others",
            help="Listen also where other machines reach the port. There is no authentication: whoever reaches it runs "
            "code here.",
        ),
    ] = False,
) -> None:
    """Let a workstation measure and run models here, until Ctrl-C: `--remote` there, through `ssh -L`.

    One client at a time. A link that is silent for 10 s is given up; its session, with what it runs, is kept
    for 60 s for the client to come back. TVM's own clients (tvm.rpc.connect, tvmc) are served at this port, too.

    On the workstation, `ssh -N -L 9190:localhost:9190 BOARD` makes it localhost:9190.

    Example: tvm-pipeline serve-rpc
    """
    server = BoardServer(parse_address(listen, "listen"), cache_folder() / "parcels", allow_others=allow_others)
    with closing(server), steps_to(say):
        say(
            f"board {server.name} listens on {server.address}; devices: {_devices(server.name)}; {_way(server.address)}"
        )
        server.serve()


def _devices(name: str) -> str:
    """Return the devices as one text, found by a process that ends: what a backend opens, such as a GPU, stays open."""
    child = Child("tvm_pipeline_hosts.remote.methods:tell_board", name.encode(), keeps_words=True)
    told, _ = child.receive()
    how = child.how()
    child.end()
    if not told:
        why = child.words.strip().splitlines() or [f"the process that looked {how}"]
        warn(f"no device can be found here, so that clients will be refused: {why[-1]}")
        return "none"
    description = msgspec.json.decode(told, type=Description)
    for warning in description.warnings:
        warn(warning)
    devices = description.platform.devices
    shown = [f"{d.label} (cores {','.join(core_ranges(d.cores))})" if d.cores else d.label for d in devices]
    return ", ".join(shown)


def _way(address: Address) -> str:
    """Return how a workstation reaches this address."""
    if address.host in ("127.0.0.1", "localhost", "::1"):
        return f"from a workstation: ssh -N -L {PORT}:{address} BOARD, and there --remote localhost:{PORT}"
    return f"without authentication, for whoever reaches it: --remote {address}"
