"""`tvm-pipeline run`: run bundles and models on videos, cameras and streams.

Its options are the fields of service/settings.py. Read next: service/file.py (the same from a file),
service/running.py (the run), service/supervisor.py (the run again, after a crash). These need the libraries of the
extra `video` and are imported when the command runs.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from tvm_pipeline import PipelineError
from tvm_pipeline.addresses import without_secrets
from tvm_pipeline.cli.output import say, steps_to, warn, with_options
from tvm_pipeline.errors import OptionError
from tvm_pipeline_video.service.progress import WORKER, FrameCounts
from tvm_pipeline_video.service.settings import Settings, is_secret

if TYPE_CHECKING:
    from tvm_pipeline_video.service.file import SettingsReader

WORKING = (
    "import sys; entries = int(sys.argv[1]) + 2; sys.path[:] = sys.argv[2:entries]; "
    "sys.argv[:] = ['tvm-pipeline', *sys.argv[entries:]]; import tvm_pipeline_command; tvm_pipeline_command.main()"
)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, in place of its `**options`, an option for each field of `Settings`; a bundle is an argument."""
    context, *own, _ = signature(command, eval_str=True).parameters.values()
    kinds = get_type_hints(Settings)
    settings = [_parameter(one, kinds[one.name]) for one in fields(Settings)]
    vars(command)["__signature__"] = Signature([context, *settings, *own])
    return command


def _parameter(setting: Field[Any], kind: Any) -> Parameter:
    """Return what typer makes an option of. Its default is None where a list is not given, or nothing."""
    about, default = setting.metadata, None if setting.default is MISSING else setting.default
    if default is None:
        kind = (kind if get_origin(kind) is list else get_args(kind)[0]) | None
    names = [f"--{setting.name.replace('_', '-')}", *([f"-{about['letter']}"] if "letter" in about else [])]
    if kind == bool | None:  # both can be said
        names = [f"{names[0]}/{names[0].replace('--', '--no-')}"]
    help = with_options(about["help"])
    option = typer.Option(*names, help=help, envvar=about.get("variable"), rich_help_panel=about.get("panel"))
    given = typer.Argument(help=help) if setting.name == "bundle" else option
    return Parameter(setting.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, given])


@with_settings
def command(
    ctx: typer.Context,
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel="Robustness",
            help="TOML with any of these options under their long names, and `bundle`; paths are relative to it. On "
            "SIGHUP it is read again: the frames inside come out, and the run goes on by the new settings.",
        ),
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel="Input",
            help="Arrays in place of a source, for a model of any kind: an .npz file with an array for each input.",
        ),
    ] = None,
    outputs: Annotated[
        Path | None,
        typer.Option(rich_help_panel="Output", help="With --inputs: the .npz file for the model's own outputs."),
    ] = None,
    worker: Annotated[Path | None, typer.Option(envvar=WORKER, hidden=True)] = None,
    **options: Any,
) -> None:
    """Run bundles or models on live video, with a table of measured figures; Ctrl-C drains the pipeline and ends.

    A device that fails is left out and its frames run again on the others, as long as there are others.

    Example: tvm-pipeline run model.tar --source bikes.mp4 --output out.mp4

    A model file: tvm-pipeline run yolov8n.onnx --source bikes.mp4 --output out.mp4 --classes person,bicycle

    Arrays: tvm-pipeline run model.onnx --inputs x.npz --outputs y.npz

    Two cameras: tvm-pipeline run model.tar --source camera:0 --source camera:1 --results -

    Two models: tvm-pipeline run faces.tar scenes.tar --source camera:0 --source camera:1 --watch 9600

    A service: tvm-pipeline run --config service.toml --supervise
    """
    from tvm_pipeline_video.service.file import SettingsReader

    settings = Settings(**{name: value for name, value in options.items() if value is not None})
    sources = {name: ctx.get_parameter_source(name) for name in options}
    origins = {name: source.name for name, source in sources.items() if source}
    for name, origin in origins.items():
        if origin == "COMMANDLINE" and is_secret(name, options[name]) and worker is None:
            warn(
                f"every user of this machine can see the secret of `{name}` in the list of processes; write it into a "
                "file for --config that you alone can read"
            )
    if outputs and not inputs:
        raise OptionError("`outputs` goes with `inputs`; of a video, `results` has what was found", option="outputs")
    if inputs:
        from tvm_pipeline_video.commands.arrays import USED, run_arrays
        from tvm_pipeline_video.commands.screen import Screen

        for name, origin in {**origins, "config": "COMMANDLINE" if config else ""}.items():
            if origin == "COMMANDLINE" and name not in USED:
                raise OptionError(f"`{name}` does nothing with `inputs`; leave it out", option=name)
        with Screen() as screen, steps_to(screen.step):
            run_arrays(settings, inputs, outputs, screen)
        return
    if config is None:
        _run(settings.check(), None, worker)
        return
    given = {name for name, origin in origins.items() if origin in ("COMMANDLINE", "ENVIRONMENT")}
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
