"""The Plan that a scheduler returns, with its stages, its predicted figures, and the reasons for the choice.

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

Next: `problem.py`, the Problem that a plan solves; `cost/evaluate.py`, which predicts what a plan costs; and
`planning/`, which makes plans.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tvm_pipeline.core.frame_energy import FrameEnergy
from tvm_pipeline.core.graph_limits import MOST_FILE_BYTES
from tvm_pipeline.core.problem import OBJECTIVES, Objective
from tvm_pipeline.core.profile import SegmentProfile
from tvm_pipeline.core.statistics import RunStatistics
from tvm_pipeline.documents import blamed
from tvm_pipeline.errors import PlanError
from tvm_pipeline.files import read_bytes

Status = Literal["optimal", "feasible"]
SEVERAL = " + "  # joins the names of models that are planned as one graph


@dataclass(frozen=True, slots=True)
class Stage:
    """A set of operators, in order, on one device or on several replicas that share the frames.

    Examples:
        >>> from tvm_pipeline.testing import example_problem
        >>> replicated = Stage(("d0", "d1"), ("double", "increment"))  # the two devices share the frames
        >>> round(evaluate(example_problem(), (replicated,)).predicted.throughput_fps, 1)
        33.3
    """

    devices: tuple[str, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted figures of a plan; a figure is None where it is not known.

    Attributes:
        throughput_fps: frames a second in steady state.
        latency_s: seconds of a frame that meets no queue, on the slowest replica of each stage.
        energy_j: joules of a frame: the idle power of the machine times the seconds between frames of a full pipeline,
            and the active energy of its stages. Where the idle power is not known, it is the active energy alone.
        jitter_s: seconds that a frame may be faster, on the fastest replica of each stage.
        memory_bytes: parameters of the largest stage.
        dram_bytes: parameters beyond the caches of their stages' devices; None where a device states no cache.
        communication_bytes: tensors that cross the widest boundary between stages, each counted once.
        edge_communication_bytes: the most that edges bring into a stage, each edge counted in front of its reader's.
        uncertainty: relative half-width of the 95 % confidence interval of throughput_fps and latency_s, which follows
            from that of the profile; None where the profile has none.
        latency_p50_s, latency_p90_s, latency_p99_s: quantiles of the latency under load, as `cost/under_load.py`
            simulates it; None where that was not done.

    Examples:
        >>> from tvm_pipeline.testing import example_problem
        >>> predicted = plan(example_problem()).plan.predicted
        >>> predicted.throughput_fps, predicted.latency_s, predicted.memory_bytes, predicted.energy_j
        (50.0, 0.04, 4, None)
    """

    throughput_fps: float | None = None
    latency_s: float | None = None
    energy_j: float | None = None
    jitter_s: float | None = None
    memory_bytes: int | None = None
    dram_bytes: int | None = None
    communication_bytes: int | None = None
    edge_communication_bytes: int | None = None
    uncertainty: float | None = None
    latency_p50_s: float | None = None
    latency_p90_s: float | None = None
    latency_p99_s: float | None = None

    def loaded_latency_s(self, inside: int) -> float | None:
        """Return the seconds of a frame in a pipeline that always holds `inside` frames; None if they are not known.

        By Little's law they are the frames inside over the rate (J. D. C. Little, "A Proof for the Queuing Formula
        L = λW", Operations Research 1961). A frame takes as long as one that meets no queue at least.

        >>> Prediction(throughput_fps=50.0, latency_s=0.04).loaded_latency_s(4)
        0.08
        """
        if not self.throughput_fps or self.latency_s is None:
            return None
        return max(self.latency_s, inside / self.throughput_fps)


