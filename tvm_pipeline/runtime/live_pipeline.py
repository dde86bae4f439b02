"""A pipeline whose plan may change while it runs: because devices slow down, or because one fails.

A running plan is a Pipeline; a change of plan makes a second one. Frames that are inside finish where they are, new
frames take the new plan, and results are taken from the old pipeline until it is empty. So order holds, no frame is
lost and nothing stops. If a device fails, the unfinished frames of its pipeline are put into the next one.

Read next: `generations.py`, which holds the pipelines during an exchange; `adaptation.py`, which says when another plan
is worth a change; `replanning.py`, which finds that plan.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.core.plan import Plan, shown_stages
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.statistics import RunRecord, RunStatistics, StageRecord
from tvm_pipeline.errors import (
    NoPlanError,
    OptionError,
    PipelineClosedError,
    PipelineError,
    PlatformError,
    StageError,
)
from tvm_pipeline.runtime.carried_state import CarriedState
from tvm_pipeline.runtime.frame_stream import FrameStream, Inputs, Result, Tagged
from tvm_pipeline.runtime.generations import Generation, Generations
from tvm_pipeline.runtime.host_work import HostWork
from tvm_pipeline.runtime.pipeline import Pipeline
from tvm_pipeline.runtime.replanning import (
    LimitWatch,
    gain,
    nearest_plan,
    quick_plan,
    shown_objective,
    with_frames_as,
    with_runtime_objective,
    without,
    without_limits,
)
from tvm_pipeline.runtime.strategy import TICK_S, Strategy
from tvm_pipeline.runtime.worker import Threads

KEPT_EVENTS = 1000
PLANNING_SHARE = 0.05  # of a core that the search for better plans takes from the stages, at most
STOP_S = 2.0  # how long `stop` waits for a plan that is being exchanged

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a live pipeline decided or that happened, as data, and the plan that runs since then.

    Attributes:
        time_s: seconds since the start, on a clock that never jumps.
        kind: `start`; `measured` (a plan that was measured meanwhile runs); `switch`; `failure`; `return` (of a
            device); `refusal` (of a plan); `objective`; `limit` (the plan begins to miss one, or keeps it again);
            `throttled` (the machine is slowed down because of heat or current) and `unthrottled` (no longer);
            `restart` (of a process, by its supervisor).
        reason: why, for people.
        version: of the plan, counted from 0.
        frame: the first frame of that plan; -1 if the plan did not change.
        plan: the devices of its stages, as `core.plan.shown_stages` writes them.
    """

    time_s: float
    kind: str
    reason: str
    version: int
    frame: int = -1
    plan: str = ""


