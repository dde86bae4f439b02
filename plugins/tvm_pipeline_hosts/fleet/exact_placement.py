"""The exact search for placements of small fleets, by CP-SAT.

Two searches, one after the other: the fewest cameras that starve, now and after losses, and then the least greatest
load of the placements that starve so few. Shares are whole numbers of PARTS of a second, rounded down, so that what the
solver proves holds for the true shares; a placement of the solver counts only as the true shares have it.

Next: placement_search.py, which asks for it at the end.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline.solvers.cpsat import library, search
from tvm_pipeline_hosts.fleet.fleet_arrays import FleetArrays, Indices
from tvm_pipeline_hosts.fleet.reassigning import FULL
from tvm_pipeline_hosts.fleet.spare_hosts import tried_losses

# The resolution of shares; and the largest model: pairs of camera and host, now and after each loss.
PARTS, MOST_PAIRS = 10_000_000, 6_000
# A bound so near is a proof: shares are rounded.
SURE = 1e-5

Key = tuple[int, int, float]


@dataclass(frozen=True, slots=True)
class ExactPlacement:
    """What the exact search found and proved.

    Attributes:
        key: how many starve in its placement, now and after all losses together, and its greatest load.
        bound: of the greatest load of all placements that starve so few.
        least_starving: no placement starves fewer now.
    """

    host_of: Indices
    key: Key
    bound: float
    least_starving: int
    proven: bool


def proven(arrays: FleetArrays, host_of: Indices, key: Key, deadline: float) -> ExactPlacement | None:
    """Return the best placement and its proof, as far as the time allows; None where the fleet is too large.

    Args:
        host_of, key: a placement to begin with.
        deadline: of `time.monotonic`.
    """
    spare, size = arrays.fleet.spare, arrays.share.shape[1]
    usable = arrays.share <= FULL
    pairs = int(usable.sum())
    if pairs * (1 + (math.comb(size, spare) if spare else 0)) > MOST_PAIRS or deadline <= time.monotonic():
        return None
    model = _Model(arrays, usable, list(itertools.combinations(range(size), spare)) if spare else [])
    half = time.monotonic() + (deadline - time.monotonic()) / 2
    weight = model.weight
    bound = 0
    for turn in range(0 if key[0] + key[1] else 1, 2):  # none can be fewer than none
        model.aim(None if turn == 0 else key)
        model.hint(host_of)
        answer = search(model.model, half if turn == 0 else deadline)
        if answer.solver is not None and (found := model.placement(answer.solver)) is not None:
            found_key = _key(arrays, found)
            if found_key < key:
                host_of, key = found, found_key
        if turn == 0:
            bound = max(0, math.ceil(answer.bound - 1e-6)) if answer.bound > 0 else 0
    least_load = max(0.0, answer.bound / PARTS) if math.isfinite(answer.bound) else 0.0
    sure = bound == key[0] * weight + key[1] and least_load >= key[2] * (1 - SURE)
    return ExactPlacement(host_of, key, min(least_load, key[2]), bound // weight, sure)


def _key(arrays: FleetArrays, host_of: Indices) -> Key:
    spare = arrays.fleet.spare
    lost = tried_losses(arrays, host_of, spare, 0).total if spare else 0
    return int((host_of < 0).sum()), lost, arrays.most(host_of)


class _Model:
    """The model of CP-SAT: which host takes each camera, and which after each loss.

    Attributes:
        weight: of a camera that starves now against one that starves after a loss.
    """

    def __init__(self, arrays: FleetArrays, usable: NDArray[np.bool_], losses: list[tuple[int, ...]]) -> None:
        self._arrays = arrays
        self.model = model = library().CpModel()
        count, size = usable.shape
        shares = np.where(usable, np.floor(np.where(usable, arrays.share, 0.0) * PARTS), 0).astype(np.int64)
        on = {(c, h): model.new_bool_var("") for c, h in zip(*map(np.ndarray.tolist, np.nonzero(usable)), strict=True)}
        self._on = on
        self.weight = count * (math.comb(size - 1, arrays.fleet.spare - 1) if losses else 1) + 1
        by_camera = [[h for h in range(size) if usable[c, h]] for c in range(count)]
        by_host = [[c for c in range(count) if usable[c, h]] for h in range(size)]
        for c in range(count):
            model.add_at_most_one([on[c, h] for h in by_camera[c]])
        self._loads = [sum(int(shares[c, h]) * on[c, h] for c in by_host[h]) for h in range(size)]
        for load in self._loads:
            model.add(load <= PARTS)
        self._starving = count - sum(on.values())
        self._lost: Any = 0
        for lost in losses:
            takes: list[list[Any]] = [[] for _ in range(size)]
            for c in range(count):
                gone = [on[c, h] for h in by_camera[c] if h in lost]
                if not gone:
                    continue
                new = {h: model.new_bool_var("") for h in by_camera[c] if h not in lost}
                model.add(sum(new.values()) <= sum(gone))
                self._lost += sum(gone) - sum(new.values())
                for h, variable in new.items():
                    takes[h].append(int(shares[c, h]) * variable)
            for h in range(size):
                if takes[h]:
                    model.add(self._loads[h] + sum(takes[h]) <= PARTS)

    def aim(self, key: Key | None) -> None:
        """Look for the fewest that starve, or for the least load with no more of them than this key has."""
        if key is None:
            self.model.minimize(self.weight * self._starving + self._lost)
            return
        most = self.model.new_int_var(0, PARTS, "most")
        for load in self._loads:
            self.model.add(load <= most)
        self.model.add(self._starving <= key[0])
        self.model.add(self._lost <= key[1])
        self.model.minimize(most)

    def hint(self, host_of: Indices) -> None:
        self.model.clear_hints()
        for (camera, host), variable in self._on.items():
            self.model.add_hint(variable, bool(host_of[camera] == host))

    def placement(self, solver: Any) -> Indices | None:
        """Return the solver's placement; None where a host would be too busy by the true shares."""
        found = np.full(len(self._arrays.share), -1, np.int64)
        for (camera, host), variable in self._on.items():
            if solver.boolean_value(variable):
                found[camera] = host
        return found if self._arrays.most(found) <= FULL else None
