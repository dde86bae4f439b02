"""The planner of a fleet: which host takes which camera.

    placement = place(fleet)

All models of a camera run on one of the hosts that reach it. Read next: placement_search.py, which has the steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from tvm_pipeline_hosts.fleet.description import Camera, Fleet, Placement
from tvm_pipeline_hosts.fleet.fleet_arrays import FleetArrays, Indices
from tvm_pipeline_hosts.fleet.placement_search import Solution, compile_loops, searched
from tvm_pipeline_hosts.fleet.reassigning import FULL
from tvm_pipeline_hosts.fleet.spare_hosts import starving_cameras, tried_losses

# Sets of lost hosts that a placement tells at most; those that starve most come first.
MOST_TOLD = 1000


def place(
    fleet: Fleet, time_limit_s: float = 20.0, seed: int = 0, before: Mapping[str, str] | None = None
) -> Placement:
    """Return which host takes which camera.

    Of all placements in which no host works for more than each second, those are better that leave fewer cameras
    without a host; of these, those after whose losses of `Fleet.spare` hosts fewer cameras starve, added up over all
    sets of hosts; of these, those with the smaller greatest utilisation. After a loss the cameras in place stay, see
    `takeover.take_over`.

    What is exact: the utilisation, and the `bound`. Who starves after a loss is tried with the function that takes over
    after a real one, for each set of hosts up to `spare_hosts.MOST_SETS` of them; a note says where that is not all, or
    where it is not proven that no fewer need starve. Placements of small fleets are proven to be the best by CP-SAT,
    see `Placement.proven`; those of large ones are the best that were found.

    Args:
        time_limit_s: seconds to search; a result comes also at 0. The first call of an installation takes some seconds
            more, to compile the loops.
        seed: of the random numbers.
        before: camera -> host, where the cameras are now. They stay where they are unless that starves a camera or
            another placement lowers the greatest utilisation by more than `placement_search.WORTH`, a tenth. Then few
            move: the greatest utilisation may be up to a tenth above that of the best placement found.
    """
    arrays = FleetArrays.of(fleet)
    compile_loops()
    deadline = time.monotonic() + time_limit_s
    found = searched(arrays, deadline, seed, _indices(arrays, before or {}))
    return _named(arrays, found, seed, before)


def _indices(arrays: FleetArrays, host_of: Mapping[str, str]) -> Indices:
    """Return the host of each camera where the fleet has both and the host can take it; -1 else."""
    found = np.full(len(arrays.shares.cameras), -1, np.int64)
    for camera, index in arrays.shares.cameras.items():
        host = arrays.shares.hosts.get(host_of.get(camera, ""), -1)
        if host >= 0 and np.isfinite(arrays.share[index, host]):
            found[index] = host
    return found


def _named(arrays: FleetArrays, found: Solution, seed: int, before: Mapping[str, str] | None) -> Placement:
    """Return a placement with its names, and its reasons."""
    fleet, host_of = arrays.fleet, found.host_of
    load = arrays.load(host_of)
    names = [host.name for host in fleet.hosts]
    notes = []
    without: dict[str, tuple[str, ...]] = {}
    if fleet.spare:
        losses = tried_losses(arrays, host_of, fleet.spare, seed)
        if losses.checked:
            notes.append(losses.checked)
        starved = np.flatnonzero(losses.starving)
        if len(starved) > MOST_TOLD:
            notes.append(f"{len(starved):,} sets of hosts starve a camera if they are lost; the worst are named")
            starved = np.argsort(-losses.starving, kind="stable")[:MOST_TOLD]
        for row in starved:
            cameras = starving_cameras(arrays, host_of, losses.sets[row])
            without["+".join(names[host] for host in losses.sets[row])] = tuple(
                fleet.cameras[camera].name for camera in cameras
            )
        if not losses.proven.all():
            notes.append(
                f"of {(~losses.proven).sum()} sets of lost hosts it is not proven that no fewer cameras need starve"
            )
    told = {camera.name: names[host_of[index]] for index, camera in enumerate(fleet.cameras) if host_of[index] >= 0}
    return Placement(
        told,
        {name: float(load[index]) for index, name in enumerate(names)},
        found.bound,
        {camera.name: _why(arrays, camera, index) for index, camera in enumerate(fleet.cameras) if host_of[index] < 0},
        without,
        least_starving=found.least_starving,
        proven=found.proven,
        moved=tuple(camera for camera, host in (before or {}).items() if told.get(camera, host) != host),
        notes=tuple(notes),
    )


def _why(arrays: FleetArrays, camera: Camera, index: int) -> str:
    """Return why a camera has no host."""
    fleet = arrays.fleet
    reached = [host for host in fleet.hosts if not camera.hosts or host.name in camera.hosts]
    if not reached:
        return "no host of the fleet reaches it"
    whom = f"of its {len(reached)} hosts" if camera.hosts else f"of the {len(reached)} hosts"
    for model in camera.rates_fps:
        if not any(model in host.work_s for host in reached):
            return f"none {whom} can run {model}"
    share = arrays.share[index]
    if not np.isfinite(share).any():
        return f"none {whom} can run all of {', '.join(camera.rates_fps)}"
    best = int(share.argmin())
    if share[best] > FULL:
        rates = ", ".join(f"{model}@{rate:g}" for model, rate in camera.rates_fps.items())
        return f"{rates} needs {share[best]:.0%} of {fleet.hosts[best].name}, the fastest {whom}; lower its rate"
    fitting = int((share <= FULL).sum())
    return (
        f"no room: {fitting} {whom} could take it and are busy with others; it needs {share[best]:.0%} of the fastest"
    )
