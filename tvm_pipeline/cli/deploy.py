"""`tvm-pipeline deploy`: several models on one platform, each at its own rate."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tvm_pipeline.cli.common import JsonOption, PlatformOption, plan_json, planned, print_json, progress, show
from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import write_bytes
from tvm_pipeline.report.tables import deployment_table
from tvm_pipeline.scheduling.deployment import Demand, deploy


def command(
    models: Annotated[
        list[str], typer.Argument(help="MODEL@FPS for each: what `plan` takes, and the frames a second it must make.")
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A folder for the plans, as text.")] = None,
    platform: PlatformOption = None,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", help="Seconds to search; then the best known, with its gap.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Places several models on one set of devices; meets their rates, or says which cannot be met and what can.

    Example: tvm-pipeline deploy faces.tar@30 scenes.tar@10
    """
    wanted = [_parsed(model) for model in models]
    with progress() as tell, ExitStack() as stack:
        demands = []
        for source, rate_fps in wanted:
            what = stack.enter_context(planned(source, None, platform, None, tell))
            demands.append(Demand(what.problem(), rate_fps))
        found = deploy(demands, time_limit)
    if output:
        output.mkdir(parents=True, exist_ok=True)
        for index, plan in enumerate(found.plans):
            write_bytes(output / f"{index}-{plan.graph}.txt", str(plan).encode())
    if json:
        print_json({**asdict(found), "plans": [plan_json(plan) for plan in found.plans]})
    else:
        show(deployment_table(found), json)
        show(found.why, json)


def _parsed(model: str) -> tuple[str, float]:
    source, at, rate = model.rpartition("@")
    try:
        if not at or not source:
            raise ValueError
        return source, float(rate)
    except ValueError:
        raise OptionError(f"{model!r} does not say a rate; write MODEL@FPS, such as faces.onnx@30") from None
