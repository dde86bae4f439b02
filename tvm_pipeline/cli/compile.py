"""`tvm-pipeline compile`: a model becomes a bundle that `run` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvm_pipeline.bundle import Bundle, write_bundle
from tvm_pipeline.cli.common import (
    JsonOption,
    ObjectiveOption,
    PlatformOption,
    ProfileOption,
    SchedulerOption,
    ShapesOption,
    StagesOption,
    checked_objective,
    compile_source,
    decide,
    decision_json,
    measured_profile,
    print_json,
    progress,
    show,
    video_room,
)
from tvm_pipeline.evaluate import judged
from tvm_pipeline.plan import Problem, read_plan
from tvm_pipeline.report import candidates_table
from tvm_pipeline.scheduling import Decision


def command(
    model: Annotated[str, typer.Argument(help="A model file, or a network of relay.testing such as resnet-50.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The bundle to write, such as model.tar.")],
    plan: Annotated[Path | None, typer.Option("--plan", help="Take this plan instead of solving.")] = None,
    objective: ObjectiveOption = "throughput",
    stages: StagesOption = None,
    scheduler: SchedulerOption = "best",
    platform: PlatformOption = None,
    profile: ProfileOption = None,
    preprocessing: Annotated[
        Path | None,
        typer.Option(help="TOML: how a picture becomes the input; MODEL.toml is taken where it exists."),
    ] = None,
    input_shapes: ShapesOption = None,
    json: JsonOption = False,
) -> None:
    """Compiles, measures and plans a model, and writes one file with all that `run` needs.

    Example: tvm-pipeline compile model.onnx -o model.tar
    """
    wanted = checked_objective(objective)
    beside = Path(model).with_suffix(".toml")
    settings = preprocessing or (beside if beside.exists() else None)
    with progress() as tell:
        made = compile_source(model, input_shapes, platform, tell)
        prepared = video_room().preprocessing_for(made.compiled.graph, settings).to_dict() if settings else None
        measured = measured_profile(made, profile, tell)
        problem = Problem(made.compiled.graph, made.platform, measured, wanted, stages)
        if plan:
            given = judged(problem, read_plan(plan))
            decision = Decision(given, (given,), f"it was given by {plan}")
        else:
            decision, measured = decide(problem, scheduler, made.compiled, tell)
        tell(f"writing {output}")
        bundle = Bundle(made.compiled.graph, made.platform, measured, decision.plan, made.compiled, prepared)
        write_bundle(output, bundle)
    if json:
        print_json({"output": str(output), **decision_json(decision, made.platform)})
    else:
        show(candidates_table(decision), json)
        show(f"{decision.why}\nwritten: {output}", json)
