"""`tvm-pipeline profile`: measure every operator on every device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tvm_pipeline.cli.options import (
    DeviceOption,
    JsonOption,
    MemoryRewriteOption,
    PlatformOption,
    PowerSensorOption,
    RemoteOption,
    ShapesOption,
    ToleranceOption,
    ValuesOption,
    check_outputs,
    check_remote,
    shapes_of,
    values_of,
)
from tvm_pipeline.cli.output import print_json, show, spinner
from tvm_pipeline.core.model import TOLERANCE
from tvm_pipeline.core.profile import Profile
from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import write_bytes
from tvm_pipeline.report import devices_table, joules_table
from tvm_pipeline.workflow.machine import opened_machine
from tvm_pipeline.workflow.mode_profiles import mode_file, profile_modes
from tvm_pipeline.workflow.steps import REPEATS, Compiled, compile_source, measured_profile


def command(
    model: Annotated[str, typer.Argument(help="A model file, or with Relay a network such as resnet-50.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The file for the profile, as JSON.")] = None,
    graph: Annotated[Path | None, typer.Option("--graph", help="Write the operator graph too, as JSON.")] = None,
    repeats: Annotated[
        int, typer.Option(help="Passes over the model for each device; fewer if they take over 10 s.")
    ] = REPEATS,
    strict: Annotated[
        bool, typer.Option("--strict", help="Make all passes; fail rather than write figures that were disturbed.")
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
    tolerance: ToleranceOption = TOLERANCE,
    memory_rewrite: MemoryRewriteOption = False,
    power_modes: Annotated[
        bool,
        typer.Option(
            "--power-modes",
            help="Measure once in each power mode of the platform, and write a file for each: profile-MAXN.json beside "
            "the name that --output gives. It takes --allow-power-modes.",
        ),
    ] = False,
    allow_power_modes: Annotated[
        bool,
        typer.Option(
            "--allow-power-modes",
            help="With --power-modes: set each mode, which takes the rights of root, and put back what was before.",
        ),
    ] = False,
    remote: RemoteOption = None,
    platform: PlatformOption = None,
    device: DeviceOption = "",
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
    if allow_power_modes and not power_modes:
        raise OptionError("--allow-power-modes goes with --power-modes")
    check_remote(remote, {"power_modes": power_modes}, "modes are set on the machine itself; run the command there")
    check_remote(remote, {"memory_rewrite": memory_rewrite}, "what it gains is tried on this machine's devices")
    check_outputs(output, graph, inputs=(model, platform))
    shapes, values = shapes_of(input_shapes), values_of(input_values)
    with spinner(), opened_machine(remote) as machine:
        if power:
            machine.check_sensor(power_sensor)  # that it is missing is told before anything is compiled

        def made_in(mode: str) -> Compiled:
            return compile_source(
                model,
                shapes,
                platform,
                devices=device,
                tolerance=tolerance,
                values=values,
                power_mode=mode,
                memory_rewrite=memory_rewrite,
                machine=machine,
            )

        def measure(made: Compiled) -> Profile:
            found = measured_profile(made, None, repeats, strict, machine)
            if power:
                found = machine.with_joules(made.compiled, made.platform, found, power_sensor)
            return found

        def once() -> Iterator[tuple[Compiled, Profile]]:
            made = made_in("")
            yield made, measure(made)

        found: list[tuple[Compiled, Profile]] = []
        each = profile_modes(platform, made_in, measure, allow_power_modes) if power_modes else once()
        for made, measured in each:
            found.append((made, measured))
            if output:
                content = msgspec.json.format(msgspec.json.encode(measured))
                write_bytes(mode_file(output, measured.power_mode), content)
    if graph:
        write_bytes(graph, msgspec.json.format(msgspec.json.encode(found[0][0].compiled.graph)))
    if json:
        print_json([measured for _, measured in found] if power_modes else found[0][1])
        return
    for made, measured in found:
        show(devices_table(made.platform, measured), json)
        if measured.idle:
            show(joules_table(made.platform, measured.idle, measured), json)
