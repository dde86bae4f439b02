"""The exact search of a deployment: CP-SAT over the cuts and devices of all models, started at a known deployment.

The activations of a stage are no sum over its operators, and do not grow with it. So the model first counts those of
each operator alone. If the best deployment does not fit, the model learns what each of its stages needs in the best
order, and the search is repeated: the bound of every turn is one of the problem.

Next: `sat/placement.py`, the devices in the solver's model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import lock_s
from tvm_pipeline.errors import PlanError
from tvm_pipeline.memory import stage_memory
from tvm_pipeline.planning.sat.placement import Loads, Placement, alike, break_symmetry, second_rows, unit_of
from tvm_pipeline.planning.sat.staging import Dag, Staging, dag_of, stage_of, weighted
from tvm_pipeline.planning.together.deployment_judge import (
    Demand,
    Plans,
    busy_factors,
    fitted_together,
    judge_deployment,
    scarce_devices,
)
from tvm_pipeline.solvers.cpsat import library, search

if TYPE_CHECKING:
    from tvm_pipeline.planning.sat.staging import Expression


@dataclass(frozen=True, slots=True)
class ExactDeployment:
    """The best deployment that was found; None where there is none better than the one known.

    Attributes:
        bound: a lower bound of the greatest utilisation; infinite where it is proven that no deployment exists.
        reason: why the last one that was found does not fit.
    """

    plans: list[tuple[Stage, ...]] | None
    bound: float
    reason: str = ""


def most_literals(demands: Sequence[Demand]) -> int:
    """Return about how many literals the model has: operators times stages times devices."""
    total = 0
    for demand in demands:
        problem = demand.problem
        total += len(problem.graph) * _most_stages(problem) * len(problem.platform.devices)
    return total


def placed_together(demands: Sequence[Demand], known: Plans | None, deadline: float) -> ExactDeployment:
    """Search until the best deployment is proven, or until `deadline` of `time.monotonic`.

    Args:
        known: a deployment to start from.
    """
    dags = [dag_of(demand.problem.graph, demand.problem.children_together) for demand in demands]
    learnt: dict[tuple[int, frozenset[str]], int] = {}
    best, least = None, math.inf
    bound, reason = 0.0, ""
    while True:
        model = _Model(demands, dags, learnt)
        if known is not None:
            model.hint(known)
        answer = search(model.model, deadline)
        bound = max(bound, answer.bound * model.unit)
        if answer.solver is None:
            return ExactDeployment(best, bound, reason)
        found = [placement.stages(answer.solver) for placement in model.placements]
        try:
            fitted = fitted_together(demands, found)
            most = max(judge_deployment(demands, fitted).values(), default=0.0)
        except PlanError as error:
            reason = str(error)
            if _learn(demands, found, learnt) and time.monotonic() < deadline:
                continue
            return ExactDeployment(best, bound, reason)
        if most < least:
            best, least = fitted, most
        return ExactDeployment(best, bound, reason)


def _learn(demands: Sequence[Demand], plans: Plans, learnt: dict[tuple[int, frozenset[str]], int]) -> bool:
    """Note what the stages need at least, on devices that may be too small; return whether any of it is new."""
    scarce, new = scarce_devices(demands), False
    for index, (demand, stages) in enumerate(zip(demands, plans, strict=True)):
        for stage in stages:
            key = index, frozenset(stage.operators)
            if stage.devices[0] in scarce and demand.problem.activations and key not in learnt:
                learnt[key] = stage_memory.least_peak(demand.problem.graph, stage.operators).bound_bytes
                new = True
    return new


def _most_stages(problem: Problem) -> int:
    widest = max(len(group) for group in disjoint_sets(problem.platform.devices))
    return problem.stages or min(len(problem.graph), widest)


class _Model:
    """The model of CP-SAT: the placement of each model, and what they share."""

    def __init__(
        self, demands: Sequence[Demand], dags: Sequence[Dag], learnt: dict[tuple[int, frozenset[str]], int]
    ) -> None:
        self.demands, self.model, self.unit = demands, library().CpModel(), _unit(demands)
        self.placements: list[Placement] = []
        loads: list[Loads] = []
        for demand, dag in zip(demands, dags, strict=True):
            problem, rate = demand.problem, demand.rate_fps
            staging = Staging(self.model, dag, _most_stages(problem))
            placement = Placement(staging, problem, optional=problem.stages is None, again=False)
            factors = {name: factor * rate for name, factor in busy_factors(problem).items()}
            self.placements.append(placement)
            loads.append(Loads(placement, self.unit, factors, bus_factor=rate))
            if problem.max_latency_s is not None:
                unit_s = unit_of(*second_rows(problem))
                alone = Loads(placement, unit_s, dict.fromkeys(factors, 1.0))
                self.model.add(sum(alone.device) <= math.floor(problem.max_latency_s * (1 + 5e-10) / unit_s))
        for d, device in enumerate(self.placements[0].devices):
            if device.most_stages is not None:
                self.model.add(sum(sum(placement.at[d]) for placement in self.placements) <= device.most_stages)
        break_symmetry(self.placements)
        self._share_memory(learnt)
        self._share_cores()
        _share_caches(demands, loads)
        held = sum(demand.rate_fps * lock_s(demand.problem) for demand in demands)
        most = self.model.new_int_var(round(held / self.unit), 2**60, "")
        for d in range(len(self.placements[0].devices)):
            self.model.add(sum(load.device[d] for load in loads) <= most)
        for bus in {name for load in loads for name in load.bus}:
            self.model.add(sum(load.bus.get(bus, 0) for load in loads) <= most)
        self.model.minimize(most)

    def hint(self, plans: Plans) -> None:
        """Start the search at this deployment, with interchangeable devices in the order that the model demands."""
        devices = self.placements[0].devices
        renamed: dict[str, str] = {}
        for stage in (stage for stages in plans for stage in stages):
            name = stage.devices[0]
            if name not in renamed:
                here = next(device for device in devices if device.name == name)
                equal = [d for d in devices if all(alike(demand.problem, here, d) for demand in self.demands)]
                renamed[name] = next((d.name for d in equal if d.name not in renamed.values()), name)
        for demand, placement, stages in zip(self.demands, self.placements, plans, strict=True):
            moved = [Stage((renamed[stage.devices[0]],), stage.operators) for stage in stages]
            placement.hint(moved, stage_of(demand.problem.graph, stages))

    def _share_memory(self, learnt: dict[tuple[int, frozenset[str]], int]) -> None:
        """Require that memory holds the parameters of all models and the activations, as far as these are known."""
        scarce = scarce_devices(self.demands)
        for d, device in enumerate(self.placements[0].devices):
            if device.memory_bytes is None:
                continue
            held = sum(weighted(p.weights(d, p.staging.dag.param_bytes)) for p in self.placements)
            if device.name in scarce:
                held = held + sum(
                    self._activations(index, d, learnt)
                    for index, demand in enumerate(self.demands)
                    if demand.problem.activations
                )
            self.model.add(held <= device.memory_bytes)

    def _activations(self, index: int, d: int, learnt: dict[tuple[int, frozenset[str]], int]) -> Expression:
        """Return a variable no less than the activations of a model's stage on a device, as far as they are known."""
        placement, graph = self.placements[index], self.demands[index].problem.graph
        tensors, rows = graph.tensors, placement.on[d]
        touched = [
            sum(tensors[name].bytes for name in dict.fromkeys(operator.inputs)) + operator.output_bytes
            for operator in graph.operators
        ]
        most = max([*touched, *(size for (model, _), size in learnt.items() if model == index)])
        needed: Expression = self.model.new_int_var(0, most, "")
        for literal, size in zip(rows, touched, strict=True):
            if size:
                self.model.add(needed >= size * literal)
        for (model, members), size in learnt.items():
            if model == index:
                others = sum(
                    1 - literal if operator.name in members else literal
                    for operator, literal in zip(graph.operators, rows, strict=True)
                )
                self.model.add(needed + size * others >= size)
        return needed

    def _share_cores(self) -> None:
        """Require that of devices which share cores only one is used."""
        for (d, one), (e, two) in combinations(enumerate(self.placements[0].devices), 2):
            if one.overlaps(two):
                for first in self.placements:
                    for second in self.placements:
                        self.model.add_bool_or(~first.used[d], ~second.used[e])


