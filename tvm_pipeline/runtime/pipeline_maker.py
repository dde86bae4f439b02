"""The pipelines that one run makes of its plans, one after another: they share threads, host work and carried state.

Read next: live_pipeline.py, which decides by which plan to go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.runtime.carried_state import CarriedState
from tvm_pipeline.runtime.host_work import HostWork
from tvm_pipeline.runtime.pipeline import Pipeline
from tvm_pipeline.runtime.worker import Threads


@dataclass(slots=True)
class PipelineMaker:
    """Makes pipelines of one model on one platform.

    Attributes:
        in_flight, host: as for Pipeline.
        making_s: a device that takes longer to tie a stage's thread to has failed; None waits for ever.
    """

    compiled: CompiledModel
    platform: Platform
    in_flight: int | None
    host: HostWork | None
    making_s: float | None
    threads: Threads = field(default_factory=Threads)
    state: CarriedState = field(init=False)

    def __post_init__(self) -> None:
        self.state = CarriedState(self.compiled.graph)

    def make(self, plan: Plan, least_slots: int = 0, after: Pipeline | None = None) -> Pipeline:
        """Return a pipeline that is not started, for `least_slots` frames inside at least."""
        slots = plan.frames_inside if self.in_flight is None else self.in_flight
        return Pipeline(
            self.compiled,
            plan,
            self.platform,
            in_flight=max(least_slots, slots),
            threads=self.threads,
            after=after,
            host=self.host,
            state=self.state,
        )

    def started(
        self, plan: Plan, least_slots: int = 0, after: Pipeline | None = None, first_frame: int = 0
    ) -> Pipeline:
        """Return a pipeline that runs; its first frame has this number in the run."""
        pipeline = self.make(plan, least_slots, after)
        pipeline.begin_at(first_frame)
        pipeline.start(self.making_s)
        return pipeline
