"""The devices of a problem as arrays for the loops of local search, and the columns of the nodes' weights.

Columns of the weights: MACs, bytes of parameters, the number of operators, then the seconds that an operator adds on
each kind of device, its joules, and whether the device cannot run it. Devices with equal figures share columns.

Next: `annealing.py`, which adds them up by stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import DeviceCosts, busy_factor, cost_of
from tvm_pipeline.cost.stage_table import DeviceTable, device_table
from tvm_pipeline.planning.local.graph_arrays import whole_units
from tvm_pipeline.planning.search.cuts import Floats, Integers

MACS, PARAMS, COUNT = 0, 1, 2


class DeviceArrays(NamedTuple):
    """The figures of D devices, and of the links and the B buses between them.

    Attributes:
        table: of the devices.
        added, joule_column, blocked: D; the columns of the weights, -1 where the device has none.
        s_per_mac, capacity, cache, watts: D; see `DeviceCosts`; `cache` is that of overflow.
        slowdown: D+1 x D; the factor of each device while so many devices work.
        link_bus: D x D; the bus of the link from the device of the row; -1 for none.
        bus: D; the bus over which parameters are fetched, -1 for none.
        copies: D; the bus that carries the device's transfers in its place, -1 for none.
        buses: B.
    """

    table: DeviceTable
    added: Any
    joule_column: Any
    blocked: Any
    s_per_mac: Any
    capacity: Any
    cache: Any
    watts: Any
    slowdown: Any
    link_bus: Any
    bus: Any
    copies: Any
    buses: int

    @property
    def are_alike(self) -> bool:
        """Whether all devices and links have equal figures, so that it does not matter which device has which stage."""
        call, spill, cached, receive, send, link = self.table
        alone = [self.added, self.joule_column, self.blocked, self.s_per_mac, self.capacity, self.cache, self.watts]
        alone += [self.bus, self.copies, *self.slowdown, call, spill, cached, *receive, *send]
        apart = ~np.eye(len(call), dtype=bool)
        between = [figures[apart] for figures in (self.link_bus, *link[:, :-1])]
        return all(bool((figures == figures[:1]).all()) for figures in (*alone, *between))


def device_arrays(problem: Problem, devices: Sequence[Device]) -> tuple[DeviceArrays, Floats]:
    """Return the arrays of these devices, and the N x C weights of the operators."""
    operators = problem.graph.operators
    costs = [cost_of(problem, device) for device in devices]
    macs = np.array([operator.macs for operator in operators], np.float64)
    params = np.array([operator.param_bytes for operator in operators], np.float64)
    columns: list[Floats] = [macs, params, np.ones(len(operators))]
    known: dict[bytes, int] = {}

    def column(figures: Floats) -> int:
        if not figures.any():
            return -1
        key = figures.tobytes()
        if key not in known:
            known[key] = len(columns)
            columns.append(whole_units(figures))
        return known[key]

    added: list[int] = []
    joules: list[int] = []
    blocked: list[int] = []
    for index, cost in enumerate(costs):
        same = next((other for other in range(index) if costs[other].alike(cost)), None)
        if same is not None:
            for found in (added, joules, blocked):
                found.append(found[same])
            continue
        seconds = _added_s(problem, cost)
        blocked.append(column(np.isnan(seconds).astype(np.float64)))
        added.append(column(np.nan_to_num(seconds)))
        measured_j = cost.added_j(operators[0]) is not None and problem.objective == "energy"
        joules.append(column(np.array([cost.added_j(o) for o in operators], np.float64)) if measured_j else -2)
    names = [device.name for device in devices]
    links = [[problem.link(source, target).bus for target in names] for source in names]
    used = {*(bus for row in links for bus in row), *(c.shared_bus for c in costs), *(c.copies_bus for c in costs)}
    buses = sorted(used - {""})
    number = {"": -1, **{bus: index for index, bus in enumerate(buses)}}
    arrays = DeviceArrays(
        table=device_table(problem, devices),
        added=_whole(added),
        joule_column=_whole(joules),
        blocked=_whole(blocked),
        s_per_mac=_real([float(cost.every_work_s(np.ones(1))[0]) for cost in costs]),
        capacity=_real([np.inf if device.memory_bytes is None else device.memory_bytes for device in devices]),
        cache=_real([device.cache_bytes or np.inf for device in devices]),
        watts=_real([cost.active_w or 0.0 for cost in costs]),
        slowdown=_real([[busy_factor(problem, d, max(n, 1)) for d in devices] for n in range(len(devices) + 1)]),
        link_bus=_whole([[number[bus] for bus in row] for row in links]),
        bus=_whole([number[cost.shared_bus] for cost in costs]),
        copies=_whole([number[cost.copies_bus] for cost in costs]),
        buses=len(buses),
    )
    return arrays, np.stack(columns, axis=1)


def _added_s(problem: Problem, cost: DeviceCosts) -> Floats:
    if problem.is_lexicographic and not cost.is_known:
        return np.zeros(len(problem.graph))
    return cost.every_added_s(problem.graph.operators)


def _whole(figures: Any) -> Integers:
    return np.array(figures, np.int64)


def _real(figures: Any) -> Floats:
    return np.array(figures, np.float64)
