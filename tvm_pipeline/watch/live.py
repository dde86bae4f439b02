"""A LivePipeline as something to watch, with the sources that feed it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict

from tvm_pipeline.runtime.live import LivePipeline
from tvm_pipeline.simulate import Bar
from tvm_pipeline.statistics import RunStatistics
from tvm_pipeline.watch.snapshot import Snapshot
from tvm_pipeline.watch.trace import stage_bars

SHOWN_EVENTS = 50


class LiveWatch:
    """What a server needs of a running pipeline: the `Watched` of `LivePipeline`.

    Args:
        drops: source -> reason -> frames, as they are now.
    """

    def __init__(self, pipeline: LivePipeline, drops: Callable[[], Mapping[str, Mapping[str, int]]] = dict) -> None:
        self._pipeline, self._drops = pipeline, drops
        self.statistics: Callable[[], RunStatistics] = pipeline.statistics

    def snapshot(self) -> Snapshot:
        live = self._pipeline
        problem = live.given
        return Snapshot(
            live.began_s,
            live.plan,
            live.version,
            problem.objective,
            live.frames,
            time.perf_counter() - live.last_result_s,
            latencies_s=live.latencies_s(),
            queue_depths=live.waiting(),
            in_flight=live.in_flight,
            drops=self._drops(),
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