@dataclass(frozen=True, slots=True)
class Plan:
    """The stages of a graph with their devices and their predicted figures.

    Attributes:
        scheduler: the name of the algorithm that made the plan.
        status: `optimal` where the value is proven to be the best of all plans that the scheduler considers.
        bound: no plan that the scheduler considers is better than this, in the objective's unit; one figure for each
            part of a lexicographic objective. None where nothing is proven.
        power_mode: the power mode of the platform that its figures are of; empty where none is set for it.
        in_flight: the least number of frames inside that was measured to keep the rate; None if that was not measured.
            With a batch, the number of calls inside.
        batch: how many frames a call of each stage computes, see `OperatorGraph`.

    Examples:
        >>> text = "plan net by hand\\nobjective latency\\nstatus optimal\\nbound 0.04\\npredicted latency_s 0.05"
        >>> by_hand = Plan.parse(text + "\\nstage d0\\n  double\\nstage d1\\n  increment\\n")
        >>> by_hand.devices, by_hand.value, round(by_hand.gap, 2)
        (('d0', 'd1'), (0.05,), 0.25)
        >>> Plan.parse(str(by_hand)) == by_hand
        True
    """

    graph: str
    scheduler: str
    objective: Objective
    stages: tuple[Stage, ...]
    predicted: Prediction
    status: Status = "feasible"
    bound: tuple[float, ...] | None = None
    power_mode: str = ""
    in_flight: int | None = None
    batch: int = 1

    @property
    def value(self) -> tuple[float, ...] | None:
        """The predicted figures of the plan's own objective."""
        return objective_value(self.predicted, self.objective)

    @property
    def gap(self) -> float | None:
        """The distance of the value from the bound, relative to the bound, in the first part where they differ."""
        if self.value is None or self.bound is None:
            return None
        for value, bound in zip(self.value, self.bound, strict=True):
            if value != bound:
                return abs(value - bound) / abs(bound) if bound else math.inf
        return 0.0

    @property
    def calls_inside(self) -> int:
        """How many calls a full pipeline holds."""
        return self.in_flight or calls_inside(self.stages, self.predicted, self.batch)

    @property
    def frames_inside(self) -> int:
        """How many frames a full pipeline holds."""
        return self.batch * self.calls_inside

    @property
    def loaded_latency_s(self) -> float | None:
        """The median latency under load; that of a full pipeline by Little's law where it was not simulated."""
        return self.predicted.latency_p50_s or self.predicted.loaded_latency_s(self.frames_inside)

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device that the plan uses, once, in the order of the stages."""
        return tuple(dict.fromkeys(device for stage in self.stages for device in stage.devices))

    def __str__(self) -> str:
        figures = ((name, getattr(self.predicted, name)) for name in Prediction.__slots__)
        predicted = " ".join(f"{name} {figure}" for name, figure in figures if figure is not None)
        lines = [
            f"plan {self.graph} by {self.scheduler}",
            f"objective {self.objective}",
            f"status {self.status}",
            *([f"power_mode {self.power_mode}"] if self.power_mode else []),
            *([f"in_flight {self.in_flight}"] if self.in_flight else []),
            *([f"batch {self.batch}"] if self.batch > 1 else []),
            *([] if self.bound is None else [f"bound {' '.join(map(str, self.bound))}"]),
            f"predicted {predicted}",
        ]
        for stage in self.stages:
            lines.append(f"stage {' '.join(stage.devices)}")
            lines.extend(f"  {name}" for name in stage.operators)
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Return the plan that `str(plan)` printed. Raise PlanError, which names the line."""
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
                    raise PlanError(f"line {number}: cannot read {line[:80]!r} as part of a plan") from error
        for word in ("plan", "objective", "status", "predicted"):
            if word not in heads:
                raise PlanError(f"a line beginning with {word!r} is missing")
        graph, scheduler = heads["plan"]
        bound, parts = heads.get("bound"), heads["objective"].split(",")
        if bound is not None and len(bound) != len(parts):
            raise PlanError(f"the bound has {len(bound)} figures, objective {heads['objective']} has {len(parts)}")
        return cls(
            graph,
            scheduler,
            heads["objective"],
            tuple(Stage(devices, tuple(operators)) for devices, operators in stages),
            heads["predicted"],
            heads["status"],
            bound,
            heads.get("power_mode", ""),
            heads.get("in_flight"),
            heads.get("batch", 1),
        )


