"""The compiled loops that give cameras without a host to hosts that have room, while all others stay where they are.

What the coordinator does after a loss, and what the planner counts on when it says that a host may be lost, is this one
function, `reassigned`. Cameras and hosts are indices here. A camera's *share* of a host is the part of each second for
which the host's busiest device works for it; the shares of a host add up to its load, and at a load of 1 it is full.

Next: takeover.py, which calls it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline.solvers.hot import hot

FULL = 1.0 + 1e-9
# Steps of the search for fewer starving cameras, some microseconds each; the search ends at once where all have room.
NODES = 2_000


class Options(NamedTuple):
    """The hosts that can take each camera: those of camera c have the indices first[c] to first[c + 1].

    Attributes:
        host: index of a host.
        share: what the camera adds to that host's load.
    """

    first: NDArray[np.int64]
    host: NDArray[np.int64]
    share: NDArray[np.float64]


@hot
def roomiest(options: Any, load: Any, camera: int) -> Any:
    """Return the host on which the camera leaves the least load, -1 without room; that load, and the second least."""
    at, low, second = -1, np.inf, np.inf
    for k in range(options.first[camera], options.first[camera + 1]):
        then = load[options.host[k]] + options.share[k]
        if then > FULL:
            continue
        if then < low:
            at, low, second = options.host[k], then, low
        elif then < second:
            second = then
    return at, low, second


@hot
def share_of(options: Any, camera: int, host: int) -> Any:
    """Return what the camera adds to the host's load; inf where the host cannot take it."""
    for k in range(options.first[camera], options.first[camera + 1]):
        if options.host[k] == host:
            return options.share[k]
    return np.inf


@hot
def by_regret(options: Any, load: Any, cameras: Any, chosen: Any) -> Any:
    """Place the cameras one by one, first the one that would lose most by waiting; return how many starve.

    Write the hosts to `chosen`, and add the shares to `load`.
    """
    count = len(cameras)
    at = np.empty(count, np.int64)
    low = np.empty(count)
    second = np.empty(count)
    for i in range(count):
        at[i], low[i], second[i] = roomiest(options, load, cameras[i])
        chosen[i] = -2
    starving = 0
    for _ in range(count):
        best, most = -1, -1.0
        for i in range(count):
            if chosen[i] != -2:
                continue
            if at[i] < 0:  # it never will have room, since loads only grow
                chosen[i] = -1
                starving += 1
                continue
            # A camera with one host left comes before all others; of equal ones the largest does.
            regret = (min(second[i], 3.0) - low[i]) + 1e-3 * low[i]
            if regret > most:
                best, most = i, regret
        if best < 0:
            break
        host = at[best]
        chosen[best] = host
        load[host] = low[best]
        for i in range(count):
            if chosen[i] == -2 and (at[i] == host or second[i] < 3.0):
                at[i], low[i], second[i] = roomiest(options, load, cameras[i])
    return starving


@hot
def insert(keys: Any, values: Any, count: Any, key: Any, value: Any) -> None:
    """Put a value among the first `count`, which are in the order of their keys; numba compiles a sort for seconds."""
    place = count
    while place > 0 and keys[place - 1] > key:
        keys[place], values[place] = keys[place - 1], values[place - 1]
        place -= 1
    keys[place], values[place] = key, value


@hot
def fewest_starving(options: Any, load: Any, cameras: Any, chosen: Any, starving: int, nodes: int) -> Any:
    """Search all ways to place the cameras for one that starves fewer; return whether the search came to its end.

    Depth first; a branch is left where it cannot starve fewer than `chosen`, which is replaced by what is better.
    """
    count = len(cameras)
    sizes, order = np.empty(count), np.empty(count, np.int64)
    for i in range(count):  # those with the fewest hosts first, of equal ones the largest
        fitting, least = 0, np.inf
        for k in range(options.first[cameras[i]], options.first[cameras[i] + 1]):
            if load[options.host[k]] + options.share[k] <= FULL:
                fitting += 1
                least = min(least, options.share[k])
        insert(sizes, order, i, fitting - min(least, 1.0) if fitting else 1e9, i)
    now = load.copy()
    widest = 1
    for i in range(count):
        widest = max(widest, options.first[cameras[i] + 1] - options.first[cameras[i]])
    branch = np.zeros((count, widest + 1), np.int64)  # entries of options, the roomiest host first; -1 is to starve
    branches = np.zeros(count, np.int64)
    then = np.empty(widest)
    tried = np.zeros(count, np.int64)
    starved = np.zeros(count + 1, np.int64)
    depth, entering = 0, True
    while depth >= 0:
        if entering:
            nodes -= 1
            if nodes < 0:
                return False
            left = starved[depth]  # those that certainly starve in this branch
            for j in range(depth, count):
                if roomiest(options, now, cameras[order[j]])[0] < 0:
                    left += 1
            if left >= starving:
                depth -= 1
                entering = False
                continue
            if depth == count:
                starving = starved[depth]
                for j in range(count):
                    k = branch[j, tried[j] - 1]
                    chosen[order[j]] = options.host[k] if k >= 0 else -1
                depth -= 1
                entering = False
                continue
            camera = cameras[order[depth]]
            fitting = 0
            for k in range(options.first[camera], options.first[camera + 1]):
                load_then = now[options.host[k]] + options.share[k]
                if load_then <= FULL:
                    insert(then, branch[depth], fitting, load_then, k)
                    fitting += 1
            branch[depth, fitting] = -1
            branches[depth] = fitting + 1
            tried[depth] = 0
        else:  # take back what was tried
            k = branch[depth, tried[depth] - 1]
            if k >= 0:
                now[options.host[k]] -= options.share[k]
        if tried[depth] == branches[depth]:
            depth -= 1
            entering = False
            continue
        k = branch[depth, tried[depth]]
        tried[depth] += 1
        starved[depth + 1] = starved[depth] + (k < 0)
        if k >= 0:
            now[options.host[k]] += options.share[k]
        depth += 1
        entering = True
    return True


