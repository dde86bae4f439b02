"""The 165 instances of SEC 2022's Figure 6, each solved once: 11 networks, 2 to 6 stages, three orders of objectives.

The networks are those of Table III with the layers folded that TFLite's converter folds (`as_tflite`), because the
model of the device is calibrated on such operators. An instance is solved by `ideals`, and by CP-SAT where
communication is counted by edges as in the paper.

The paper's baseline is the Edge TPU compiler, whose source is not public. The paper (section II-B) and Google's
documentation say that it spreads parameters evenly. Two baselines follow that description: `even-parameters` as well as
it can be followed in the graph's order, and libcoral's partitioner by parameter count, Google's own open code for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import nan
from pathlib import Path
from typing import cast

from edgetpu_model import as_tflite, hub
from planner import ORDERS, keras

from tvm_pipeline import planning
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Plan, Stage, read_plan
from tvm_pipeline.core.problem import Objective, Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.cost.simulate import simulate
from tvm_pipeline.files import write_bytes

# The paper's names of the orders: (1) is memory, (2) DRAM, (3) communication.
STRATEGIES: dict[Objective, str] = dict(zip(ORDERS, ("(1)(3)", "(1)(2)(3)", "(2)(1)(3)"), strict=True))
COMPILER, LIBCORAL = "compiler", "libcoral"
BASELINES = {COMPILER: "even-parameters", LIBCORAL: "coral-parameters"}
FRAMES = 300


def by_edges(order: Objective) -> Objective:
    """Return the order with communication counted by edges, as in the paper's equations 9 and 10."""
    return cast(Objective, order.replace("communication", "edge_communication"))


@dataclass
class Keeper:
    """Plans that were found before, as text in a folder; without a folder nothing is kept."""

    folder: Path | None

    def plan(self, problem: Problem, scheduler: str) -> Plan:
        """Return the plan of a scheduler, that of the folder if it is there, judged anew."""
        if self.folder is None:
            return planning.plan(problem, scheduler).plan
        limits = f"{problem.objective} {problem.stages} {problem.children_together} {problem.time_limit_s}"
        what = f"{problem.graph.fingerprint} {problem.platform} {limits} {scheduler}"
        path = self.folder / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.txt"
        if path.exists():
            return judged(problem, read_plan(path))
        plan = planning.plan(problem, scheduler).plan
        self.folder.mkdir(parents=True, exist_ok=True)
        write_bytes(path, str(plan).encode())
        return plan


@dataclass
class Instance:
    """A network in so many stages: the plan of each strategy and of the compiler, and what they take."""

    network: str
    stages: int
    keeper: Keeper
    _graph: OperatorGraph | None = field(default=None, repr=False)

    @cached_property
    def graph(self) -> OperatorGraph:
        return self._graph or as_tflite(keras(self.network))

    def problem(self, objective: Objective = "memory,dram,communication", *, bus: bool = True) -> Problem:
        return Problem(self.graph, hub(self.stages, bus=bus), unmeasured(self.graph), objective, self.stages)

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """The plans by the names of the baselines and strategies."""
        theirs = {name: self.keeper.plan(self.problem(), scheduler) for name, scheduler in BASELINES.items()}
        ours = {name: self.keeper.plan(self.problem(order), "ideals") for order, name in STRATEGIES.items()}
        return theirs | ours

    @cached_property
    def paper_plans(self) -> dict[str, Plan]:
        """The plans by the paper's whole formulation: edges are counted, and all readers of a tensor share a stage."""
        return {
            name: self.keeper.plan(replace(self.problem(by_edges(order)), children_together=True), "cp-sat")
            for order, name in STRATEGIES.items()
        }

    def ms(self, stages: tuple[Stage, ...], *, bus: bool = True) -> float:
        """Return the milliseconds between frames in the simulator, kept full."""
        return 1e3 / (simulate(self.problem(bus=bus), stages, FRAMES).statistics.throughput_fps or nan)

    @cached_property
    def times_ms(self) -> dict[str, float]:
        return {name: self.ms(plan.stages) for name, plan in self.plans.items()}

    def stage_bytes(self, name: str) -> list[int]:
        """Return the parameter bytes of each stage of a plan."""
        sizes = {operator.name: operator.param_bytes for operator in self.graph.operators}
        return [sum(sizes[each] for each in stage.operators) for stage in self.plans[name].stages]


def instances(networks: Iterable[str], counts: Iterable[int], keeper: Keeper) -> list[Instance]:
    """Return the instances, each of which solves and simulates when it is first asked."""
    counts, graphs = list(counts), {name: as_tflite(keras(name)) for name in networks}
    return [Instance(name, count, keeper, _graph=graph) for name, graph in graphs.items() for count in counts]
