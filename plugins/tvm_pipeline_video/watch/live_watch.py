"""A LivePipeline, with the sources that feed it, as something to watch.

Read next: snapshot.py, what is told of it; server.py, which answers requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from tvm_pipeline import Plan, Problem
from tvm_pipeline.core.frame_energy import FrameEnergy
from tvm_pipeline.core.statistics import Bar
from tvm_pipeline.cost.busy_energy import energy_by_watts
from tvm_pipeline.runtime import LivePipeline, RunStatistics
from tvm_pipeline.runtime.metering import RunEnergy
from tvm_pipeline_video.watch.snapshot import Snapshot
from tvm_pipeline_video.watch.trace import stage_bars

SHOWN_EVENTS = 50


class LiveWatch:
    """A running pipeline as `WatchedPipeline`.

    Args:
        sources: returns the present `Snapshot.sources`.
        metering: returns what measures joules; None where nothing does.
        awaited_s: returns the clock time (`time.perf_counter`) before which no frame was to be expected.
        paced: returns whether frames come at a rate, that of their sources or `rate`.
    """

    def __init__(
        self,
        pipeline: LivePipeline,
        sources: Callable[[], Mapping[str, Mapping[str, Any]]] = dict,
        metering: Callable[[], RunEnergy | None] = lambda: None,
        awaited_s: Callable[[], float] = lambda: 0.0,
        paced: Callable[[], bool] = lambda: False,
    ) -> None:
        self._pipeline, self._sources, self._metering, self._awaited_s = pipeline, sources, metering, awaited_s
        self._paced = paced
        self._made_s = time.perf_counter()
        self.graph = pipeline.given.graph
        self.statistics: Callable[[], RunStatistics] = pipeline.statistics

    def snapshot(self) -> Snapshot:
        live = self._pipeline
        problem, metering, events = live.given, self._metering(), list(live.events)
        return Snapshot(
            live.began_s or self._made_s,  # the first request may come before the pipeline has begun
            live.plan,
            live.version,
            problem.objective,
            live.frames,
            time.perf_counter() - max(live.last_result_s, self._made_s, self._awaited_s()),
            latencies_s=live.latencies_s(),
            queue_depths=live.waiting(),
            in_flight=live.in_flight,
            sources=self._sources(),
            factors=live.factors,
            stand_ins=problem.platform.stand_ins,
            energy_j=metering.energy_j if metering else None,
            energy=metering.frame if metering else self._by_watts(problem, live.plan),
            events=[asdict(event) for event in events[-SHOWN_EVENTS:]],
            throttled=next((e.kind == "throttled" for e in events[::-1] if e.kind.endswith("throttled")), False),
            paced=self._paced(),
        )

    def _by_watts(self, problem: Problem, plan: Plan) -> FrameEnergy | None:
        if any(problem.platform.device(name).active_w is None for name in plan.devices):
            return None  # statistics take longer than all else here
        return energy_by_watts(problem, plan, self.statistics())

    def bars(self, since_s: float) -> list[Bar]:
        return [
            Bar(bar.stage, bar.device, bar.frame + base, bar.start_s, bar.transfer_s, bar.compute_s)
            for base, records in self._pipeline.records()
            for record in records
            for bar in stage_bars(record.stage, record.device, list(record.samples), since_s)
        ]
