"""A service: each model's pipeline fed by its sources, until they end, a signal comes, or the settings change.

Each model has a thread that takes its results. The thread that calls `Service.run` handles signals, reads the control
file and lets the listener look. Read next: settings.py (what can be requested), running_model.py (one model),
records.py (what comes out).
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from tvm_pipeline import PipelineError
from tvm_pipeline.core.state_loops import carry_of
from tvm_pipeline.errors import OptionError
from tvm_pipeline.power import power_modes
from tvm_pipeline.profiling.throttling import ThrottleWatch
from tvm_pipeline.report import check_picture
from tvm_pipeline.signals import ENDS, Interrupts, Requests, ending, handling
from tvm_pipeline.workflow.machine_modes import with_mode_of
from tvm_pipeline_video.errors import VideoError
from tvm_pipeline_video.service.changing_inputs import ChangingInputs
from tvm_pipeline_video.service.control import ControlFile, controlled
from tvm_pipeline_video.service.file import SettingsReader
from tvm_pipeline_video.service.listener import Listener
from tvm_pipeline_video.service.progress import FrameCounts
from tvm_pipeline_video.service.records import ModelReport
from tvm_pipeline_video.service.running_model import ResultWriter, RunningModel, opened_models
from tvm_pipeline_video.service.settings import Settings
from tvm_pipeline_video.service.status_file import StatusFile

TICK_S = 0.1  # between two looks at the signals
LOOK_S = 0.5  # between two looks at the control file, and two of the listener
TOLD_FIGURES = "throughput_fps", "latency_p50_s", "latency_p99_s"  # of the pipeline, in the file of `status`


class _Left(BaseException):
    """A signal came while frames waited: it ends the measuring, and the run drains."""


class Service:
    """Runs bundles on sources of frames.

        settings = Settings(bundle=[Path("model.tar")], source=["bikes.mp4"], results="found.jsonl")
        (report,) = Service(settings).run()
        print(report.statistics.throughput_fps)

    In the main thread, `run` handles SIGINT and SIGTERM, and SIGHUP where there is no `reader`: the first lets the
    frames inside come out and ends it, and another one ends it at once, by KeyboardInterrupt. `supervise` and `json` of
    the settings are for the command line and have no effect here.

    Args:
        settings: the options of the run.
        reader: reads the settings again on SIGHUP, where they come from a file.
        counts: how far an earlier process of the same run came; results are then appended to their file.
        parent: a process whose end also ends the run.
        listener: hears of the run; without it, lines go to the log.
        root: the folder with the files of the system that tell whether the machine is throttled.

    Raises OptionError where the settings contradict each other.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        reader: SettingsReader | None = None,
        counts: FrameCounts | None = None,
        parent: int | None = None,
        listener: Listener | None = None,
        root: Path = Path("/"),
    ) -> None:
        self._settings, self._root = settings.check(), root
        if settings.wait and reader is None:
            raise OptionError(
                "`wait` needs `config`: sources come and go with the file of the settings, on SIGHUP", option="wait"
            )
        self._reader, self._parent = reader, parent
        self._counts = counts or FrameCounts()
        self._listener = listener or Listener()
        self._keeps_results = reader is not None or parent is not None
        self._requests = Requests()
        self._drains = False  # the frames inside are to come out
        self._running = self._settings  # what the run has now
        self._began_s = time.time()

    def stop(self) -> None:
        """End the run after the frames inside have come out. Call it from another thread."""
        self._requests.stop = True

    def reread(self) -> None:
        """Read the settings again, as on SIGHUP. Call it from another thread; there must be a reader."""
        self._requests.reread = True

    def run(self) -> list[ModelReport]:
        """Run to the end, and begin again whenever other settings are read; return the figures of each model.

        Where a run by the new settings cannot begin, it goes back to the settings before.

        Raises:
            OptionError: a setting does not fit the bundle, or a file cannot be opened; with its line in a file.
            VideoError: a source broke; the frames before that have come out.
            PipelineError: anything else that the run met.
        """
        # Until it runs there is nothing to drain, but temporary folders are to be removed.
        leaving = Interrupts(0)
        handlers = ending(leaving, [number for number in self._ending_signals() if number != signal.SIGINT])
        if self._reader:
            handlers[signal.SIGHUP] = self._requests.request_reread
        try:
            with handling(handlers):
                return self._run()
        except OptionError as error:
            located = self._located(error)
            if located is error:
                raise
            raise located from error
        finally:
            leaving.over()
            self._requests.interrupts.over()

    def _ending_signals(self) -> list[int]:
        """Return the signals that end the run; a SIGHUP reads settings again where these come from a file."""
        return [number for number in ENDS if number != signal.SIGHUP or self._reader is None]

    def _run(self) -> list[ModelReport]:
        settings, before = self._settings, None
        power_modes().put_back_left()
        while True:
            if settings.report:
                _make_folder(settings.report)  # now, since other files of the run may be in it
            self._listener.begin(settings)
            self._running = settings
            status = StatusFile(settings.status, self._began_s)
            status.write(ready=False, frames=0, tags={})
            with ExitStack() as stack:
                try:
                    stack.enter_context(with_mode_of(settings.bundle, settings.allow_power_modes))
                    models, write = stack.enter_context(
                        opened_models(settings, self._counts, self._keeps_results, self._listener)
                    )
                except PipelineError as error:
                    if before is None:
                        raise
                    self._listener.warn(f"{self._located(error)}; back to the settings before")
                    settings, before = before, None
                    continue
                self._drains = False
                try:
                    following = self._run_to_end(models, write, settings, status)
                finally:
                    self._write_status(status, models[0], False)
            failure = next((model.failure for model in models if model.failure), None)
            if following is None or failure:
                reports = [model.report() for model in models]
                if settings.report and not failure:
                    for model, report in zip(models, reports, strict=True):
                        model.write_report(settings.report / report.label, report)
                self._listener.end(reports)
                if failure:
                    raise failure
                return reports
            settings, before = following, self._running

    def _run_to_end(
        self, models: Sequence[RunningModel], write: ResultWriter, settings: Settings, status: StatusFile
    ) -> Settings | None:
        """Run until the sources end, one model fails, or a signal comes; then let the frames inside come out.

        Return the settings to go on with, where new ones were read. A source that broke is left in its model's
        `failure`; any other failure is raised.
        """
        control = ControlFile(settings.control) if settings.control else None
        throttling = ThrottleWatch(self._root)
        requests = self._requests
        following: Settings | None = None
        with ExitStack() as stack:
            handlers = {signal.SIGINT: requests.request_stop} | ending(requests.request_stop, self._ending_signals())
            stack.enter_context(handling(handlers))
            threads = self._started(stack, models, write)
            look_s, closed = time.monotonic(), False
            for model in models:
                if isinstance(model.sources, ChangingInputs):
                    model.sources.change(settings)
            while alive := [t for t, model in zip(threads, models, strict=True) if t.is_alive() and not model.hangs]:
                alive[0].join(TICK_S)
                for model in models:
                    model.check(settings.watchdog)
                if requests.reread and not requests.stop:
                    requests.reread = False
                    following = self._reread(models)
                    status.look()
                if status.is_due:
                    self._write_status(status, models[0], models[0].ready.is_set())
                if requests.stop or following or any(model.failure for model in models) or self._is_orphan():
                    self._drains = True
                if self._drains and not closed:
                    closed = True
                    self._listener.say("draining; Ctrl-C or SIGTERM again ends at once")
                    for model in models:
                        model.sources.close()
                if time.monotonic() >= look_s:
                    look_s = time.monotonic() + LOOK_S
                    if control:
                        self._obey(control, models, settings)
                    for model in models:
                        model.guard.keep()
                    self._keep_sources(models[0])
                    if models[0].should_be_measured:  # no other model runs then
                        self._measure(models[0], settings)
                    if models[0].metering:
                        models[0].metering.update()  # one measures for all of them
                    if news := throttling.look():
                        (self._listener.warn if throttling.is_throttled else self._listener.say)(news)
                        for model in models:
                            model.pipeline.note("throttled" if throttling.is_throttled else "unthrottled", news)
                    self._listener.look(lambda: [model.report() for model in models])
            if models[0].metering:
                models[0].metering.finish()
            if worst := next((m.failure for m in models if m.failure and not isinstance(m.failure, VideoError)), None):
                raise worst
        return None if requests.stop else following

    def _started(self, stack: ExitStack, models: Sequence[RunningModel], write: ResultWriter) -> list[threading.Thread]:
        """Start the pipelines, then a thread for each model that takes its results."""
        stopped: Callable[[], bool] = lambda: self._requests.stop or self._drains  # noqa: E731
        threads = []
        for model in models:
            stack.enter_context(model.pipeline)
            threads.append(
                threading.Thread(
                    target=model.take_results, args=(write, stopped), name=f"results {model.label}", daemon=True
                )
            )
        # A full collection goes through all that was made until now, and for 0.1 s no stage runs.
        gc.freeze()
        stack.callback(gc.unfreeze)
        for thread in threads:
            thread.start()
        return threads

    def _measure(self, model: RunningModel, settings: Settings) -> None:
        """Have a model measured and planned while its frames wait; a signal that ends the run ends that, too."""

        def leave(number: int, frame: FrameType | None) -> None:
            is_first = not self._requests.stop
            self._requests.request_stop(number, frame)
            if is_first:
                raise _Left

        self._listener.begin(settings)
        self._listener.say(
            "the source lasts so long that a measured plan pays: its frames wait until the model is measured"
        )
        try:
            with suppress(_Left), handling(dict.fromkeys((signal.SIGINT, *self._ending_signals()), leave)):
                model.measure()
        except PipelineError as error:
            self._listener.warn(f"{error}; it runs on as before")

    def _is_orphan(self) -> bool:
        return self._parent is not None and os.getppid() != self._parent

    def _reread(self, models: Sequence[RunningModel]) -> Settings | None:
        """Return the settings to begin again with, as the file has them now.

        Return None where only sources that may come and go have changed, which is done then; and, with a warning, where
        a run by the new settings cannot begin.
        """
        if self._reader is None:
            return None
        settings = self._running
        try:
            found = self._reader.read()
            if found.output and found.output == settings.output and found.segment is None:
                raise OptionError(
                    f"`output` {found.output} would be overwritten; give it another name, or give `segment`"
                )
        except OptionError as error:
            self._listener.warn(f"{error}; it runs on as before")
            return None
        sources, graph = models[0].sources, models[0].bundle.compiled.graph
        others = replace(found, source=settings.source, tag=settings.tag, policy=settings.policy)
        if isinstance(sources, ChangingInputs) and others == settings and not carry_of(graph):
            self._running = found
            self._listener.say(sources.change(found))
            return None
        self._listener.say("the settings were read anew; what is inside comes out first")
        return found

    def _keep_sources(self, model: RunningModel) -> None:
        """Let the source go that came last where frames are late, and try those again that were refused for long."""
        sources = model.sources
        if not isinstance(sources, ChangingInputs) or not self._running.deadline:
            return
        if len(sources.statistics()) > 1 and (reason := model.guard.misses()):
            sources.shed(reason)
        elif sources.retries:
            self._listener.say(sources.change(self._running))

    def _write_status(self, status: StatusFile, model: RunningModel, is_ready: bool) -> None:
        sources, statistics = model.sources, model.pipeline.statistics()
        if isinstance(sources, ChangingInputs):
            figures = {name: getattr(statistics, name) for name in TOLD_FIGURES}
            status.write(ready=is_ready, frames=sources.written, tags=sources.status(), statistics=figures)

    def _obey(self, control: ControlFile, models: Sequence[RunningModel], settings: Settings) -> None:
        """Plan for what the control file requests now, if it has changed; warn where that cannot be."""
        try:
            file = control.changed()
            if file:
                for model in models:
                    model.pipeline.set_objective(controlled(model.problem, file, settings))
        except PipelineError as error:
            self._listener.warn(f"{error}; it runs on as before")

    def _located(self, error: PipelineError) -> PipelineError:
        """Return the error with its line in the file of settings, where its option stands there."""
        return self._reader.located(error) if self._reader and isinstance(error, OptionError) else error


def _make_folder(report: Path) -> None:
    """Make the folder of a report; raise PipelineError now where its pictures cannot be drawn at the end."""
    check_picture(report / "gantt.png")
    try:
        report.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"`report` {report}: {error.strerror}; choose another folder", option="report") from error
