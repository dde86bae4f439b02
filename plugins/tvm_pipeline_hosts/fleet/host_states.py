"""The fleet as a coordinator sees it, for people: the states of its hosts and duties."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from tvm_pipeline_hosts.fleet.assignment import Assignment
from tvm_pipeline_hosts.fleet.heard_host import HeardHost, holders, rivals
from tvm_pipeline_hosts.fleet.messages import DutyStatus, HostStatus

RIVAL_SHOWN_S = 60.0  # for which a second agent of a host is told of after it spoke last


def host_statuses(
    assignment: Assignment, hosts: Mapping[str, HeardHost], planned: Collection[str], now_s: float
) -> dict[str, HostStatus]:
    """Return host -> its state, for those of the plan and all others that were heard."""
    return {
        name: _host_status(name, assignment, hosts.get(name), name in planned, now_s)
        for name in sorted({*planned, *hosts})
    }


def duty_statuses(assignment: Assignment, hosts: Collection[HeardHost], now_s: float) -> Iterator[DutyStatus]:
    """Yield the state of each duty, in the order of cameras and models."""
    for name, camera in sorted(assignment.cameras.items()):
        problem = camera.problem
        if camera.host is not None and not camera.granted:
            let_go = " and ".join(holders(hosts, name, camera.host))
            problem = f"goes to {camera.host}" + (f" when {let_go} lets it go" if let_go else "")
        for model, duty in sorted(camera.duties.items()):
            counts = duty.counts
            yield DutyStatus(
                name,
                model,
                camera.host if camera.granted else None,
                duty.epoch,
                counts.fps(),
                counts.lines,
                dict(counts.lost_until(now_s, duty.rate_fps)),
                counts.gap_until(now_s),
                problem,
            )


def _host_status(
    name: str, assignment: Assignment, host: HeardHost | None, is_planned: bool, now_s: float
) -> HostStatus:
    cameras, utilisation = tuple(assignment.cameras_of(name)), assignment.utilisation(name)
    if host is None or host.report is None:
        return HostStatus("unknown", None, cameras, utilisation)
    problems = host.report.problems
    if host.rival and now_s - host.rival[1] < RIVAL_SHOWN_S:
        problems = (*problems, rivals(name, host.agent, host.rival[0]))
    state = "alive" if host.alive else "late"
    if host.alive and not is_planned:
        state = "leaving" if host.held else "spare"
    return HostStatus(state, max(0.0, now_s - host.heard_s), cameras, utilisation, host.report.figures, problems)
