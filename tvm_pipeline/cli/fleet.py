"""Many boards as one: which host takes which camera, also after a host is lost.

Example: tvm-pipeline fleet plan fleet.toml
"""

from __future__ import annotations

import typer

from tvm_pipeline.cli import fleet_join, fleet_plan, fleet_run, fleet_status, fleet_up

group = typer.Typer(help=__doc__, no_args_is_help=True)
for command in (fleet_plan, fleet_up, fleet_join, fleet_run, fleet_status):
    group.command(command.__name__.rpartition("_")[2])(command.command)
