"""One model of a run: its bundle, pipeline and sources, what watches it, and where its results go.

Each model has a thread that takes its results. A model that waits for sources (changing_inputs.py) has the plan of the
model alone, and a frame of noise warms its pipeline. Read next: running.py, which starts these threads and ends them.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline import Bundle, Decision, PipelineError, Problem
from tvm_pipeline.addresses import without_secrets
from tvm_pipeline.core.plan import describe, shown_stages
from tvm_pipeline.core.state_loops import carry_of
from tvm_pipeline.cost.busy_energy import energy_by_watts
from tvm_pipeline.cost.device_costs import cost_of, known_idle_w
from tvm_pipeline.errors import OptionError, RunError
from tvm_pipeline.report import write_report
from tvm_pipeline.runtime import Event, LivePipeline, Strategy
from tvm_pipeline.runtime.adaptation import strategy_of
from tvm_pipeline.runtime.isolation import DeviceProcesses, isolated, making_limit_s
from tvm_pipeline.runtime.metering import RunEnergy
from tvm_pipeline.runtime.replanning import nearest_plan
from tvm_pipeline.workflow.power_meter import opened_meter
from tvm_pipeline_video.service.changing_inputs import ChangingInputs
from tvm_pipeline_video.service.deadline_guard import DeadlineGuard
from tvm_pipeline_video.service.host_planning import ApplicationRecord, HostPlan
from tvm_pipeline_video.service.inputs import HeldFrames, ModelSources, opened_sources
from tvm_pipeline_video.service.listener import Listener
from tvm_pipeline_video.service.model_bundle import opened_model, settings_beside
from tvm_pipeline_video.service.model_plan import SEEN_S, begins_at_once, pays, plan_alone, planned_model
from tvm_pipeline_video.service.progress import FrameCounts
from tvm_pipeline_video.service.records import ModelReport, WriteEvent, event_log
from tvm_pipeline_video.service.result_files import ResultFiles
from tvm_pipeline_video.service.result_lines import result_line
from tvm_pipeline_video.service.settings import Settings, for_each
from tvm_pipeline_video.service.video_extra import (
    USUAL_FPS,
    Analysis,
    Annotation,
    Application,
    Decoder,
    Follow,
    Frame,
    Interpretation,
    Outputs,
    Overlay,
    Preprocessing,
    Request,
    Trackers,
    Transform,
    decoder_name,
    draw,
    interpret,
    is_known,
    stream,
)

MOST_LABELS = 100  # that are counted; texts that were read may all differ
SAMPLED_S = 0.1  # between two reads of a sensor of power, for weeks
LOOK_S = 0.1  # between two looks at whether the run ends, until the noise is through
LEAVES_S = 0.01  # between two looks at whether the frames inside have come out
BY_SHAPES = "the shapes of its operators alone (`plan_first` measures before the first frame)"
NOISE_SIZE = 640, 480  # of the picture that warms a pipeline up; a model that takes any size has one of its own
Picture = NDArray[np.uint8]


class ResultWriter(Protocol):
    """Writes what was found on a frame of the model of that label; the picture has it drawn, where that was done."""

    def __call__(self, label: str, seen: Analysis[Frame], picture: Picture | None = None) -> None: ...


class TimedDecoder:
    """A decoder that tells for how many seconds it has been at its frame."""

    def __init__(self, decode: Decoder) -> None:
        update_wrapper(self, decode)
        self.name = decoder_name(decode)
        self._decode, self._since_s = decode, math.inf

    def __call__(self, outputs: Outputs, transform: Transform) -> Sequence[Annotation]:
        self._since_s = time.perf_counter()
        try:
            return self._decode(outputs, transform)
        finally:
            self._since_s = math.inf

    @property
    def busy_s(self) -> float:
        """Return the seconds, 0 or less where it is at none."""
        return time.perf_counter() - self._since_s


@dataclass(frozen=True, slots=True)
class SourceEvent(Event):
    """What became of a source of a run with `wait`: `source-opened`, `-failed`, `-ended`, `-closed` or `-refused`.

    Attributes:
        source: its name, with passwords hidden.
        tag: the text that it was given; empty without one.
        seconds: that it took, where it was opened.
    """

    source: str = ""
    tag: str = ""
    seconds: float = 0.0


@dataclass(eq=False)
class RunningModel:
    """A model that runs.

    Attributes:
        label: empty where it is the only one.
        problem: what its plan was made for when the run began.
        results: gives what was found on each frame, in order, and ends early once its argument says so.
        writes: whether each result is still to be written; a plan with host work writes it in a stage.
        last: the last frame that came out, with what was found on it.
        latest: the same of each source, by its tag, or its name where it has none.
        decoder: the one that the thread of the results calls; None where a stage does, which has its own watchdog.
        failure: why its results ended early.
        hangs: whether the thread of the results does not end.
        metering: measures the joules of the frames of all models of the run; None without a sensor.
        ready: set when the pipeline of a run with `wait` has run a frame.
        decision: how the plan that the run began with was chosen; None if it was given.
        found, found_in: as in `ModelReport`.
        for_rate: whether its plan is for a rate of frames.
        guard: watches the frames against their deadline, where there is one.
        measured: measures the model and the work around it, and plans; None where that is done.
        strategy: makes what watches the devices once they are measured, with the decision for the plan.
        chosen_by: what chose the plan, where no decision did; as in `ModelReport`.
    """

    label: str
    bundle: Bundle
    problem: Problem
    pipeline: LivePipeline
    sources: ModelSources | ChangingInputs
    results: Callable[[Callable[[], bool]], Iterator[Analysis[Frame]]]
    writes: bool
    decoder: TimedDecoder | None = None
    last: Analysis[Frame] | None = None
    latest: dict[str, Analysis[Frame]] = field(default_factory=dict)
    failure: Exception | None = None
    hangs: bool = False
    metering: RunEnergy | None = None
    ready: threading.Event = field(default_factory=threading.Event)
    decision: Decision | None = None
    found: Counter[str] = field(default_factory=Counter)
    found_in: int = 0
    for_rate: bool = False
    measured: Callable[[], HostPlan] | None = None
    strategy: Callable[[Decision | None], Strategy | None] = lambda _: None
    chosen_by: str = ""
    guard: DeadlineGuard = field(init=False)

    def __post_init__(self) -> None:
        self.guard = DeadlineGuard(self.pipeline)

    def take_results(self, write: ResultWriter, stopped: Callable[[], bool]) -> None:
        """Take every result to the end of the sources; keep an error in `failure` for the main thread."""
        try:
            for seen in self.results(stopped):
                if self.writes:
                    write(self.label, seen)
                self.last = seen
                self._keep(seen)
                self._count(seen)
        except Exception as error:
            self.failure = error
        except BaseException as error:  # a source, too, may call sys.exit
            self.failure = RunError(
                f"{self.sources.name}: {type(error).__name__} ended the thread of its results: {error}"
            )

    def _keep(self, seen: Analysis[Frame]) -> None:
        source = seen.frame.tag or seen.frame.source
        if source not in self.latest:  # those of sources that are gone, too, hold a picture
            known = self.sources.statistics()
            self.latest = {name: kept for name, kept in self.latest.items() if name in known}
        self.latest[source] = seen

    @property
    def should_be_measured(self) -> bool:
        """Whether the model was not measured, and its file lasts for long enough that a measured plan pays."""
        seconds, file = time.perf_counter() - self.pipeline.began_s, self._file
        if self.measured is None or file is None or seconds < SEEN_S:
            return False
        return pays(self.pipeline.frames, seconds, file.left, self.bundle.platform)

    @property
    def _file(self) -> HeldFrames | None:
        return self.sources.file if isinstance(self.sources, ModelSources) else None

    def measure(self) -> None:
        """Let the frames wait, measure and plan, and let the others run by that plan.

        Raises:
            PipelineError: that was not possible; the others run by the plan from shapes, and it is not tried again.
        """
        measured, self.measured, file = self.measured, None, self._file
        if measured is None or file is None:
            return
        began_s = time.perf_counter()
        with file.held():
            while self.pipeline.state == "running" and self.pipeline.frames < file.given:
                time.sleep(LEAVES_S)
            planned = measured()
            self.problem, self.decision, self.guard.decision = planned.problem, planned.decision, planned.decision
            reason = f"frames waited for {time.perf_counter() - began_s:.0f} s until the plan was measured"
            self.pipeline.begin_again(planned.problem, planned.plan, self.strategy(planned.decision), reason)
            if self.metering:
                self.metering.begin_again()

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return what became of the frames of each source that is read ahead, and the latency of its last one."""
        found = self.sources.summary()
        for name, source in found.items():
            last = self.latest.get(name)
            source["latency_s"] = last.result.latency_s if last else None
        return found

    def _count(self, seen: Analysis[Frame]) -> None:
        self.found_in += bool(seen.annotations)
        self.guard.count(seen.frame.age_s or seen.result.latency_s)  # one that is read ahead waits before it enters
        for annotation in seen.annotations:
            if annotation.label in self.found or len(self.found) < MOST_LABELS:
                self.found[annotation.label] += 1

    def late_age_s(self) -> float:
        """Return the age of a frame from which the stages behind reading it end after its deadline, as predicted."""
        deadline = self.guard.deadline
        if deadline is None:
            return math.inf
        plan, first = self.pipeline.plan, self.problem.graph.operators[0]
        reading = cost_of(self.problem, plan.stages[0].devices[0])
        read_s = reading.alone_s(first) if first.is_host else 0.0
        return deadline.seconds - ((plan.predicted.latency_s or 0.0) - read_s)

    def check(self, limit_s: float) -> None:
        """Give the results up where the decoder has been at a frame for longer than this."""
        if self.decoder and not self.hangs and self.decoder.busy_s > limit_s:
            where = f"after frame {self.last.frame.index}" if self.last else "at the first frame"
            self.hangs = True
            self.failure = RunError(
                f"{self.decoder.name} did not return within {limit_s:g} s {where} of {self.sources.name}; mend the "
                "function, or give it more time as `watchdog`"
            )

    @property
    def is_paced(self) -> bool:
        """Whether frames come at a rate, that of `rate` or of live sources, and not when the pipeline takes them."""
        return self.for_rate or bool(self.sources.statistics())

    def report(self) -> ModelReport:
        """Return the figures of now."""
        plan, statistics = self.pipeline.plan, self.pipeline.statistics()
        return ModelReport(
            label=self.label,
            source=self.sources.name,
            frame=self.last.frame.index if self.last else 0,
            plan=plan,
            platform=self.bundle.platform,
            statistics=statistics,
            events=tuple(event for event in self.pipeline.events if event.kind != "start"),
            sources=self.sources.statistics(),
            damaged=self.sources.damaged(),
            energy=self.metering.frame if self.metering else energy_by_watts(self.problem, plan, statistics),
            chosen_by=_chosen_by(self.decision) if self.decision else self.chosen_by,
            found=dict(self.found),
            found_in=self.found_in,
            deadline=self.guard.deadline,
            late_share=self.guard.late / max(self.pipeline.frames, 1) if self.guard.deadline else None,
            paced=self.is_paced,
        )

    def write_report(self, folder: Path, figures: ModelReport) -> None:
        """Write report.md and its pictures; raise PipelineError where that is not possible."""
        decision = self.decision or Decision(figures.plan, (figures.plan,), self.chosen_by or "it was given")
        switches = [event for event in figures.events if event.kind == "switch"]
        why = f"after {switches[-1].time_s:.1f} s, {switches[-1].reason}" if switches else decision.why
        candidates = decision.candidates
        if all(candidate.stages != figures.plan.stages for candidate in candidates):
            candidates = (figures.plan, *candidates)
        folder.mkdir(exist_ok=True)
        write_report(
            folder,
            self.problem,
            replace(decision, plan=figures.plan, candidates=candidates, why=why),
            figures.statistics,
            self.pipeline.records()[-1][1],
            remarks=[f"{event.time_s:.1f} s: {event.kind}: {event.reason}" for event in figures.events],
            command=[without_secrets(argument) for argument in ("tvm-pipeline", *sys.argv[1:])],
            paced=figures.paced,
        )


