"""`tvm-pipeline deploy`: several models on one platform, each at its own rate."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tvm_pipeline.backends.bundle import Bundle, write_bundle
from tvm_pipeline.backends.contract import leading_backend
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import write_bytes
from tvm_pipeline.planning.deployment import Demand, deploy
from tvm_pipeline.report.tables import deployment_table
from tvm_pipeline.service.common import (
    JsonOption,
    Planned,
    PlatformOption,
    plan_json,
    planned,
    print_json,
    progress,
    show,
)


def command(
    models: Annotated[
        list[str], typer.Argument(help="MODEL@FPS for each: what `plan` takes, and the frames a second it must make.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="A folder for the plans, and of models a bundle each for `run`."),
    ] = None,
    platform: PlatformOption = None,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", help="Seconds to search; then the best known, with its gap.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Places several models on one set of devices; meets their rates, or says which cannot be met and what can.

    Models on the same Edge TPU are compiled together, so that they share its parameter cache.

    Example: tvm-pipeline deploy faces.tar@30 scenes.tar@10
    """
    wanted = [_parsed(model) for model in models]
    with progress() as tell, ExitStack() as stack:
        sources = [stack.enter_context(planned(source, None, platform, None, tell)) for source, _ in wanted]
        demands = [Demand(what.problem(), rate_fps) for what, (_, rate_fps) in zip(sources, wanted, strict=True)]
        found = deploy(demands, time_limit)
        if output:
            tell(f"writing {output}")
            _write(output, sources, found.plans)
    if json:
        print_json({**asdict(found), "plans": [plan_json(plan, sources[0].platform) for plan in found.plans]})
    else:
        show(deployment_table(found), json)
        show(found.why, json)


def _write(output: Path, sources: Sequence[Planned], plans: Sequence[Plan]) -> None:
    """The plans as text, and bundles of those that can run, their stages prepared for the same devices."""
    output.mkdir(parents=True, exist_ok=True)
    for index, plan in enumerate(plans):
        write_bytes(output / f"{index}-{plan.graph}.txt", str(plan).encode())
    platform = sources[0].platform
    residents = [(w.compiled, plan.stages) for w, plan in zip(sources, plans, strict=True) if w.compiled]
    if not residents:
        return
    leading_backend(platform).share(residents, platform)
    for index, (what, plan) in enumerate(zip(sources, plans, strict=True)):
        if what.compiled:
            bundle = Bundle(what.graph, what.platform, what.profile, plan, what.compiled)
            write_bundle(output / f"{index}-{plan.graph}.tar", bundle)


def _parsed(model: str) -> tuple[str, float]:
    source, at, rate = model.rpartition("@")
    try:
        if not at or not source:
            raise ValueError
        return source, float(rate)
    except ValueError:
        raise OptionError(f"{model!r} does not say a rate; write MODEL@FPS, such as faces.onnx@30") from None
