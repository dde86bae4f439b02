"""The options that several commands share, as types for typer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from tvm_pipeline.cli.output import with_options
from tvm_pipeline.core.problem import OBJECTIVES, is_lexicographic
from tvm_pipeline.cost.simulate import check_rate
from tvm_pipeline.cost.under_load import FrameDeadline, frame_deadline
from tvm_pipeline.errors import OptionError, PipelineError
from tvm_pipeline.files import check_distinct
from tvm_pipeline.frontends import Shapes, Values, parse_shapes, parse_values
from tvm_pipeline.option_names import HELP
from tvm_pipeline.planning import BEST, SCHEDULERS
from tvm_pipeline.runtime.verification import VERIFY_S, check_seconds

PlatformOption = Annotated[
    Path | None,
    typer.Option("--platform", help="TOML file of devices and links; without it, this machine is detected."),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        help="Use only these devices of the platform: cpu, gpu, tpu, or names that `devices` lists, with commas.",
    ),
]
EnginesOption = Annotated[
    str,
    typer.Option(
        "--engines",
        help="The engines that compete for each stage, with commas: tvm, and those that are installed: onnxruntime and "
        "openvino for .onnx, tflite and litert for .tflite. Without it, TVM runs what it takes.",
    ),
]
RemoteOption = Annotated[
    str | None,
    typer.Option(
        "--remote",
        metavar="HOST:PORT",
        help="A board that `tvm-pipeline serve-rpc` runs on, such as localhost:9190 behind `ssh -L`: its devices are "
        "compiled for here, and measured there.",
    ),
]
ShapesOption = Annotated[
    str | None,
    typer.Option("--input-shapes", help=HELP["input_shapes"]),
]
ValuesOption = Annotated[
    str | None,
    typer.Option(
        "--input-values", help='Inputs of an .onnx file that become constants: "sr=16000", arrays as "scale=[1,2]".'
    ),
]
ProfilesOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--profile",
        help="Measured before with `profile`; without it, measured now. Several, each of a power mode of the platform, "
        "plan over these modes.",
    ),
]
ObjectiveOption = Annotated[
    str,
    typer.Option(
        "--objective",
        help=f"What the plan is best at: {', '.join(one for one in OBJECTIVES if not is_lexicographic(one))}; or the "
        f"fewest bytes, the first kind first: {'; '.join(filter(is_lexicographic, OBJECTIVES))}. Communication counts "
        "tensors, edge_communication counts edges as Yin et al., SEC 2022, do.",
    ),
]
MinThroughputOption = Annotated[float | None, typer.Option("--min-throughput", help=HELP["min_throughput"])]
MaxLatencyOption = Annotated[float | None, typer.Option("--max-latency", help=HELP["max_latency"])]
StagesOption = Annotated[
    int | None, typer.Option("--stages", help="Exactly this number of stages; without it, the planner chooses.")
]
TimeLimitOption = Annotated[
    float | None, typer.Option("--time-limit", help="Seconds to search; then the best plan known, with its gap.")
]


def _listed_schedulers(name: str) -> str:
    """Return the name of a scheduler; list all and end the command if it is `help`."""
    if name != "help":
        return name
    typer.echo(f"{BEST:25} the best of all exact schedulers")
    for other in SCHEDULERS:
        typer.echo(f"{other:25} {SCHEDULERS[other].summary}")
    raise typer.Exit


SchedulerOption = Annotated[
    str,
    typer.Option(
        "--scheduler",
        callback=_listed_schedulers,
        help=f"{BEST} takes the best of all exact ones, which suits nearly everybody; `--scheduler help` lists the "
        "others.",
    ),
]
VerifyOption = Annotated[
    float | None,
    typer.Option(
        "--verify",
        help="Seconds, at most, in which candidates whose predictions are too close run side by side; the measured "
        "best is chosen. Half as many more find how few frames inside keep its rate. "
        f"{VERIFY_S:g} where the plan can run here; 0 chooses by prediction.",
    ),
]
DeadlineOption = Annotated[str | None, typer.Option("--deadline", help=with_options(HELP["deadline"]))]
MissOption = Annotated[float, typer.Option("--miss", help=with_options(HELP["miss"]))]
RateOption = Annotated[
    float | None,
    typer.Option("--rate", help="Frames a second that arrive; without it, the source is never waited for."),
]
PowerSensorOption = Annotated[
    str,
    typer.Option(
        "--power-sensor",
        help=HELP["power_sensor"],
    ),
]
ToleranceOption = Annotated[
    float,
    typer.Option(
        "--tolerance",
        help="The error that faster algorithms, such as Winograd's for 3x3 convolutions, may add to an output, over "
        "its largest value. It is measured against float64 when the model is compiled. 0 keeps direct sums.",
    ),
]
WeightsOption = Annotated[
    str,
    typer.Option(
        "--weights",
        help="How weights of convolutions and matrix products are stored: float32; or rounded to float16 or bfloat16, "
        "in half of the memory. All is computed in float32. What rounding costs is measured. Needs Relax.",
    ),
]
MemoryRewriteOption = Annotated[
    bool,
    typer.Option(
        "--memory-rewrite",
        help="Do concatenations in parts where that lowers the peak of memory, and order operators as `compile "
        "--memory-order` does. The outputs are compared: floats may differ by rounding, integers must be equal.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help=HELP["json"])]


def shapes_of(text: str | None) -> Shapes | None:
    """Return the shapes that --input-shapes gives."""
    return parse_shapes(text) if text else None


def values_of(text: str | None) -> Values | None:
    """Return the values that --input-values gives."""
    return parse_values(text) if text else None


def check_remote(remote: str | None, given: Mapping[str, object], why: str) -> None:
    """Raise OptionError where a board is asked for beside a setting, by its field, that is for this machine alone."""
    if remote is not None:
        check_apart("remote", given, why)


def check_apart(field: str, given: Mapping[str, object], why: str) -> None:
    """Raise OptionError where one of these settings is given beside that of `field`."""
    for name, value in given.items():
        if value:
            raise OptionError(f"`{name}` does not go with `{field}`: {why}", option=name)


def deadline_of(text: str | None, miss: float, rate_fps: float | None, obstacle: str = "") -> FrameDeadline | None:
    """Return what --deadline, --miss and --rate ask for; raise OptionError where there is an obstacle."""
    check_rate(rate_fps)
    if text is None:
        return None
    if obstacle:
        raise OptionError(f"--deadline {text}: {obstacle}; leave it out")
    return frame_deadline(text, miss, rate_fps)


def verify_seconds(verify: float | None, obstacle: str = "") -> float:
    """Return the seconds of --verify; raise OptionError where they were asked for and there is an obstacle."""
    if verify is None:
        return 0.0 if obstacle else VERIFY_S
    check_seconds(verify)
    if verify and obstacle:
        raise OptionError(f"--verify {verify:g}: {obstacle}; leave it out")
    return verify


def check_outputs(*files: Path | None, folder: Path | None = None, inputs: Iterable[Path | str | None] = ()) -> None:
    """Raise PipelineError where a file, or a folder that need not be there yet, cannot be written, or is an input.

    A command asks this before it compiles or measures, which takes minutes.
    """
    check_distinct(files, inputs)
    for file in files:
        if file is not None and file.is_dir():
            raise PipelineError(f"cannot write {file}: it is a folder; give the name of a file")
    for path in (*(file and file.parent for file in files), folder):
        if path is None:
            continue
        try:
            place = path if path == folder else path.resolve(strict=True)
            while not place.exists():
                place = place.parent
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            whole = next((file for file in files if file is not None and file.parent == path), path)
            raise PipelineError(f"cannot write {whole}: {error.strerror or error}; choose another place") from error
