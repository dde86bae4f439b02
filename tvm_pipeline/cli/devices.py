"""`tvm-pipeline devices`: the devices of this machine, or of a platform file, and its sensors of power."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tvm_pipeline.backends.registry import description, find_backend, known_engines, left_out, settle_platform, state
from tvm_pipeline.cli.options import EnginesOption, JsonOption, PlatformOption, check_outputs
from tvm_pipeline.cli.output import print_json, say, show
from tvm_pipeline.core.platform import read_platform
from tvm_pipeline.core.platform_text import platform_toml
from tvm_pipeline.errors import PipelineError, PlatformError
from tvm_pipeline.files import write_bytes
from tvm_pipeline.power import MeanPower, Sensor, Survey, mean_watts, power_modes, survey
from tvm_pipeline.report import devices_table, sensors_table
from tvm_pipeline.workflow.applications import applications
from tvm_pipeline.workflow.engines import with_engines
from tvm_pipeline.workflow.machine_modes import this_machine


def command(
    platform: PlatformOption = None,
    engines: EnginesOption = "",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the devices as a platform file to edit.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the devices that a plan can use, and the sensors of power that tell what they draw.

    Example: tvm-pipeline devices -o desk.toml
    """
    check_outputs(output)
    given = read_platform(platform) if platform else this_machine(None)
    _, settled = settle_platform(with_engines(given, engines))
    if output:
        write_bytes(output, platform_toml(settled).encode())
    found = Survey([], {}) if platform else survey()
    now = mean_watts(found.sensors)
    obstacles = found.obstacles | now.obstacles
    if json:
        print_json({**msgspec.to_builtins(settled), **({} if platform else _as_json(found.sensors, now, obstacles))})
    else:
        show(devices_table(settled), json)
        if found.sensors:
            show(sensors_table(found.sensors, now.watts), json)
    for line in () if platform else power_modes().described():
        say(line)
    for device in settled.devices:
        if told := "; ".join(filter(None, (description(device), state(device)))):
            say(f"{device.name}: {told}")
    if not platform and not found.sensors and not obstacles:
        say("sensors of power: none that can be read here; joules are not measured, unless a meter's log is given")
    for name, reason in obstacles.items():
        say(f"{name}: it cannot be read: {reason}")
    if settled.power_modes and platform:
        say(f"power modes: {', '.join(mode.name for mode in settled.power_modes)}")
    if not platform and not engines:
        say(f"engines: {', '.join(known_engines())}; `--engines` with some of these shows and plans for their devices")
    for line in () if platform else (*left_out(), *_compiler(), *_for_applications()):
        say(line)


def _as_json(sensors: Sequence[Sensor], now: MeanPower, obstacles: Mapping[str, str]) -> dict[str, Any]:
    return {
        "sensors": [
            {"name": s.name, "covers": s.covers, "scope": s.scope, "watts": now.watts.get(s.name)} for s in sensors
        ],
        "sensors_not_read": obstacles,
    }


def _compiler() -> Iterator[str]:
    """Yield a line for the TVM that compiles; none where there is none, which `left_out` says."""
    with suppress(PlatformError):
        yield f"compiler: {find_backend('host').compiler()}"


def _for_applications() -> Iterator[str]:
    """Yield what the plug-in for applications sees; nothing where it, or its extra, is not installed."""
    with suppress(PipelineError):
        yield from applications("devices").seen()
