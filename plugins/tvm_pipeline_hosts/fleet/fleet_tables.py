"""A placement as tables for people. Next: placement.py; report/tables.py, whose tables these are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from tvm_pipeline.report.tables import TextTable, percent
from tvm_pipeline_hosts.fleet.description import Fleet, Placement

# A table of cameras has so many rows at most, and a row so many names; the files and JSON have all.
MOST_ROWS, MOST_NAMES = 100, 12


def placement_tables(fleet: Fleet, placement: Placement, together: Mapping[str, float]) -> list[TextTable]:
    """Return how busy the hosts are, where the cameras are, who starves, and who would without which hosts.

    Args:
        together: host -> its utilisation where its models are planned together; see `host_works.together`.
    """
    on: dict[str, list[str]] = defaultdict(list)
    for camera, host in placement.host_of.items():
        on[host].append(camera)
    rows = []
    for host in sorted(placement.utilisation, key=lambda name: -placement.utilisation[name]):
        planned = (percent(together[host]) if host in together else "-",) if together else ()
        rows.append((host, str(len(on[host])), percent(placement.utilisation[host]), *planned, _names(on[host])))
    proof = "proven" if placement.proven else f"gap {percent(placement.gap)}"
    title = f"Hosts (the busiest at least {percent(placement.bound)}, {proof})"
    columns = ("host", "cameras", "busy", *(("planned together",) if together else ()), "which")
    tables = [TextTable(title, columns, tuple(rows))]
    cameras = [camera for camera in fleet.cameras if camera.name in placement.host_of]
    if len(cameras) <= MOST_ROWS:
        found = (
            (camera.name, ", ".join(f"{model}@{rate:g}" for model, rate in camera.rates_fps.items()), host)
            for camera in cameras
            for host in [placement.host_of[camera.name]]
        )
        tables.append(TextTable("Cameras", ("camera", "models", "host"), tuple(found)))
    if placement.starving:
        starving = tuple(placement.starving.items())[:MOST_ROWS]
        at_least = f"{len(placement.starving)}, at least {placement.least_starving} of any placement"
        tables.append(TextTable(f"Cameras that starve ({at_least})", ("camera", "why"), starving))
    if placement.starving_without:
        without = tuple((lost, str(len(c)), _names(c)) for lost, c in placement.starving_without.items())[:MOST_ROWS]
        tables.append(TextTable("Who would starve if hosts are lost", ("lost", "cameras", "which"), without))
    return tables


def verdict(fleet: Fleet, placement: Placement) -> str:
    """Return in a sentence whether the rates are met, and whether hosts may be lost."""
    met = (
        f"{len(placement.starving)} of {len(fleet.cameras)} cameras starve"
        if placement.starving
        else "all rates are met"
    )
    if not fleet.spare:
        return f"{met}; spare is 0, so nothing is said of lost hosts"
    which = "any host" if fleet.spare == 1 else f"any {fleet.spare} hosts"
    if not placement.starving_without:
        return f"{met}, and {which} may be lost"
    worst = max(placement.starving_without, key=lambda lost: len(placement.starving_without[lost]))
    sets = f"{len(placement.starving_without)} " + ("hosts" if fleet.spare == 1 else f"sets of {fleet.spare} hosts")
    cameras = len(placement.starving_without[worst])
    return f"{met}; {sets} cannot be lost: without {worst} {cameras} camera{'s starve' if cameras > 1 else ' starves'}"


def _names(names: list[str] | tuple[str, ...]) -> str:
    more = len(names) - MOST_NAMES
    return " ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
