"""`tvm-pipeline serve`: a running pipeline answers other programs; today Frigate, which asks for detections."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from tvm_pipeline.cli.output import say, steps_to
from tvm_pipeline.core.plan import describe
from tvm_pipeline.runtime import LivePipeline
from tvm_pipeline.runtime.isolation import isolated, making_limit_s


def command(
    model: Annotated[Path, typer.Argument(help="A bundle (.tar), or a model to compile and measure first.")],
    frigate: Annotated[
        list[str],
        typer.Option(
            "--frigate",
            metavar="ENDPOINT",
            help="Where Frigate's detectors of type zmq connect to: ipc:///PATH or tcp://ADDRESS:PORT. Each endpoint "
            "keeps one picture in the pipeline, so give as many as there are devices to keep busy.",
        ),
    ],
    decoder: Annotated[
        str, typer.Option(help="What reads boxes from the outputs, by name, where it is not recognised: yolov8, ssd.")
    ] = "",
    preprocessing: Annotated[
        str | None, typer.Option(help="How a picture becomes the model's input: a TOML file or a preset, such as yolo.")
    ] = None,
    allow_others: Annotated[
        bool,
        typer.Option(
            "--allow-others",
            help="Listen also where other machines reach the port. There is no authentication: whoever reaches it has "
            "pictures analysed here.",
        ),
    ] = False,
) -> None:
    """Serve a detector to Frigate over its ZMQ protocol, until Ctrl-C: all cameras share one pipeline.

    A device that fails is left out, as long as there are others. A model file is planned for the latency of a picture
    if there is one endpoint, and for throughput otherwise; `compile` offers more choices.

    Example: tvm-pipeline serve yolov9.tar --frigate ipc:///run/frigate/a --frigate ipc:///run/frigate/b
    """
    from tvm_pipeline_video.service.frigate import interpretation, serve
    from tvm_pipeline_video.service.listener import Listener
    from tvm_pipeline_video.service.model_bundle import is_model, opened_model, settings_beside
    from tvm_pipeline_video.service.running_model import plan_alone
    from tvm_pipeline_video.service.settings import Settings

    settings = Settings(
        [model],
        decoder=[decoder] if decoder else [],
        preprocessing=preprocessing,
        objective="latency" if is_model(model) and len(frigate) == 1 else None,
    )
    with ExitStack() as stack:
        stack.enter_context(steps_to(say))
        _, bundle = stack.enter_context(opened_model(model, settings, Listener()))
        found = interpretation(bundle, decoder, preprocessing or settings_beside(model))
        planned = plan_alone(settings, bundle)
        for line in (*found.said, f"plan: {describe(planned.plan)}"):
            say(line)
        stages, making_s = planned.plan.stages, making_limit_s(bundle.compiled.graph, settings.watchdog)
        compiled = stack.enter_context(isolated(bundle.compiled, bundle.platform, stages, making_s, every=False))
        pipeline = LivePipeline(
            compiled, planned.problem, planned.plan, watchdog_s=settings.watchdog, making_s=making_s
        )
        serve(stack.enter_context(pipeline), found, frigate, model=str(model), allow_others=allow_others)
