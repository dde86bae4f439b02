"""What a scheduler is given (Problem) and what it returns (Plan).

A Plan is data: it prints as text that a person can read and edit, and that parses back:

    plan squeezenet1.1 by chain
    objective throughput
    status optimal
    bound 58.1
    predicted throughput_fps 58.1 latency_s 0.0353
    stage cpu0
      conv2d+add+relu_0
      max_pool2d_1
    stage cpu1 cpu2
      ...

Next: `evaluate.py`, which says what a plan costs, and `scheduling/`, which makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tvm_pipeline.errors import InfeasibleError, OptionError, PlanError
from tvm_pipeline.files import read_bytes
from tvm_pipeline.graph import OperatorGraph
from tvm_pipeline.platform import Link, Platform, find_link
from tvm_pipeline.profile import Profile

Objective = Literal["throughput", "latency", "energy"]
OBJECTIVES: tuple[Objective, ...] = ("throughput", "latency", "energy")
Status = Literal["optimal", "feasible"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A graph to be planned on a platform by its profile.

    Attributes:
        objective: what is best: most frames a second, least seconds or least joules a frame.
        stages: exactly how many stages a pipeline has; None lets the planner choose.
    """

    graph: OperatorGraph
    platform: Platform
    profile: Profile
    objective: Objective = "throughput"
    stages: int | None = None

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise OptionError(f"objective {self.objective!r} is none of {', '.join(OBJECTIVES)}")
        if self.stages is not None and self.stages < 1:
            raise OptionError(f"--stages {self.stages}: a plan has at least one stage")
        if self.stages is not None and self.stages > len(self.graph):
            raise InfeasibleError(
                f"{self.stages} stages: {self.graph.name} has only {len(self.graph)} operators, "
                "and every stage needs one"
            )
        self.profile.check_graph(self.graph)
        for device in self.platform.devices:
            self.profile.device(device.name)

    def link(self, source: str, destination: str) -> Link:
        """What a transfer costs: as the platform says, else as it was measured."""
        return find_link((*self.platform.links, *self.profile.links), source, destination)


@dataclass(frozen=True, slots=True)
class Stage:
    """A set of operators, in order, on one device or on several replicas that share the frames."""

    devices: tuple[str, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Steady-state frames a second, seconds a frame that meets no queue, joules a frame where known."""

    throughput_fps: float
    latency_s: float
    energy_j: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Which device runs which operators, and how good that is.

    Attributes:
        scheduler: the name of the algorithm (or candidate) that made it.
        status: `optimal` where the value is proven the best of the scheduler's space of plans.
        bound: what no plan of that space can pass, in the objective's unit.
    """

    graph: str
    scheduler: str
    objective: Objective
    stages: tuple[Stage, ...]
    predicted: Prediction
    status: Status = "feasible"
    bound: float | None = None

    @property
    def value(self) -> float | None:
        """The predicted figure of the plan's own objective."""
        return objective_value(self.predicted, self.objective)

    @property
    def gap(self) -> float | None:
        """How far the value lies from the bound, relative to the bound; None where either is unknown."""
        if self.value is None or not self.bound:
            return None
        return abs(self.value - self.bound) / abs(self.bound)

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device the plan uses, once, in the order of the stages."""
        return tuple(dict.fromkeys(device for stage in self.stages for device in stage.devices))

    def __str__(self) -> str:
        predicted = f"throughput_fps {self.predicted.throughput_fps} latency_s {self.predicted.latency_s}"
        if self.predicted.energy_j is not None:
            predicted += f" energy_j {self.predicted.energy_j}"
        lines = [
            f"plan {self.graph} by {self.scheduler}",
            f"objective {self.objective}",
            f"status {self.status}",
            *([] if self.bound is None else [f"bound {self.bound}"]),
            f"predicted {predicted}",
        ]
        for stage in self.stages:
            lines.append(f"stage {' '.join(stage.devices)}")
            lines.extend(f"  {name}" for name in stage.operators)
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Reads what `str(plan)` printed. Raises PlanError naming the line."""
        heads: dict[str, Any] = {}
        stages: list[tuple[tuple[str, ...], list[str]]] = []
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if line[0].isspace():
                if not stages:
                    raise PlanError(f"line {number}: operator {words[0]} stands before the first stage")
                stages[-1][1].append(line.strip())
            elif words[0] == "stage" and len(words) > 1:
                stages.append((tuple(words[1:]), []))
            elif words[0] in heads:
                raise PlanError(f"line {number}: a second line begins with {words[0]!r}")
            else:
                try:
                    heads[words[0]] = _head(line, words)
                except (ValueError, TypeError) as error:
                    raise PlanError(f"line {number}: cannot read {line!r} as part of a plan") from error
        for word in ("plan", "objective", "status", "predicted"):
            if word not in heads:
                raise PlanError(f"a line beginning with {word!r} is missing")
        graph, scheduler = heads["plan"]
        return cls(
            graph,
            scheduler,
            heads["objective"],
            tuple(Stage(devices, tuple(operators)) for devices, operators in stages),
            heads["predicted"],
            heads["status"],
            heads.get("bound"),
        )


def _head(line: str, words: list[str]) -> Any:
    """What a line above the stages says; raises ValueError or TypeError where it says nothing of a plan."""
    match words:
        case ["plan", *_, "by", scheduler]:
            # The name of a graph is that of a file, and may hold blanks.
            return line[len("plan ") : line.rindex(" by ")], scheduler
        case ["objective", objective] if objective in OBJECTIVES:
            return objective
        case ["status", "optimal" | "feasible" as status]:
            return status
        case ["bound", figure]:
            return float(figure)
        case ["predicted", *figures]:
            return Prediction(**dict(zip(figures[::2], map(float, figures[1::2]), strict=True)))
    raise ValueError(line)


def objective_value(predicted: Prediction, objective: Objective) -> float | None:
    """The figure of `predicted` that `objective` is about."""
    match objective:
        case "throughput":
            return predicted.throughput_fps
        case "latency":
            return predicted.latency_s
        case "energy":
            return predicted.energy_j


def read_plan(path: Path | str) -> Plan:
    """Reads a plan's text from a file; raises PlanError naming the file and the line."""
    content = read_bytes(path, PlanError)
    try:
        return Plan.parse(content.decode())
    except (UnicodeDecodeError, PlanError) as error:
        raise PlanError(f"{path}: {error}") from error