@contextmanager
def opened_models(
    settings: Settings, counts: FrameCounts, keeps_results: bool, listener: Listener
) -> Iterator[tuple[list[RunningModel], ResultWriter]]:
    """Open every model with its sources and its watcher, and the files that results go to; nothing runs yet.

    Args:
        keeps_results: results are appended as they come, for a later run goes on with the same file.
    """
    labels = _labels(settings.bundle) if settings.models > 1 else [""]
    policies = for_each("policy", settings.policy, len(settings.source), "sources")
    tags = settings.tag or [""] * len(settings.source)
    plans = for_each("plan", settings.plan, settings.models, "models")
    with ExitStack() as stack:
        if keeps_results and settings.results_file:
            counts.recall(settings.results_file, settings.segment is not None)
        write_event = stack.enter_context(event_log(settings.events))
        meter = stack.enter_context(opened_meter(settings.power_sensor, SAMPLED_S))
        opened: list[_OpenModel] = []
        stack.callback((processes := DeviceProcesses()).end)
        for index, label in enumerate(labels):
            own = slice(None) if len(labels) == 1 else slice(index, index + 1)
            specs, given = settings.source[own], settings.bundle[index]
            measured = not begins_at_once(settings)
            path, bundle = stack.enter_context(opened_model(given, settings, listener, index, measured=measured))
            if settings.isolate is not False:  # plans are compared before they run, and a device may fail then
                making_s = making_limit_s(bundle.compiled.graph, settings.watchdog)
                apart = isolated(
                    bundle.compiled, bundle.platform, bundle.plan.stages, making_s, processes=processes, every=False
                )
                bundle = replace(bundle, compiled=stack.enter_context(apart))
            if len(specs) > 1 and (carried := carry_of(bundle.compiled.graph)):
                raise OptionError(
                    f"{path} carries a state ({carried[0][0]}) from frame to frame, which several sources in turn "
                    "would mix; give it one `source`, and run it once for each of the others"
                )
            found = _interpreted(settings, index, bundle)
            for line in found.said:
                listener.say(f"{label}: {line}" if label else line)
            followed = settings.followed()
            trackers = Trackers(followed) if followed else None
            sources: ModelSources | ChangingInputs
            if settings.wait:
                listener.say(
                    "reading, decoding and writing frames is in no plan: `wait` has no source to measure it on"
                )
                planned, sources = plan_alone(settings, bundle, plans[index]), ChangingInputs(settings, counts)
                stack.callback(sources.close)
                opened.append(_OpenModel(label, bundle, found, planned, sources, trackers))
                continue
            inputs = specs, policies[own]
            planned = planned_model(settings, path, bundle, plans[index], inputs, found, listener, meter)
            sources = stack.enter_context(
                opened_sources(
                    specs,
                    tags[own],
                    policies[own],
                    settings.stall,
                    settings.limit,
                    partial(counts.of, label),
                    settings.hardware_decoding,
                )
            )
            opened.append(_OpenModel(label, bundle, found, planned, sources, trackers))
        write = stack.enter_context(writing(opened, settings, keeps_results))
        models = []
        for index, one in enumerate(opened):
            models.append(_running(stack, one, settings, write, write_event, processes))
            models[-1].decision = one.planned.decision
            models[-1].guard.deadline = one.planned.deadline
            models[-1].guard.decision = one.planned.decision if one.planned.has_host else one.bundle.decision
            models[-1].for_rate = one.planned.rate_fps is not None
            models[-1].measured = one.planned.measured
            models[-1].strategy = partial(_strategy, settings)
            models[-1].chosen_by = BY_SHAPES if one.planned.measured else ""
            if settings.late == "drop" and isinstance(one.sources, ModelSources):
                for source in one.sources.live:
                    source.late_age_s = models[-1].late_age_s
            if isinstance(one.sources, ChangingInputs):
                one.sources.tell = partial(tell_source, models[-1].pipeline, write_event, listener)
                if settings.deadline:
                    one.sources.admits = partial(models[-1].guard.admits, settings.deadline, settings.miss)
                    one.sources.late_age_s = models[-1].late_age_s if settings.late == "drop" else None
            stack.enter_context(watched(models[-1], index, settings, listener))
        if meter:
            came_out, idle_w = partial(_came_out, models), known_idle_w(models[0].problem, meter.sensor.covers)
            metering = RunEnergy(meter, came_out, idle_w)
            for model in models:
                model.metering = metering
        yield models, write


