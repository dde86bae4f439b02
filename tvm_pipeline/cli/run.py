"""`tvm-pipeline run`: a bundle on a video, a camera or a stream."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from tvm_pipeline.bundle import Bundle
from tvm_pipeline.cli.common import (
    JsonOption,
    chosen_plan,
    errors,
    opened_bundle,
    plan_json,
    print_json,
    show,
    video_room,
)
from tvm_pipeline.errors import OptionError, PipelineError, VideoError
from tvm_pipeline.report import statistics_table
from tvm_pipeline.runtime import Adaptation, Event, LivePipeline, RunStatistics

WATCHDOG_S = 30.0
REFRESH_EVERY = 10  # frames between two drawings of the live table


def command(
    bundle: Annotated[Path, typer.Argument(help="A bundle of `compile`.")],
    source: Annotated[
        list[str],
        typer.Option(help="File, folder of pictures, http/rtsp URL, camera:0, synthetic:640x480; several take turns."),
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Annotated video to write.")] = None,
    results: Annotated[str | None, typer.Option(help="JSON lines to write, one a frame; - is standard output.")] = None,
    decoder: Annotated[str | None, typer.Option(help="What reads the outputs: file.py:function.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="Run this plan instead of the bundle's own.")] = None,
    preprocessing: Annotated[Path | None, typer.Option(help="TOML instead of the bundle's own.")] = None,
    limit: Annotated[int | None, typer.Option(help="Stop after so many frames.")] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="For sources that live, which are read ahead and opened again where they break: "
            "block, latest, every=N, max-age=SECONDS, or several with commas."
        ),
    ] = None,
    stall: Annotated[float, typer.Option(help="With --policy: seconds without a frame after which it broke.")] = 10.0,
    adapt: Annotated[
        str, typer.Option(help="replan: another plan where devices become slower or faster, without stopping; or off.")
    ] = "replan",
    watchdog: Annotated[
        float, typer.Option(help="Seconds after which a stage that is at one frame has failed.")
    ] = WATCHDOG_S,
    events: Annotated[Path | None, typer.Option(help="JSON lines to write: every change of plan, with why.")] = None,
    watch: Annotated[
        str | None,
        typer.Option(
            help="PORT or ADDRESS:PORT: metrics, health, traces and a page; beyond loopback it needs --token."
        ),
    ] = None,
    token: Annotated[
        str | None, typer.Option(help="With --watch: what a client must know.", envvar="TVM_PIPELINE_TOKEN")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Runs a bundle on live video, with a table of what it measures; Ctrl-C drains the pipeline and ends.

    A device that fails is left out and its frames run again on the others, as long as there are others.

    Example: tvm-pipeline run model.tar --source bikes.mp4 --output out.mp4

    Two cameras: tvm-pipeline run model.tar --source camera:0 --source camera:1 --policy latest --results -
    """
    if limit is not None and limit < 1:
        raise OptionError(f"--limit {limit}: at least one frame must run")
    if json and results == "-":
        raise OptionError("--json and --results - both want standard output; write the results to a file")
    if adapt not in ("replan", "off"):
        raise OptionError(f"--adapt {adapt!r} is neither replan nor off")
    if output and len(source) > 1:
        raise OptionError("--output is a video of one source; of several, write --results, or run one for each")
    if len(set(source)) < len(source):
        raise OptionError("--source names one source twice")
    if not watchdog > 0:
        raise OptionError(f"--watchdog {watchdog:g}: it must be positive")
    video = video_room()
    with opened_bundle(bundle) as opened:
        problem, chosen = chosen_plan(opened, plan)
        settings = video.preprocessing_for(opened.graph, preprocessing or opened.preprocessing)
        decode = video.find_decoder(decoder) if decoder else None
        with event_log(events) as tell:
            pipeline = LivePipeline(
                opened.compiled,
                # What counts while it runs is time; bytes do not change.
                replace(problem, objective="throughput") if problem.is_lexicographic else problem,
                chosen,
                adaptation=Adaptation() if adapt == "replan" else None,
                watchdog_s=watchdog,
                on_event=tell,
            )
            with opened_sources(video, source, policy, stall, limit) as frames, watched(pipeline, frames, watch, token):
                statistics, broken = _run(video, opened, pipeline, frames, settings, decode, output, results, json)
    changes = [asdict(event) for event in pipeline.events if event.kind != "start"]
    if json:
        measured = {"measured": measured_json(statistics), "events": changes, "sources": frames.summary()}
        print_json({**plan_json(pipeline.plan, opened.platform), "source": ", ".join(source), **measured})
    else:
        show(statistics_table(pipeline.plan.predicted, statistics), json or results == "-")
        for event in changes:
            errors.print(f"{event['time_s']:.1f} s: {event['kind']}: {event['reason']}", markup=False, highlight=False)
        for name, figures in frames.summary().items():
            lost = ", ".join(f"{count} {reason}" for reason, count in figures["dropped"].items()) or "none"
            errors.print(
                f"{name}: {figures['delivered']} frames, dropped {lost}, opened again {figures['reconnects']} times",
                markup=False,
                highlight=False,
            )
    if broken:
        raise broken


