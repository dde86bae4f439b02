"""The state of a running pipeline as plain data, so that pipelines and those who watch them need not know each other.

Read next: metrics.py and server.py, which publish it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tvm_pipeline import OperatorGraph, Plan
from tvm_pipeline.core.frame_energy import FrameEnergy
from tvm_pipeline.core.statistics import Bar
from tvm_pipeline.runtime import RunStatistics
from tvm_pipeline_video.watch.state import State


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A running pipeline at one moment. Frames and energy are counted since its start, over all plans.

    Attributes:
        began_s: when the run began, on the clock of `time.perf_counter`.
        plan: the plan that new frames take.
        plan_version: grows by one with every switch.
        objective: what is planned for now, which may differ from `plan.objective`.
        frames: how many came out.
        since_last_frame_s: since a frame came out, or since one was to be expected if none has.
        latencies_s: of the last frames that came out, the newest last; as many as the run's window holds.
        queue_depths: frames that wait in front of each stage.
        in_flight: frames inside.
        sources: live source, by its tag or its name -> the counts of its frames, under the names of
            `video.LiveStatistics`; `source` is its name, and `latency_s` that of its last frame.
        factors: device -> how many times slower it is now than its profile says.
        stand_ins: device -> what stands in for it.
        events: the latest decisions and failures, the oldest first. Every one has `time_s` (since the start), `kind`
            and `reason`; other keys are shown as they are.
        energy_j: joules that a sensor measured since the first frame, of all models of the run; None without a sensor.
        energy: the joules of a frame; None where nothing tells.
        throttled: whether the machine is slowed down because of heat or current.
        paced: whether frames come at a rate, that of their sources or `rate`.
    """

    began_s: float
    plan: Plan
    plan_version: int
    objective: str
    frames: int
    since_last_frame_s: float
    latencies_s: Sequence[float] = ()
    queue_depths: Sequence[int] = ()
    in_flight: int = 0
    sources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()
    energy_j: float | None = None
    energy: FrameEnergy | None = None
    throttled: bool = False
    paced: bool = False

    def health(self, unhealthy_after_s: float) -> str:
        """Return why the pipeline is unhealthy; empty if it is healthy."""
        if self.since_last_frame_s <= unhealthy_after_s:
            return ""
        return f"no frame has come out for {self.since_last_frame_s:.1f} s, and {unhealthy_after_s:g} s are allowed"

    def state(self, statistics: RunStatistics, unhealthy_after_s: float, *, picture: bool) -> State:
        """Return everything but the latencies, as what is sent to others.

        Args:
            unhealthy_after_s: how long no frame may come out.
            picture: whether the last frame can be had as a picture.
        """
        why = self.health(unhealthy_after_s)
        return State(
            now_s=time.perf_counter() - self.began_s,
            graph=self.plan.graph,
            plan=str(self.plan),
            scheduler=self.plan.scheduler,
            predicted=self.plan.predicted,
            stages=self.plan.stages,
            statistics=statistics,
            plan_version=self.plan_version,
            objective=self.objective,
            frames=self.frames,
            since_last_frame_s=self.since_last_frame_s,
            queue_depths=self.queue_depths,
            in_flight=self.in_flight,
            sources=self.sources,
            factors=self.factors,
            stand_ins=self.stand_ins,
            events=self.events,
            energy_j=self.energy_j,
            energy=self.energy,
            healthy=not why,
            why=why,
            picture=picture,
            paced=self.paced,
        )


class WatchedPipeline(Protocol):
    """Something that can be watched. The methods are called from the server's threads, while the pipeline runs."""

    @property
    def graph(self) -> OperatorGraph:
        """Return the graph of every plan."""
        ...

    def snapshot(self) -> Snapshot:
        """Return the present state; it is as cheap as a health check should be."""
        ...

    def statistics(self) -> RunStatistics:
        """Return what was measured in steady state, with the stages of the plan that runs."""
        ...

    def bars(self, since_s: float) -> Sequence[Bar]:
        """Return the recorded bars of each stage on each device, at least those that ended after `since_s`.

        Times are those of `time.perf_counter`, frames are numbered as they came out. See `trace.stage_bars`.
        """
        ...
