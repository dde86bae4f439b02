"""Measure the planner of a fleet: seconds, the gap to its bound, and whether hosts may be lost.

    python benchmarks/fleet_plan.py                  # all parts, some minutes
    python benchmarks/fleet_plan.py --only large     # one of large, small, takeover
    python benchmarks/fleet_plan.py --short          # a little of each, for CI

1. large: 1000 cameras on 100 unlike hosts, spare = 1, by how busy the hosts would be if cameras could be split; three
   seeds each. After the search every host is lost once, and the coordinator's function takes over; plain code checks
   that no host is too busy then and that cameras in place stay.
2. small: fleets that CP-SAT proves, beside what the search finds without CP-SAT.
3. takeover: milliseconds of `take_over` for 1000 cameras on 100 hosts, of which 1, 2 and 50 are lost.

Seconds are of the clock, the loops are compiled before.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for benchmarks.planner and tests.support

from benchmarks.planner import FIGURES, figure, run_parts, s, show
from tests.plugins.hosts.fleets import FULL, loads, unlike_fleet
from tvm_pipeline_hosts.fleet.description import Fleet, Placement
from tvm_pipeline_hosts.fleet.messages import FleetPlan
from tvm_pipeline_hosts.fleet.placement import place
from tvm_pipeline_hosts.fleet.takeover import take_over

LEVELS, SEEDS, LIMIT_S = (0.3, 0.5, 0.65), 3, 20.0
SMALL = ((12, 3, 0.4), (20, 3, 0.5), (20, 5, 0.5), (30, 6, 0.4))


def percent(share: float) -> str:
    return f"{share:.2%}"


def plan_of(fleet: Fleet, placement: Placement) -> FleetPlan:
    names = tuple(host.name for host in fleet.hosts)
    return FleetPlan(
        {camera.name: (camera.source, camera.rates_fps) for camera in fleet.cameras},
        placement.host_of,
        {camera.name: camera.hosts or names for camera in fleet.cameras},
        {host.name: host.work_s for host in fleet.hosts},
        {},
    )


def checked_losses(fleet: Fleet, placement: Placement) -> int:
    """Lose every host once; return how many cameras starve in all, as the placement says it."""
    plan = plan_of(fleet, placement)
    starving = 0
    for lost in fleet.hosts:
        alive = {host.name for host in fleet.hosts} - {lost.name}
        now = {camera: host for camera, host in placement.host_of.items() if host in alive}
        then = take_over(plan, placement.host_of, alive)
        if not now.items() <= then.items() or max(loads(fleet, then).values()) > FULL:
            raise SystemExit(f"without {lost.name} a camera in place moved, or a host is too busy")
        left = len(placement.host_of) - len(then)
        if left > len(placement.starving_without.get(lost.name, ())):
            raise SystemExit(f"without {lost.name} {left} cameras starve, more than the placement says")
        starving += left
    return starving


def large(short: bool) -> None:
    rows, gaps, walls, left = [], [], [], 0
    cases = [(level, seed) for level in LEVELS for seed in range(SEEDS)]
    for level, seed in [(0.5, 0)] if short else cases:
        fleet = unlike_fleet(12 if short else 1000, 3 if short else 100, level, seed)
        began = time.perf_counter()
        found = place(fleet, 0.2 if short else LIMIT_S, seed)
        walls.append(time.perf_counter() - began)
        gaps.append(found.gap)
        lost = checked_losses(fleet, found)
        left += lost
        most = max(found.utilisation.values())
        row = (percent(most), percent(found.bound), percent(found.gap), len(found.starving), lost)
        rows.append((percent(level), seed, *row, s(walls[-1])))
    columns = ("split", "seed", "busiest", "bound", "gap", "starve", "starve after a loss", "in")
    show("1. Cameras on unlike hosts, any one of which may be lost", columns, rows)
    show("", FIGURES, [figure("widest gap", max(gaps), percent, 0.05), figure("longest search", max(walls), s, 30.0)])


def small(short: bool) -> None:
    rows = []
    for cameras, hosts, level in [(12, 3, 0.3)] if short else SMALL:
        for seed in range(1 if short else 3):
            fleet = unlike_fleet(cameras, hosts, level, seed, least_reach=2)
            began = time.perf_counter()
            exact = place(fleet, 0.2 if short else LIMIT_S, seed)
            wall = time.perf_counter() - began
            rough = place(fleet, 0.0, seed)
            most = max(exact.utilisation.values())
            row = (percent(most), percent(exact.gap), "yes" if exact.proven else "no")
            lost = sum(map(len, exact.starving_without.values())), sum(map(len, rough.starving_without.values()))
            rows.append((f"{cameras} on {hosts}", seed, *row, percent(max(rough.utilisation.values())), *lost, s(wall)))
    columns = ("cameras", "seed", "busiest", "gap", "proven", "at 0 s", "starve after a loss", "at 0 s", "in")
    show("2. Small fleets, spare = 1", columns, rows)


def takeover(short: bool) -> None:
    fleet = unlike_fleet(12 if short else 1000, 3 if short else 100, 0.5, 0)
    placement = place(fleet, 0.2 if short else 1.0)
    plan = plan_of(fleet, placement)
    rows = []
    for count in (1, 2, len(fleet.hosts) // 2):
        lost = {host.name for host in fleet.hosts[:count]}
        alive = {host.name for host in fleet.hosts} - lost
        take_over(plan, placement.host_of, alive)
        best = 1e9
        for _ in range(5):
            began = time.perf_counter()
            then = take_over(plan, placement.host_of, alive)
            best = min(best, time.perf_counter() - began)
        homeless = sum(host in lost for host in placement.host_of.values())
        rows.append((count, homeless, len(placement.host_of) - len(then), f"{best * 1e3:.1f} ms"))
    show("3. A takeover", ("lost hosts", "cameras of them", "starve", "best of 5"), rows)


PARTS = {"large": large, "small": small, "takeover": takeover}


if __name__ == "__main__":
    run_parts(__doc__, PARTS)
