"""Who would starve if hosts are lost, and placements of which fewer would.

Every set of `spare` hosts is tried with `reassigned`, the function that also takes over after a real loss: those in
place stay, the cameras of the lost hosts go where there is room. If the sets are more than MOST_SETS, those that extend
the worst smaller sets are tried, and random ones; a sentence says so.

Next: reassigning.py (the loops), placement.py, which weighs this against the greatest load.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline_hosts.fleet.fleet_arrays import FleetArrays, Floats, Indices
from tvm_pipeline_hosts.fleet.reassigning import NODES, left_by_losses, reassigned

# Sets of lost hosts that are tried: all up to MOST_SETS; else from each of the WORST smaller ones, and random ones.
MOST_SETS, WORST, RANDOM_SETS = 200_000, 100, 10_000
# Sets that the search for a better placement tries at every step, and its steps without a gain before it gives up.
FEW_SETS, PATIENCE = 300, 1500
# Nodes of the search of `reassigned` in each of these steps, where a rough answer serves.
FEW_NODES = 30


@dataclass(frozen=True, slots=True)
class Losses:
    """What the sets of lost hosts do to a placement.

    Attributes:
        sets: those that were tried, a row of indices of hosts each.
        starving: how many cameras starve without each.
        proven: whether it is the fewest, each.
        checked: how the sets were chosen, where not all were tried; else empty.
    """

    sets: Indices
    starving: Indices
    proven: NDArray[np.bool_]
    checked: str = ""

    @property
    def total(self) -> int:
        return int(self.starving.sum())


def tried_losses(arrays: FleetArrays, host_of: Indices, spare: int, seed: int) -> Losses:
    """Return who starves without each set of `spare` hosts; all sets where these are at most MOST_SETS."""
    load = arrays.load(host_of)
    size = len(load)
    if math.comb(size, spare) <= MOST_SETS:
        sets = np.array(list(itertools.combinations(range(size), spare)), np.int64).reshape(-1, spare)
        return Losses(sets, *left_by_losses(arrays.shares.options, load, host_of, sets, NODES))
    smaller = tried_losses(arrays, host_of, spare - 1, seed)
    worst = smaller.sets[np.argsort(-smaller.starving, kind="stable")[:WORST]]
    random = np.random.default_rng(seed)
    chosen = {tuple(sorted(random.choice(size, spare, replace=False).tolist())) for _ in range(RANDOM_SETS)}
    for row in worst.tolist():
        chosen |= {tuple(sorted((*row, host))) for host in range(size) if host not in row}
    sets = np.array(sorted(chosen), np.int64)
    checked = (
        f"of {math.comb(size, spare):,} sets of {spare} hosts {len(sets):,} were tried: those that extend the worst "
        "smaller sets, and random ones"
    )
    starving, proven = left_by_losses(arrays.shares.options, load, host_of, sets, NODES)
    return Losses(sets, starving, proven, checked)


def starving_cameras(arrays: FleetArrays, host_of: Indices, lost: Indices) -> list[int]:
    """Return the cameras that no host could take without these hosts."""
    now = arrays.load(host_of)
    now[lost] = np.inf
    cameras = np.flatnonzero(np.isin(host_of, lost))
    chosen, _ = reassigned(arrays.shares.options, now, cameras, NODES)
    return [int(camera) for camera, host in zip(cameras, chosen, strict=True) if host < 0]


class Repair:
    """The search for a placement that starves fewer cameras after losses.

    Cameras are moved that matter to a loss: one that would starve, or one on a host where it would find room. A move
    after which more would starve is taken back.

    Args:
        deadline: of `time.monotonic`.
        effort: the part of PATIENCE to have.
    """

    def __init__(self, arrays: FleetArrays, seed: int, deadline: float, effort: float = 1.0) -> None:
        self._arrays, self._share = arrays, arrays.share
        self._random = np.random.default_rng(seed)
        self._seed, self._deadline, self._patience = seed, deadline, int(PATIENCE * effort)

    def run(self, host_of: Indices, most: float) -> Indices:
        """Return a placement of the same cameras whose losses starve fewer; no load grows above `most`."""
        load = self._arrays.load(host_of)
        losses = self._losses(host_of)
        sets = self._watched(losses)
        idle = 0
        by_set = self._by_set(load, host_of, sets) if losses.total else np.zeros(len(sets), np.int64)
        while by_set.any() and idle < self._patience and time.monotonic() < self._deadline:
            idle += 1
            moved = self._moved(host_of, load, sets[self._random.choice(np.flatnonzero(by_set))], most)
            if moved is None:
                continue
            then = self._arrays.load(moved)
            found = self._by_set(then, moved, sets)
            if found.sum() < by_set.sum():
                idle = 0
            if found.sum() <= by_set.sum():
                host_of, load, by_set = moved, then, found
        return host_of

    def _losses(self, host_of: Indices) -> Losses:
        return tried_losses(self._arrays, host_of, self._arrays.fleet.spare, self._seed)

    def _watched(self, losses: Losses) -> Indices:
        """Return the sets that are tried at every step: the worst ones, and some of the others."""
        if len(losses.sets) <= FEW_SETS:
            return losses.sets
        order = np.argsort(-losses.starving, kind="stable")
        rest = self._random.choice(order[FEW_SETS // 2 :], FEW_SETS - FEW_SETS // 2, replace=False)
        chosen: Indices = losses.sets[np.concatenate([order[: FEW_SETS // 2], rest])]
        return chosen

    def _by_set(self, load: Floats, host_of: Indices, sets: Indices) -> Indices:
        found: Indices = left_by_losses(self._arrays.shares.options, load, host_of, sets, FEW_NODES)[0]
        return found

    def _moved(self, host_of: Indices, load: Floats, lost: Indices, most: float) -> Indices | None:
        """Return the placement after a random move or swap that bears on this loss; None where there was none."""
        random = self._random
        starving = starving_cameras(self._arrays, host_of, lost)
        if not starving:
            return None
        camera = int(random.choice(starving))
        others = np.flatnonzero(np.isfinite(self._share[camera]) & (np.arange(len(load)) != host_of[camera]))
        if not len(others):
            return None
        host = int(random.choice(others))
        there = np.flatnonzero(host_of == host)
        kind = random.integers(3)
        found = host_of.copy()
        if kind == 0 or not len(there):  # to be lost with other hosts
            found[camera] = host
        elif kind == 1:  # the two change places
            other = int(random.choice(there))
            found[camera], found[other] = host, host_of[camera]
        else:  # to leave room where it would go
            other = int(random.choice(there))
            away = np.flatnonzero(np.isfinite(self._share[other]))
            found[other] = int(random.choice(away))
            if random.integers(2):  # and another camera comes back from there
                back = np.flatnonzero((host_of == found[other]) & np.isfinite(self._share[:, host]))
                if len(back):
                    found[int(random.choice(back))] = host
        changed = np.flatnonzero(found != host_of)
        if not len(changed) or not np.isfinite(self._share[changed, found[changed]]).all():
            return None
        then = self._arrays.load(found)
        touched = np.unique(np.concatenate([found[changed], host_of[changed]]))
        return found if (then[touched] <= np.maximum(most, load[touched])).all() else None
