"""A LivePipeline, with the sources that feed it, as something to watch.

Read next: snapshot.py, what is told of it; server.py, which answers requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from tvm_pipeline.core.statistics import Bar, RunStatistics
from tvm_pipeline.runtime.live_pipeline import LivePipeline
from tvm_pipeline.watch.snapshot import Snapshot
from tvm_pipeline.watch.trace import stage_bars

SHOWN_EVENTS = 50


class LiveWatch:
    """A running pipeline as `Watched`.

    Args:
        sources: returns the present `Snapshot.sources`.
    """

    def __init__(self, pipeline: LivePipeline, sources: Callable[[], Mapping[str, Mapping[str, Any]]] = dict) -> None:
        self._pipeline, self._sources = pipeline, sources
        self._made_s = time.perf_counter()
        self.graph = pipeline.given.graph
        self.statistics: Callable[[], RunStatistics] = pipeline.statistics

    def snapshot(self) -> Snapshot:
        live = self._pipeline
        problem = live.given
        return Snapshot(
            live.began_s or self._made_s,  # the first request may come before the pipeline has begun
            live.plan,
            live.version,
            problem.objective,
            live.frames,
            time.perf_counter() - max(live.last_result_s, self._made_s),
            latencies_s=live.latencies_s(),
            queue_depths=live.waiting(),
            in_flight=live.in_flight,
            sources=self._sources(),
            factors=live.factors,
            stand_ins=problem.platform.stand_ins,
            events=[asdict(event) for event in list(live.events)[-SHOWN_EVENTS:]],
        )

    def bars(self, since_s: float) -> list[Bar]:
        return [
            Bar(bar.stage, bar.device, bar.frame + base, bar.start_s, bar.transfer_s, bar.compute_s)
            for base, records in self._pipeline.records()
            for record in records
            for bar in stage_bars(record.stage, record.device, list(record.samples), since_s)
        ]
