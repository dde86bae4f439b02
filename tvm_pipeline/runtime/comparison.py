"""Runs plans side by side: in turns, so that any other load of the machine affects all of them.

A `Run` runs one plan for one turn; `runner` makes the one that runs a compiled model on noise. An application with host
work opens its pipelines itself and runs them by `turn`. Read next: verification.py, which chooses a plan by such turns;
pipeline.py, which runs each plan; `report/tables.py`, which prints the comparison.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import TypeVar

import numpy as np

from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.backends.ports import frame_of_noise
from tvm_pipeline.core.frame_energy import FrameEnergy
from tvm_pipeline.core.plan import Measured, Plan
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.statistics import RunStatistics, StageRecord
from tvm_pipeline.runtime.frame_stream import Tagged
from tvm_pipeline.runtime.pipeline import Pipeline

_log = logging.getLogger(__name__)

SINGLE_FRAMES = 3  # frames sent alone in each turn, for the latency that meets no queue
TURN_FRAMES = 12  # frames that fill the pipeline in each turn, at least
MOST_TIMES = 1000  # of frames, kept of each stage on each device
# A turn of a plan that is slower than predicted may take this many times longer; it then has fewer frames.
MOST_TIMES_LONGER = 4


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn:
    """What one plan did in its turn.

    Attributes:
        statistics: of the full pipeline.
        latency_s: median of the frames that were alone in the pipeline.
        full_s: the moments, of `time.perf_counter`, between which the pipeline was full.
        full_frames: how many frames came out between them.
        energy: the joules of a frame of the full pipeline; None where nobody asked, or nothing tells (`metering.py`).
        times_s: as in `Measured`.
    """

    statistics: RunStatistics
    latency_s: float
    full_s: tuple[float, float] = (0.0, 0.0)
    full_frames: int = 0
    energy: FrameEnergy | None = None
    times_s: tuple[tuple[float, ...], ...] = ()

    @property
    def throughput_fps(self) -> float:
        """Frames a second of the full pipeline; 0 where too few frames came out."""
        return self.statistics.throughput_fps or 0.0


# A function that runs a plan for a turn of about so many seconds; raises PipelineError where it cannot.
Run = Callable[[Plan, float], Turn]


def runner(compiled: CompiledModel, platform: Platform) -> Run:
    """Return the function that runs a plan of a model on seeded noise, on a platform settled on this machine."""
    frame = frame_of_noise(compiled.graph)

    def run(plan: Plan, seconds: float) -> Turn:
        with Pipeline(compiled, plan, platform) as pipeline:
            return turn(pipeline, lambda: Tagged(frame, None), seconds)

    return run


def turn(pipeline: Pipeline, frame: Callable[[], Tagged], seconds: float) -> Turn:
    """Run a pipeline that was just started for one turn: frames alone, then as many as it takes."""
    alone: list[float] = []
    for inputs, tag in _for_seconds(frame, 0.0, SINGLE_FRAMES, seconds):
        pipeline.submit(inputs, tag=tag)
        alone.append(pipeline.result().latency_s)
    pipeline.reset_statistics()
    entered_s: list[float] = []
    least = TURN_FRAMES * pipeline.plan.batch
    entering = _for_seconds(_noting(frame, entered_s), seconds, least, MOST_TIMES_LONGER * seconds)
    done_s = [time.perf_counter() for _ in pipeline.map(entering)]
    full = [done for done in done_s if done <= entered_s[-1]]  # then it runs empty
    full = full if len(full) > 1 else done_s
    times_s = own_times_s(pipeline.records(), pipeline.plan.calls_inside)
    return Turn(pipeline.statistics(), median(alone), (full[0], full[-1]), len(full) - 1, times_s=times_s)


def own_times_s(records: Sequence[StageRecord], skip: int) -> tuple[tuple[float, ...], ...]:
    """Return the seconds of each frame in each stage, without the first `skip`, and without waits.

    Stages of one device take turns on its cores, and each counts its wait for the others as work: their busy shares add
    up to more than 1. The seconds of each of their frames are divided by that sum.
    """
    busy: dict[str, float] = defaultdict(float)
    for record in records:
        busy[record.device] += 1 - record.summary(skip).bubble_share
    return tuple(
        tuple(round(seconds / max(busy[record.device], 1.0), 7) for seconds in record.times_s(skip))
        for record in records
    )


def _noting(frame: Callable[[], Tagged], entered_s: list[float]) -> Callable[[], Tagged]:
    """Return a function that gives frames and notes when."""

    def noted() -> Tagged:
        entered_s.append(time.perf_counter())
        return frame()

    return noted


def compare(
    compiled: CompiledModel,
    platform: Platform,
    plans: Sequence[Plan],
    *,
    seconds: float = 2.0,
    rounds: int = 3,
    run: Run | None = None,
) -> list[Measured]:
    """Run every plan for about `seconds` in every one of `rounds` rounds, on seeded noise unless `run` is given.

    Each round begins with another plan.
    """
    run = run or runner(compiled, platform)
    return side_by_side([(plan, run) for plan in plans], seconds=seconds, rounds=rounds)


def side_by_side(runs: Sequence[tuple[Plan, Run]], *, seconds: float, rounds: int) -> list[Measured]:
    """Run every plan by what runs it, as `compare` does: for plans of several builds of one model."""
    turns: list[list[Turn]] = [[] for _ in runs]
    for round_ in range(rounds):
        for index in in_turn(range(len(runs)), round_):
            plan, run = runs[index]
            _log.info(f"{plan.scheduler} on {', '.join(plan.devices)}, round {round_ + 1} of {rounds}")
            turns[index].append(run(plan, seconds))
    return [measured(plan, found) for (plan, _), found in zip(runs, turns, strict=True)]


def in_turn(items: Sequence[T], round_: int) -> list[T]:
    """Return the items in the order of a round: each round begins with another one."""
    first = round_ % len(items)
    return [*items[first:], *items[:first]]


def measured(plan: Plan, turns: Sequence[Turn]) -> Measured:
    """Return the medians over a plan's turns."""
    rates = np.array([turn.throughput_fps for turn in turns])
    latencies_s = np.array([turn.latency_s for turn in turns])
    figures = latencies_s if plan.objective == "latency" else rates
    if plan.objective == "energy" and all(turn.energy for turn in turns):
        figures = np.array([turn.energy.energy_j for turn in turns if turn.energy])
    low, middle, high = np.quantile(figures, [0.25, 0.5, 0.75])
    statistics = turns[int(np.argsort(rates)[len(rates) // 2])].statistics
    medians_s = [turn.statistics.latency_p50_s for turn in turns if turn.statistics.latency_p50_s is not None]
    return Measured(
        plan,
        float(np.median(rates)),
        float((high - low) / max(middle, 1e-12)),
        float(np.median(latencies_s)),
        replace(
            statistics,
            frames=sum(turn.statistics.frames for turn in turns),
            latency_p50_s=median(medians_s) if medians_s else None,
        ),
        _energy(turns),
        tuple(tuple(chain(*own))[-MOST_TIMES:] for own in zip(*(turn.times_s for turn in turns), strict=True)),
    )


def _energy(turns: Sequence[Turn]) -> FrameEnergy | None:
    """Return the joules of the turn in the middle; None where one has none."""
    known = sorted((turn.energy for turn in turns if turn.energy), key=lambda energy: energy.energy_j)
    return known[len(known) // 2] if len(known) == len(turns) else None


def _for_seconds(frame: Callable[[], Tagged], seconds: float, least: int, most_s: float) -> Iterator[Tagged]:
    """Yield frames for `seconds`, and `least` times if that takes at most `most_s`; twice in any case."""
    begin_s = time.perf_counter()
    count = 0
    while True:
        took_s = time.perf_counter() - begin_s
        if took_s >= seconds and count >= 2 and (count >= least or took_s >= most_s):
            return
        yield frame()
        count += 1
