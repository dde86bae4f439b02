"""Who takes the cameras that have no host, while those that have one stay where they are.

    host_of = take_over(plan, host_of, alive={"attic", "barn"})

The coordinator asks this when hosts are lost, come back, or are told apart from a plan. It takes some milliseconds for
a thousand cameras, once `compile_loops` was called. Next: reassigning.py, the loops.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline_hosts.fleet.messages import FleetPlan
from tvm_pipeline_hosts.fleet.reassigning import FULL, NODES, Options, reassigned, share_of

# The plan of the last call with its arrays: a coordinator asks the same one again and again.
_last: list[tuple[FleetPlan, Shares]] = []


@dataclass(frozen=True, slots=True)
class Shares:
    """Cameras and hosts with what each camera adds to the load of each host, as arrays.

    Attributes:
        cameras, hosts: name -> index.
        options: see `reassigning.Options`.
    """

    cameras: Mapping[str, int]
    hosts: Mapping[str, int]
    options: Options

    def load(self, host_of: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the load of each host where these cameras are on these hosts; -1 is none."""
        load = np.zeros(len(self.hosts))
        for camera, host in enumerate(host_of):
            if host >= 0:
                load[host] += share_of(self.options, camera, host)
        return load


def shares(
    rates_fps: Mapping[str, Mapping[str, float]],
    work_s: Mapping[str, Mapping[str, float]],
    reach: Mapping[str, Sequence[str]],
) -> Shares:
    """Return the arrays of cameras and hosts.

    Args:
        rates_fps: camera -> model -> frames a second.
        work_s: host -> model -> seconds for a frame, see `description.Host`.
        reach: camera -> the hosts that reach it. Those that lack one of its models cannot take it.
    """
    hosts = {name: index for index, name in enumerate(work_s)}
    first, host, share = [0], [], []
    for camera, rates in rates_fps.items():
        for name in dict.fromkeys(reach[camera]):
            if name not in hosts or not rates.keys() <= work_s[name].keys():
                continue
            host.append(hosts[name])
            share.append(sum(rate * work_s[name][model] for model, rate in rates.items()))
        first.append(len(host))
    options = Options(np.array(first, np.int64), np.array(host, np.int64), np.array(share, np.float64))
    return Shares({name: index for index, name in enumerate(rates_fps)}, hosts, options)


def take_over(plan: FleetPlan, host_of: Mapping[str, str], alive: Collection[str]) -> dict[str, str]:
    """Return camera -> host for all cameras of the plan that can have one on the hosts that are alive.

    A camera stays on its host if that is alive, reaches it and has its models, however busy the host is. Of the others,
    as few as possible are left out, and no host that takes one works for more than each second. Those whose planned
    host is alive and has room go there, unless more would starve then; the rest goes where the loads stay low.

    Args:
        host_of: camera -> host, as it is now; cameras that the plan does not have are left out.
        alive: names of hosts; those that the plan does not have are ignored.
    """
    arrays = _arrays(plan)
    now = np.full(len(arrays.cameras), -1, np.int64)
    planned = now.copy()
    lost = np.array([name not in alive for name in arrays.hosts], np.bool_)
    for camera, index in arrays.cameras.items():
        for told, indices in ((host_of, now), (plan.host_of, planned)):
            host = arrays.hosts.get(told.get(camera, ""), -1)
            if host >= 0 and not lost[host] and np.isfinite(share_of(arrays.options, index, host)):
                indices[index] = host
    load = arrays.load(now)
    load[lost] = np.inf
    found = _with_planned(arrays, now, planned, load)
    hosts = list(arrays.hosts)
    return {camera: hosts[found[index]] for camera, index in arrays.cameras.items() if found[index] >= 0}


def compile_loops() -> None:
    """Have the loops of `take_over` ready: the first call of a process reads or compiles them, for some seconds."""
    one = np.zeros(1, np.int64)
    options = Options(np.array([0, 1]), one, np.full(1, 0.5))
    Shares({"": 0}, {"": 0}, options).load(one)
    reassigned(options, np.zeros(1), one, NODES)


def _with_planned(
    arrays: Shares, now: NDArray[np.int64], planned: NDArray[np.int64], load: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return a host for each camera: its own, its planned one where that has room, or another one; -1 for none."""
    options = arrays.options
    homeless = np.flatnonzero(now < 0)
    if not len(homeless):
        return now
    there: NDArray[np.int64] = now.copy()
    room = load.copy()
    for camera in map(int, homeless):
        host = int(planned[camera])
        if host >= 0 and (then := room[host] + share_of(options, camera, host)) <= FULL:
            there[camera], room[host] = host, then
    rest = np.flatnonzero(there < 0)
    if len(rest):
        there[rest] = reassigned(options, room, rest, NODES)[0]
    if (there < 0).any() and len(rest) < len(homeless):
        free: NDArray[np.int64] = now.copy()
        free[homeless] = reassigned(options, load, homeless, NODES)[0]
        if int((free < 0).sum()) < int((there < 0).sum()):
            return free
    return there


def _arrays(plan: FleetPlan) -> Shares:
    """Return the arrays of a plan, those of the last call where it is the same plan."""
    if _last and _last[0][0] is plan:
        return _last[0][1]
    found = shares({name: rates for name, (_, rates) in plan.cameras.items()}, plan.work_s, plan.reach)
    _last[:] = [(plan, found)]
    return found
