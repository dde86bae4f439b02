"""`tvm-pipeline run`: a bundle on a video, a camera or a stream."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
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
from tvm_pipeline.errors import OptionError, VideoError
from tvm_pipeline.report import statistics_table
from tvm_pipeline.runtime import Adaptation, Event, LivePipeline, RunStatistics

WATCHDOG_S = 30.0
REFRESH_EVERY = 10  # frames between two drawings of the live table


def command(
    bundle: Annotated[Path, typer.Argument(help="A bundle of `compile`.")],
    source: Annotated[str, typer.Option(help="File, folder of pictures, http/rtsp URL, camera:0, synthetic:640x480.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Annotated video to write.")] = None,
    results: Annotated[str | None, typer.Option(help="JSON lines to write, one a frame; - is standard output.")] = None,
    decoder: Annotated[str | None, typer.Option(help="What reads the outputs: file.py:function.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="Run this plan instead of the bundle's own.")] = None,
    preprocessing: Annotated[Path | None, typer.Option(help="TOML instead of the bundle's own.")] = None,
    limit: Annotated[int | None, typer.Option(help="Stop after so many frames.")] = None,
    adapt: Annotated[
        str, typer.Option(help="replan: another plan where devices become slower or faster, without stopping; or off.")
    ] = "replan",
    watchdog: Annotated[
        float, typer.Option(help="Seconds after which a stage that is at one frame has failed.")
    ] = WATCHDOG_S,
    events: Annotated[Path | None, typer.Option(help="JSON lines to write: every change of plan, with why.")] = None,
    json: JsonOption = False,
) -> None:
    """Runs a bundle on live video, with a table of what it measures; Ctrl-C drains the pipeline and ends.

    A device that fails is left out and its frames run again on the others, as long as there are others.

    Example: tvm-pipeline run model.tar --source bikes.mp4 --output out.mp4
    """
    if limit is not None and limit < 1:
        raise OptionError(f"--limit {limit}: at least one frame must run")
    if json and results == "-":
        raise OptionError("--json and --results - both want standard output; write the results to a file")
    if adapt not in ("replan", "off"):
        raise OptionError(f"--adapt {adapt!r} is neither replan nor off")
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
            statistics, broken = _run(video, opened, pipeline, source, settings, decode, output, results, limit, json)
    changes = [asdict(event) for event in pipeline.events if event.kind != "start"]
    if json:
        measured = {"measured": measured_json(statistics), "events": changes}
        print_json({**plan_json(pipeline.plan, opened.platform), "source": source, **measured})
    else:
        show(statistics_table(pipeline.plan.predicted, statistics), json or results == "-")
        for event in changes:
            errors.print(f"{event['time_s']:.1f} s: {event['kind']}: {event['reason']}", markup=False, highlight=False)
    if broken:
        raise broken


def _run(
    video: Any,
    bundle: Bundle,
    pipeline: LivePipeline,
    source: str,
    settings: Any,
    decode: Any,
    output: Path | None,
    results: str | None,
    limit: int | None,
    quiet: bool,
) -> tuple[RunStatistics, VideoError | None]:
    """Runs to the end of the source; a source that breaks is reported after what it gave was written."""
    broken: VideoError | None = None
    with ExitStack() as stack:
        frames = stack.enter_context(video.open_source(source, limit=limit))
        lines = stack.enter_context(video.JsonLines(results)) if results else None
        file = stack.enter_context(video.VideoFile(output, frames.fps or 25.0)) if output else None
        stack.enter_context(pipeline)
        stopped = stack.enter_context(draining_on_interrupt())
        live = stack.enter_context(Live(console=errors, auto_refresh=False, transient=True))
        try:
            for seen in video.stream(pipeline, frames, settings, decode, stopped):
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
        if frames.damaged:
            errors.print(f"warning: {frames.name}: {frames.damaged} damaged pieces skipped", style="yellow")
        return pipeline.statistics(), broken


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


@contextmanager
def draining_on_interrupt() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C sets what the yielded function returns; a second one interrupts at once."""
    hit = False

    def first(*_: object) -> None:
        nonlocal hit
        hit = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        errors.print("draining; Ctrl-C again ends at once")

    before = signal.signal(signal.SIGINT, first)
    try:
        yield lambda: hit
    finally:
        signal.signal(signal.SIGINT, before)


def line_json(seen: Any, stand_ins: Iterable[str] = ()) -> dict[str, Any]:
    """One frame's line: what a decoder found, else the size and the highest place of each output."""
    line = {"frame": seen.frame.index, "time_s": seen.frame.time_s, "latency_s": seen.result.latency_s}
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