class LivePipeline(FrameStream):
    """A running plan that is exchanged while it runs.

    Args:
        compiled: the model, compiled for every device of the problem's platform.
        problem: what to plan for; the platform settled on this machine. An objective of bytes becomes throughput.
        plan: what to begin with.
        adaptation: watches the devices and proposes plans; None keeps the plan while nothing fails.
        watchdog_s: a stage that works at one frame for longer has failed; None waits for ever.
        making_s: a device that takes longer to tie a stage's thread to has failed; None waits for ever.
        cool_down_s: how long a failed device is left out before it may serve again, see `Quarantine`.
        on_event: is called with every event, from the thread in which it happens.
        in_flight, host: as for Pipeline.

    A device that fails costs speed and no frame: it is left out of the next plan, and the frames inside are run again.
    A StageError is raised only if no device or plan is left, or a host operator failed.
    """

    def __init__(
        self,
        compiled: CompiledModel,
        problem: Problem,
        plan: Plan,
        *,
        adaptation: Strategy | None = None,
        watchdog_s: float | None = None,
        making_s: float | None = None,
        cool_down_s: float = 30.0,
        on_event: Callable[[Event], None] = lambda _: None,
        in_flight: int | None = None,
        host: HostWork | None = None,
    ) -> None:
        self.version = 0
        self.events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._problem, self._adaptation, self._watchdog_s = with_runtime_objective(problem), adaptation, watchdog_s
        self._maker = PipelineMaker(compiled, self._problem.platform, in_flight, host, making_s)
        self._on_event = on_event
        self._limits = LimitWatch()
        self._quarantine = Quarantine(cool_down_s)
        self._changing = threading.RLock()  # held while a plan is being exchanged
        self._record = RunRecord()
        self.frames = 0  # results taken
        self.last_result_s = self._last_entry_s = 0.0
        self.began_s = time.perf_counter()
        self._closing = False
        self._ended = threading.Event()
        self.plan = self._given_plan = plan
        self._generations = Generations(self._first(plan))
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)

    def start(self) -> None:
        if self._adaptation and len(self._problem.platform.devices) > 1:
            # For its first plan a process loads compiled loops, which takes most of a second.
            free = without_limits(self._problem)
            for problem in (self._problem,) if free == self._problem else (self._problem, free):
                with suppress(PipelineError):
                    nearest_plan(problem)
        self.began_s = self.last_result_s = time.perf_counter()
        try:
            self._generations.newest.pipeline.start(self._maker.making_s)
        except StageError as error:
            self._failed(error)
            pipeline, self.plan = self._survivor((), 0, error)
            self._generations = Generations(pipeline)
        self._tell("start", "devices failed" if self._quarantine.out() else "the run begins", 0)
        self._watcher.start()

    @property
    def state(self) -> str:
        return self._generations.newest.pipeline.state

    @property
    def given(self) -> Problem:
        """Return the problem as it was given: every device as it was profiled."""
        return self._problem

    @property
    def problem(self) -> Problem:
        """Return the problem to plan for: without the failed devices, the others as slow as they are measured."""
        return self._adaptation.scaled(self._able()) if self._adaptation else self._able()

    def _able(self) -> Problem:
        """Return the problem without the devices that are left out; raise PlatformError if none remains."""
        return without(self._problem, self._quarantine.out())

    def submit(self, inputs: Inputs, timeout_s: float | None = None, *, tag: Any = None) -> int:
        """Copy one frame's inputs in and return its index; wait while the pipeline is full.

        Raises what `Pipeline.submit` raises; a StageError only if nothing can run the frames any more.
        """
        while True:
            generation = self._generations.newest
            try:
                frame = generation.pipeline.submit(inputs, timeout_s, tag=tag)
            except StageError as error:
                self._outlive(generation, error)
            except PipelineClosedError:
                with self._changing:  # a plan may be being exchanged
                    if self._generations.newest is generation:
                        raise
            else:
                self._last_entry_s = time.perf_counter()
                return generation.base + frame

    def result(self, timeout_s: float | None = None) -> Result:
        """Return the next frame's result, in the order of submission, whichever plan it ran on.

        Raises what `Pipeline.result` raises; a StageError only if nothing can run the frames any more.
        """
        while True:
            generation = self._generations.oldest
            try:
                result = generation.result(timeout_s)
            except StageError as error:
                if not (generation.over and self._generations.retire(generation)):
                    self._outlive(generation, error)
            except PipelineClosedError:
                if not self._generations.retire(generation):
                    raise
            else:
                self.last_result_s = done_s = time.perf_counter()
                self.frames += 1
                self._maker.state.forget(self.frames)
                self._record.add(done_s - result.latency_s, done_s)
                return replace(result, frame=generation.base + result.frame)

    def drain(self) -> None:
        with self._changing:
            self._closing = True
            self._generations.newest.pipeline.drain()

    def stop(self) -> None:
        self._ended.set()
        # Another thread may be making a stage, which it gives up when it sees that this has ended.
        held = self._changing.acquire(timeout=STOP_S)
        try:
            for generation in self._generations:
                generation.pipeline.stop()
            self._maker.threads.close()
        finally:
            if held:
                self._changing.release()
        if self._watcher.ident is not None and self._watcher is not threading.current_thread():
            self._watcher.join()

    def refuse(self, what: str) -> NoReturn:
        self._generations.newest.pipeline.refuse(what)

    def statistics(self) -> RunStatistics:
        """Return the statistics of the whole run, with the stages of the plan that runs now."""
        stages = self._generations.newest.pipeline.stage_statistics()
        return self._record.summary(0, self._last_entry_s, stages)

    def reset_statistics(self) -> None:
        self._record = RunRecord()
        self._generations.newest.pipeline.reset_statistics()

    def latencies_s(self) -> list[float]:
        """Return the latencies of the last frames that came out, the newest last."""
        return [done_s - entered_s for entered_s, done_s in list(self._record.samples)]

    def waiting(self) -> list[int]:
        """Return how many frames wait in front of each stage of the plan that runs."""
        return self._generations.newest.pipeline.waiting()

    @property
    def in_flight(self) -> int:
        """Return the number of frames inside."""
        newest = self._generations.newest
        return newest.base + newest.pipeline.submitted - self.frames

    def records(self) -> list[tuple[int, list[StageRecord]]]:
        """Return the records of the stages by plan, the newest last, each with the number of the plan's first frame."""
        return self._generations.records()

    @property
    def factors(self) -> dict[str, float]:
        """Return how many times slower each device is than its profile; empty without a strategy."""
        return dict(self._adaptation.factors) if self._adaptation else {}

    def switch(self, plan: Plan, reason: str, kind: str = "switch") -> bool:
        """Run new frames by `plan`; those inside finish by the old one. The event of it has this kind.

        Returns False, and keeps the old plan, if the new one cannot be started or the pipeline is ending.
        """
        with self._changing:
            if self.state != "running":
                return False
            try:
                pipeline = self._made(plan, after=self._generations.newest.pipeline)
            except PipelineError as error:
                if isinstance(error, StageError):
                    self._leave_out(error.device)
                self._tell("refusal", f"{reason}, but it cannot be started: {error}", -1, plan)
                return False
            base = self._generations.hand_over(pipeline)
            if base is None:
                pipeline.stop()
                return False
            self._now(plan, kind, reason, base)
            return True

    def begin_again(self, problem: Problem, plan: Plan, adaptation: Strategy | None, reason: str) -> None:
        """Run new frames by a plan that was measured since the pipeline began; its statistics begin with them.

        Where the plan cannot be started, the one before runs on.

        Args:
            problem: of the same graph; its platform and profile are those from now on.
            adaptation: as for the pipeline as a whole.
            reason: of the event.
        """
        with self._changing:
            self._problem, self._maker.platform = with_runtime_objective(problem), problem.platform
            self._given_plan, self._adaptation = plan, adaptation
            if not self.switch(plan, reason, "measured"):
                self._run_by(self.plan)
            self._record.samples.clear()

    def note(self, kind: str, reason: str) -> None:
        """Make an event of something that happened outside, with the plan that runs."""
        self._tell(kind, reason, -1)

    def set_objective(self, problem: Problem) -> None:
        """Plan for another objective or other limits from now on.

        If a limit cannot be kept now, because devices are slow or out, the plan that comes nearest runs.

        Args:
            problem: a problem of the same graph and platform.

        Raises:
            InfeasibleError: no plan keeps the limits even with every device as it was profiled; nothing changes.
            OptionError: the problem is of another graph or platform.
            ProfileError: a figure that the objective needs, such as energy, is unknown.
        """
        requested = with_runtime_objective(problem)
        if (requested.graph, requested.platform) != (self._problem.graph, self._problem.platform):
            keeps = f"{self._problem.graph.name} on {self._problem.platform.name}"
            raise OptionError(f"a running pipeline keeps {keeps}; make the problem by `replace(pipeline.given, ...)`")
        quick_plan(requested)
        with self._changing:
            self._problem, self._limits = requested, LimitWatch()
            self._tell("objective", shown_objective(requested), -1)
            plan = self._nearest()
            if plan.stages != self.plan.stages:
                self.switch(plan, f"it is best for {shown_objective(requested)}")
            else:
                self._run_by(plan)

    def _first(self, plan: Plan) -> Pipeline:
        """Return the pipeline of the plan, or of another one where a device fails while its stage is made."""
        while True:
            try:
                self.plan = plan
                return self._maker.make(plan)
            except StageError as error:
                self._failed(error)
                plan = self._plan_left(error)

    def _made(self, plan: Plan, least_slots: int = 0, after: Pipeline | None = None, base: int = 0) -> Pipeline:
        """Return a started pipeline of the plan; raise PipelineClosedError where `stop` came meanwhile."""
        pipeline = self._maker.started(plan, least_slots, after, base)
        if self._ended.is_set():
            pipeline.stop()
            raise PipelineClosedError("the pipeline was stopped")
        return pipeline

    def _outlive(self, generation: Generation, failure: StageError) -> None:
        """Put the unfinished frames of a failed pipeline into a new one on other devices.

        Raises the failure, with the frame's number in the whole run, if no device or plan is left, or if a host
        operator failed.
        """
        cause = failure.__cause__ or failure
        number = generation.base + failure.frame
        error = StageError(failure.stage, failure.device, number, cause, failure.operator)
        error.__cause__ = cause
        if error.operator:
            raise error
        with self._changing:
            # The frames of this pipeline wait for the state that those before them leave.
            while self._maker.state and (other := self._generations.failed_before(generation)):
                self._outlive(*other)
            self._replace_failed(generation, error)

    def _replace_failed(self, generation: Generation, error: StageError) -> None:
        with generation.taking:
            if generation.over:
                return
            generation.finish()  # the frames before the failed one still come out
            self._failed(error)
            unfinished = generation.pipeline.unfinished()
            base = generation.base + generation.pipeline.delivered
            pipeline, plan = self._survivor(unfinished, base, error)
            if self._generations.replace(generation, pipeline, closing=self._closing) is not None:
                self._now(plan, "switch", f"device {error.device} failed; {len(unfinished)} frames run again", base)

    def _survivor(self, frames: Sequence[Tagged], base: int, error: StageError) -> tuple[Pipeline, Plan]:
        """Return a started pipeline on the devices that are left, with these frames from `base` on, and its plan."""
        while True:
            plan = self._plan_left(error)
            pipeline: Pipeline | None = None
            try:
                pipeline = self._made(plan, len(frames), base=base)
                for inputs, tag in frames:
                    pipeline.submit(inputs, tag=tag)
                return pipeline, plan
            except StageError as again:  # a stage in a process of its own may fail while it is made
                if pipeline is not None:
                    pipeline.stop()
                self._failed(again)

    def _plan_left(self, error: StageError) -> Plan:
        """Return the best plan for the devices that are left; raise the error where there is none."""
        try:
            return self._nearest()
        except (NoPlanError, PlatformError):
            raise error from error.__cause__

    def _nearest(self) -> Plan:
        """Return the plan to run for the devices as they are now; raise what `nearest_plan` raises."""
        return with_frames_as(self._given_plan, nearest_plan(self.problem))

    def _failed(self, error: StageError) -> None:
        self._leave_out(error.device)
        self._tell("failure", str(error), -1)

    def _leave_out(self, label: str) -> None:
        device = next(device.name for device in self._problem.platform.devices if device.label == label)
        self._quarantine.leave_out(device)

    def _now(self, plan: Plan, kind: str, reason: str, base: int) -> None:
        self.version += 1
        self._run_by(plan)
        self._tell(kind, reason, base, plan)

    def _run_by(self, plan: Plan) -> None:
        self.plan = plan
        if self._adaptation:
            self._adaptation.begin(self._problem, plan)

    def _tell(self, kind: str, reason: str, frame: int, plan: Plan | None = None) -> None:
        shown = shown_stages((plan or self.plan).stages)
        event = Event(time.perf_counter() - self.began_s, kind, reason, self.version, frame, shown)
        self.events.append(event)
        _log.info("%s: %s (plan %d: %s)", kind, reason, self.version, shown)
        self._on_event(event)

    def _watch(self) -> None:
        """Look at the stages every `TICK_S`: hanging ones fail, slow ones may be worth another plan."""
        with self._changing:
            self._run_by(self.plan)
        said, resting_s = "", 0.0
        while not self._ended.wait(TICK_S):
            self._generations.give_back_freed()
            if self._watchdog_s is not None:
                for generation in self._generations:
                    generation.pipeline.overdue(self._watchdog_s)
            resting_s -= TICK_S
            if resting_s > 0 or not self._changing.acquire(blocking=False):
                continue  # another thread exchanges the plan, and may wait for a stage that only this thread can end
            began_s = time.thread_time()
            try:
                self._improve()
            except PipelineError as error:
                if str(error) != said:
                    _log.warning("no new plan: %s", error)
                said = str(error)
            finally:
                self._changing.release()
                resting_s = (time.thread_time() - began_s) / PLANNING_SHARE

    def _improve(self) -> None:
        """Change to a better plan if there is one: by the slow-downs, or because a device may serve again."""
        back = self._quarantine.returned()
        for name in back:
            self._tell("return", f"device {name} may serve again", -1)
        if self._closing or self.state != "running":
            return
        if self._adaptation:
            proposal = self._adaptation.look(self._generations.newest.pipeline.records(), self._able())
            if proposal:
                plan, reason = proposal
                self.switch(with_frames_as(self._given_plan, plan), reason)
        if back:
            plan = self._nearest()
            if gain(self.problem, plan, self.plan) > 0:
                self.switch(plan, f"{', '.join(back)} may serve again")
        if self._problem.min_throughput_fps or self._problem.max_latency_s:
            starved = self._adaptation is not None and self._adaptation.starved
            if news := self._limits.look(self.problem, self.plan, starved):
                self._tell("limit", news, -1)


