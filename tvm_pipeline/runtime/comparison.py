"""Runs plans side by side: in turns, so that any other load of the machine affects all of them.

Read next: pipeline.py, which runs each plan; `report/tables.py`, which prints the comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tvm_pipeline.backends.contract import Array, CompiledModel, Port
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.statistics import RunStatistics
from tvm_pipeline.runtime.pipeline import Pipeline

SINGLE_FRAMES = 5  # frames sent alone in each round, for the latency that meets no queue


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured figures of one plan: medians over the rounds.

    Attributes:
        throughput_fps: of a saturated pipeline, in steady state.
        spread: interquartile range over median of the rounds' throughputs.
        latency_s: of a frame that is alone in the pipeline, as a plan predicts it.
        statistics: of the round in the middle.
    """

    plan: Plan
    throughput_fps: float
    spread: float
    latency_s: float
    statistics: RunStatistics

    @property
    def prediction_error(self) -> float:
        """Return predicted over measured throughput, minus one."""
        return (self.plan.predicted.throughput_fps or 0.0) / self.throughput_fps - 1


def compare(
    compiled: CompiledModel,
    platform: Platform,
    plans: Sequence[Plan],
    *,
    seconds: float = 2.0,
    rounds: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Measured]:
    """Run every plan for about `seconds` in every one of `rounds` rounds, on seeded noise.

    Each round begins with another plan.
    """
    frame = {t.name: noise(Port(t.name, t.shape, t.dtype)) for t in compiled.graph.inputs}
    runs: list[list[RunStatistics]] = [[] for _ in plans]
    alone: list[list[float]] = [[] for _ in plans]
    for round_ in range(rounds):
        for turn in range(len(plans)):
            index = (turn + round_) % len(plans)
            progress(f"{plans[index].scheduler} on {', '.join(plans[index].devices)}, round {round_ + 1} of {rounds}")
            with Pipeline(compiled, plans[index], platform) as pipeline:
                for _ in range(SINGLE_FRAMES):
                    pipeline.submit(frame)
                    alone[index].append(pipeline.result().latency_s)
                pipeline.reset_statistics()
                for _ in pipeline.map(_for_seconds(frame, seconds)):
                    pass
                runs[index].append(pipeline.statistics())
    return [_summary(*row) for row in zip(plans, runs, alone, strict=True)]


def _for_seconds(frame: dict[str, Array], seconds: float) -> Iterator[dict[str, Array]]:
    """Yield the same frame again and again: for `seconds`, and at least 24 times."""
    end = time.perf_counter() + seconds
    count = 0
    while count < 24 or time.perf_counter() < end:
        yield frame
        count += 1


def _summary(plan: Plan, runs: list[RunStatistics], alone: list[float]) -> Measured:
    rates = np.array([run.throughput_fps or 0.0 for run in runs])
    low, median, high = np.quantile(rates, [0.25, 0.5, 0.75])
    middle = runs[int(np.argsort(rates)[len(rates) // 2])]
    return Measured(
        plan,
        float(median),
        float((high - low) / median),
        float(np.median(alone)),
        replace(middle, frames=sum(r.frames for r in runs)),
    )
