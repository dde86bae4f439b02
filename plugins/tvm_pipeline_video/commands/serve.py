"""`tvm-pipeline serve`: a running pipeline answers other programs: Frigate, or clients of an inference server."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from tvm_pipeline.cli.output import say, steps_to
from tvm_pipeline.errors import OptionError


def command(
    model: Annotated[Path, typer.Argument(help="A bundle (.tar), or a model to compile and measure first.")],
    frigate: Annotated[
        list[str] | None,
        typer.Option(
            "--frigate",
            metavar="ENDPOINT",
            help="Where Frigate's detectors of type zmq connect to: ipc:///PATH or tcp://ADDRESS:PORT; may be given "
            "several times.",
        ),
    ] = None,
    http: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS:PORT",
            help="Where clients of the Open Inference Protocol (KServe, Triton) send arrays by HTTP, such as 8000.",
        ),
    ] = "",
    grpc: Annotated[
        str, typer.Option(metavar="ADDRESS:PORT", help="The same by gRPC, such as 8001; beside --http or alone.")
    ] = "",
    name: Annotated[
        str, typer.Option(help="By which clients ask for the model; without it, the name of its file.")
    ] = "",
    token: Annotated[
        str,
        typer.Option(envvar="TVM_PIPELINE_TOKEN", help="The token that clients of --http and --grpc must send."),
    ] = "",
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
            help="Listen also where other machines reach the port. Frigate has no authentication: whoever reaches it "
            "has pictures analysed here. --http and --grpc need a token then.",
        ),
    ] = False,
) -> None:
    """Serve a model until Ctrl-C: a detector to Frigate over its ZMQ protocol, or any to Triton's clients.

    All clients share one pipeline. A device that fails is left out, as long as there are others. A model file is
    planned for the latency of a picture if there is one endpoint of Frigate, and for throughput otherwise; `compile`
    offers more choices.

    Example: tvm-pipeline serve model.onnx --http 8000 --grpc 8001
    """
    if bool(frigate) == bool(http or grpc):
        raise OptionError("give `frigate`, or `http` or `grpc`, and not both kinds: a pipeline serves one kind")
    # What is not installed is told before a model is compiled.
    if frigate:
        from tvm_pipeline_video.service.frigate import interpretation, serve
    else:
        from tvm_pipeline_video.service.inference import InferenceModel, address_of, serving
    from tvm_pipeline_video.service.listener import Listener
    from tvm_pipeline_video.service.model_bundle import is_model, settings_beside
    from tvm_pipeline_video.service.running_model import opened_pipeline
    from tvm_pipeline_video.service.settings import Settings

    addresses = {}
    for option, text in (("http", http), ("grpc", grpc)):
        if text:
            import_module(f"tvm_pipeline_video.service.inference_{option}")
            addresses[option] = address_of(option, text, token, allow_others=allow_others)
    settings = Settings(
        [model],
        decoder=[decoder] if decoder else [],
        preprocessing=preprocessing,
        objective="latency" if is_model(model) and len(frigate or ()) == 1 else None,
    )
    with steps_to(say), opened_pipeline(model, settings, Listener()) as (pipeline, bundle):
        if frigate:
            found = interpretation(bundle, decoder, preprocessing or settings_beside(model))
            for line in found.said:
                say(line)
            serve(pipeline, found, frigate, model=str(model), allow_others=allow_others)
            return
        served = InferenceModel(pipeline, bundle.graph, name or model.name.partition(".")[0])
        served.warm()
        with serving(served, addresses.get("http"), addresses.get("grpc"), token):
            say(f"{served.name} is served; Ctrl-C ends it")
            served.run()