def _head(line: str, words: list[str]) -> Any:
    """Return the content of a line above the stages. Raise ValueError or TypeError where a plan has no such line."""
    match words:
        case ["plan", *_, "by", scheduler]:
            # The name of a graph is that of a file, and may contain blanks.
            return line[len("plan ") : line.rindex(" by ")], scheduler
        case ["objective", objective] if objective in OBJECTIVES:
            return objective
        case ["status", "optimal" | "feasible" as status]:
            return status
        case ["power_mode", mode]:
            return mode
        case ["in_flight" | "batch", count] if int(count) > 0:
            return int(count)
        case ["bound", *figures] if figures:
            return tuple(map(_number, figures))
        case ["predicted", *figures]:
            return Prediction(**dict(zip(figures[::2], map(_number, figures[1::2]), strict=True)))
    raise ValueError(line)


def _number(text: str) -> Any:
    return int(text) if text.lstrip("-").isdigit() else float(text)


def check_one_model(plan: Plan, graph: str) -> None:
    """Raise PlanError where a plan is of several models (`workflow/merged.py`), and `graph` is one of their names."""
    models = plan.graph.split(SEVERAL)
    if len(models) > 1 and graph in models:
        raise PlanError(
            f"the plan is of {len(models)} models, {' and '.join(models)}, and {graph} is one of them; `simulate` runs "
            "it with all of them in the simulator, and `deploy` places them to be run"
        )


# The most frames inside for each worker. A replica so slow that it needs more than these is best left out of the plan.
MAX_FRAMES_PER_WORKER = 16


def calls_inside(stages: Sequence[Stage], predicted: Prediction, batch: int = 1) -> int:
    """Return how many calls, mostly of one frame, a pipeline holds by default: one in each worker and one that waits.

    A device computes one stage at a time, so of its stages two count at most. Uneven replicas need more, because a
    frame that a fast replica finished waits for those before it, which a slow one may have. By Little's law throughput
    times latency is the number of frames inside; one more waits for each worker.
    """
    served = Counter(device for stage in stages for device in stage.devices)
    workers = sum(min(count, 2) for count in served.values())
    fps, latency_s = (predicted.throughput_fps or 0.0) / batch, predicted.latency_s or 0.0
    return max(2 * workers, math.ceil(min(MAX_FRAMES_PER_WORKER * workers, fps * latency_s)) + workers)


def shown_stages(stages: Sequence[Stage]) -> str:
    """Return the devices of a plan in a few words: `cpu0 | cpu1` is a pipeline, `cpu0 + cpu1` are replicas."""
    return " | ".join(" + ".join(stage.devices) for stage in stages)


def objective_value(predicted: Prediction, objective: Objective) -> tuple[float, ...] | None:
    """Return the figures of `predicted` that `objective` compares, in its order; None where one is unknown."""
    units = {"throughput": "fps", "latency": "s", "energy": "j"}
    names = [f"{part}_{units.get(part, 'bytes')}" for part in objective.split(",")]
    figures = [getattr(predicted, name) for name in names]
    return None if None in figures else tuple(figures)


def cost_key(plan: Plan) -> tuple[float, ...]:
    """Return the plan's figures, signed so that less is better. Raise PlanError where one is unknown."""
    if plan.value is None:
        raise PlanError(f"nothing is known of the {plan.objective} of {plan.scheduler}'s plan of {plan.graph}")
    return tuple(-figure for figure in plan.value) if plan.objective == "throughput" else plan.value


def margin(plan: Plan, other: Plan) -> float | None:
    """Return the lead of `plan` over `other`, relative to `other`, in the first part of the objective that differs."""
    if plan.value is None or other.value is None:
        return None
    for mine, theirs in zip(plan.value, other.value, strict=True):
        if mine != theirs:
            ahead = mine - theirs if plan.objective == "throughput" else theirs - mine
            return ahead / abs(theirs) if theirs else math.copysign(math.inf, ahead)
    return 0.0


