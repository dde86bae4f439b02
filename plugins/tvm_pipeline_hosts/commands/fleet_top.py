"""`tvm-pipeline fleet top`: show a fleet in the terminal, from /state of `fleet run --watch`."""

from __future__ import annotations

from typing import Annotated

import typer

from tvm_pipeline_hosts.fleet.messages import FleetStatus
from tvm_pipeline_hosts.fleet.status_tables import fleet_view
from tvm_pipeline_video.commands.top import first_state, server_at, show_live, states


def command(
    url: Annotated[
        str, typer.Argument(help="The address at which `fleet run --watch` listens.")
    ] = "http://127.0.0.1:9600/",
    token: Annotated[
        str | None, typer.Option(help="The token that `fleet run --token` was given.", envvar="TVM_PIPELINE_TOKEN")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the state of now and end.")] = False,
) -> None:
    """Show a fleet, once a second, until Ctrl-C: its hosts, their cameras, what was lost, who would starve.

    Example: tvm-pipeline fleet top http://10.0.0.2:9600/
    """
    server = server_at(url, token, "fleet run")
    first = first_state(server, FleetStatus)
    show_live((fleet_view(status, gone) for status, gone in states(server, first)), once)