def _chosen_by(decision: Decision) -> str:
    rate = f" ({decision.measured[0].throughput_fps:.1f} fps)" if decision.measured else ""
    return f"{decision.decided_by}{rate}"


def _came_out(models: Sequence[RunningModel]) -> tuple[int, float]:
    """Return how many frames of all models came out, and when the last one did."""
    pipelines = [model.pipeline for model in models]
    return sum(pipeline.frames for pipeline in pipelines), max(pipeline.last_result_s for pipeline in pipelines)


@dataclass(frozen=True, slots=True)
class _OpenModel:
    """All that a model runs on."""

    label: str
    bundle: Bundle
    found: Interpretation
    planned: HostPlan
    sources: ModelSources | ChangingInputs
    trackers: Trackers | None


def _interpreted(settings: Settings, index: int, bundle: Bundle) -> Interpretation:
    """Return how a model is read: as the settings say, else as the bundle has it, else as its file suggests."""
    request = settings.request(index)
    if request == Request() and (known := ApplicationRecord.of(bundle)) and is_known(known.decoder or "none"):
        request = known.request  # a function of the user's own is taken only where it is given
    given = settings.preprocessing or bundle.preprocessing or settings_beside(settings.bundle[index])
    return interpret(bundle.compiled.graph, bundle.metadata, request, given, "from the bundle")


