"""`tvm-pipeline calibrate`: the models of the devices that are here, refitted to a few measured stages."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tvm_pipeline.calibration.fit import Constant
from tvm_pipeline.calibration.measuring import STAGES
from tvm_pipeline.cli.options import JsonOption, PlatformOption, ShapesOption, check_outputs, shapes_of
from tvm_pipeline.cli.output import print_json, show, spinner
from tvm_pipeline.core.platform import Platform, read_platform
from tvm_pipeline.core.platform_text import platform_toml
from tvm_pipeline.files import write_bytes
from tvm_pipeline.report import TextTable
from tvm_pipeline.report.tables import duration, percent, size
from tvm_pipeline.workflow.calibrating import CalibratedDevices, CalibratedPlatform, calibrate_platform


def command(
    models: Annotated[
        list[str],
        typer.Argument(help="Model files, or with Relay networks such as squeezenet; two or three that differ."),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The file for the platform with the refitted models, as TOML.")
    ],
    stages: Annotated[
        int, typer.Option("--stages-to-measure", help="On each device; of equal devices one is measured.")
    ] = STAGES,
    platform: PlatformOption = None,
    input_shapes: ShapesOption = None,
    json: JsonOption = False,
) -> None:
    """Refit the models of the devices that are plugged in to a few measured stages.

    The stages are chosen so that they tell most. `plan --platform` of the file that it writes then needs no profile,
    also for networks that never ran on these devices; `profile` measures.

    Example: tvm-pipeline calibrate small.onnx large.onnx --platform board.toml -o calibrated.toml
    """
    check_outputs(output, inputs=models)
    shapes = shapes_of(input_shapes)
    machine = seen_from(read_platform(platform), platform.parent, output.parent) if platform else None
    with spinner():
        found = calibrate_platform(models, machine, shapes, stages)
    write_and_show(found, output, json)


def write_and_show(found: CalibratedPlatform, output: Path, json: bool) -> None:
    """Write the platform with its refitted models, and print what was fitted and what to measure next."""
    write_bytes(output, platform_toml(found.platform, found.comments).encode())
    if json:
        groups = [_json(group) for group in found.groups]
        print_json({"platform": str(output), "calibrated": groups, "left_out": found.left_out})
        return
    for group in found.groups:
        show(constants_table(group), json)
        for line in group.advice:
            show(line, json)
    show(f"{output} has the models; `tvm-pipeline plan MODEL --platform {output}` plans with them", json)


def constants_table(group: CalibratedDevices) -> TextTable:
    """Return the constants of equal devices before and after, and how well the stages determine them."""
    calibration = group.found.calibration
    rows = tuple(
        (
            name,
            _figure(name, each.prior),
            _figure(name, each.fitted),
            f"{_figure(name, each.fitted / _factor(each))} to {_figure(name, each.fitted * _factor(each))}",
            "" if each.is_known else "badly",
        )
        for name, each in calibration.constants.items()
    )
    title = (
        f"{', '.join(group.names)}: error {percent(calibration.prior_error)} -> {percent(calibration.error)} on "
        f"{calibration.stages} stages, leaving out {calibration.left_out}"
    )
    return TextTable(title, ("constant", "before", "after", "95 % interval", "known"), rows)


def seen_from(platform: Platform, before: Path, now: Path) -> Platform:
    """Return the platform with the files that it names seen from another folder."""
    moved = tuple(
        replace(device, layer_times=os.path.relpath(before / device.layer_times, now)) if device.layer_times else device
        for device in platform.devices
    )
    return replace(platform, devices=moved)


def _figure(name: str, value: float) -> str:
    if name == "macs_per_s":
        return f"{value / 1e9:.3g} GMAC/s"
    if name.endswith("bytes_per_s"):
        return f"{size(value)}/s"
    if name.endswith("_bytes"):
        return size(value)
    return duration(value) if name.endswith("_s") else f"x{value:.2f}"


def _factor(constant: Constant) -> float:
    """Return the factor by which the constant may be off either way, in 95 of 100 cases."""
    return math.exp(1.96 * constant.sd)


def _json(group: CalibratedDevices) -> dict[str, Any]:
    calibration, found = group.found.calibration, group.found
    return {
        "devices": group.names,
        "error": calibration.error,
        "prior_error": calibration.prior_error,
        "left_out": calibration.left_out,
        "model": calibration.model,
        "constants": {name: asdict(constant) for name, constant in calibration.constants.items()},
        "badly_known": list(group.badly_known),
        "stages": [
            {"graph": time.graph.name, "operators": time.operators, "seconds": time.seconds, "spread": time.spread}
            for time in found.times
        ],
        "next": group.advice,
    }
