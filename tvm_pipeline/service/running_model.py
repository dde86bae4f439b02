"""One model of a run: its bundle, pipeline and sources, what watches it, and where its results go.

Each model has a thread that takes its results. Read next: running.py, which starts these threads and ends them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tvm_pipeline.backends.bundle import Bundle
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.errors import PipelineError
from tvm_pipeline.runtime import LivePipeline
from tvm_pipeline.runtime.isolation import isolated
from tvm_pipeline.runtime.replanning import quick_plan
from tvm_pipeline.service.control import requested_problem
from tvm_pipeline.service.inputs import ModelSources, opened_sources
from tvm_pipeline.service.listener import Listener
from tvm_pipeline.service.progress import FrameCounts
from tvm_pipeline.service.records import ModelReport, WriteEvent, event_log, line_json
from tvm_pipeline.service.result_files import ResultFiles
from tvm_pipeline.service.settings import STRATEGIES, Settings, for_each
from tvm_pipeline.service.video_extra import (
    Analysed,
    Decoder,
    Frame,
    Preprocessing,
    draw,
    find_decoder,
    preprocessing_for,
    stream,
)
from tvm_pipeline.service.workflow import chosen_plan, opened_bundle

Write = Callable[["RunningModel", Analysed[Frame]], None]

USUAL_FPS = 25.0  # of a video to write, where the source does not say


@dataclass(eq=False)
class RunningModel:
    """A model that runs.

    Attributes:
        label: empty where it is the only one.
        problem: what its plan was made for when the run began.
        last: the last frame that came out, with what was found on it.
        failure: why its results ended early.
    """

    label: str
    bundle: Bundle
    problem: Problem
    pipeline: LivePipeline
    sources: ModelSources
    preprocessing: Preprocessing
    decoder: Decoder | None
    last: Analysed[Frame] | None = None
    failure: Exception | None = None

    def take_results(self, write: Write, stopped: Callable[[], bool]) -> None:
        """Write every result to the end of the sources; keep an error in `failure` for the main thread."""
        try:
            for seen in stream(self.pipeline, self.sources.frames, self.preprocessing, self.decoder, stopped):
                write(self, seen)
                self.last = seen
        except Exception as error:
            self.failure = error

    def report(self) -> ModelReport:
        """Return the figures of now."""
        return ModelReport(
            label=self.label,
            source=self.sources.name,
            frame=self.last.frame.index if self.last else 0,
            plan=self.pipeline.plan,
            platform=self.bundle.platform,
            statistics=self.pipeline.statistics(),
            events=tuple(event for event in self.pipeline.events if event.kind != "start"),
            sources=self.sources.statistics(),
            damaged=self.sources.damaged(),
        )


@contextmanager
def opened_models(
    settings: Settings, counts: FrameCounts, keeps_results: bool, listener: Listener
) -> Iterator[tuple[list[RunningModel], Write]]:
    """Open every model with its sources and its watcher, and the files that results go to; nothing runs yet.

    Args:
        keeps_results: results are appended as they come, for a later run goes on with the same file.
    """
    labels = _labels(settings.bundle) if settings.models > 1 else [""]
    policies = for_each("policy", settings.policy, len(settings.source), "sources")
    plans = for_each("plan", settings.plan, settings.models, "models")
    decoders = for_each("decoder", settings.decoder, settings.models, "models")
    with ExitStack() as stack:
        if keeps_results and settings.results is not None and settings.results != "-":
            counts.recall(Path(settings.results), settings.segment is not None)
        write_event = stack.enter_context(event_log(settings.events, listener.warn))
        models = []
        for index, label in enumerate(labels):
            bundle = stack.enter_context(opened_bundle(settings.bundle[index], listener.warn))
            own = slice(None) if len(labels) == 1 else slice(index, index + 1)
            prepared = preprocessing_for(bundle.graph, settings.preprocessing or bundle.preprocessing)
            name = decoders[index]
            decoder = find_decoder(name) if name else None
            problem, pipeline = _pipeline(stack, bundle, plans[index], settings, write_event, label)
            sources = stack.enter_context(
                opened_sources(
                    settings.source[own], policies[own], settings.stall, settings.limit, partial(counts.of, label)
                )
            )
            models.append(RunningModel(label, bundle, problem, pipeline, sources, prepared, decoder))
            stack.enter_context(watched(models[-1], index, settings, listener))
        write = stack.enter_context(writing(models, settings, keeps_results))
        yield models, write


def _labels(bundles: Sequence[Path]) -> list[str]:
    """Return the files' names; numbered where two are alike."""
    names = [path.stem for path in bundles]
    return [
        f"{name}-{names[: index + 1].count(name)}" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def _pipeline(
    stack: ExitStack, bundle: Bundle, plan: Path | None, settings: Settings, write_event: WriteEvent, label: str
) -> tuple[Problem, LivePipeline]:
    """Return the bundle's problem, and a pipeline of one of three plans.

    The plan is that of a file; else, where the settings request an objective or a limit, a quick one for these; else
    the bundle's own.
    """
    given, chosen = chosen_plan(bundle, plan)
    problem = requested_problem(given, settings.objective, settings.min_throughput, settings.max_latency)
    if settings.objective or settings.min_throughput or settings.max_latency:
        requested = replace(chosen, objective=problem.objective, status="feasible", bound=None)
        chosen = judged(problem, requested) if plan else quick_plan(problem)
    compiled = bundle.compiled
    if settings.isolate:
        compiled = stack.enter_context(isolated(compiled, bundle.platform, chosen.stages))
    pipeline = LivePipeline(
        compiled,
        problem,
        chosen,
        adaptation=STRATEGIES[settings.adapt](),
        watchdog_s=settings.watchdog,
        on_event=lambda event: write_event(event, label),
    )
    return given, pipeline


@contextmanager
def watched(model: RunningModel, index: int, settings: Settings, listener: Listener) -> Iterator[None]:
    """Let others watch the model over HTTP while the block lasts, where the settings request it."""
    where = settings.watch_port(index)
    if where is None:
        yield
        return
    try:
        from tvm_pipeline.watch import LiveWatch, WatchServer
        from tvm_pipeline.watch.picture import jpeg
    except ImportError as error:
        raise PipelineError(f"`watch` needs an extra: pip install 'tvm-pipeline[watch]' ({error})") from error

    def picture() -> bytes | None:
        seen = model.last
        return jpeg(draw(seen.frame.image, seen.annotations)) if seen else None

    with WatchServer(
        LiveWatch(model.pipeline, model.sources.summary),
        *where,
        token=settings.token,
        unhealthy_after_s=settings.unhealthy_after,
        picture=picture,
    ) as server:
        listener.say(f"watch {model.label or 'it'} at {server.url}")
        yield


@contextmanager
def writing(models: Sequence[RunningModel], settings: Settings, keeps_results: bool) -> Iterator[Write]:
    """Open the files of results; yield the function that writes a frame's line, draws its picture and counts it."""
    lock = threading.Lock()  # each model has a thread; only the last line may be ahead of what is counted
    with ResultFiles(settings, models[0].sources.fps or USUAL_FPS, keeps_results) as files:

        def write(model: RunningModel, seen: Analysed[Frame]) -> None:
            with lock:
                files.begin_frame(model.label, seen.frame.source, seen.frame.time_s)
                if files.lines:
                    files.lines.write(line_json(seen, model.bundle.platform.stand_ins, model.label))
                if files.video:
                    files.video.write(draw(seen.frame.image, seen.annotations))
                model.sources.count(seen.frame)

        yield write