def _running(
    stack: ExitStack,
    opened: _OpenModel,
    settings: Settings,
    write: ResultWriter,
    write_event: WriteEvent,
    processes: DeviceProcesses,
) -> RunningModel:
    """Return the model with its pipeline, which does not run yet."""
    label, bundle, planned, sources = opened.label, opened.bundle, opened.planned, opened.sources
    application: Application[Frame] | None = None
    if planned.has_host:
        application = Application(
            bundle.compiled.graph,
            planned.problem.graph,
            sources.frames,
            opened.found.preprocessing,
            opened.found.decode,
            partial(write, label),
            settings.rate,
            sources.place,
            Overlay() if settings.overlay else None,
            opened.trackers,
        )
    host = application.host if application else None
    compiled, making_s = bundle.compiled, making_limit_s(bundle.compiled.graph, settings.watchdog)
    if settings.isolate:
        apart = isolated(compiled, bundle.platform, planned.plan.stages, making_s, processes=processes)
        compiled = stack.enter_context(apart)
    strategy = None if planned.measured else _strategy(settings, planned.decision)
    pipeline = LivePipeline(
        compiled,
        planned.problem,
        planned.plan,
        adaptation=strategy,
        watchdog_s=settings.watchdog,
        making_s=making_s,
        on_event=lambda event: write_event(event, label),
        host=host,
    )
    if application:
        results: Callable[[Callable[[], bool]], Iterator[Analysis[Frame]]] = partial(application.run, pipeline)
        return RunningModel(label, bundle, planned.problem, pipeline, sources, results, False)
    decoder = TimedDecoder(opened.found.decode) if opened.found.decode else None
    preprocessing = opened.found.preprocessing
    results = partial(stream, pipeline, sources.frames, preprocessing, decoder, follow=opened.trackers)
    model = RunningModel(label, bundle, planned.problem, pipeline, sources, results, True, decoder)
    graph = bundle.compiled.graph
    if carry_of(graph):
        model.ready.set()  # noise would change the state
    elif isinstance(sources, ChangingInputs):
        shape, warm = graph.inputs[0].shape, model.ready.set
        # Sources that are there already, as after a crash, do not wait for what a change of plan needs.
        replans = strategy is not None and not settings.source
        model.results = warmed_results(
            pipeline, sources.frames, preprocessing, decoder, shape, warm, opened.trackers, replans=replans
        )
    return model


