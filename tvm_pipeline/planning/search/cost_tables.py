"""The costs of a problem as arrays over cuts: the cost of a stage between two cuts on one device.

Every search needs the cost of the operators between cut i and cut j on device d, which receives cut i from device p.
It follows from `cost/stage_table.py` and from sums that are computed once:

    computing(d, added[d, j] - added[d, i], work[d, j] - work[d, i], bytes between) + enter[p, d, i] + leave[d, j]

For a measured device only `added`, `enter` and `leave` are not zero, and costs are additive. For a modelled device (an
Edge TPU with its parameter cache) they are not. Next: `dynamic_programming.py`, whose searches read these arrays;
`planning/baselines/segments.py`, for costs that only a call returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import busy_factor, cost_of
from tvm_pipeline.cost.stage_table import DeviceTable, computed, device_table
from tvm_pipeline.planning.search.cuts import Cuts, Floats, Integers

CutIndices = Integers | int


@dataclass(frozen=True, slots=True, eq=False)
class StageCosts:
    """Costs of D devices over M cuts, in seconds or joules.

    Attributes:
        table: of the devices.
        added, work, leave: D x M.
        enter: (D+1) x D x M; what device d pays to receive cut i from device p. Row D is the source of the frames.
        least, least_added: M; cumulative costs of each operator on its cheapest device, in all and by `added` alone.
        impossible: a cost that a stage only reaches if its device cannot run one of its operators.
    """

    table: DeviceTable
    added: Floats
    work: Floats
    enter: Floats
    leave: Floats
    least: Floats
    least_added: Floats
    impossible: float

    @property
    def adds_up(self) -> bool:
        """Return whether a stage costs the sum of its operators and of the transfers at its first cut."""
        return not (self.table.call.any() or self.work.any() or self.table.spill.any() or self.leave.any())

    def stage(self, param_bytes: Floats, device: int, source: int, start: CutIndices, end: CutIndices) -> Floats:
        """Return the cost of one stage, or of many stages in one call; `param_bytes` are those of the cuts."""
        added, work = (sums[device, end] - sums[device, start] for sums in (self.added, self.work))
        call, spill, cached = (figures[device] for figures in self.table[:3])
        taken = computed(call, spill, cached, added, work, param_bytes[end] - param_bytes[start])
        total: Floats = taken + self.enter[source, device, start] + self.leave[device, end]
        return total


def capacities(devices: Sequence[Device]) -> Floats:
    """Return the parameter bytes that fit each device; infinite where there is no limit."""
    return np.array([np.inf if device.memory_bytes is None else device.memory_bytes for device in devices], dtype=float)


def stage_seconds(problem: Problem, cuts: Cuts, devices: Sequence[Device], working: int = 0) -> StageCosts:
    """Return the seconds of stages.

    Args:
        working: the devices that work at the same time: the seconds are those for which a stage occupies its device.
            Without it, they are those of a frame that is alone.
    """
    factors = [busy_factor(problem, device.name, max(working, 1)) for device in devices]
    return _costs(problem, cuts, devices, factors, occupied=working > 0)


def stage_joules(problem: Problem, cuts: Cuts, devices: Sequence[Device]) -> StageCosts:
    """Return the joules above idle of stages a frame: as measured, else active power times seconds.

    A transfer draws the active power of the receiver.
    """
    watts = [cost_of(problem, device).active_w or 0.0 for device in devices]
    return _costs(problem, cuts, devices, watts, joules=True)


def bus_seconds(problem: Problem, cuts: Cuts, devices: Sequence[Device], bus: str) -> StageCosts:
    """Return the seconds for which a stage occupies one bus: parameters beyond caches, and transfers over links."""
    table, nothing = device_table(problem, devices, bus=bus), np.zeros((len(devices), len(cuts)))
    enter, leave = _transfers(table, cuts)
    return StageCosts(table, nothing, nothing, enter, leave, nothing[0], nothing[0], impossible=math.inf)


def least_bus_seconds(problem: Problem, devices: Sequence[Device], bus: str, most_devices: int) -> float:
    """Return a lower bound of the seconds for which a pipeline of at most `most_devices` devices occupies a bus.

    The parameters that all caches together cannot hold are fetched over the bus.
    """
    costs = [cost_of(problem, device) for device in devices]
    if any(cost.shared_bus != bus for cost in costs):
        return 0.0
    param_bytes = sum(operator.param_bytes for operator in problem.graph.operators)
    caches = sorted((min(cost.cached_bytes, param_bytes) for cost in costs), reverse=True)
    return min(cost.spill_s_per_byte for cost in costs) * max(0, param_bytes - sum(caches[:most_devices]))


def buses(problem: Problem, devices: Sequence[Device]) -> list[str]:
    """Return the buses that these devices or the links between them use."""
    names, costs = {device.name for device in devices}, [cost_of(problem, device) for device in devices]
    links = (*problem.platform.links, *problem.profile.links)
    used = [bus for cost in costs for bus in (cost.shared_bus, cost.copies_bus)]
    used += [link.bus for link in links if link.source in names and link.destination in names]
    return sorted({bus for bus in used if bus})


def operator_costs(
    problem: Problem, devices: Sequence[Device], scale: Sequence[float] | Floats, *, joules: bool = False
) -> tuple[Floats, Floats]:
    """Return what each operator adds on each device (infinite where it cannot run), and its work, both D x N."""
    operators, added, work = problem.graph.operators, [], []
    macs = np.array([operator.macs for operator in operators], np.float64)
    for device, factor in zip(devices, scale, strict=True):
        costs = cost_of(problem, device)
        seconds = costs.every_added_s(operators)
        measured_j = [costs.added_j(operator) for operator in operators] if joules else [None]
        figures = seconds * factor if None in measured_j else np.array(measured_j, np.float64)
        added.append(np.where(np.isnan(seconds), np.inf, figures))
        work.append(costs.every_work_s(macs) * factor)
    return np.array(added), np.array(work)


def _costs(
    problem: Problem,
    cuts: Cuts,
    devices: Sequence[Device],
    scale: list[float],
    *,
    joules: bool = False,
    occupied: bool = False,
) -> StageCosts:
    """Return the seconds of each device times its entry of `scale`.

    With `joules`, the measured joules of a device replace the seconds of its operators, if a sensor measured them.
    """
    table = device_table(problem, devices, scale, occupied=occupied)
    enter, leave = _transfers(table, cuts)
    figures, busiest = operator_costs(problem, devices, scale, joules=joules)
    blocked = np.isinf(figures)
    work = np.array([cuts.sums(row) for row in busiest])
    # This is above the cost of every possible stage, but small enough that sums with it keep the digits of other terms.
    impossible = 1.0 + 4.0 * float(
        np.where(blocked, 0.0, figures).sum(axis=1).max() + (table.call + work[:, -1]).max() + enter.max() + leave.max()
        + (table.spill * cuts.param_bytes[-1]).max()
    )  # fmt: skip
    cheapest = np.where(blocked, 2 * impossible, figures)
    added = np.array([cuts.sums(row) for row in cheapest])
    least, least_added = cuts.sums((cheapest + busiest).min(axis=0)), cuts.sums(cheapest.min(axis=0))
    return StageCosts(table, added, work, enter, leave, least, least_added, impossible)


def _transfers(table: DeviceTable, cuts: Cuts) -> tuple[Floats, Floats]:
    """Return (D+1) x D x M costs of receiving each cut, and D x M costs of sending it."""
    (fixed, of_byte), (send, of_sent) = table.receive[:, None] + table.link, table.send
    enter = fixed[..., None] + of_byte[..., None] * cuts.crossing_bytes
    return enter, send[:, None] + of_sent[:, None] * cuts.crossing_bytes
