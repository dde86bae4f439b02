"""What every plan costs at least, whatever its cuts: its operators, calls, first inputs, last outputs and fetches.

The figures are those of an imagined device that is as good as the best device in each. Next: `chain_bound.py`, which
adds the transfers between stages, and `bounds.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tvm_pipeline.core.platform import disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import busy_factor, counts_period
from tvm_pipeline.cost.stage_table import DeviceTable, computed, device_table
from tvm_pipeline.planning.sat.staging import leaders_of
from tvm_pipeline.planning.search.cost_tables import operator_costs
from tvm_pipeline.planning.search.cuts import Floats


@dataclass(frozen=True, slots=True, eq=False)
class LeastCosts:
    """The least figures over all devices of a platform, for N operators, in seconds or joules.

    Attributes:
        devices: how many devices a plan can use.
        replicates: whether stages may have replicas.
        added, work: N; see `device_costs.py`.
        alone: N; the least sum of both on one device.
        param_bytes: N.
        call: of a stage.
        receive, link, send: the fixed cost and the cost of a byte, of what a stage receives, of a hop from another
            device, and of what a stage sends.
        spill: for a byte of parameters beyond a cache; 0 where a device has none.
        caches: the caches of the devices, the largest first.
        first_bytes, last_bytes: what the first stage receives, and what the last one sends.
        leaders: operators with the same leader share a stage.
    """

    devices: int
    replicates: bool
    added: Floats
    work: Floats
    alone: Floats
    param_bytes: Floats
    call: float
    receive: tuple[float, float]
    link: tuple[float, float]
    send: tuple[float, float]
    spill: float
    caches: Floats
    first_bytes: int
    last_bytes: int
    leaders: list[int]

    @property
    def most_cached(self) -> float:
        """The largest cache, where every device has one."""
        return float(self.caches[0]) if self.spill else 0.0

    @property
    def spills(self) -> bool:
        """Whether some parameters are beyond every cache, wherever a graph is cut."""
        return bool(self.spill and self.param_bytes.sum() > self.most_cached)

    @property
    def most_price(self) -> float:
        """The bytes that move in three seconds, the highest price of a second of work; 0 where bytes cost nothing."""
        s_per_byte = self.receive[1] + self.link[1] + self.send[1]
        return 3 / s_per_byte if s_per_byte else 0.0

    def mean_work(self, weight: float) -> Floats:
        """Return the cost of each operator where multiplications count with this weight, and fetches with the rest."""
        return self.added + weight * self.work + (1 - weight) * self.spill * self.param_bytes

    @property
    def table(self) -> DeviceTable:
        """The imagined device as a table, in which all parameters stay where a device has no cache."""
        figures = [self.call], [self.spill], [self.most_cached if self.spill else np.inf], self.receive, self.send
        call, spill, cached, receive, send = (np.array(figure, np.float64) for figure in figures)
        link = np.array([[pair, 0.0] for pair in self.link])
        return DeviceTable(call, spill, cached, receive[:, None], send[:, None], link[:, :, None])

    def total(self, stages: int | None, boundary_bytes: float = 0.0) -> float:
        """Return the least sum over the stages of a plan.

        Args:
            stages: the number of stages, where it is known.
            boundary_bytes: the least bytes that cross a boundary between two stages.
        """
        fixed = self.receive[0] + self.send[0]
        moved = self.first_bytes * self.receive[1] + self.last_bytes * self.send[1]
        hop = self.link[0] + fixed + boundary_bytes * (self.receive[1] + self.link[1] + self.send[1])
        cached = float(self.caches[: stages or self.devices].sum()) if self.spill else 0.0
        sums = [figures.sum() for figures in (self.added, self.work, self.param_bytes)]
        computing = max(float(computed(self.call, self.spill, cached, *sums)), self.call + float(self.alone.sum()))
        one = computing + fixed + moved
        return one + ((stages or 1) - 1) * (self.call + hop)

    def computing(self, added: Floats, work: Floats, param_bytes: Floats) -> Floats:
        """Return the least cost of computing stages with these sums over their operators."""
        return computed(self.call, self.spill, self.most_cached, added, work, param_bytes)

    def largest(self) -> float:
        """Return the least cost of a stage that holds the operators that cost most of those that stand together."""
        return float(np.bincount(self.leaders, self.alone).max()) + self.call


def least_of(
    problem: Problem,
    scale: Sequence[float],
    *,
    joules: bool = False,
    shared: bool = False,
    occupied: bool = False,
) -> LeastCosts:
    """Return the least figures of a problem's devices.

    Args:
        scale: a factor for the seconds of each device: how much slower it is beside others, or its watts.
        joules: whether measured joules of operators replace their scaled seconds.
        shared: whether a replica may serve other stages.
        occupied: whether to count only the seconds for which a stage occupies its device.
    """
    graph, devices = problem.graph, problem.platform.devices
    table = device_table(problem, devices, scale, occupied=occupied)
    added, work = operator_costs(problem, devices, scale, joules=joules)
    between = ~np.eye(len(devices), dtype=bool)
    widest = max(map(len, disjoint_sets(devices)))
    stages = problem.stages or 1
    inputs, outputs = {tensor.name for tensor in graph.inputs}, set(graph.outputs)
    sizes, readers = graph.tensors, graph.edges.readers
    return LeastCosts(
        devices=widest,
        replicates=shared or (counts_period(problem) and widest > stages),
        added=added.min(axis=0),
        work=np.where(np.isinf(added), np.inf, work).min(axis=0),
        alone=(added + work).min(axis=0),
        param_bytes=np.array([operator.param_bytes for operator in graph.operators], np.float64),
        call=float(table.call.min()),
        receive=_least(table.receive),
        link=_least(table.link[:, :-1][:, between]) if between.any() else (0.0, 0.0),
        send=_least(table.send),
        spill=float(table.spill.min()) if np.isfinite(table.cached).all() else 0.0,
        caches=np.sort(table.cached)[::-1],
        first_bytes=sum(sizes[name].bytes for name in inputs if readers[name] or name in outputs),
        last_bytes=sum(sizes[name].bytes for name in outputs),
        leaders=leaders_of(graph.edges.before) if problem.children_together else list(range(len(graph))),
    )


def busy_scale(problem: Problem, working: int) -> list[float]:
    """Return how many times slower each device is at least in a plan of `working` devices or more."""
    devices = problem.platform.devices
    return [min(busy_factor(problem, device, n) for n in {working, len(devices)}) for device in devices]


def _least(figures: Floats) -> tuple[float, float]:
    """Return the least fixed cost, and the least cost of a byte."""
    fixed, of_byte = figures.min(axis=1)
    return float(fixed), float(of_byte)
