"""`tvm-pipeline devices`: what this machine has, or what a platform file says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvm_pipeline.backends.contract import detect_platform, settle_platform
from tvm_pipeline.core.platform import platform_toml, read_platform
from tvm_pipeline.files import write_bytes
from tvm_pipeline.report import devices_table
from tvm_pipeline.service.common import JsonOption, PlatformOption, print_json, show


def command(
    platform: PlatformOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write them as a platform file to edit.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Lists the devices that a plan can use.

    Example: tvm-pipeline devices -o desk.toml
    """
    _, settled = settle_platform(read_platform(platform) if platform else detect_platform())
    if output:
        write_bytes(output, platform_toml(settled).encode())
    if json:
        print_json(settled)
    else:
        show(devices_table(settled), json)
