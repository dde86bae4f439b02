"""`tvm-pipeline run`: bundles on videos, cameras and streams.

Here stands what it takes; read next: settings.py (what contradicts itself), service.py (the same from a file),
running.py (the run), supervise.py (the run again, after a crash).
"""

from __future__ import annotations

import os
import traceback
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from tvm_pipeline.errors import OptionError, PipelineError
from tvm_pipeline.service.common import JsonOption, MaxLatencyOption, MinThroughputOption, say
from tvm_pipeline.service.feeds import Progress, is_live
from tvm_pipeline.service.file import Asked
from tvm_pipeline.service.running import run
from tvm_pipeline.service.settings import Settings
from tvm_pipeline.service.supervisor import CRASHED, WORKER, may_fare_better, supervise


def command(
    ctx: typer.Context,
    bundle: Annotated[
        list[Path] | None,
        typer.Argument(help="Bundles of `compile`; of several, each takes one --source, in their order."),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(help="File, folder of pictures, http/rtsp URL, camera:0, synthetic:640x480; several take turns."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML with any of these options under their long names, and `bundle`; paths are relative to it. "
            "SIGHUP reads it anew: what is inside comes out, and it goes on by the new settings."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Annotated video to write.")] = None,
    results: Annotated[
        str | None,
        typer.Option(
            help="JSON lines to write, one a frame; - is standard output. "
            "With --config or --supervise they are appended as they come."
        ),
    ] = None,
    decoder: Annotated[
        list[str] | None,
        typer.Option(help="What reads the outputs: file.py:function; one, or one for each model."),
    ] = None,
    plan: Annotated[
        list[Path] | None,
        typer.Option("--plan", help="Run this plan instead of the bundle's own; one, or one for each model."),
    ] = None,
    preprocessing: Annotated[Path | None, typer.Option(help="TOML instead of the bundle's own.")] = None,
    limit: Annotated[int | None, typer.Option(help="Stop each model after so many frames.")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Which frames of sources that are read ahead, and opened again where they break, are let go: "
            "block, latest, every=N, max-age=SECONDS, or several with commas; one, or one for each source. "
            "Without it cameras and rtsp, rtmp and udp streams have latest, all else block."
        ),
    ] = None,
    stall: Annotated[
        float, typer.Option(help="Seconds without a frame after which a source that is read ahead broke.")
    ] = 10.0,
    adapt: Annotated[
        str,
        typer.Option(
            help="replan: another plan where devices become slower or faster, without stopping; hill-climb: one "
            "operator at a time from the slowest stage; or off."
        ),
    ] = "replan",
    objective: Annotated[
        str | None, typer.Option(help="What to plan for: throughput, latency or energy; else what the bundle is for.")
    ] = None,
    min_throughput: MinThroughputOption = None,
    max_latency: MaxLatencyOption = None,
    control: Annotated[
        Path | None,
        typer.Option(help="TOML with objective, min-throughput, max-latency: obeyed whenever it changes."),
    ] = None,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="Each stage in a process of its own, whose crash costs no frame.")
    ] = False,
    watchdog: Annotated[
        float, typer.Option(help="Seconds after which a stage that is at one frame has failed.")
    ] = 30.0,
    events: Annotated[Path | None, typer.Option(help="JSON lines to append: every change of plan, with why.")] = None,
    watch: Annotated[
        str | None,
        typer.Option(
            help="PORT or ADDRESS:PORT: metrics, health, traces and a page; beyond loopback it needs --token. "
            "A second model has the next port, and so on."
        ),
    ] = None,
    unhealthy_after: Annotated[
        float, typer.Option("--unhealthy-after", help="With --watch: seconds without a result until health says no.")
    ] = 10.0,
    token: Annotated[
        str | None, typer.Option(help="With --watch: what a client must know.", envvar="TVM_PIPELINE_TOKEN")
    ] = None,
    supervise_: Annotated[
        bool,
        typer.Option("--supervise", help="Start it again where it crashes, to go on where it was; ever less often."),
    ] = False,
    json: JsonOption = False,
    worker: Annotated[Path | None, typer.Option(envvar=WORKER, hidden=True)] = None,
) -> None:
    """Runs bundles on live video, with a table of what it measures; Ctrl-C drains the pipeline and ends.

    A device that fails is left out and its frames run again on the others, as long as there are others.

    Example: tvm-pipeline run model.tar --source bikes.mp4 --output out.mp4

    Two cameras: tvm-pipeline run model.tar --source camera:0 --source camera:1 --results -

    Two models: tvm-pipeline run faces.tar scenes.tar --source camera:0 --source camera:1 --watch 9600

    A service: tvm-pipeline run --config service.toml --supervise
    """
    values = {name.rstrip("_"): value for name, value in locals().items()}
    given = {
        name.rstrip("_")
        for name in ctx.params
        if (origin := ctx.get_parameter_source(name)) and origin.name in ("COMMANDLINE", "ENVIRONMENT")
    }
    several = {"bundle", "source", "decoder", "plan", "policy"}
    options = {f.name: values[f.name] or [] if f.name in several else values[f.name] for f in fields(Settings)}
    asked = Asked(options, given, config)
    settings = asked.read()
    if settings.supervise and worker is None:
        raise typer.Exit(supervise(settings.events, asked.may_change))
    progress = Progress(worker)
    try:
        run(asked, settings, progress, os.getppid() if worker else None)
    except OptionError as error:
        raise asked.located(error) from error
    except Exception as error:
        if worker is None or not may_fare_better(error, progress, any(map(is_live, settings.source))):
            raise
        if not isinstance(error, PipelineError):
            traceback.print_exc()
        say(f"error: {error}", "red")
        raise typer.Exit(CRASHED) from error