@hot
def evened(options: Any, load: Any, cameras: Any, chosen: Any) -> None:
    """Move the cameras between hosts as long as that lowers the greatest load of a host that has one of them."""
    count = len(cameras)
    for _ in range(4 * count):
        worst, most = -1, 0.0
        for i in range(count):
            if chosen[i] >= 0 and load[chosen[i]] > most:
                worst, most = chosen[i], load[chosen[i]]
        best, least, to = -1, most - 1e-9, -1
        for i in range(count):
            if chosen[i] != worst or worst < 0:
                continue
            for k in range(options.first[cameras[i]], options.first[cameras[i] + 1]):
                then = load[options.host[k]] + options.share[k]
                if options.host[k] != worst and then < least:
                    best, least, to = i, then, options.host[k]
        if best < 0:
            return
        load[worst] -= share_of(options, cameras[best], worst)
        load[to] = least
        chosen[best] = to


@hot
def reassigned(options: Any, load: Any, cameras: Any, nodes: int) -> Any:
    """Return a host for each of these cameras, -1 for those that starve, and whether no choice starves fewer.

    First the fewest starve. Then the greatest load is small, which is not proven.

    Args:
        options: see Options.
        load: of each host, without these cameras; inf for a host that is lost.
        cameras: indices of the cameras that need a host.
        nodes: how long to search for fewer starving cameras, see NODES.
    """
    chosen = np.full(len(cameras), -1, np.int64)
    now = load.copy()
    without_room = 0
    for camera in cameras:
        if roomiest(options, now, camera)[0] < 0:
            without_room += 1
    starving = by_regret(options, now, cameras, chosen)
    proven = starving == without_room
    if not proven:
        proven = fewest_starving(options, load, cameras, chosen, starving, nodes)
        now = load.copy()
        for i in range(len(cameras)):
            if chosen[i] >= 0:
                now[chosen[i]] += share_of(options, cameras[i], chosen[i])
    evened(options, now, cameras, chosen)
    return chosen, proven


@hot
def left_by_losses(options: Any, load: Any, host_of: Any, losses: Any, nodes: int) -> Any:
    """Return for each set of lost hosts, a row of `losses`, how many cameras starve, and whether that is the fewest.

    Args:
        host_of: of each camera, -1 where it has none.
    """
    starving = np.zeros(len(losses), np.int64)
    proven = np.ones(len(losses), np.bool_)
    count = np.zeros(len(load) + 1, np.int64)
    for host in host_of:
        count[host + 1] += 1
    end = count.copy()
    for host in range(1, len(end)):
        end[host] += end[host - 1]
    on = np.empty(len(host_of), np.int64)  # cameras by host, those without a host first
    for camera in range(len(host_of) - 1, -1, -1):
        end[host_of[camera] + 1] -= 1
        on[end[host_of[camera] + 1]] = camera
    for row in range(len(losses)):
        now = load.copy()
        size = 0
        for host in losses[row]:
            now[host] = np.inf
            size += count[host + 1]
        cameras = np.empty(size, np.int64)
        size = 0
        for host in losses[row]:
            for k in range(end[host + 1], end[host + 1] + count[host + 1]):
                cameras[size] = on[k]
                size += 1
        chosen, proven[row] = reassigned(options, now, cameras, nodes)
        for host in chosen:
            starving[row] += host < 0
    return starving, proven
