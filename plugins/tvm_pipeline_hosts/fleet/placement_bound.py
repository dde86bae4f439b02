"""What no placement can beat: the least greatest load, and how many cameras starve at least, by linear relaxation.

A camera may be split over hosts here, but not over hosts that it alone would load too much, see `relaxed_whole`. Hosts
that are equal to every camera are one host of several times the room.

The bound of the load does not lean on the solver's precision. For weights w of the hosts, not negative and 1 together,
the greatest load is at least the sum of w times load, hence at least the sum over the cameras of their least w times
share. The dual values of the relaxation are such weights, and the best ones; the sum is computed from them here.

Next: placement.py, which compares a placement with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline.solvers.ortools_parts import part

Floats = NDArray[np.float64]
# The precision to which the solver's sum of cameras is trusted when it is rounded to a whole number.
SURE = 1e-5
# By this part a load grows from trial to trial of `relaxed_whole`.
STEP = 0.04


@dataclass(frozen=True, slots=True)
class RelaxedPlacement:
    """A placement of split cameras.

    Attributes:
        parts: cameras x hosts; the part of a camera that a host has.
        bound: of the greatest load of every placement.
    """

    parts: Floats
    bound: float


def relaxed(share: Floats, below: float = math.inf, placed: int | None = None) -> RelaxedPlacement:
    """Return the placement of split cameras with the least greatest load.

    Args:
        share: cameras x hosts, inf where the host cannot take the camera; each camera has a host.
        below: a greatest load that is known; the bound is at most this, and no host takes a camera that has such a
            share of it.
        placed: how many cameras have a host at least; all without it.
    """
    usable = np.where(share < below, share, np.inf)
    if placed is None and np.isinf(usable).all(axis=1).any():
        return RelaxedPlacement(np.zeros_like(share), below)
    groups, sizes = _groups(usable)
    solver, parts, rooms = _model(usable[:, groups], None if placed is None else placed)
    most = solver.NumVar(0.0, solver.infinity(), "most")
    for room, size in zip(rooms, sizes, strict=True):
        room.SetCoefficient(most, -float(size))
        room.SetUb(0.0)
    solver.Minimize(most)
    if solver.Solve() != solver.OPTIMAL:
        return RelaxedPlacement(np.zeros_like(share), _simple(usable, placed, below))
    weights = np.maximum([-room.dual_value() for room in rooms], 0.0)
    weights /= max(float(weights @ sizes), 1e-300)
    found = np.zeros_like(share)
    spread = _spread(usable, groups)
    for (camera, group), variable in parts.items():
        found[camera, spread[group]] = variable.solution_value() / len(spread[group])
    bound = max(_simple(usable, placed, below), _weighed(usable[:, groups], weights, placed))
    return RelaxedPlacement(found, min(below, bound))


def relaxed_whole(share: Floats) -> RelaxedPlacement:
    """Return the placement of split cameras where no host takes a camera that alone would make it too busy.

    `relaxed` puts parts of large cameras on slow hosts, which could not take them whole. A placement with all loads
    below T has no camera on a host that it alone loads with T or more. So where the relaxation without these hosts
    gives T or more, T is a bound. T grows until it gives less. Lenstra, Shmoys, Tardos, "Approximation algorithms for
    scheduling unrelated parallel machines", Mathematical Programming 46, 1990.

    Args:
        share: see `relaxed`.
    """
    bound = relaxed(share).bound
    while True:
        below = bound * (1 + STEP)
        found = relaxed(share, below)
        if found.bound < below or below <= 0:
            return RelaxedPlacement(found.parts, max(bound, found.bound))
        bound = below


def most_placed(share: Floats) -> tuple[Floats, int]:
    """Return the parts where as many cameras as possible have a host and no load is above 1, and their whole number."""
    usable = np.where(share <= 1.0 + 1e-9, share, np.inf)
    groups, sizes = _groups(usable)
    solver, parts, rooms = _model(usable[:, groups], 0)
    for room, size in zip(rooms, sizes, strict=True):
        room.SetUb(float(size))
    objective = solver.Objective()
    for variable in parts.values():
        objective.SetCoefficient(variable, 1.0)
    objective.SetMaximization()
    found = np.zeros_like(share)
    if solver.Solve() != solver.OPTIMAL:
        return found, int(np.isfinite(usable).any(axis=1).sum())
    spread = _spread(usable, groups)
    for (camera, group), variable in parts.items():
        found[camera, spread[group]] = variable.solution_value() / len(spread[group])
    return found, math.floor(objective.Value() + SURE)


def _groups(share: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return one host of each group of equal hosts, and the number of hosts of each group."""
    _, firsts, counts = np.unique(share, axis=1, return_index=True, return_counts=True)
    return firsts, counts


def _spread(share: Floats, groups: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the hosts of each group."""
    return [np.flatnonzero((share == share[:, [host]]).all(axis=0)) for host in groups]


def _model(share: Floats, placed: int | None) -> tuple[Any, dict[tuple[int, int], Any], list[Any]]:
    """Return GLOP's model: its solver, the part of each camera and host, and a row of each host."""
    solver = part("ortools.linear_solver", "pywraplp", "the bound of a placement").Solver.CreateSolver("GLOP")
    count, size = share.shape
    least = 1.0 if placed is None else 0.0
    rows = [solver.Constraint(least, 1.0) for _ in range(count)]
    rooms = [solver.Constraint(-solver.infinity(), 0.0) for _ in range(size)]
    total = solver.Constraint(float(placed), float(count)) if placed else None
    parts = {}
    for camera, group in zip(*(found.tolist() for found in np.nonzero(np.isfinite(share))), strict=True):
        parts[camera, group] = variable = solver.NumVar(0.0, 1.0, "")
        rows[camera].SetCoefficient(variable, 1.0)
        rooms[group].SetCoefficient(variable, float(share[camera, group]))
        if total is not None:
            total.SetCoefficient(variable, 1.0)
    return solver, parts, rooms


def _weighed(share: Floats, weights: Floats, placed: int | None) -> float:
    """Return the sum of the least weighed shares of the cameras, or of those `placed` that have the smallest."""
    with np.errstate(invalid="ignore"):
        least = np.where(np.isinf(share), np.inf, share * weights).min(axis=1)
    return float(np.sort(least)[:placed].sum())


def _simple(share: Floats, placed: int | None, below: float) -> float:
    """Return the share that the largest placed camera has at least, of the host that is best for it."""
    least = np.sort(share.min(axis=1))[:placed]
    return min(below, float(least[-1])) if len(least) else 0.0
