"""`tvm-pipeline serve-rpc`: this machine is a board that a workstation measures and runs models on."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from typing import Annotated

import msgspec
import typer

from tvm_pipeline.cli.output import say, warn
from tvm_pipeline.core.platform import core_ranges
from tvm_pipeline.files import cache_folder
from tvm_pipeline_hosts.remote.address import PORT, Address, parse_address
from tvm_pipeline_hosts.remote.methods import Description
from tvm_pipeline_hosts.remote.serving import BoardServer

# Devices are looked for by another process: what a backend opens for that, such as a GPU, stays open.
LOOK = (
    "import sys; sys.path[:] = sys.argv[2:]; import msgspec; "
    "from tvm_pipeline_hosts.remote.methods import described_board; "
    "sys.stdout.buffer.write(msgspec.json.encode(described_board(sys.argv[1])))"
)


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

    Example: tvm-pipeline serve-rpc, and on the workstation: ssh -N -L 9190:localhost:9190 BOARD
    """
    server = BoardServer(parse_address(listen, "listen"), cache_folder() / "parcels", say, allow_others=allow_others)
    with closing(server):
        say(
            f"board {server.name} listens on {server.address}; devices: {_devices(server.name)}; {_way(server.address)}"
        )
        server.serve()


def _devices(name: str) -> str:
    """Return the devices of this machine as one text, found by a process that ends."""
    found = subprocess.run(
        [sys.executable, "-c", LOOK, name, *sys.path], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    try:
        description = msgspec.json.decode(found.stdout, type=Description)
    except msgspec.MsgspecError:
        why = found.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {found.returncode}"]
        warn(f"no device can be found here, so that clients will be refused: {why[-1]}")
        return "none"
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
