"""`tvm-pipeline profile`: measure every operator on every device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tvm_pipeline.cli.options import (
    JsonOption,
    PlatformOption,
    PowerSensorOption,
    ShapesOption,
    ValuesOption,
    WinogradOption,
    check_outputs,
    shapes_of,
    values_of,
)
from tvm_pipeline.cli.output import print_json, show, spinner, warn
from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import write_bytes
from tvm_pipeline.report import devices_table, joules_table
from tvm_pipeline.service.power_meter import required_sensor, with_joules
from tvm_pipeline.service.workflow import REPEATS, compile_source, measured_profile


def command(
    model: Annotated[str, typer.Argument(help="A model file, or a network of relay.testing such as resnet-50.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The file for the profile, as JSON.")] = None,
    graph: Annotated[Path | None, typer.Option("--graph", help="Write the operator graph too, as JSON.")] = None,
    repeats: Annotated[int, typer.Option(help="Passes over the model for each device.")] = REPEATS,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail rather than write figures that another program disturbed.")
    ] = False,
    power: Annotated[
        bool,
        typer.Option(
            "--power",
            help="Measure joules as well: of the idle machine, of the model, and of each operator, which is repeated "
            "until the sensor resolves it; about 2 s for each on each device, and longer with a slow sensor.",
        ),
    ] = False,
    power_sensor: PowerSensorOption = "",
    winograd: WinogradOption = False,
    platform: PlatformOption = None,
    input_shapes: ShapesOption = None,
    input_values: ValuesOption = None,
    json: JsonOption = False,
) -> None:
    """Measure every operator on every device, and the links between them.

    Example: tvm-pipeline profile model.onnx -o profile.json

    With joules, where a sensor of power is: tvm-pipeline profile model.onnx --power -o profile.json
    """
    if repeats < 2:
        raise OptionError(f"--repeats {repeats}: a median needs at least 2")
    if power_sensor and not power:
        raise OptionError("`power_sensor` goes with `power`", option="power_sensor")
    check_outputs(output, graph)
    sensor = required_sensor(power_sensor) if power else None
    with spinner() as tell:
        made = compile_source(
            model, shapes_of(input_shapes), platform, tell, warn, winograd=winograd, values=values_of(input_values)
        )
        measured = measured_profile(made, None, tell, warn, repeats, strict)
        if sensor:
            measured = with_joules(made.compiled, made.platform, measured, sensor, tell, warn)
    if output:
        write_bytes(output, msgspec.json.format(msgspec.json.encode(measured)))
    if graph:
        write_bytes(graph, msgspec.json.format(msgspec.json.encode(made.compiled.graph)))
    if json:
        print_json(measured)
    else:
        show(devices_table(made.platform, measured), json)
        if measured.idle:
            show(joules_table(made.platform, measured.idle, measured), json)