@dataclass(slots=True)
class PipelineMaker:
    """Makes the pipelines of a run, one after another: they share threads, host work and carried state.

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
        slots = plan.calls_inside if self.in_flight is None else self.in_flight
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


class Quarantine:
    """The devices that failed, by name, and for how long each is left out of the plans.

    A device that fails is left out for a cool-down. If it fails again before it has served for as long as it was out,
    its cool-down doubles, so that a broken device interrupts ever less often.

    Args:
        cool_down_s: how long a device is left out after its first failure.
        clock: tells the time in seconds; monotonic.
    """

    def __init__(self, cool_down_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._cool_down_s, self._clock = cool_down_s, clock
        self._until_s: dict[str, tuple[float, float]] = {}  # device -> until when it is out, and for how long
        self._looked_s = -math.inf

    def leave_out(self, device: str) -> None:
        """Leave a device out from now on, because it failed."""
        now_s = self._clock()
        until_s, before_s = self._until_s.get(device, (-math.inf, 0.0))
        out_s = 2 * before_s if now_s - until_s < before_s else self._cool_down_s
        self._until_s[device] = now_s + out_s, out_s

    def out(self) -> set[str]:
        """Return the devices that are left out now."""
        now_s = self._clock()
        return {device for device, (until_s, _) in list(self._until_s.items()) if until_s > now_s}

    def returned(self) -> list[str]:
        """Return the devices whose cool-down ended since the last call."""
        before_s, self._looked_s = self._looked_s, self._clock()
        return [device for device, (until_s, _) in list(self._until_s.items()) if before_s < until_s <= self._looked_s]