def _run(
    video: Any,
    bundle: Bundle,
    pipeline: LivePipeline,
    frames: Sources,
    settings: Any,
    decode: Any,
    output: Path | None,
    results: str | None,
    quiet: bool,
) -> tuple[RunStatistics, VideoError | None]:
    """Runs to the end of the source; a source that breaks is reported after what it gave was written."""
    broken: VideoError | None = None
    with ExitStack() as stack:
        lines = stack.enter_context(video.JsonLines(results)) if results else None
        file = stack.enter_context(video.VideoFile(output, frames.fps or 25.0)) if output else None
        stack.enter_context(pipeline)
        stopped = stack.enter_context(draining_on_interrupt(frames.close))
        live = stack.enter_context(Live(console=errors, auto_refresh=False, transient=True))
        try:
            for seen in video.stream(pipeline, frames.frames, settings, decode, stopped):
                if lines:
                    lines.write(line_json(seen, bundle.platform.stand_ins))
                if file:
                    file.write(video.draw(seen.frame.image, seen.annotations))
                if not quiet and seen.frame.index % REFRESH_EVERY == 0:
                    title = Text(f"{bundle.graph.name} on {frames.name}: frame {seen.frame.index}")
                    live.update(
                        Group(title, statistics_table(pipeline.plan.predicted, pipeline.statistics())), refresh=True
                    )
        except VideoError as error:
            broken = error
        if damaged := frames.damaged():
            errors.print(f"warning: {frames.name}: {damaged} damaged pieces skipped", style="yellow")
        return pipeline.statistics(), broken


@contextmanager
def watched(pipeline: LivePipeline, frames: Sources, where: str | None, token: str | None) -> Iterator[None]:
    """Lets others watch the run over HTTP, where that is asked for."""
    if where is None:
        if token:
            raise OptionError("--token goes with --watch")
        yield
        return
    try:
        from tvm_pipeline.watch import LiveWatch, WatchServer
    except ImportError as error:
        raise PipelineError(f"--watch needs an extra: pip install 'tvm-pipeline[watch]' ({error})") from error
    address, _, port = where.rpartition(":")
    if not port.isdigit():
        raise OptionError(f"--watch {where}: give it as PORT or ADDRESS:PORT")
    watching = LiveWatch(pipeline, lambda: {name: found["dropped"] for name, found in frames.summary().items()})
    with WatchServer(watching, address or "127.0.0.1", int(port), token=token) as server:
        errors.print(f"watch it at {server.url}", highlight=False)
        yield


@contextmanager
def event_log(path: Path | None) -> Iterator[Callable[[Event], None]]:
    """Appends each event to a file of JSON lines; where that fails it is said, and the run goes on."""
    if path is None:
        yield lambda _: None
        return
    try:
        file = path.open("ab")
    except OSError as error:
        raise OptionError(f"--events {path}: {error.strerror}; choose another place") from error
    with file:

        def write(event: Event) -> None:
            try:
                file.write(msgspec.json.encode(event) + b"\n")
                file.flush()
            except (OSError, ValueError) as error:
                errors.print(f"warning: --events {path}: {error}; it lacks: {event.reason}", style="yellow")

        yield write


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the frames come from: one source as it is, or those that live; `damaged` counts undecodable pieces."""

    name: str
    fps: float | None
    frames: Iterable[Any]
    damaged: Callable[[], int]
    live: tuple[Any, ...] = ()

    def summary(self) -> dict[str, dict[str, Any]]:
        """What became of the frames of each source that lives."""
        return {source.name: asdict(source.statistics()) for source in self.live}

    def close(self) -> None:
        """Ends those that live, which might wait long for a frame."""
        for source in self.live:
            source.close()


@contextmanager
def opened_sources(
    video: Any, specs: Sequence[str], policy: str | None, stall_s: float, limit: int | None
) -> Iterator[Sources]:
    """With a policy, or where there are several, they live; else the one is read as it comes."""
    with ExitStack() as stack:
        if len(specs) == 1 and policy is None:
            only = stack.enter_context(video.open_source(specs[0], limit=limit))
            yield Sources(only.name, only.fps, only, lambda: int(only.damaged))
            return
        parsed = video.parse_policy(policy or "block")
        live = tuple(stack.enter_context(video.LiveSource(spec, parsed, stall_s=stall_s)) for spec in specs)
        yield Sources(
            ", ".join(source.name for source in live),
            live[0].fps,
            islice(video.merge(live), limit),
            lambda: sum(source.statistics().damaged for source in live),
            live,
        )


@contextmanager
def draining_on_interrupt(close: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C, or a SIGTERM, sets what the yielded function returns; a second Ctrl-C interrupts at once.

    `close` is called then, in a thread of its own.
    """
    hit = False

    def first(*_: object) -> None:
        nonlocal hit
        hit = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        errors.print("draining; Ctrl-C again ends at once")
        threading.Thread(target=close, daemon=True).start()

    before = {number: signal.signal(number, first) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: hit
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def line_json(seen: Any, stand_ins: Iterable[str] = ()) -> dict[str, Any]:
    """One frame's line: what a decoder found, else the size and the highest place of each output."""
    line = {"frame": seen.frame.index, "time_s": seen.frame.time_s, "latency_s": seen.result.latency_s}
    if hasattr(seen.frame, "source"):
        line |= {"source": seen.frame.source, "age_s": seen.frame.age_s}
    if stand_ins:
        line["stand_ins"] = list(stand_ins)
    if seen.annotations:
        return {**line, "annotations": [asdict(annotation) for annotation in seen.annotations]}
    outputs = {
        name: {"shape": list(array.shape), "argmax": int(array.argmax()), "max": float(array.max())}
        for name, array in seen.result.outputs.items()
    }
    return {**line, "outputs": outputs}


def measured_json(statistics: RunStatistics) -> dict[str, Any]:
    """A run's statistics under the names of a prediction; the latency includes the queues of a full pipeline."""
    return {"latency_s": statistics.latency_p50_s, "energy_j": None, **asdict(statistics)}
