"""Throughput, latency and energy on unequal devices, by CP-SAT.

Next: `cp_sat.py`, which calls this, and `placement.py`, the variables of devices.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

from tvm_pipeline.core.plan import Plan, Prediction, Stage, objective_value
from tvm_pipeline.core.platform import disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import busy_factor, cost_of, idle_w, lock_s, require_energy
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, PlanError, SearchTimeError
from tvm_pipeline.planning.sat.placement import Loads, Placement, break_symmetry, second_rows, unit_of
from tvm_pipeline.planning.sat.staging import Staging, dag_of, stage_of
from tvm_pipeline.solvers.cpsat import Answer, library, search

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

    from tvm_pipeline.planning.sat.staging import Expression


def least_seconds(problem: Problem, hint: tuple[Stage, ...] | None, deadline: float) -> Plan:
    """Return the best pipeline for throughput, latency or energy; see `cp_sat` for parameters and errors."""
    if problem.objective == "energy":
        require_energy(problem)
    return _Seconds(problem, hint, deadline).plan()


class _Seconds:
    """One solve; its cost, of which less is better, is that of a frame: for throughput the seconds between frames."""

    def __init__(self, problem: Problem, hint: tuple[Stage, ...] | None, deadline: float) -> None:
        self.problem, self.deadline = problem, deadline
        self.devices = problem.platform.devices
        self.dag = dag_of(problem.graph, problem.children_together)
        rows, other_s = second_rows(problem)
        self.unit_s = unit_of(rows, other_s)
        self.watts = {device.name: cost_of(problem, device).active_w or 0.0 for device in self.devices}
        self.idle_w = idle_w(problem) if problem.objective == "energy" else 0.0
        self.joules = _measured_joules(problem)
        self.unit = self.unit_s
        if problem.objective == "energy":
            watts = max(self.watts.values())
            of_seconds = [
                [s and s * self.watts[d.name] for s in row] for d, row in zip(self.devices, rows, strict=True)
            ]
            joules = [list(self.joules.get(d.name, row)) for d, row in zip(self.devices, of_seconds, strict=True)]
            idle_j = [[(s or 0.0) * self.idle_w for s in row] for row in rows]
            summed = [
                [j and j + idle for j, idle in zip(*pair, strict=True)] for pair in zip(joules, idle_j, strict=True)
            ]
            self.unit = unit_of(summed, other_s * (watts + self.idle_w))
        self.best: tuple[Stage, ...] | None = None
        self.figures = Prediction()
        self.cost = math.inf
        if hint is not None and self._in_space(hint):
            with suppress(PlanError):
                self._take(hint)

    def _in_space(self, stages: tuple[Stage, ...]) -> bool:
        """Return whether a plan is one of those that the model can express."""
        names = [name for stage in stages for name in stage.devices]
        again = self.problem.objective != "throughput"
        once = {device.name for device in self.devices if cost_of(self.problem, device).serves_once or not again}
        return (
            self.problem.stages in (None, len(stages))
            and all(len(stage.devices) == 1 for stage in stages)
            and all(a != b for a, b in pairwise(names))
            and all(names.count(name) == 1 for name in once.intersection(names))
            and len(stages) <= self._most_stages()
        )

    def _most_stages(self) -> int:
        if self.problem.stages is not None:
            return self.problem.stages
        widest = max(len(group) for group in disjoint_sets(self.devices))
        once = self.problem.objective == "throughput" or all(
            cost_of(self.problem, device).serves_once for device in self.devices
        )
        return min(len(self.dag), widest if once else 2 * widest)

    def _take(self, stages: tuple[Stage, ...]) -> None:
        """Evaluate a plan and keep it if it is the best; raise PlanError if a limit forbids it."""
        predicted = evaluate(self.problem, stages).predicted
        match self.problem.objective:
            case "throughput":
                cost = 1 / (predicted.throughput_fps or math.inf)
            case "latency":
                cost = predicted.latency_s or 0.0
            case _:
                cost = predicted.energy_j or 0.0
        if cost < self.cost:
            self.best, self.figures, self.cost = stages, predicted, cost

    def plan(self) -> Plan:
        """Solve a model for each number of stages that needs its own, and return the best plan with its bound."""
        problem, most = self.problem, self._most_stages()
        if problem.objective != "throughput":
            bound = self._solve(most, self.deadline)
        else:
            # The number of working devices decides how much they slow each other down, so each number of stages is a
            # model of its own. The largest number is first, and its plan limits the others. They share the time evenly.
            counts = [most] if problem.stages is not None else range(most, 0, -1)
            bound = math.inf
            for done, count in enumerate(counts):
                share = (self.deadline - time.monotonic()) / (len(counts) - done)
                if done and share <= 0:  # to build a model takes seconds where operators and devices are many
                    bound = 0.0
                    break
                bound = min(bound, self._solve(count, time.monotonic() + share))
        if self.best is None:
            if bound == math.inf:
                requested = "" if problem.stages is None else f" of {problem.stages} stages"
                raise InfeasibleError(
                    f"no plan{requested} of {problem.graph.name} on platform {problem.platform.name} meets the limits "
                    "of the problem"
                )
            raise SearchTimeError(f"no plan found within {problem.time_limit_s} s; give more `time_limit_s`")
        proven = bound >= self.cost * (1 - 1e-6)
        cost = self.cost if proven else max(bound, 0.0)
        # The bound is a value of the objective: frames a second for throughput.
        figure = 1 / max(cost, 1e-12) if problem.objective == "throughput" else cost
        value = objective_value(self.figures, problem.objective)
        return Plan(
            problem.graph.name,
            "cp-sat",
            problem.objective,
            self.best,
            self.figures,
            "optimal" if proven else "feasible",
            value if proven else (figure,),
        )

    def _solve(self, stages: int, deadline: float) -> float:
        """Search plans of (up to) so many stages; return a lower bound of their cost, infinite if there is none."""
        # Costs are rounded to whole units. At first a limit is relaxed by the most that rounding can add, so that the
        # bound is valid. If `evaluate` then refuses the plan, the limit is tightened by as much instead.
        bound = math.inf
        for slack in (1, -1):
            placement, answer = self._search(stages, deadline, slack)
            bound = min(bound, answer.bound * self.unit)
            if answer.solver is None:
                break
            try:
                self._take(placement.stages(answer.solver))
                break
            except PlanError:
                if slack < 0 or not self._limited:
                    raise
        return bound

    @property
    def _limited(self) -> bool:
        return self.problem.min_throughput_fps is not None or self.problem.max_latency_s is not None

    def _search(self, stages: int, deadline: float, slack: int) -> tuple[Placement, Answer]:
        problem = self.problem
        of_rate = problem.objective == "throughput"
        staging = Staging(library().CpModel(), self.dag, stages)
        optional = problem.stages is None and not of_rate
        placement = Placement(staging, problem, optional=optional, again=not of_rate)
        break_symmetry([placement])
        goal = self._rate_goal(placement, slack) if of_rate else self._sum_goal(placement, slack)
        staging.model.minimize(goal)
        if self.best is not None:
            if of_rate and len(self.best) != stages:
                staging.model.add(goal <= math.floor(self.cost / self.unit) - 1)
            else:
                placement.hint(self.best, stage_of(problem.graph, self.best))
        return placement, search(staging.model, deadline)

    def _rate_goal(self, placement: Placement, slack: int) -> Expression:
        working, model = placement.staging.stages, placement.model
        factors = {device.name: busy_factor(self.problem, device.name, working) for device in self.devices}
        loads = Loads(placement, self.unit, factors, occupied=True)
        pace = model.new_int_var(round(lock_s(self.problem) / self.unit), 2**60, "")
        for load in (*loads.device, *loads.bus.values()):
            model.add(load <= pace)
        if self.problem.max_latency_s is not None:
            alone = Loads(placement, self.unit_s, dict.fromkeys(factors, 1.0))
            model.add(sum(alone.device) <= self._limit(self.problem.max_latency_s, slack))
        return pace

    def _sum_goal(self, placement: Placement, slack: int) -> Expression:
        alone = Loads(placement, self.unit_s, dict.fromkeys(self.watts, 1.0))
        if self.problem.min_throughput_fps is not None:
            apart = any(device.concurrent_copies for device in self.devices)
            loads = Loads(placement, self.unit_s, dict.fromkeys(self.watts, 1.0), occupied=True) if apart else alone
            self._keep_pace(placement, loads, 1 / self.problem.min_throughput_fps, slack)
        if self.problem.objective == "latency":
            return sum(alone.device)
        active = sum(Loads(placement, self.unit, self.watts, figures=self.joules).device)
        return active + self._idle(placement) if self.idle_w else active

    def _idle(self, placement: Placement) -> Expression:
        """Return a variable no less than the idle power times the seconds of the busiest device or bus."""
        model = placement.model
        idle_j = model.new_int_var(round(lock_s(self.problem) * self.idle_w / self.unit), 2**60, "")
        is_count = self._is_count(placement)
        # Devices that slow one another down have loads of their own for each number of working devices.
        known: dict[tuple[float, ...], Loads] = {}
        for working, literal in enumerate(is_count, 1):
            factors = {d.name: self.idle_w * busy_factor(self.problem, d.name, working) for d in self.devices}
            key = tuple(factors.values())
            if key not in known:
                known[key] = Loads(placement, self.unit, factors, bus_factor=self.idle_w, occupied=True)
            for load in known[key].device:
                model.add(load <= idle_j).only_enforce_if(literal)
        for load in next(iter(known.values())).bus.values():
            model.add(load <= idle_j)
        return idle_j

    def _is_count(self, placement: Placement) -> list[cp_model.IntVar]:
        """Return a literal for each number of devices, from one on, that says whether so many are used."""
        model = placement.model
        is_count = [model.new_bool_var("") for _ in range(min(len(self.devices), placement.staging.stages))]
        model.add_exactly_one(is_count)
        model.add(sum(placement.used) == sum(n * literal for n, literal in enumerate(is_count, 1)))
        return is_count

    def _keep_pace(self, placement: Placement, alone: Loads, most_s: float, slack: int) -> None:
        """Demand that no device and no bus takes longer than `most_s` while all devices of the plan work."""
        model = placement.model
        for load in (*alone.bus.values(), round(lock_s(self.problem) / self.unit_s)):
            model.add(load <= self._limit(most_s, slack))
        for working, literal in enumerate(self._is_count(placement), 1):
            for device, load in zip(self.devices, alone.device, strict=True):
                factor = busy_factor(self.problem, device.name, working)
                model.add(load <= self._limit(most_s / factor, slack)).only_enforce_if(literal)

    def _limit(self, seconds: float, slack: int) -> int:
        # `evaluate` allows a relative error of 1e-9. Every operator and every transfer is rounded by half a unit at
        # most.
        return math.floor(seconds * (1 + 5e-10) / self.unit_s) + slack * (len(self.dag) + 2 * len(self.devices))


def _measured_joules(problem: Problem) -> dict[str, list[float]]:
    """Return the joules of the operators, in the graph's order, on each device that has a sensor."""
    found = {}
    for device in problem.platform.devices:
        costs = cost_of(problem, device)
        joules = [costs.added_j(operator) for operator in problem.graph.operators]
        known = [figure for figure in joules if figure is not None]
        if len(known) == len(joules):
            found[device.name] = known
    return found
