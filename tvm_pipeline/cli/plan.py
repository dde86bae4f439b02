"""`tvm-pipeline plan`: every candidate with its prediction, and why the winner won."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvm_pipeline.cli.common import (
    JsonOption,
    ObjectiveOption,
    PlatformOption,
    ProfileOption,
    SchedulerOption,
    ShapesOption,
    StagesOption,
    checked_objective,
    decision_json,
    planned,
    print_json,
    progress,
    show,
)
from tvm_pipeline.files import write_bytes
from tvm_pipeline.report import candidates_table
from tvm_pipeline.scheduling import solve


def command(
    model: Annotated[
        str, typer.Argument(help="A model, a bundle (.tar), or an operator graph (.json with --profile).")
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan, as text.")] = None,
    objective: ObjectiveOption = "throughput",
    stages: StagesOption = None,
    scheduler: SchedulerOption = "best",
    platform: PlatformOption = None,
    profile: ProfileOption = None,
    input_shapes: ShapesOption = None,
    json: JsonOption = False,
) -> None:
    """Plans a model: which device runs which operators.

    Example: tvm-pipeline plan model.onnx --objective latency -o plan.txt
    """
    wanted = checked_objective(objective)
    with progress() as tell, planned(model, input_shapes, platform, profile, tell) as what:
        decision = solve(what.problem(wanted, stages), scheduler)
    if output:
        write_bytes(output, str(decision.plan).encode())
    if json:
        print_json(decision_json(decision))
    else:
        show(candidates_table(decision), json)
        show(decision.why, json)
