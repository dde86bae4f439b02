"""Memory, DRAM overflow and communication in lexicographic order, by CP-SAT.

The problem is that of Yin et al., "Exact Memory- and Communication-aware Scheduling of DNNs on Pipelined Edge TPUs",
SEC 2022, objectives (1) to (3). The parts are solved one after another: the optimum of a part becomes a limit of the
next. An upper bound of the bytes of a stage leaves each operator a window of stages, which is most of the speed.

Communication is counted in one of two ways. `communication` counts tensors at every boundary that they cross, as
`handed_on_bytes` does. `edge_communication` is the paper's: by equations 9 and 10, with s the stage of an operator and
t_e the bytes of edge e from operator i to operator j,

    com_{k,k+1} = sum over edges e of t_e * alpha_e,    alpha_e = 1 where s_i != s_j and s_j = k + 1, else 0

and objective (3) is the largest of them (section IV-B), as `edge_communication_bytes` counts it.

Next: `cp_sat.py`, which calls this, and `staging.py`, the booleans.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from tvm_pipeline.core.graph import edge_bytes
from tvm_pipeline.core.plan import Plan, Prediction, Stage, Status
from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import cost_of, equal_cache_bytes
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, NoPlanError, PlanError, SearchTimeError
from tvm_pipeline.planning.sat.staging import Staging, dag_of, stage_of, weighted
from tvm_pipeline.planning.search.cuts import prefixes
from tvm_pipeline.planning.search.lexicographic import lexicographic
from tvm_pipeline.solvers.cpsat import library, search

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

    from tvm_pipeline.planning.sat.staging import Expression


def least_bytes(problem: Problem, hint: tuple[Stage, ...] | None, deadline: float) -> Plan:
    """Return the lexicographic optimum over all chains of k downsets; see `cp_sat` for parameters and errors."""
    line = max(disjoint_sets(problem.platform.devices), key=len)
    if problem.stages is not None:
        return _Bytes(problem, line, problem.stages, hint, deadline).plan()
    for stages in range(min(len(line), len(problem.graph)), 1, -1):
        try:
            return _Bytes(problem, line, stages, hint, deadline).plan()
        except NoPlanError:
            # Operators that must stay together may leave too few cuts.
            if not problem.children_together:
                raise
    return _Bytes(problem, line, 1, hint, deadline).plan()


class _Bytes:
    """One solve: the best plan so far, and the parts whose optimum is known."""

    def __init__(
        self, problem: Problem, line: tuple[Device, ...], stages: int, hint: tuple[Stage, ...] | None, deadline: float
    ) -> None:
        if stages > len(line):
            raise InfeasibleError(
                f"no plan of {stages} stages: platform {problem.platform.name} has {len(line)} devices that can work "
                "at the same time, and each serves one stage; ask for fewer `stages`"
            )
        self.problem, self.devices, self.stages, self.deadline = problem, line[:stages], stages, deadline
        self.dag = dag_of(problem.graph, problem.children_together)
        self.total = sum(self.dag.param_bytes)
        self.cache = equal_cache_bytes(problem, self.devices)
        self.best: tuple[Stage, ...] | None = None
        self.figures = Prediction()
        self.known: dict[str, int] = {}
        if hint is not None and len(hint) == stages:
            self._take([stage.operators for stage in hint])
        with suppress(PlanError):  # an even cut of the graph's order, without a search for the other parts
            by_memory = replace(problem, objective="memory,communication", stages=stages, time_limit_s=0.0)
            self._take([stage.operators for stage in lexicographic(by_memory, prefixes(problem.graph), "chain").stages])

    def _take(self, groups: list[tuple[str, ...]]) -> None:
        """Keep the plan if it is legal and better than the best so far."""
        stages = tuple(Stage((device.name,), group) for device, group in zip(self.devices, groups, strict=True))
        try:
            figures = evaluate(self.problem, stages).predicted
        except PlanError:
            return  # a hint need not be a plan of this problem
        if self.best is None or self._value(figures) < self._value(self.figures):
            self.best, self.figures = stages, figures

    def _value(self, figures: Prediction) -> tuple[int, ...]:
        return tuple(getattr(figures, f"{part}_bytes") for part in self.problem.objective.split(","))

    def plan(self) -> Plan:
        """Minimise one part after another, and return the best plan with its bound."""
        parts = self.problem.objective.split(",")
        bound: list[int] = []
        for part in parts:
            floor = self._floor(part)
            if self.best is None or getattr(self.figures, f"{part}_bytes") > floor:
                proven = self._improve(part, floor)
                if proven is not None:
                    # This part is not proven, so the later parts only have the bounds that need no search.
                    bound += [proven, *map(self._floor, parts[len(bound) + 1 :])]
                    break
            self.known[part] = getattr(self.figures, f"{part}_bytes")
            bound.append(self.known[part])
        if self.best is None:
            raise SearchTimeError(
                f"no plan of {self.stages} stages found within {self.problem.time_limit_s} s; give more `time_limit_s`"
            )
        value = self._value(self.figures)
        status: Status = "optimal" if value == tuple(bound) else "feasible"
        problem = self.problem
        return Plan(problem.graph.name, "cp-sat", problem.objective, self.best, self.figures, status, tuple(bound))

    def _floor(self, part: str) -> int:
        """Return a lower bound of a part that needs no search."""
        if part == "memory":
            return max(max(self.dag.param_bytes), -(-self.total // self.stages))
        return max(0, self.total - self.stages * self.cache) if part == "dram" else 0

    def _improve(self, part: str, floor: int) -> int | None:
        """Minimise a part under the optima of the parts before it; return a lower bound if time ended the search."""
        most = self._most_bytes(part)
        model = library().CpModel()
        staging = Staging(model, self.dag, self.stages, self.dag.windows(self.stages, most))
        for stage in range(self.stages):
            staging.fill(stage)
        param_bytes = self._param_bytes(staging, most)
        self._forbid_unsupported(staging)
        match part:
            case "memory":
                goal = model.new_int_var(min(floor, most), most, "")
                for size in param_bytes:
                    model.add(size <= goal)
            case "dram":
                goal = self._overflow(staging, param_bytes, most)
            case "edge_communication":
                goal = self._edge_communication(staging)
            case _:
                goal = self._communication(staging)
        if part != "dram" and "dram" in self.known:
            model.add(self._overflow(staging, param_bytes, most) <= self.known["dram"])
        model.minimize(goal)
        if self.best is not None:
            staging.hint(stage_of(self.problem.graph, self.best))
        answer = search(model, self.deadline)
        if answer.bound == math.inf:
            raise InfeasibleError(
                f"no plan of {self.stages} stages of {self.problem.graph.name} meets the limits of the problem"
            )
        if answer.solver is not None:
            self._take(staging.groups(answer.solver))
        return None if answer.proven else max(floor, math.ceil(max(answer.bound, 0) - 1e-6))

    def _most_bytes(self, part: str) -> int:
        """Return the most parameter bytes that a stage has in a plan that is at least as good as the best so far."""
        most = self.known.get("memory", self.total)
        if self.best is not None and part == "memory":
            most = min(most, self.figures.memory_bytes or 0)
        if self.best is not None and (part == "dram" or "dram" in self.known):
            most = min(most, self.cache + (self.figures.dram_bytes or 0))
        return most

    def _param_bytes(self, staging: Staging, most: int) -> list[Expression]:
        """Return the parameter bytes of each stage, as differences of prefixes, and add every limit on them."""
        limits = [device.memory_bytes for device in self.devices]
        prefixes: list[Expression] = [0]
        for boundary in range(1, self.stages):
            least = max(0, self.total - (self.stages - boundary) * most)
            prefix = staging.model.new_int_var(least, min(self.total, boundary * most), "")
            staging.model.add(prefix == staging.prefix(boundary, self.dag.param_bytes))
            prefixes.append(prefix)
        param_bytes = [after - before for before, after in pairwise([*prefixes, self.total])]
        for size, limit in zip(param_bytes, limits, strict=True):
            if self.stages > 1 or limit is not None:
                staging.model.add(size <= (most if limit is None else min(most, limit)))
        return param_bytes

    def _overflow(self, staging: Staging, param_bytes: list[Expression], most: int) -> Expression:
        """Return objective (2): the sum over stages of the parameter bytes beyond the cache."""
        beyond = [staging.model.new_int_var(0, max(0, most - self.cache), "") for _ in param_bytes]
        for size, over in zip(param_bytes, beyond, strict=True):
            staging.model.add(over >= size - self.cache)
        total: Expression = library().LinearExpr.sum(beyond)
        return total

    def _communication(self, staging: Staging) -> cp_model.IntVar:
        """Return objective (3): the most bytes that operators hand on across a boundary."""
        flows = [replace(flow, kept=False) for flow in self.dag.flows if flow.writer is not None and flow.readers]
        widest = staging.model.new_int_var(0, sum(flow.bytes for flow in flows), "")
        for boundary in range(1, self.stages):
            staging.model.add(weighted(staging.crossing(boundary, flows)) <= widest)
        return widest

    def _edge_communication(self, staging: Staging) -> cp_model.IntVar:
        """Objective (3) by the paper's equations 9 and 10: the most bytes that edges bring into a stage."""
        sizes: dict[tuple[int, int], int] = {}
        leader = self.dag.leader
        for (writer, reader), size in edge_bytes(self.problem.graph).items():
            # Edges between operators that share their stages count at the same boundary.
            pair = leader[writer], leader[reader]
            if size and pair[0] != pair[1]:
                sizes[pair] = sizes.get(pair, 0) + size
        widest = staging.model.new_int_var(0, sum(sizes.values()), "")
        for stage in range(1, self.stages):
            terms = [(staging.enters(stage, *pair), size) for pair, size in sizes.items()]
            received = weighted([(literal, size) for literal, size in terms if literal is not staging.false])
            staging.model.add(received <= widest)
        return widest

    def _forbid_unsupported(self, staging: Staging) -> None:
        for stage, device in enumerate(self.devices):
            costs = cost_of(self.problem, device)
            for operator, row in zip(self.problem.graph.operators, staging.before, strict=True):
                if not costs.can_run(operator):
                    staging.model.add_bool_or(~row[stage + 1], row[stage])
