"""A run: each model's pipeline fed by its sources, until they end, a signal comes, or the settings change.

Each model has a thread that takes its results; the main thread listens to signals, looks at the control file and draws
the table. Read next: settings.py (what was asked for), frames.py (what goes in), records.py (what comes out).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from tvm_pipeline.backends.bundle import Bundle
from tvm_pipeline.core.plan import Problem
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.errors import OptionError, PipelineError, VideoError
from tvm_pipeline.report import statistics_table
from tvm_pipeline.runtime import LivePipeline
from tvm_pipeline.runtime.isolation import isolated
from tvm_pipeline.runtime.replanning import quick_plan
from tvm_pipeline.service.common import chosen_plan, errors, opened_bundle, plan_json, print_json, say, show, video_room
from tvm_pipeline.service.control import ControlFile, controlled, wanted
from tvm_pipeline.service.feeds import Progress, Sources, opened_sources
from tvm_pipeline.service.file import Asked
from tvm_pipeline.service.records import Tell, appending, event_log, line_json, measured_json
from tvm_pipeline.service.settings import STRATEGIES, Settings, each

TICK_S = 0.1  # between two looks at the signals
LOOK_S = 0.5  # between two looks at the control file, and two drawings of the table

Write = Callable[["Model", Any], None]


@dataclass(eq=False)
class Model:
    """A model that runs; `label` is empty where it is the only one."""

    label: str
    bundle: Bundle
    problem: Problem
    pipeline: LivePipeline
    sources: Sources
    preprocessing: Any
    decode: Any
    last: Any = None
    failure: Exception | None = None

    def work(self, video: Any, write: Write, stopped: Callable[[], bool]) -> None:
        """Takes every result, to the end of its sources; what fails is kept for the main thread."""
        try:
            for seen in video.stream(self.pipeline, self.sources.frames, self.preprocessing, self.decode, stopped):
                write(self, seen)
                self.last = seen
        except Exception as error:
            self.failure = error


@dataclass
class Asking:
    """What signals have asked for; plain flags, since a signal may come while any lock is held."""

    stop: bool = False
    reread: bool = False

    def drain(self, *_: object) -> None:
        """For the first Ctrl-C, or a SIGTERM; a second Ctrl-C interrupts."""
        self.stop = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def read_anew(self, *_: object) -> None:
        self.reread = True


@contextmanager
def handling(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Has signals handled so while the block lasts."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(asked: Asked, settings: Settings, progress: Progress, parent: int | None = None) -> None:
    """Runs to the end, beginning anew whenever other settings are read.

    Where the new settings cannot be run by, it goes back to those before. `parent` is a process whose end ends it.
    """
    lasting = asked.may_change or parent is not None
    video = video_room()
    asking = Asking()
    before: Settings | None = None
    # Until it runs there is nothing to drain, but temporary folders are to be removed.
    with handling(
        {signal.SIGTERM: lambda *_: sys.exit(0)} | ({signal.SIGHUP: asking.read_anew} if asked.may_change else {})
    ):
        while True:
            with ExitStack() as stack:
                try:
                    models, write = stack.enter_context(opened(video, settings, progress, lasting))
                except PipelineError as error:
                    if before is None:
                        raise
                    said = asked.located(error) if isinstance(error, OptionError) else error
                    say(f"{said}; back to the settings before", "yellow")
                    settings, before = before, None
                    continue
                following = run_to_end(video, models, write, settings, asked, asking, parent)
            broken = next((model.failure for model in models if model.failure), None)
            if following is None or broken:
                report(models, settings)
                if broken:
                    raise broken
                return
            settings, before = following, settings


@contextmanager
def opened(video: Any, settings: Settings, progress: Progress, lasting: bool) -> Iterator[tuple[list[Model], Write]]:
    """Every model with its sources and what watches it, and what writes a result; nothing runs yet."""
    labels = _labels(settings.bundle) if settings.models > 1 else [""]
    policies = each("--policy", settings.policy, len(settings.source), "sources")
    plans = each("--plan", settings.plan, settings.models, "models")
    decoders = each("--decoder", settings.decoder, settings.models, "models")
    with ExitStack() as stack:
        if lasting and settings.results not in (None, "-"):
            progress.recall(Path(settings.results))
        tell = stack.enter_context(event_log(settings.events))
        models = []
        for place, label in enumerate(labels):
            bundle = stack.enter_context(opened_bundle(settings.bundle[place]))
            taken = slice(None) if len(labels) == 1 else slice(place, place + 1)
            prepared = video.preprocessing_for(bundle.graph, settings.preprocessing or bundle.preprocessing)
            decode = video.find_decoder(decoders[place]) if decoders[place] else None
            problem, pipeline = _pipeline(stack, bundle, plans[place], settings, tell, label)
            sources = stack.enter_context(
                opened_sources(
                    video,
                    settings.source[taken],
                    policies[taken],
                    settings.stall,
                    settings.limit,
                    partial(progress.of, label),
                )
            )
            models.append(Model(label, bundle, problem, pipeline, sources, prepared, decode))
            stack.enter_context(watched(video, models[-1], place, settings))
        write = stack.enter_context(writing(video, models, settings, lasting))
        yield models, write


def _labels(bundles: list[Path]) -> list[str]:
    """The files' names; numbered where two are alike."""
    names = [path.stem for path in bundles]
    return [
        f"{name}-{names[: place + 1].count(name)}" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]