def describe(plan: Plan) -> str:
    """Return a plan in a few words: `cpu0 | cpu1` is a pipeline, `cpu0 + cpu1` are replicas; then its power mode."""
    mode = f" in {plan.power_mode}" if plan.power_mode else ""
    return f"{plan.scheduler} ({shown_stages(plan.stages)}){mode}"


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of a plan that ran in turns with others: medians over the rounds.

    Those of `plan.predicted` are as they were predicted.

    Attributes:
        throughput_fps: of a full pipeline, in steady state.
        spread: interquartile range over median of the rounds' latencies where latency is the plan's objective, of their
            joules where energy is and they are known, else of their throughputs.
        latency_s: of a frame that is alone in the pipeline, as a plan predicts it.
        statistics: of the round in the middle, with the frames of all rounds and the median of their median latencies.
        energy: joules of a frame of the full pipeline, of the round in the middle; None where nothing tells.
        times_s: for each of `statistics.stages`, the seconds of its latest frames in a full pipeline, or at the rate
            that an application is planned for, without waits, in order; empty in files of earlier versions.
    """

    plan: Plan
    throughput_fps: float
    spread: float
    latency_s: float
    statistics: RunStatistics
    energy: FrameEnergy | None = None
    times_s: tuple[tuple[float, ...], ...] = ()

    @property
    def prediction_error(self) -> float:
        """Return predicted over measured throughput, minus one."""
        return (self.plan.predicted.throughput_fps or 0.0) / self.throughput_fps - 1


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen plan, and why it was chosen.

    Attributes:
        candidates: every plan that was considered, the chosen one first, the others by their predictions.
        why: the reason, in words.
        segments: stages that were measured as a whole for this decision; a profile with them predicts the plan.
        measured: the candidates that ran side by side for this decision, the chosen one first. Their predictions are as
            they were before.
        asked: whether this plan or its scheduler was asked for, so that no others compete.

    Examples:
        >>> from tvm_pipeline.testing import example_problem
        >>> decision = plan(example_problem())
        >>> [candidate.scheduler for candidate in decision.candidates]
        ['two-stage', 'replicas', 'single']
        >>> decision.why.partition(":")[0], decision.plan == decision.candidates[0]
        ('two-stage (d0 | d1) has the best throughput', True)
        >>> decision.decided_by  # `plan` runs nothing
        'prediction'
    """

    plan: Plan
    candidates: tuple[Plan, ...]
    why: str
    segments: tuple[SegmentProfile, ...] = ()
    measured: tuple[Measured, ...] = ()
    asked: bool = False

    def times_s(self, plan: Plan) -> tuple[tuple[float, ...], ...]:
        """Return the measured seconds of a plan's stages, as `Measured` has them; empty where it did not run."""
        return next((found.times_s for found in self.measured if found.plan.stages == plan.stages), ())

    def full_p50_s(self, plan: Plan) -> float | None:
        """Return the measured median latency of a plan's full pipeline; None where it never ran with so many inside."""
        same = (m for m in self.measured if (m.plan.stages, m.plan.calls_inside) == (plan.stages, plan.calls_inside))
        return next((found.statistics.latency_p50_s for found in same), None)

    @property
    def decided_by(self) -> Literal["prediction", "measurement"]:
        """What chose the plan; candidates are measured only where the measurement then decides."""
        return "measurement" if self.measured else "prediction"


def read_plan(path: Path | str) -> Plan:
    """Read a plan from its text in a file. Raise PlanError, which names the file and the line.

    Examples:
        >>> import tempfile
        >>> from tvm_pipeline.testing import example_problem
        >>> with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        ...     _ = file.write(str(plan(example_problem()).plan))
        ...     file.flush()
        ...     print(read_plan(file.name).stages[1])
        Stage(devices=('d1',), operators=('increment',))
    """
    content = read_bytes(path, PlanError, MOST_FILE_BYTES)
    with blamed(path, PlanError, "`tvm-pipeline plan MODEL -o FILE` writes one"):
        return Plan.parse(content.decode())
