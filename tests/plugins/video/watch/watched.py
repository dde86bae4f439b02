"""A pipeline to watch: real ones over the fake backend, one after another as if the plan had been switched."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tests.support.fake_backend import busy, chain_model, fake_platform, make_plan, numbers
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.statistics import Bar, RunStatistics, Sample, StageRecord
from tvm_pipeline.runtime import Pipeline
from tvm_pipeline_video.watch import Snapshot, stage_bars

PLATFORM = fake_platform("d0", "d1", "d2")
DRAWN = (["d0"], ["op0"]), (["d1", "d2"], ["op1"])
WHOLE = ((["d0"], ["op0", "op1"]),)


class TimedRecord(StageRecord):
    """Writes down, too, when each frame was done; frames are numbered as they came."""

    def __init__(self, stage: int, device: str) -> None:
        super().__init__(stage, device)
        self.timed: list[Sample] = []

    def add(self, *parts: Any) -> None:
        wait_s, transfer_s, compute_s, *_ = parts
        self.timed.append(Sample(wait_s, transfer_s, compute_s, self.frames, time.perf_counter()))
        super().add(*parts)


class Watching:
    """What the runtime would tell of itself; `run` is one plan's turn."""

    def __init__(self) -> None:
        self.model = chain_model(hooks={("op0", "d0"): busy(0.002), ("op1", "d1"): busy(0.001)})
        self.latencies_s: list[float] = []
        self.graph = self.model.graph
        self.sources: dict[str, dict[str, Any]] = {}
        self.idle_s = 0.0
        self.more: dict[str, Any] = {}
        self.records: list[TimedRecord] = []
        self.version = 0
        self.began_s = time.perf_counter()
        self.plan: Plan
        self.measured: RunStatistics

    def run(self, frames: int, stages: Sequence[Any] = DRAWN) -> None:
        self.version += 1
        self.plan = make_plan(self.model.graph, *stages)
        pipeline = Pipeline(self.model, self.plan, PLATFORM)
        for worker in pipeline._workers:
            worker.record = TimedRecord(worker.record.stage, worker.record.device)
            self.records.append(worker.record)
        with pipeline:
            self.latencies_s += [result.latency_s for result in pipeline.map(numbers(frames))]
        self.measured = pipeline.statistics()

    def snapshot(self) -> Snapshot:
        return Snapshot(
            self.began_s,
            self.plan,
            self.version,
            "throughput",
            len(self.latencies_s),
            self.idle_s,
            latencies_s=tuple(self.latencies_s),
            queue_depths=(0,) * len(self.plan.stages),
            sources=self.sources,
            **self.more,
        )

    def statistics(self) -> RunStatistics:
        return self.measured

    def bars(self, since_s: float) -> list[Bar]:
        return [bar for r in self.records for bar in stage_bars(r.stage, r.device, r.timed, since_s)]


def watching(frames: int = 30) -> Watching:
    made = Watching()
    made.run(frames)
    return made
