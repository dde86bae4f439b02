"""Fleets for tests and benchmarks, and what is known of them by trying everything.

Nothing here is shared with the planner. Next: tests/plugins/hosts/fleet/test_placement.py, benchmarks/fleet_plan.py.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

from tvm_pipeline_hosts.fleet.description import Camera, Fleet, Host

FULL = 1 + 1e-9
# Seconds for a frame of each model on a host of speed 1; speeds of hosts; frames a second of cameras.
MODELS = {"faces": 0.004, "plates": 0.010, "people": 0.020, "text": 0.050}
SPEEDS = (1, 2, 4, 8, 16)
RATES = (2.0, 5.0, 10.0, 15.0)


def unlike_fleet(cameras: int, hosts: int, level: float, seed: int, spare: int = 1, least_reach: int = 3) -> Fleet:
    """Return a fleet of hosts of five speeds, which differ by model and lack a tenth of the models.

    A camera has one or two models and is reached by `least_reach` to 30 hosts, two of which can take it without being
    busy for more than half of the time by it alone. All work is scaled, so that it would be `level` of all hosts if
    each camera were split over the hosts that reach it by their speed.
    """
    drawn = random.Random(seed)
    speeds = [drawn.choice(SPEEDS) for _ in range(hosts)]
    works = [
        {m: work / speed * drawn.uniform(0.7, 1.4) for m, work in MODELS.items() if drawn.random() < 0.9}
        for speed in speeds
    ]
    wanted: list[tuple[dict[str, float], list[int]]] = []
    load = [0.0] * hosts
    while len(wanted) < cameras:
        rates = {m: drawn.choice(RATES) for m in drawn.sample(list(MODELS), drawn.choice((1, 1, 2)))}
        reach = drawn.sample(range(hosts), min(hosts, drawn.randint(least_reach, 30)))
        able = [h for h in reach if rates.keys() <= works[h].keys()]
        if len(able) < 2:
            continue
        total = sum(speeds[h] for h in able)
        for host in able:
            load[host] += speeds[host] / total * sum(rate * works[host][m] for m, rate in rates.items())
        wanted.append((rates, reach))
    scale = level / (sum(load) / hosts)
    found = []
    for index, (rates, reach) in enumerate(wanted):
        shares = sorted(
            scale * sum(rate * works[h][m] for m, rate in rates.items())
            for h in reach
            if rates.keys() <= works[h].keys()
        )
        slower = min(1.0, 0.5 / shares[1])  # a camera that is too much for its hosts asks for fewer frames
        found.append(
            Camera(f"c{index}", "", {m: rate * slower for m, rate in rates.items()}, tuple(f"h{h}" for h in reach))
        )
    named = tuple(Host(f"h{i}", {m: scale * w for m, w in work.items()}) for i, work in enumerate(works))
    return Fleet(named, tuple(found), spare)


def may_take(host: Host, camera: Camera) -> bool:
    return (not camera.hosts or host.name in camera.hosts) and camera.rates_fps.keys() <= host.work_s.keys()


def share(host: Host, camera: Camera) -> float:
    return sum(rate * host.work_s[model] for model, rate in camera.rates_fps.items())


def loads(fleet: Fleet, host_of: Mapping[str, str]) -> dict[str, float]:
    """Return the load of each host."""
    found = {host.name: 0.0 for host in fleet.hosts}
    hosts = {host.name: host for host in fleet.hosts}
    for camera in fleet.cameras:
        if camera.name in host_of:
            found[host_of[camera.name]] += share(hosts[host_of[camera.name]], camera)
    return found


def fewest_left(cameras: Sequence[Camera], hosts: Sequence[Host], room: Mapping[str, float]) -> int:
    """Return how many of the cameras starve at least on hosts with this room, by trying all ways."""
    if not cameras:
        return 0
    first, rest = cameras[0], cameras[1:]
    least = 1 + fewest_left(rest, hosts, room)
    for host in hosts:
        if least == 0:
            break
        if may_take(host, first) and share(host, first) <= room[host.name]:
            least = min(least, fewest_left(rest, hosts, {**room, host.name: room[host.name] - share(host, first)}))
    return least


def lost_starving(fleet: Fleet, host_of: Mapping[str, str]) -> dict[str, int]:
    """Return the lost hosts, as `a+b` -> how many cameras starve then, by trying all ways to place those they had."""
    load = loads(fleet, host_of)
    found = {}
    for lost in itertools.combinations([host.name for host in fleet.hosts], fleet.spare) if fleet.spare else ():
        left = [host for host in fleet.hosts if host.name not in lost]
        cameras = [camera for camera in fleet.cameras if host_of.get(camera.name) in lost]
        found["+".join(lost)] = fewest_left(cameras, left, {host.name: FULL - load[host.name] for host in left})
    return found


def least_key(fleet: Fleet) -> tuple[int, int, float]:
    """Return by trying all ways the fewest that starve, now and after all losses, and the least greatest load."""
    choices = [[None, *(host.name for host in fleet.hosts if may_take(host, camera))] for camera in fleet.cameras]
    best: tuple[int, int, float] = (len(fleet.cameras) + 1, 0, 0.0)
    for chosen in itertools.product(*choices):
        host_of = {camera.name: host for camera, host in zip(fleet.cameras, chosen, strict=True) if host}
        starving = len(fleet.cameras) - len(host_of)
        most = max(loads(fleet, host_of).values())
        if starving > best[0] or most > FULL:
            continue
        key = (starving, sum(lost_starving(fleet, host_of).values()), most)
        best = min(best, key)
    return best
