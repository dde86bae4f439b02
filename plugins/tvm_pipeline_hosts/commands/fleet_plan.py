"""`tvm-pipeline fleet plan`: which host takes which camera, and who starves if hosts are lost."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tvm_pipeline.cli.options import JsonOption, check_outputs
from tvm_pipeline.cli.output import print_json, show, spinner, warn
from tvm_pipeline.documents import blamed
from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import read_bytes, write_bytes

_log = logging.getLogger(__name__)

SEARCH_S = 20.0
_MOST_BYTES = 64 << 20


def command(
    fleet: Annotated[Path, typer.Argument(metavar="FLEET.TOML", help="Hosts, models and cameras, see docs/fleet.md.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the placement, as JSON, for --before.")
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option(
            "--before",
            help="A placement that was written before: cameras move only if that pays. The file of --output may be "
            "the same.",
        ),
    ] = None,
    together: Annotated[
        bool,
        typer.Option("--together", help="Plan the models of each host together, as `deploy` does; 5 s for each host."),
    ] = False,
    time_limit: Annotated[
        float, typer.Option("--time-limit", help="Seconds to search; then the best placement known, with its gap.")
    ] = SEARCH_S,
    json: JsonOption = False,
) -> None:
    """Place cameras on hosts, so that the busiest host has least to do and hosts may be lost.

    How fast each host is comes from the profiles, bundles or frames a second that the file names. Nothing is measured,
    and no host need be there.

    Example: tvm-pipeline fleet plan fleet.toml -o placement.json
    """
    from tvm_pipeline_hosts.fleet.fleet_file import read_fleet
    from tvm_pipeline_hosts.fleet.fleet_tables import placement_tables, verdict
    from tvm_pipeline_hosts.fleet.host_works import host_works
    from tvm_pipeline_hosts.fleet.host_works import together as planned_together
    from tvm_pipeline_hosts.fleet.placement import place

    if not 0 <= time_limit < float("inf"):
        raise OptionError(f"--time-limit {time_limit:g}: it must be a number of seconds, or 0")
    check_outputs(output, inputs=[fleet])
    told = _before(before) if before else None
    with spinner():
        file = read_fleet(fleet)
        works = host_works(file)
        described = file.fleet(works.work_s)
        _log.info(f"placing {len(described.cameras)} cameras on {len(described.hosts)} hosts")
        placement = place(described, time_limit, before=told)
        mixes = planned_together(described, placement, works) if together else {}
    for host, models in works.missing.items():
        for model, why in models.items():
            warn(f"{model} is not on {host}: {why}")
    if output:
        write_bytes(output, msgspec.json.format(msgspec.json.encode({"host_of": placement.host_of})))
    if json:
        print_json(
            {**asdict(placement), "gap": placement.gap, "together": mixes, "missing": works.missing},
        )
        return
    for table in placement_tables(described, placement, mixes):
        show(table, json)
    for note in placement.notes:
        show(note, json)
    if told is not None:
        show(f"{len(placement.moved)} cameras leave their hosts: {' '.join(placement.moved) or '-'}", json)
    show(verdict(described, placement), json)


def _before(path: Path) -> Mapping[str, str]:
    """Return the placement of a file that this command wrote."""
    content = read_bytes(path, OptionError, _MOST_BYTES)
    with blamed(path, OptionError, "give a file that `tvm-pipeline fleet plan -o FILE` wrote"):
        return msgspec.json.decode(content, type=dict[str, dict[str, str]])["host_of"]