def _unit(demands: Sequence[Demand]) -> float:
    """Return the solver's unit of utilisation, which is seconds of a frame times frames a second."""
    rows: list[list[float | None]] = [[] for _ in demands[0].problem.platform.devices]
    other = 0.0
    for demand in demands:
        own, extra_s = second_rows(demand.problem)
        other += extra_s * demand.rate_fps
        for row, figures in zip(rows, own, strict=True):
            row += [None if s is None else s * demand.rate_fps for s in figures]
    return unit_of(rows, other)


def _share_caches(demands: Sequence[Demand], loads: Sequence[Loads]) -> None:
    """Require that the stages on a device wait for parameters no less than for the overflow of its cache by all."""
    # Loads are multiplied by their rates, so each is divided by its own rate to add up seconds of a frame. The ratios
    # of usual rates are small whole numbers; others are rounded so that the bound stays a bound.
    slowest = min(demand.rate_fps for demand in demands)
    ratios = [slowest / demand.rate_fps for demand in demands]
    whole = next((n for n in range(1, 60) if all(abs(n * r - round(n * r)) < 1e-12 for r in ratios)), 60)
    for d in set[int].intersection(*(set(load.spilled) for load in loads)):
        fetched = [load.fetch(d, slowest) for load in loads]
        waits = sum(
            math.ceil(whole * ratio - 1e-12) * load.spilled[d] for ratio, load in zip(ratios, loads, strict=True)
        )
        overflow = sum(weighted(terms) for terms, _ in fetched) - fetched[0][1]
        rounding = sum(len(terms) for terms, _ in fetched)
        loads[0].model.add(waits >= whole * (overflow - rounding))
        for demand, load in zip(demands, loads, strict=True):
            load.model.add(load.spilled[d] <= weighted(load.fetch(d, demand.rate_fps)[0]))
