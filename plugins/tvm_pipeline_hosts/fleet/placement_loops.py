"""The compiled loops of the planner: simulated annealing over moves and swaps of cameras.

What is to vanish are squares: of what each host's load is above its *target*, which placement_search.py lowers from
call to call, and where hosts may be lost, of what each camera *lacks*: the room that is missing for it on the best of
its other hosts. That is a condition on single cameras; spare_hosts.py tries whole losses.

Cameras may have a *home*, the host of an earlier placement; with a price on those that are elsewhere, the loops bring
cameras home as long as all else holds. Next: placement_search.py, which calls them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline.solvers.hot import draw, hot

# What is added to every lack, since a small one, too, leaves a camera without a host.
EVERY_LACK = 0.02


class Aim(NamedTuple):
    """What `annealed` looks for.

    Attributes:
        target: of each host; no load is to be above it.
        covers: whether each camera is to find room on another host.
        price: of a camera that is not at home, in squares of load; 0 ends the search at the first success.
        home: of each camera, -1 for none.
    """

    target: NDArray[np.float64]
    covers: bool
    price: float
    home: NDArray[np.int64]


class Pairs(NamedTuple):
    """Which camera can be on which host.

    Attributes:
        first, hosts: the hosts of camera c are hosts[first[c]:first[c + 1]].
        begin, cameras: the cameras of host h are cameras[begin[h]:begin[h + 1]].
        share: cameras x hosts, inf where the host cannot take the camera.
    """

    first: NDArray[np.int64]
    hosts: NDArray[np.int64]
    begin: NDArray[np.int64]
    cameras: NDArray[np.int64]
    share: NDArray[np.float64]


@hot
def above(load: Any, target: Any) -> Any:
    """Return the square of what a load is above the target."""
    over = load - target
    return over * over if over > 0.0 else 0.0


@hot
def lack(pairs: Any, load: Any, camera: Any, host: Any) -> Any:
    """Return the square of what a camera lacks if its host is lost; 0 where another host has room, or never can."""
    least = np.inf
    for k in range(pairs.first[camera], pairs.first[camera + 1]):
        other = pairs.hosts[k]
        if other != host:
            over = load[other] + pairs.share[camera, other] - 1.0
            if over <= 0.0:
                return 0.0
            least = min(least, over)
    return 0.0 if least == np.inf else (least + EVERY_LACK) ** 2


@hot
def relacked(pairs: Any, load: Any, host_of: Any, lacks: Any, host: Any, old: Any, olds: Any, size: Any) -> Any:
    """Compute anew what the cameras of a host lack; return the change of the sum, and append what was to the lists."""
    change = 0.0
    for k in range(pairs.begin[host], pairs.begin[host + 1]):
        camera = pairs.cameras[k]
        then = lack(pairs, load, camera, host_of[camera])
        if then != lacks[camera]:
            change += then - lacks[camera]
            old[size], olds[size] = camera, lacks[camera]
            size += 1
            lacks[camera] = then
    return change, size


@hot
def move(places: Any, on: Any, counts: Any, host_of: Any, camera: Any, to: Any) -> None:
    """Put a camera on another host, also in the lists by host: `on[host, :counts[host]]`, it being at `places`."""
    host = host_of[camera]
    last = on[host, counts[host] - 1]
    on[host, places[camera]] = last
    places[last] = places[camera]
    counts[host] -= 1
    on[to, counts[to]] = camera
    places[camera] = counts[to]
    counts[to] += 1
    host_of[camera] = to


@hot
def copy_into(there: Any, array: Any) -> None:
    """Copy an array into one of the same length; numba compiles `there[:] = array` for seconds, with its error."""
    for index in range(len(array)):
        there[index] = array[index]


@hot
def annealed(pairs: Any, host_of: Any, aim: Any, warm: float, cold: float, steps: int, random: Any) -> Any:
    """Move and swap cameras until the aim is reached; return whether it was, and change `host_of`.

    With a price go on to the last step, and leave the placement with the fewest cameras that are not at home, of those
    that reach the rest of the aim.

    Args:
        host_of: of each camera; each has one.
        warm, cold: the temperatures of the first and the last step, in squares of load.
    """
    share, target, home = pairs.share, aim.target, aim.home
    count, size = share.shape
    load = np.zeros(size)
    on = np.empty((size, count), np.int32)
    counts = np.zeros(size, np.int64)
    places = np.empty(count, np.int64)
    away = 0
    for camera in range(count):
        host = host_of[camera]
        load[host] += share[camera, host]
        on[host, counts[host]] = camera
        places[camera] = counts[host]
        counts[host] += 1
        away += home[camera] >= 0 and home[camera] != host
    crowded = 0
    for host in range(size):
        crowded += load[host] > target[host]
    lacks, total = np.zeros(count), 0.0
    old, olds = np.empty(2 * count, np.int64), np.empty(2 * count)
    if aim.covers:
        for camera in range(count):
            lacks[camera] = lack(pairs, load, camera, host_of[camera])
            total += lacks[camera]
    best = host_of.copy()
    kept, fewest = crowded == 0 and total < 1e-12, away
    cooling = (cold / warm) ** (1.0 / max(1, steps // 1000))
    temperature = warm
    for step in range(steps):
        if kept and (aim.price == 0.0 or fewest == 0):
            break
        if step % 1000 == 999:
            temperature *= cooling
        camera = draw(random, count)
        host = host_of[camera]
        if aim.price > 0.0 and home[camera] >= 0 and home[camera] != host and draw(random, 2):
            to = home[camera]
        else:
            to = pairs.hosts[pairs.first[camera] + draw(random, pairs.first[camera + 1] - pairs.first[camera])]
        if to == host:
            continue
        less, more = load[host] - share[camera, host], load[to] + share[camera, to]
        turned = np.int64(home[camera] == host) - np.int64(home[camera] == to)
        other = np.int64(-1)
        if counts[to] and draw(random, 2):
            other = np.int64(on[to, draw(random, counts[to])])
            if share[other, host] == np.inf:
                continue
            less += share[other, host]
            more -= share[other, to]
            turned += np.int64(home[other] == to) - np.int64(home[other] == host)
        worse = above(less, target[host]) - above(load[host], target[host])
        worse += above(more, target[to]) - above(load[to], target[to])
        worse += aim.price * turned
        allowed = -temperature * math.log((draw(random, 1 << 30) + 1.0) / (1 << 30))
        if worse - total > allowed:
            continue
        was_less, was_more = load[host], load[to]
        load[host], load[to] = less, more
        move(places, on, counts, host_of, camera, to)
        if other >= 0:
            move(places, on, counts, host_of, other, host)
        if aim.covers:
            change, changes = relacked(pairs, load, host_of, lacks, host, old, olds, 0)
            second, changes = relacked(pairs, load, host_of, lacks, to, old, olds, changes)
            if worse + change + second > allowed:
                for k in range(changes - 1, -1, -1):
                    lacks[old[k]] = olds[k]
                load[host], load[to] = was_less, was_more
                move(places, on, counts, host_of, camera, host)
                if other >= 0:
                    move(places, on, counts, host_of, other, to)
                continue
            total += change + second
        crowded += np.int64(less > target[host]) + np.int64(more > target[to])
        crowded -= np.int64(was_less > target[host]) + np.int64(was_more > target[to])
        away += turned
        if crowded == 0 and total < 1e-12 and (not kept or away < fewest):
            kept, fewest = True, away
            copy_into(best, host_of)
    if kept:
        copy_into(host_of, best)
    return kept
