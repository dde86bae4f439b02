"""The steps that find a placement, each of which improves on the one before until the time is over.

1. `relaxed_whole`  split cameras: a bound, and where most cameras go
2. `balanced`       moves and swaps of cameras, until the greatest load is near the bound; then the loads below it
3. `shed`           where the loads stay above 1: which cameras are left out
4. `spared`         room for the cameras of hosts that are lost
5. `proven`         CP-SAT for small fleets; for others `polished`, a greatest load as low as the time allows
6. `settled`        few cameras leave the hosts that they are on

Next: placement_bound.py, placement_loops.py, spare_hosts.py, exact_placement.py, which have what the steps need.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from tvm_pipeline_hosts.fleet.exact_placement import proven
from tvm_pipeline_hosts.fleet.fleet_arrays import FleetArrays, Floats, Indices, pairs_of
from tvm_pipeline_hosts.fleet.placement_bound import most_placed, relaxed, relaxed_whole
from tvm_pipeline_hosts.fleet.placement_loops import Aim, annealed
from tvm_pipeline_hosts.fleet.reassigning import FULL, NODES, Options, left_by_losses, reassigned
from tvm_pipeline_hosts.fleet.spare_hosts import Repair, tried_losses

# Steps of the calls of `annealed`: of the first ones, and of those after them, which become longer while nothing is
# gained; with `covers` a step takes some 50 times as long.
FIRST_STEPS, STEPS, MOST_STEPS, COVER_STEPS = 10_000_000, 300_000, 10_000_000, 200_000
# With fewer pairs of a camera and a host than this, the numbers of steps are smaller in proportion.
MANY_PAIRS = 2_000
# Temperatures, and the price of a move, relative to the usual share of a camera.
WARM, COLD, PRICE = 0.1, 0.002, 0.05
# A greatest load so near to the bound is good enough; the first targets, above the bound; and the next ones, between
# bound and load.
NEAR, FIRST_TARGETS, NEXT_TARGET = 0.002, (0.04, 0.03, 0.02), 0.7
# Steps that lower the greatest load again.
LOWERED = 4
# A load counts as lower only by this part.
LOWER = 1e-9
# Of the busiest host so many cameras are tried to be put elsewhere, the largest first.
LARGEST = 6
# Rounds that lower the loads of the hosts that are not the busiest, and the part of the time for all this.
EVEN_ROUNDS, BALANCE_TIME = 12, 0.5
# The greatest load may grow by these parts for the sake of cameras that would starve after a loss.
GROWN = (0.0, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 1.0)
# Cameras in place move only where the greatest load falls by more than this part, or for cameras that starve.
WORTH = 0.1
# Steps to squeeze in a camera, and cameras in a row for which that fails before the rest is left out.
SQUEEZE_STEPS, REFUSED = 2_000_000, 12


@dataclass(frozen=True, slots=True)
class Solution:
    """A placement with what is proven of it; see `description.Placement`."""

    host_of: Indices
    bound: float
    least_starving: int
    proven: bool = False


class Search:
    """A search for a placement of the cameras that some host could take alone."""

    def __init__(self, arrays: FleetArrays, deadline: float, seed: int) -> None:
        self.arrays, self.deadline, self.seed = arrays, deadline, seed
        self.cameras = np.flatnonzero(arrays.share.min(axis=1, initial=np.inf) <= FULL)
        # A host is no option for a camera that alone keeps it too busy; `_nowhere` is a host for none.
        self._share = np.where(arrays.share <= FULL, arrays.share, np.inf)
        usual = arrays.share[arrays.share <= FULL]
        # Small fleets need fewer steps.
        self.effort = min(1.0, len(usual) / MANY_PAIRS)
        self._usual = float(np.median(usual)) if len(usual) else 1.0
        self._random = np.array([np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] | 1], np.uint64)
        self._nowhere = np.full(len(arrays.share), -1, np.int64)

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def key(self, host_of: Indices) -> tuple[int, int, float]:
        """Return what placements are compared by, smaller is better."""
        starving = int((host_of < 0).sum())
        spare = self.arrays.fleet.spare
        lost = tried_losses(self.arrays, host_of, spare, self.seed).total if spare else 0
        return starving, lost, self.arrays.most(host_of)

    def anneal(
        self,
        host_of: Indices,
        target: Floats | float,
        *,
        steps: int = STEPS,
        below: float = math.inf,
        covers: bool = False,
        home: Indices | None = None,
        without: tuple[int, int] | None = None,
    ) -> tuple[Indices, bool]:
        """Return the placement that `annealed` makes of one, of the same cameras, and whether it reaches the aim.

        Args:
            target: for each host or for all, no load is to be above it.
            below: no camera goes to a host that it alone would load so much.
            without: a camera and a host that it is not to be on.
        """
        placed = np.flatnonzero(host_of >= 0)
        away = (self._nowhere if home is None else home)[placed]
        price = 0.0 if home is None else (PRICE * self._usual) ** 2
        there = host_of[placed].copy()
        share = np.where(self._share[placed] < below, self._share[placed], np.inf)
        rows = np.arange(len(placed))
        share[rows, there] = self._share[placed, there]
        if without is not None:
            share[placed == without[0], without[1]] = np.inf
        aim = Aim(np.broadcast_to(target, share.shape[1]).astype(np.float64), covers, price, away)
        temperatures = (WARM * self._usual) ** 2, (COLD * self._usual) ** 2
        reached = annealed(pairs_of(share), there, aim, *temperatures, int(steps * self.effort), self._random)
        found = self._nowhere.copy()
        found[placed] = there
        return found, bool(reached)

    def balanced(self, host_of: Indices, bound: float) -> Indices:
        """Return a placement of the same cameras whose greatest load is small, and then the loads below it.

        Simulated annealing leaves large cameras on slow hosts. So at first no camera goes to a host that it alone would
        load above the target, which falls from call to call. Then each large camera of the busiest host is forbidden to
        be there, one after the other, and the others are moved until they find room for it.
        """
        until = time.monotonic() + BALANCE_TIME * self.left_s
        for target in FIRST_TARGETS:
            limit = bound * (1 + target)
            found, reached = self.anneal(host_of, limit, steps=FIRST_STEPS, below=limit)
            if self.arrays.most(found) < self.arrays.most(host_of):
                host_of = found
            if not reached:
                break
        return self._evened(self._lowered(host_of, bound, until))

    def polished(self, host_of: Indices, bound: float) -> Indices:
        """Lower the greatest load in the time that is left, where no more cameras starve after losses."""
        return self._lowered(host_of, bound, self.deadline, self.key(host_of)[1])

    def _lowered(self, host_of: Indices, bound: float, until: float, lost: int | None = None) -> Indices:
        """Lower the greatest load until it is near the bound; with `lost`, no more cameras may starve after losses."""
        most, steps = self.arrays.most(host_of), STEPS
        while most > bound * (1 + NEAR) and time.monotonic() < until and steps <= MOST_STEPS:
            better = self._unburdened(host_of, most, bound + NEXT_TARGET * (most - bound), steps, until)
            if better is not None and lost is not None and self.key(better)[1] > lost:
                better = Repair(self.arrays, self.seed, until, self.effort).run(better, most * (1 - LOWER))
                if self.key(better) >= (*self.key(host_of)[:2], most):
                    better = None
            if better is None:
                steps *= 3
            else:
                host_of, most = better, self.arrays.most(better)
        return host_of

    def _unburdened(self, host_of: Indices, most: float, target: float, steps: int, until: float) -> Indices | None:
        """Return a placement with a smaller greatest load, as a camera has left the busiest host; None without."""
        load = self.arrays.load(host_of)
        host = int(load.argmax())
        there = np.flatnonzero(host_of == host)
        for camera in there[np.argsort(-self._share[there, host])][:LARGEST]:
            others = np.where(np.arange(len(load)) == host, np.inf, load + self._share[camera])
            if not np.isfinite(others).any() or time.monotonic() >= until:
                continue
            trial = host_of.copy()
            trial[camera] = int(others.argmin())
            found, _ = self.anneal(trial, target, steps=steps, below=most, without=(int(camera), host))
            if self.arrays.most(found) < most * (1 - LOWER):
                return found
        return None

    def _evened(self, host_of: Indices) -> Indices:
        """Lower the loads of the hosts that do not decide the greatest one: a loss then finds more room."""
        load = self.arrays.load(host_of)
        fixed = load >= 0.97 * load.max()
        for _ in range(EVEN_ROUNDS):
            if fixed.all() or self.left_s <= 0:
                break
            rest = 0.95 * load[~fixed].max()
            if rest <= 0:
                break
            found, reached = self.anneal(host_of, np.where(fixed, np.maximum(load, rest), rest))
            if not reached:
                fixed |= load > rest
                continue
            host_of, load = found, self.arrays.load(found)
        return host_of

    def shed(self) -> tuple[Indices, int]:
        """Return a placement with loads up to 1 that leaves out few cameras, and how few are left out at least."""
        share = self.arrays.share
        parts, at_most = most_placed(share[self.cameras])
        host_of = self._nowhere.copy()
        whole = parts.max(axis=1) > 1 - 1e-6
        host_of[self.cameras[whole]] = parts[whole].argmax(axis=1)
        load = self.arrays.load(host_of)
        for host in np.flatnonzero(load > FULL):  # equal hosts share what the relaxation gives to all of them
            there = np.flatnonzero(host_of == host)
            for camera in there[np.argsort(-share[there, host])]:
                if load[host] > FULL:
                    host_of[camera] = -1
                    load[host] -= share[camera, host]
        rest = self.cameras[host_of[self.cameras] < 0]
        host_of[rest] = reassigned(self.arrays.shares.options, load, rest, 50 * NODES)[0]
        rest = self.cameras[host_of[self.cameras] < 0]
        refused = 0
        for camera in rest[np.argsort(share[rest].min(axis=1))]:  # the smallest first, beside those that are placed
            if refused >= REFUSED or self.left_s <= 0 or (host_of[self.cameras] >= 0).sum() >= at_most:
                break
            trial = host_of.copy()
            trial[camera] = int((share[camera] + self.arrays.load(host_of)).argmin())
            found, reached = self.anneal(trial, 1.0, steps=SQUEEZE_STEPS)
            refused = 0 if reached else refused + 1
            host_of = found if reached else host_of
        return host_of, len(share) - at_most

    def spared(self, host_of: Indices) -> Indices:
        """Return a placement of the same cameras after whose losses fewer starve, at a load up to 1.

        The load may grow step by step; at the end it is lowered again as far as the same number starves.
        """
        best, best_key = host_of, self.key(host_of)
        low = most = best_key[2]
        for grown in GROWN:
            limit = min(1.0, most * (1 + grown))
            if not best_key[1] or self.left_s <= 0 or limit < most:
                break
            found, key = self._with_room(best, limit)
            if key < best_key:
                if key[1] < best_key[1]:
                    low = most * (1 + GROWN[max(0, GROWN.index(grown) - 1)])
                best, best_key = found, key
        for _ in range(LOWERED):
            limit = (low + best_key[2]) / 2
            if best_key[2] <= low * (1 + NEAR) or self.left_s <= 0:
                break
            found, key = self._with_room(best, limit)
            if key < best_key:
                best, best_key = found, key
            else:
                low = limit
        return best

    def _with_room(self, host_of: Indices, limit: float) -> tuple[Indices, tuple[int, int, float]]:
        """Return a placement with loads up to the limit, where that is possible, that leaves room for losses."""
        trial, _ = self.anneal(host_of, limit, covers=True, steps=COVER_STEPS, below=limit * (1 + LOWER))
        start = trial if self.arrays.most(trial) <= limit * (1 + LOWER) else host_of
        found = Repair(self.arrays, self.seed, self.deadline, self.effort).run(start, limit)
        return found, self.key(found)

    def settled(self, host_of: Indices, before: Indices) -> Indices:
        """Return a placement in which few cameras leave the host of `before`.

        It starves no more than the given one, and its greatest load is hardly greater, see WORTH.
        """
        key = self.key(host_of)
        limit = min(FULL, key[2] / (1 - WORTH))
        stay = self._with_new(before)
        best, fewest = host_of, self._moved(host_of, before)
        covers = self.arrays.fleet.spare > 0
        steps = COVER_STEPS if covers else FIRST_STEPS
        for start in (stay, host_of):
            if (start < 0).sum() > (host_of < 0).sum():
                continue
            for annealed_first in (False, True):
                if not fewest:
                    return best
                found = start
                if annealed_first:
                    found, _ = self.anneal(start, limit, covers=covers, steps=steps, home=before)
                found_key = self.key(found)
                if found_key[1] > key[1]:
                    found = Repair(self.arrays, self.seed, self.deadline, self.effort).run(found, limit)
                    found_key = self.key(found)
                good = found_key[:2] <= key[:2] and found_key[2] <= limit
                if good and self._moved(found, before) < fewest:
                    best, fewest = found, self._moved(found, before)
        return best

    def _with_new(self, before: Indices) -> Indices:
        """Return `before` with a host for the cameras that had none, where there is room."""
        found: Indices = before.copy()
        rest = self.cameras[before[self.cameras] < 0]
        found[rest] = reassigned(self.arrays.shares.options, self.arrays.load(before), rest, NODES)[0]
        return found

    def _moved(self, host_of: Indices, before: Indices) -> int:
        return int(((before >= 0) & (before != host_of)).sum())


def compile_loops() -> None:
    """Have the loops ready: the first call of an installation compiles them, and others read them from the disk."""
    one = np.zeros(1, np.int64)
    options = Options(np.array([0, 1]), one, np.full(1, 0.5))
    left_by_losses(options, np.full(1, 0.5), one, np.zeros((1, 1), np.int64), 1)
    aim = Aim(np.ones(1), False, 0.0, one)
    annealed(pairs_of(np.full((1, 1), 0.5)), one.copy(), aim, 1.0, 0.5, 1, np.ones(1, np.uint64))


def searched(arrays: FleetArrays, deadline: float, seed: int, before: Indices) -> Solution:
    """Return the best placement that is found until the deadline (of `time.monotonic`), and its bounds.

    Args:
        before: the host of each camera now, -1 for none.
    """
    search = Search(arrays, deadline, seed)
    cameras, count = search.cameras, len(arrays.share)
    if not len(cameras):
        return Solution(np.full(count, -1, np.int64), 0.0, count, True)
    share = np.where(arrays.share <= FULL, arrays.share, np.inf)[cameras]
    first = relaxed_whole(share)
    host_of = np.full(count, -1, np.int64)
    host_of[cameras] = np.where(first.parts.max(axis=1) > 0, first.parts.argmax(axis=1), share.argmin(axis=1))
    least_starving = count - len(cameras)
    if first.bound <= FULL:  # else not all can have a host
        host_of = search.balanced(host_of, first.bound)
    if arrays.most(host_of) > FULL:
        host_of, at_least = search.shed()
        least_starving = max(least_starving, at_least)
        host_of = search.balanced(host_of, min(first.bound, 0.9))
    placed = int((host_of >= 0).sum())
    best = arrays.most(host_of)
    if placed == len(cameras):
        bound = min(best, max(first.bound, relaxed(share, best).bound))
    else:
        bound = relaxed(share, best, placed).bound
    if arrays.fleet.spare:
        host_of = search.spared(host_of)
    exact = proven(arrays, host_of, search.key(host_of), deadline)
    if exact is not None:
        host_of, bound, least_starving = (
            exact.host_of,
            max(bound, exact.bound),
            max(least_starving, exact.least_starving),
        )
    if exact is None:
        host_of = search.polished(host_of, bound)
    if (before >= 0).any():
        host_of = search.settled(host_of, before)
    is_proven = exact is not None and exact.proven and search.key(host_of)[:2] == exact.key[:2]
    return Solution(host_of, bound, least_starving, is_proven)
