"""The measurements of BetterTogether's boards, and its pipelines predicted by the engine's cost model.

https://github.com/ucsc-redwood/better-together (IISWC 2025). A network is a chain of stages. A table has the time of
each stage on each processor of a board twice: while the others rest, and while all are busy. A schedule gives each
processor one run of stages, and its value is the largest sum of the second times. The repository has a log of each of
the ten best schedules of a Pixel 7a, with the times at which each processor began and ended each task.

A log has the processors in the order of the pipeline, but not which stages each one computed. `ten_best` and `matched`
find it: the logs are of ten schedules, each of one, and the times of a log are nearest to those of its schedule.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ortools.graph.python.linear_sum_assignment import SimpleLinearSumAssignment

from tvm_pipeline import (
    Device,
    DeviceProfile,
    Operator,
    OperatorGraph,
    Platform,
    Problem,
    Profile,
    Stage,
    Tensor,
    evaluate,
)
from tvm_pipeline.errors import ProfileError
from tvm_pipeline.files import read_bytes
from tvm_pipeline.planning import slowed

CYCLES_PER_S = 24.576e6  # of the timer of the Pixel 7a, as the analyses beside the logs have it
LOGS = "BM_best_raw_stage_*.txt"
TABLES = "*.raw"
BEST = 10

_TASK = re.compile(r"Chunk \d+ \((\w+)\):\s+Start: (\d+) cycles\s+End: (\d+) cycles")


@dataclass(frozen=True, slots=True)
class Log:
    """A schedule while it ran.

    Attributes:
        stages_s: mean seconds of a task on each processor, in the order of the pipeline.
        period_s: seconds between two frames that came out.
    """

    stages_s: Mapping[str, float]
    period_s: float


def read_table(path: Path) -> Problem:
    """Read a table as a problem: a stage is an operator, in seconds beside the others, which move nothing.

    Raises:
        ProfileError: the file is no such table.
    """
    beside: list[dict[str, float]] = []
    lines = [line for line in _text(path).splitlines() if line.strip()]
    for number, line in enumerate(lines):
        fields = dict(field.partition("=")[::2] for field in line.strip().split("|"))
        try:
            processor, seconds = fields["PROCESSOR"], float(fields["AVG"]) / 1e3
            if not 0 <= seconds < math.inf:
                raise ValueError
        except (KeyError, ValueError) as error:
            raise ProfileError(f"{path}: line {number + 1} is no time of BetterTogether: {line[:80]!r}") from error
        # Each set of lines has a processor once; every other set was measured beside the others.
        if not beside or processor in beside[-1]:
            beside.append({})
        beside[-1][processor] = seconds
    processors = list(beside[0]) if beside else []
    if not processors or len(beside) % 2 or any(set(stage) != set(processors) for stage in beside):
        raise ProfileError(f"{path}: a table has each processor twice for each stage, alone and beside the others")
    names = [f"stage{number + 1}" for number in range(len(beside) // 2)]
    operators = tuple(
        Operator(name, "stage", (f"of {before}",) if before else (), (Tensor(f"of {name}", (1,), "int8"),))
        for before, name in zip((None, *names), names, strict=False)
    )
    graph = OperatorGraph(path.stem, (), operators, (f"of {names[-1]}",))
    devices = {
        processor: DeviceProfile.in_order(graph, [stage[processor] for stage in beside[1::2]])
        for processor in processors
    }
    platform = Platform(path.stem, tuple(Device(name, cores=(core,)) for core, name in enumerate(processors)))
    return Problem(graph, platform, Profile(graph.name, graph.fingerprint, devices))


def read_log(path: Path) -> Log:
    """Read the log of a schedule.

    Raises:
        ProfileError: the file is no such log, or has fewer than two frames.
    """
    taken: dict[str, list[tuple[int, int]]] = {}
    for processor, began, ended in _TASK.findall(_text(path)):
        if int(ended):  # a processor that the schedule leaves out has zeros
            taken.setdefault(processor, []).append((int(began), int(ended)))
    if not taken or len(ends := sorted(ended for _, ended in list(taken.values())[-1])) < 2:
        raise ProfileError(f"{path}: no log of BetterTogether, or one of fewer than two tasks")
    stages_s = {
        processor: sum(ended - began for began, ended in tasks) / len(tasks) / CYCLES_PER_S
        for processor, tasks in taken.items()
    }
    return Log(stages_s, (ends[-1] - ends[0]) / (len(ends) - 1) / CYCLES_PER_S)


def ten_best(problem: Problem) -> list[tuple[Stage, ...]]:
    """Return the ten schedules with the least value; each processor has one run of stages, or none."""
    names = problem.graph.operator_names
    devices = [device.name for device in problem.platform.devices]
    found = []
    for count in range(1, min(len(devices), len(names)) + 1):
        for cuts in itertools.combinations(range(1, len(names)), count - 1):
            runs = [tuple(names[begin:end]) for begin, end in itertools.pairwise((0, *cuts, len(names)))]
            for order in itertools.permutations(devices, count):
                found.append(tuple(Stage((device,), run) for device, run in zip(order, runs, strict=True)))
    return sorted(found, key=lambda stages: max(stages_s(problem, stages)))[:BEST]


def stages_s(problem: Problem, stages: tuple[Stage, ...]) -> list[float]:
    """Return the seconds of each stage as the engine judges them."""
    return [cost.seconds for cost in evaluate(problem, stages).costs]


def matched(problem: Problem, logs: Sequence[Log]) -> list[tuple[Stage, ...]]:
    """Return the schedule of each log: a different one of the ten best for each, with the least distances in all.

    Raises:
        ProfileError: a log has its processors in an order that none of the ten has.
    """
    best, pairs = ten_best(problem), SimpleLinearSumAssignment()
    for row, log in enumerate(logs):
        for column, stages in enumerate(best):
            if [stage.devices[0] for stage in stages] == list(log.stages_s):
                both = zip(stages_s(problem, stages), log.stages_s.values(), strict=True)
                distance_s = sum(abs(predicted - measured) for predicted, measured in both)
                pairs.add_arc_with_cost(row, column, round(distance_s * CYCLES_PER_S))
    for row, column in itertools.product(range(len(logs), len(best)), range(len(best))):
        pairs.add_arc_with_cost(row, column, 0)  # schedules without a log
    if len(logs) > len(best) or pairs.solve() != pairs.OPTIMAL:
        raise ProfileError(f"the {len(logs)} logs are not of the ten best schedules of {problem.graph.name}")
    return [best[pairs.right_mate(row)] for row in range(len(logs))]


def corrected(problem: Problem, runs: Sequence[tuple[tuple[Stage, ...], Log]], working: int) -> Problem:
    """Return the problem as pipelines on so many processors showed it: each is as much slower as they say.

    The factor of a processor is the median of measured over predicted seconds of its stages, as the runtime corrects a
    plan while it runs. A processor that no such pipeline had keeps its times.
    """
    ratios: dict[str, list[float]] = {}
    for stages, log in runs:
        if len(stages) == working:
            for stage, predicted in zip(stages, stages_s(problem, stages), strict=True):
                ratios.setdefault(stage.devices[0], []).append(log.stages_s[stage.devices[0]] / predicted)
    return slowed(problem, {name: median(found) for name, found in ratios.items()})


def _text(path: Path) -> str:
    return read_bytes(path, ProfileError).decode(errors="replace")
