"""`tvm-pipeline run`: run bundles and models on videos, cameras and streams.

This file holds the options and the screen. Read next: service/settings.py (options that contradict each other),
service/file.py (the same from a file), service/running.py (the run), service/supervisor.py (the run again, after a
crash). Those need the libraries of the extra `video` and are imported when the command runs.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvm_pipeline import PipelineError
from tvm_pipeline.addresses import has_secret, without_secrets
from tvm_pipeline.cli.options import (
    CLASSES_HELP,
    DECODER_HELP,
    LABELS_HELP,
    PREPROCESSING_HELP,
    THRESHOLD_HELP,
    JsonOption,
    MaxLatencyOption,
    MinThroughputOption,
    PowerSensorOption,
    ShapesOption,
)
from tvm_pipeline.cli.output import say, steps_to, warn
from tvm_pipeline.runtime.adaptation import STRATEGIES
from tvm_pipeline_video.service.progress import WORKER, FrameCounts

if TYPE_CHECKING:
    from tvm_pipeline_video.service.file import SettingsReader
    from tvm_pipeline_video.service.settings import Settings

WORKING = (
    "import sys; entries = int(sys.argv[1]) + 2; sys.path[:] = sys.argv[2:entries]; "
    "sys.argv[:] = ['tvm-pipeline', *sys.argv[entries:]]; import tvm_pipeline_command; tvm_pipeline_command.main()"
)


def command(
    ctx: typer.Context,
    bundle: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Bundles of `compile`, or model files (.onnx, .tflite), which are compiled into the cache first. "
            "Where there are several, each takes one --source, in their order."
        ),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(help="File, folder of pictures, http/rtsp URL, camera:0, synthetic:640x480; several take turns."),
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(help="A text for each source, which its lines carry as `tag`; as many as there are sources."),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="With --config: load the model, run one frame of noise, and wait for sources. They come and go with "
            "`source`, `tag` and `policy` of the file on SIGHUP, while those that stay lose no frame; a source that "
            "breaks or ends does not end the run.",
        ),
    ] = False,
    status: Annotated[
        Path | None,
        typer.Option(help="With --wait: a JSON file with the sources and their counts, replaced when they change."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML with any of these options under their long names, and `bundle`; paths are relative to it. On "
            "SIGHUP it is read again: the frames inside come out, and the run goes on by the new settings."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Annotated video to write; it plays while it is written.")
    ] = None,
    results: Annotated[
        str | None,
        typer.Option(
            help="JSON lines to write, one for each frame, as they come; - is standard output. "
            "With --config or --supervise they are appended to the file, which is replaced otherwise. "
            "mqtt://user:password@host:port/topic (or mqtts) sends each to a broker, once and in order.",
            envvar="TVM_PIPELINE_RESULTS",
        ),
    ] = None,
    segment: Annotated[
        float | None,
        typer.Option(
            help="Seconds of each source after which --output and --results go on in another file: out-0001.mp4, "
            "out-0002.mp4 and so on. None that is there is overwritten."
        ),
    ] = None,
    decoder: Annotated[
        list[str] | None,
        typer.Option(help=f"{DECODER_HELP} One, or one for each model."),
    ] = None,
    labels: Annotated[list[str] | None, typer.Option(help=f"{LABELS_HELP} One, or one for each model.")] = None,
    threshold: Annotated[list[float] | None, typer.Option(help=f"{THRESHOLD_HELP} One, or one for each model.")] = None,
    classes: Annotated[list[str] | None, typer.Option(help=f"{CLASSES_HELP} One list for each model.")] = None,
    plan: Annotated[
        list[Path] | None,
        typer.Option("--plan", help="Run this plan instead of the bundle's own; one, or one for each model."),
    ] = None,
    preprocessing: Annotated[
        str | None,
        typer.Option(
            help=f"{PREPROCESSING_HELP} Without it, that of the bundle or MODEL.toml, else that of the model's "
            "family or metadata, else what the shape of the input suggests; which of these it is gets said."
        ),
    ] = None,
    input_shapes: ShapesOption = None,
    limit: Annotated[int | None, typer.Option(help="Stop each model after this number of frames.")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Read the sources ahead, open them again where they break, and drop frames by this rule: "
            "block, latest, every=N, max-age=SECONDS, fps=N, or several with commas; one, or one for each source. "
            "Without it, cameras and rtsp, rtmp and udp streams have latest, all others block."
        ),
    ] = None,
    hardware_decoding: Annotated[
        str,
        typer.Option(
            help="auto: video is decoded by the first device that `devices` lists for that, in software where there is "
            "none; off: in software; or the kind of device, such as cuda or vaapi."
        ),
    ] = "auto",
    stall: Annotated[
        float, typer.Option(help="Seconds without a frame after which a source that is read ahead counts as broken.")
    ] = 10.0,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Frames a second that the source gives: plan for the least latency that keeps up with them and 10 % "
            "more. A file is then read at this rate. Without it, the rate of a camera or stream, if it says one."
        ),
    ] = None,
    verify: Annotated[
        float,
        typer.Option(help="Seconds in which plans too close to tell apart by prediction run side by side; 0: none do."),
    ] = 10.0,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Measure and plan anew, also if that was done for this bundle, source and decoder before."
        ),
    ] = False,
    adapt: Annotated[
        str,
        typer.Option(
            help="replan: change to another plan where devices become slower or faster, without stopping; off: keep "
            f"the plan. Installed: {', '.join(STRATEGIES)}."
        ),
    ] = "replan",
    objective: Annotated[
        str | None,
        typer.Option(help="What to plan for: throughput, latency or energy; without it, that of the bundle."),
    ] = None,
    min_throughput: MinThroughputOption = None,
    max_latency: MaxLatencyOption = None,
    control: Annotated[
        Path | None,
        typer.Option(help="TOML with objective, min-throughput, max-latency: it is read whenever it changes."),
    ] = None,
    allow_power_modes: Annotated[
        bool,
        typer.Option(
            "--allow-power-modes",
            help="Set the power mode that the plan is for, if it is for one, and put back at the end what was before; "
            "this takes the rights of root. Without it, such a plan runs only where its mode is set.",
        ),
    ] = False,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="Run each stage in a process of its own, whose crash costs no frame.")
    ] = False,
    watchdog: Annotated[float, typer.Option(help="Seconds at one frame after which a stage counts as failed.")] = 30.0,
    events: Annotated[
        Path | None, typer.Option(help="JSON lines to append: each change of plan and its reason.")
    ] = None,
    power_sensor: PowerSensorOption = "",
    watch: Annotated[
        str | None,
        typer.Option(
            help="PORT or ADDRESS:PORT: metrics, health, traces and a page; beyond loopback it needs --token. "
            "A second model has the next port, and so on."
        ),
    ] = None,
    unhealthy_after: Annotated[
        float,
        typer.Option("--unhealthy-after", help="With --watch: seconds without a result before /health says no."),
    ] = 10.0,
    token: Annotated[
        str | None, typer.Option(help="With --watch: the token that a client must send.", envvar="TVM_PIPELINE_TOKEN")
    ] = None,
    supervise: Annotated[
        bool,
        typer.Option(
            "--supervise", help="Start it again where it crashes, to go on where it was; after ever longer waits."
        ),
    ] = False,
    json: JsonOption = False,
    worker: Annotated[Path | None, typer.Option(envvar=WORKER, hidden=True)] = None,
) -> None:
    """Run bundles or models on live video, with a table of measured figures; Ctrl-C drains the pipeline and ends.

    A device that fails is left out and its frames run again on the others, as long as there are others.

    Example: tvm-pipeline run model.tar --source bikes.mp4 --output out.mp4

    A model file: tvm-pipeline run yolov8n.onnx --source bikes.mp4 --output out.mp4 --classes person,bicycle

    Two cameras: tvm-pipeline run model.tar --source camera:0 --source camera:1 --results -

    Two models: tvm-pipeline run faces.tar scenes.tar --source camera:0 --source camera:1 --watch 9600

    A service: tvm-pipeline run --config service.toml --supervise
    """
    from tvm_pipeline_video.service.file import SettingsReader
    from tvm_pipeline_video.service.settings import Settings

    settings = Settings(
        bundle=bundle or [],
        source=source or [],
        tag=tag or [],
        wait=wait,
        status=status,
        output=output,
        results=results,
        segment=segment,
        decoder=decoder or [],
        labels=labels or [],
        threshold=threshold or [],
        classes=classes or [],
        plan=plan or [],
        preprocessing=preprocessing,
        input_shapes=input_shapes,
        limit=limit,
        policy=policy or [],
        hardware_decoding=hardware_decoding,
        stall=stall,
        rate=rate,
        verify=verify,
        fresh=fresh,
        adapt=adapt,
        objective=objective,
        min_throughput=min_throughput,
        max_latency=max_latency,
        control=control,
        allow_power_modes=allow_power_modes,
        isolate=isolate,
        watchdog=watchdog,
        events=events,
        power_sensor=power_sensor,
        watch=watch,
        unhealthy_after=unhealthy_after,
        token=token,
        supervise=supervise,
        json=json,
    )
    is_secret = {
        "source": any(map(has_secret, settings.source)),
        "results": has_secret(settings.results or ""),
        "token": bool(settings.token),
    }
    for option, is_one in is_secret.items():
        origin = ctx.get_parameter_source(option)
        if is_one and origin and origin.name == "COMMANDLINE" and worker is None:
            warn(
                f"every user of this machine can see the secret of --{option} in the list of processes; write it into "
                "a file for --config that you alone can read"
            )
    if config is None:
        _run(settings.check(), None, worker)
        return
    given = {
        name
        for name in ctx.params
        if (origin := ctx.get_parameter_source(name)) and origin.name in ("COMMANDLINE", "ENVIRONMENT")
    }
    reader = SettingsReader(config, settings, given)
    _run(reader.read(), reader, worker)


def _run(settings: Settings, reader: SettingsReader | None, worker: Path | None) -> None:
    """Run as the parent that supervises, as its worker, or as neither."""
    from tvm_pipeline_video.commands.screen import Screen
    from tvm_pipeline_video.service.inputs import is_live
    from tvm_pipeline_video.service.running import Service
    from tvm_pipeline_video.service.supervisor import CRASHED, is_worth_a_restart, supervise

    with Screen() as screen, steps_to(screen.step):
        if settings.supervise and worker is None:
            # The worker finds modules where this process does, and not in the working folder, as with `-m`.
            command = [sys.executable, "-c", WORKING, str(len(sys.path)), *sys.path, *sys.argv[1:]]
            raise typer.Exit(supervise(command, settings.events, reader is not None, screen))
        counts = FrameCounts(worker)
        parent = os.getppid() if worker else None
        service = Service(settings, reader=reader, counts=counts, parent=parent, listener=screen)
        try:
            service.run()
        except Exception as error:
            if worker is None or not is_worth_a_restart(error, counts, any(map(is_live, settings.source))):
                raise
            if not isinstance(error, PipelineError):
                sys.stderr.write(without_secrets(traceback.format_exc()))
            say(f"error: {error}", "red")
            raise typer.Exit(CRASHED) from error
