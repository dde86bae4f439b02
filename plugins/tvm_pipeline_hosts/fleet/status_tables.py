"""The state of a fleet as tables for the terminal: `fleet status` and `fleet top` print them."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from tvm_pipeline.report.tables import UNKNOWN, TextTable, duration, fps, percent
from tvm_pipeline_hosts.fleet.messages import DutyStatus, FleetStatus

SHOWN_EVENTS = 8
SHOWN_CAMERAS = 4
SHOWN_DUTIES = 40


def hosts_table(status: FleetStatus) -> TextTable:
    """Return a row for each host; those that are not alive stand out."""
    rows, marked = [], set()
    for index, (name, host) in enumerate(status.hosts.items()):
        if host.state not in ("alive", "spare"):
            marked.add(index)
        since = UNKNOWN if host.since_beat_s is None else duration(host.since_beat_s)
        starve = _some(status.would_starve.get(name, ()))
        row = (name, host.state, since, percent(host.utilisation), str(len(host.cameras)), starve)
        rows.append((*row, "; ".join(host.problems) or UNKNOWN))
    columns = ("host", "state", "last beat", "busy", "cameras", "would starve without it", "problems")
    return TextTable("Hosts", columns, tuple(rows), frozenset(marked))


def duties_table(status: FleetStatus, most: int | None = None) -> TextTable:
    """Return a row for each camera and model: those with a problem first, which stand out.

    Args:
        most: rows; the title says how many are left out.
    """
    duties = sorted(status.duties, key=lambda duty: (not is_ill(duty), duty.camera, duty.model))
    shown = duties[:most]
    rows = [
        (
            f"{duty.camera}: {duty.model}",
            duty.host or "none",
            fps(duty.fps),
            str(duty.lines),
            ", ".join(f"{frames} {reason}" for reason, frames in duty.lost.items()) or "none",
            duration(duty.longest_gap_s),
            duty.problem or UNKNOWN,
        )
        for duty in shown
    ]
    left = len(duties) - len(shown)
    title = f"Cameras ({left} more without a problem)" if left else "Cameras"
    columns = ("camera", "host", "fps", "lines", "lost frames", "longest gap", "problem")
    return TextTable(title, columns, tuple(rows), frozenset(i for i, duty in enumerate(shown) if is_ill(duty)))


def is_ill(duty: DutyStatus) -> bool:
    """Return whether a duty has no host, or a problem."""
    return duty.host is None or bool(duty.problem)


def summary(status: FleetStatus) -> str:
    """Return the fleet in one sentence."""
    alive = sum(host.state == "alive" for host in status.hosts.values())
    planned = sum(host.state != "spare" for host in status.hosts.values())
    cameras: dict[str, bool] = {}
    for duty in status.duties:
        cameras[duty.camera] = cameras.get(duty.camera, True) and duty.host is not None
    rate = sum(duty.fps for duty in status.duties)
    hosts = f"{alive} of {planned} hosts alive"
    return f"{hosts}, {sum(cameras.values())} of {len(cameras)} cameras with a host, {fps(rate)} lines a second"


def fleet_view(status: FleetStatus, gone: str = "") -> Group:
    """Return all of the status as one renderable.

    Args:
        gone: why there is no newer one; empty where there is.
    """
    ill = gone or status.results
    head = Text(summary(status), style="bold")
    parts: list[Text | TextTable] = [head]
    if ill:
        parts.append(Text(ill, style="bold red"))
    parts += [hosts_table(status), duties_table(status, max(SHOWN_DUTIES, sum(map(is_ill, status.duties))))]
    events = [f"{ago_s:.0f} s ago: {kind}: {text}" for ago_s, kind, text in status.events[: -SHOWN_EVENTS - 1 : -1]]
    return Group(*parts, Text("\n".join(["Happened lately", *events])))


def _some(cameras: tuple[str, ...]) -> str:
    if not cameras:
        return "none"
    more = len(cameras) - SHOWN_CAMERAS
    return ", ".join(cameras[:SHOWN_CAMERAS]) + (f" and {more} more" if more > 0 else "")
