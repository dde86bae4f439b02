"""`tvm-pipeline deploy`: several models on one platform, each at its own rate."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tvm_pipeline.backends.bundle import Bundle, write_bundle
from tvm_pipeline.backends.carried import without_carry
from tvm_pipeline.backends.registry import platform_backend
from tvm_pipeline.cli.options import DeviceOption, JsonOption, PlatformOption, TimeLimitOption, check_outputs
from tvm_pipeline.cli.output import print_json, show, spinner, with_options
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import check_distinct, write_bytes
from tvm_pipeline.frontends import check_there
from tvm_pipeline.planning.deployment import Demand, deploy
from tvm_pipeline.report.tables import deployment_table
from tvm_pipeline.workflow.steps import PlanningInput, plan_json, planned

_log = logging.getLogger(__name__)


def command(
    models: Annotated[
        list[str], typer.Argument(help="MODEL@FPS for each: what `plan` takes, and the frames a second it must make.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="A folder for the plans, and for a bundle of each model, for `run`."),
    ] = None,
    platform: PlatformOption = None,
    device: DeviceOption = "",
    time_limit: TimeLimitOption = None,
    json: JsonOption = False,
) -> None:
    """Place several models on one set of devices; meet their rates, or say which cannot be met and what can.

    Models on the same Edge TPU are compiled together, so that they share its parameter cache. The memory_bytes of a
    device hold the parameters and the activations of all stages of all models. The search takes less than a minute
    unless --time-limit says otherwise; a deployment that is not proven has a gap.

    Example: tvm-pipeline deploy faces.tar@30 scenes.tar@10
    """
    check_outputs(folder=output)
    requested = [_parsed(model) for model in models]
    for source, _ in requested:  # before minutes of compiling the first
        check_there(source)
    with spinner(), ExitStack() as stack:
        sources = [
            stack.enter_context(planned(source, None, platform, None, devices=device)) for source, _ in requested
        ]
        demands = [Demand(s.problem(), rate_fps) for s, (_, rate_fps) in zip(sources, requested, strict=True)]
        found = deploy(demands, time_limit)
        if output:
            _log.info(f"writing {output}")
            _write(output, sources, found.plans, [source for source, _ in requested])
    if json:
        plans = [plan_json(plan, sources[0].platform) for plan in found.plans]
        print_json({**asdict(found), "gap": found.gap, "plans": plans})
    else:
        show(deployment_table(found), json)
        show(with_options(found.why), json)


def _write(output: Path, sources: Sequence[PlanningInput], plans: Sequence[Plan], models: Sequence[str]) -> None:
    """Write the plans as text, and a bundle of each that can run, with its stages prepared for the same devices."""
    names = [f"{index}-{plan.graph}" for index, plan in enumerate(plans)]
    check_distinct([output / f"{name}.tar" for name in names], models)
    output.mkdir(parents=True, exist_ok=True)
    for index, plan in enumerate(plans):
        write_bytes(output / f"{index}-{plan.graph}.txt", str(plan).encode())
    platform = sources[0].platform
    residents = [without_carry(s.compiled, p.stages) for s, p in zip(sources, plans, strict=True) if s.compiled]
    if not residents:
        return
    platform_backend(platform).share(residents, platform)
    for index, (source, plan) in enumerate(zip(sources, plans, strict=True)):
        if source.compiled:
            bundle = Bundle(source.graph, source.platform, source.profile, plan, source.compiled)
            write_bundle(output / f"{index}-{plan.graph}.tar", bundle)


def _parsed(model: str) -> tuple[str, float]:
    source, at, rate = model.rpartition("@")
    try:
        if not at or not source:
            raise ValueError
        return source, float(rate)
    except ValueError:
        raise OptionError(f"{model!r} does not say a rate; write MODEL@FPS, such as faces.onnx@30") from None