def _pipeline(
    stack: ExitStack, bundle: Bundle, plan: Path | None, settings: Settings, tell: Tell, label: str
) -> tuple[Problem, LivePipeline]:
    """What is planned for, and a pipeline of the given plan, of a quick one for what was asked, or the bundle's own."""
    given, chosen = chosen_plan(bundle, plan)
    problem = wanted(given, settings.objective, settings.min_throughput, settings.max_latency)
    if settings.objective or settings.min_throughput or settings.max_latency:
        wished = replace(chosen, objective=problem.objective, status="feasible", bound=None)
        chosen = judged(problem, wished) if plan else quick_plan(problem)
    compiled = bundle.compiled
    if settings.isolate:
        compiled = stack.enter_context(isolated(compiled, bundle.platform, chosen.stages))
    pipeline = LivePipeline(
        compiled,
        problem,
        chosen,
        adaptation=STRATEGIES[settings.adapt](),
        watchdog_s=settings.watchdog,
        on_event=lambda event: tell(event, label),
    )
    return given, pipeline


@contextmanager
def watched(video: Any, model: Model, place: int, settings: Settings) -> Iterator[None]:
    """Lets others watch the model over HTTP, where that is asked for."""
    where = settings.watch_port(place)
    if where is None:
        yield
        return
    try:
        from tvm_pipeline.watch import LiveWatch, WatchServer
        from tvm_pipeline.watch.picture import jpeg
    except ImportError as error:
        raise PipelineError(f"--watch needs an extra: pip install 'tvm-pipeline[watch]' ({error})") from error

    def picture() -> bytes | None:
        seen = model.last
        return jpeg(video.draw(seen.frame.image, seen.annotations)) if seen else None

    with WatchServer(
        LiveWatch(model.pipeline, model.sources.summary),
        *where,
        token=settings.token,
        unhealthy_after_s=settings.unhealthy_after,
        picture=picture,
    ) as server:
        say(f"watch {model.label or 'it'} at {server.url}")
        yield


@contextmanager
def writing(video: Any, models: list[Model], settings: Settings, lasting: bool) -> Iterator[Write]:
    """What writes a frame's line and draws its picture. `lasting` results are appended as they come, for they go on."""
    lock = threading.Lock()  # each model has a thread; only the last line may be ahead of what is counted
    with ExitStack() as stack:
        target: Any = settings.results
        if target not in (None, "-") and lasting:
            target = stack.enter_context(appending(Path(target)))
        lines = stack.enter_context(video.JsonLines(target)) if target else None
        fps = models[0].sources.fps or 25.0
        file = stack.enter_context(video.VideoFile(settings.output, fps)) if settings.output else None

        def write(model: Model, seen: Any) -> None:
            with lock:
                if lines:
                    lines.write(line_json(seen, model.bundle.platform.stand_ins, model.label))
                if file:
                    file.write(video.draw(seen.frame.image, seen.annotations))
                model.sources.done(seen.frame)

        yield write


