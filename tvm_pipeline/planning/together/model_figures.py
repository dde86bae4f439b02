"""Several models and the devices of a platform as arrays, for the loops that cut all models at once.

Each model is cut at some of its downsets: the prefixes of an order, or all where they can be listed. Seconds are
multiplied by the model's rate, so that they are parts of a second, and by how much its device slows down beside the
others. Next: `deployment_loops.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.platform import Device
from tvm_pipeline.cost.device_costs import known_cost_of, lock_s
from tvm_pipeline.cost.stage_table import DeviceTable, device_table
from tvm_pipeline.planning.search.cuts import Cuts, Floats, Integers, ideals
from tvm_pipeline.planning.search.with_activations import least_needs
from tvm_pipeline.planning.together.deployment_judge import Demand, busy_factors, scarce_devices

# Loops try every pair of downsets; so many pairs take a second.
MOST_LISTED = 20_000


class Figures(NamedTuple):
    """The figures of I models on D devices. A row of cuts has those of all models, one after another, M in all.

    Attributes:
        first: I + 1; where the cuts of a model begin in a row of cuts.
        added, work: D x M; the sums of the operators in front of a cut, as in `device_costs.py`.
        blocked: D x M; how many of these operators the device cannot run.
        params, crossing: M; parameter bytes in front of a cut, and the bytes that cross it.
        table: of I * D devices: column i * D + d has the cost of model i on device d, at the model's rate.
        scale: I x D; what the seconds are multiplied by: the rate, and `slowdown`, that of the device beside others.
        slowdown: I x D.
        bus: I x D x D; the number of the bus of the link from the first device to the second one, or -1.
        fetch_bus: I x D; the number of the bus over which parameters are fetched, or -1.
        held: the part of a second for which the interpreter's lock is held.
        capacity: D; bytes of memory.
        need: for each model a matrix of the activation bytes of a stage between two cuts at least, flat, or empty.
        need_first: I; where the matrix of a model begins.
        most_s: I; the latency that a frame may have.
        stages: I; the number of stages, or 0 for any.
    """

    first: Integers
    added: Floats
    work: Floats
    blocked: Integers
    params: Floats
    crossing: Floats
    table: DeviceTable
    scale: Floats
    slowdown: Floats
    bus: Integers
    fetch_bus: Integers
    buses: int
    held: float
    capacity: Floats
    need: Floats
    need_first: Integers
    most_s: Floats
    stages: Integers


class Models(NamedTuple):
    """The figures, and what a stage is made of.

    Attributes:
        cuts: for each model the downsets of a graph.
        ends: for each model the downsets at which it may be cut, as indices of them.
    """

    figures: Figures
    devices: tuple[Device, ...]
    cuts: tuple[Cuts, ...]
    ends: tuple[Integers, ...]


def listed_cuts(graph: OperatorGraph) -> Cuts | None:
    """Return all downsets of a graph; None where they are too many for the loops."""
    found = ideals(graph)
    return found if found is not None and len(found) <= MOST_LISTED else None


def models_of(demands: Sequence[Demand], cuts: Sequence[Cuts], devices: tuple[Device, ...]) -> Models:
    """Return the models on some devices of the platform, with these downsets.

    Where memory is scarce, they are the prefixes of an order: activations of other segments are not known.

    Raises:
        ProfileError: a device has neither measurements nor a model.
    """
    ends = tuple(_usable(demand, c) for demand, c in zip(demands, cuts, strict=True))
    first = np.cumsum([0, *map(len, ends)])
    size = len(demands), len(devices)
    rows = {name: np.zeros((len(devices), first[-1])) for name in ("added", "work", "blocked")}
    slowdown = np.array([[busy_factors(demand.problem)[device.name] for device in devices] for demand in demands])
    scale = slowdown * np.array([[demand.rate_fps] for demand in demands])
    tables = [device_table(demand.problem, devices, row) for demand, row in zip(demands, scale, strict=True)]
    fetch_bus, bus = np.full(size, -1), np.full((*size, len(devices)), -1)
    buses: dict[str, int] = {}
    for i, (demand, cut, end) in enumerate(zip(demands, cuts, ends, strict=True)):
        problem, operators, here = demand.problem, cut.graph.operators, slice(first[i], first[i + 1])
        macs = np.array([operator.macs for operator in operators], np.float64)
        for d, device in enumerate(devices):
            costs = known_cost_of(problem, device)
            seconds = costs.every_added_s(operators)
            rows["added"][d, here] = cut.sums(np.nan_to_num(seconds) * scale[i, d])[end]
            rows["work"][d, here] = cut.sums(costs.every_work_s(macs) * scale[i, d])[end]
            rows["blocked"][d, here] = cut.sums(np.isnan(seconds).astype(float))[end]
            if costs.shared_bus:
                fetch_bus[i, d] = buses.setdefault(costs.shared_bus, len(buses))
            for p, source in enumerate(devices):
                if p != d and (name := problem.link(source.name, device.name).bus):
                    bus[i, p, d] = buses.setdefault(name, len(buses))
    needs = _needs(demands, cuts, ends, devices)
    figures = Figures(
        first=first,
        added=rows["added"],
        work=rows["work"],
        blocked=rows["blocked"].astype(np.int64),
        params=np.concatenate([cut.param_bytes[end] for cut, end in zip(cuts, ends, strict=True)]).astype(float),
        crossing=np.concatenate([cut.crossing_bytes[end] for cut, end in zip(cuts, ends, strict=True)]).astype(float),
        table=DeviceTable(*(np.concatenate(figures, axis=-1) for figures in zip(*tables, strict=True))),
        scale=scale,
        slowdown=slowdown,
        bus=bus,
        fetch_bus=fetch_bus,
        buses=len(buses),
        held=sum(demand.rate_fps * lock_s(demand.problem) for demand in demands),
        capacity=np.array([math.inf if d.memory_bytes is None else d.memory_bytes for d in devices], np.float64),
        need=np.concatenate([need.ravel() for need in needs]) if needs else np.zeros(0),
        need_first=np.cumsum([0, *(need.size for need in needs)]),
        most_s=np.array([d.problem.max_latency_s or math.inf for d in demands]),
        stages=np.array([d.problem.stages or 0 for d in demands]),
    )
    return Models(figures, devices, tuple(cuts), ends)


def _usable(demand: Demand, cuts: Cuts) -> Integers:
    """Return the numbers of operators after which a model may be cut, with 0 and all."""
    if not demand.problem.children_together:
        return np.arange(len(cuts))
    return np.flatnonzero(cuts.together | np.isin(np.arange(len(cuts)), (0, len(cuts) - 1)))


def _needs(
    demands: Sequence[Demand], cuts: Sequence[Cuts], ends: Sequence[Integers], devices: Sequence[Device]
) -> list[Floats]:
    """Return a lower bound of the activations of each segment of each model; nothing where all devices hold enough."""
    if not scarce_devices(demands).intersection(device.name for device in devices):
        return []
    return [
        least_needs(cut.graph)[np.ix_(end, end)] if demand.problem.activations else np.zeros((len(end), len(end)))
        for demand, cut, end in zip(demands, cuts, ends, strict=True)
    ]