def _strategy(settings: Settings, decision: Decision | None) -> Strategy | None:
    """Return what watches the devices of a plan that was decided so."""
    strategy = strategy_of(settings.strategy)
    if strategy and decision:
        strategy.expect(decision.measured)
    return strategy


def _labels(bundles: Sequence[Path]) -> list[str]:
    """Return the files' names; numbered where two are alike."""
    names = [path.stem for path in bundles]
    return [
        f"{name}-{names[: index + 1].count(name)}" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


@contextmanager
def writing(opened: Sequence[_OpenModel], settings: Settings, keeps_results: bool) -> Iterator[ResultWriter]:
    """Open what results go to; yield the function that writes a frame's line and its picture, and counts it."""
    # Models write from threads of their own; only the last line may be ahead of what is counted.
    lock = threading.Lock()
    models = {one.label: one for one in opened}
    with ResultFiles(settings, opened[0].sources.fps or USUAL_FPS, keeps_results) as files:

        def write(label: str, seen: Analysis[Frame], picture: Picture | None = None) -> None:
            model = models[label]
            line = result_line(
                seen,
                decoded=model.found.decode is not None,
                stand_ins=model.bundle.platform.stand_ins,
                model=label,
            )
            with lock:
                files.write(seen, line, label, picture, partial(model.sources.count, line.counted_as, line.frame))

        yield write
        for one in opened if files.tells_events else ():
            for frame, events in one.trackers.end() if one.trackers else ():
                files.write_last(events, frame, one.label)


@contextmanager
def watched(model: RunningModel, index: int, settings: Settings, listener: Listener) -> Iterator[None]:
    """Let others watch the model over HTTP while the block lasts, where the settings request it."""
    where = settings.watch_port(index)
    if where is None:
        yield
        return
    try:
        from tvm_pipeline_video.watch import LiveWatch, WatchServer
        from tvm_pipeline_video.watch.picture import Preview
    except ImportError as error:
        raise PipelineError(f"`watch` needs an extra: pip install 'tvm-pipeline[watch]' ({error})") from error

    with WatchServer(
        LiveWatch(
            model.pipeline,
            model.summary,
            lambda: model.metering,
            awaited_s=lambda: model.sources.awaited_s,
            paced=lambda: model.is_paced,
        ),
        *where,
        token=settings.token,
        unhealthy_after_s=settings.unhealthy_after,
        picture=Preview(
            lambda source: model.latest.get(source) if source else model.last,
            lambda seen: draw(seen.frame.image, seen.annotations),
        ),
    ) as server:
        listener.say(f"watch {model.label or 'it'} at {server.url}")
        yield


def tell_source(
    pipeline: LivePipeline,
    write_event: WriteEvent,
    listener: Listener,
    kind: str,
    reason: str,
    source: str,
    tag: str,
    seconds: float,
) -> None:
    """Tell what became of a source, as an event of the pipeline that runs; warn where it gives no frames."""
    now_s, shown = time.perf_counter() - pipeline.began_s, shown_stages(pipeline.plan.stages)
    event = SourceEvent(now_s, kind, reason, pipeline.version, plan=shown, source=source, tag=tag, seconds=seconds)
    pipeline.events.append(event)
    write_event(event, "")
    if kind in ("source-failed", "source-ended", "source-refused"):
        again = "; it is tried again" if kind == "source-failed" else ""
        listener.warn(f"{reason}{again}")


@contextmanager
def opened_pipeline(model: Path, settings: Settings, listener: Listener) -> Iterator[tuple[LivePipeline, Bundle]]:
    """Yield the running pipeline of a model file or a bundle, whose frames come from elsewhere; the model is planned.

    Raises what `opened_model` raises.
    """
    with ExitStack() as stack:
        _, bundle = stack.enter_context(opened_model(model, settings, listener))
        planned = plan_alone(settings, bundle)
        listener.say(f"plan: {describe(planned.plan)}")
        stages, making_s = planned.plan.stages, making_limit_s(bundle.compiled.graph, settings.watchdog)
        compiled = stack.enter_context(isolated(bundle.compiled, bundle.platform, stages, making_s, every=False))
        # Others are slower to take a result and send the next frame than the caller for whom the fewest were found.
        plan = replace(planned.plan, in_flight=None)
        yield (
            stack.enter_context(
                LivePipeline(compiled, planned.problem, plan, watchdog_s=settings.watchdog, making_s=making_s)
            ),
            bundle,
        )


def warmed_results(
    pipeline: LivePipeline,
    frames: Iterator[Frame],
    preprocessing: Preprocessing,
    decoder: Decoder | None,
    input_shape: tuple[int, ...],
    warm: Callable[[], None],
    follow: Follow | None = None,
    *,
    replans: bool,
) -> Callable[[Callable[[], bool]], Iterator[Analysis[Frame]]]:
    """Return what gives the results of frames, after a frame of noise went the same way and was left out.

    No frame is taken before: it would grow old inside, and those behind it would be dropped.

    Args:
        input_shape: of the model's input.
        warm: is called when the noise is through.
        replans: whether what a change of plan takes is loaded before, for some seconds.
    """
    noise = _noise(preprocessing, input_shape)

    def results(stopped: Callable[[], bool]) -> Iterator[Analysis[Frame]]:
        through = threading.Event()

        def taken() -> Iterator[Frame]:
            yield noise
            while not through.wait(LOOK_S):
                if stopped():
                    return
            yield from frames

        try:
            for seen in stream(pipeline, taken(), preprocessing, decoder, stopped, follow):
                if seen.frame is noise:
                    pipeline.reset_statistics()
                    if replans:
                        with suppress(PipelineError):
                            nearest_plan(pipeline.given)
                    warm()
                    through.set()
                else:
                    yield seen
        finally:
            through.set()

    return results


def _noise(preprocessing: Preprocessing, input_shape: tuple[int, ...]) -> Frame:
    width, height = NOISE_SIZE
    if preprocessing.size is None:
        _, height, width = input_shape[1:] if preprocessing.layout == "NCHW" else (0, *input_shape[1:3])
    image: Any = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Frame(0, 0.0, image, "noise")