def run_to_end(
    video: Any, models: list[Model], write: Write, settings: Settings, asked: Asked, asking: Asking, parent: int | None
) -> Settings | None:
    """Runs until the sources end, one model fails, or a signal comes; then what is inside comes out.

    Returns the settings to go on with, where new ones were read. A source that broke is left in its model's `failure`.
    """
    control = ControlFile(settings.control) if settings.control else None
    following: Settings | None = None
    asking.stop = False
    with ExitStack() as stack:
        stack.enter_context(handling({signal.SIGINT: asking.drain, signal.SIGTERM: asking.drain}))
        live = Live(console=errors, auto_refresh=False, transient=True)
        stack.enter_context(nullcontext() if settings.json else live)
        threads = []
        for model in models:
            stack.enter_context(model.pipeline)
            work = threading.Thread(
                target=model.work, args=(video, write, lambda: asking.stop), name=f"results {model.label}", daemon=True
            )
            threads.append(work)
        for work in threads:
            work.start()
        look_s, closed = time.monotonic(), False
        while alive := [work for work in threads if work.is_alive()]:
            alive[0].join(TICK_S)
            if asking.reread and not asking.stop:
                asking.reread = False
                following = reread(asked, settings)
            if following or any(model.failure for model in models) or (parent and os.getppid() != parent):
                asking.stop = True
            if asking.stop and not closed:
                closed = True
                say("draining; Ctrl-C again ends at once")
                for model in models:
                    model.sources.close()
            if time.monotonic() >= look_s:
                look_s = time.monotonic() + LOOK_S
                if control:
                    obey(control, models, settings)
                if not settings.json:
                    live.update(Group(*map(_table, models)), refresh=True)
        if worst := next((m.failure for m in models if m.failure and not isinstance(m.failure, VideoError)), None):
            raise worst
    return following


def _table(model: Model) -> Group:
    frames = model.last.frame.index if model.last else 0
    title = Text(f"{model.label or model.bundle.graph.name} on {model.sources.name}: frame {frames}")
    return Group(title, statistics_table(model.pipeline.plan.predicted, model.pipeline.statistics()))


def reread(asked: Asked, settings: Settings) -> Settings | None:
    """The settings as the file has them now; None, and said, where it cannot be run by them."""
    try:
        found = asked.read()
        if found.output and found.output == settings.output:
            raise OptionError(f"--output {found.output} would be written anew; give it another name")
    except OptionError as error:
        say(f"{error}; it runs on as before", "yellow")
        return None
    say("the settings were read anew; what is inside comes out first")
    return found


def obey(control: ControlFile, models: list[Model], settings: Settings) -> None:
    """Plans for what the control file says now, if it has changed; where that cannot be, it is said."""
    try:
        keys = control.news()
        if keys:
            for model in models:
                model.pipeline.set_objective(controlled(model.problem, keys, settings))
    except PipelineError as error:
        say(f"{error}; it runs on as before", "yellow")


def report(models: list[Model], settings: Settings) -> None:
    """What was measured, decided and lost, model by model."""
    if settings.json:
        found = [model_json(model) for model in models]
        print_json(found[0] if len(found) == 1 else {"models": found})
        return
    for model in models:
        if model.label:
            show(model.label, settings.results == "-")
        show(statistics_table(model.pipeline.plan.predicted, model.pipeline.statistics()), settings.results == "-")
        lines = [f"{e.time_s:.1f} s: {e.kind}: {e.reason}" for e in model.pipeline.events if e.kind != "start"]
        for name, figures in model.sources.summary().items():
            lost = ", ".join(f"{count} {reason}" for reason, count in figures["dropped"].items()) or "none"
            again = f"opened again {figures['reconnects']} times"
            lines.append(f"{name}: {figures['delivered']} frames, dropped {lost}, {again}")
        if damaged := model.sources.damaged():
            lines.append(f"warning: {model.sources.name}: {damaged} damaged pieces skipped")
        for line in lines:
            say(line)


def model_json(model: Model) -> dict[str, Any]:
    """A model's plan, what was measured of it, what was decided, and what became of its frames."""
    return {
        **({"model": model.label} if model.label else {}),
        **plan_json(model.pipeline.plan, model.bundle.platform),
        "source": model.sources.name,
        "measured": measured_json(model.pipeline.statistics()),
        "events": [asdict(event) for event in model.pipeline.events if event.kind != "start"],
        "sources": model.sources.summary(),
    }
