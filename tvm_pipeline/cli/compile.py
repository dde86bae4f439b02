"""`tvm-pipeline compile`: make of a model a bundle that `run` takes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypedDict

import typer

from tvm_pipeline.backends.bundle import Bundle, write_bundle
from tvm_pipeline.backends.contract import Order
from tvm_pipeline.backends.tuning import tuned_kernels
from tvm_pipeline.cli.options import (
    JsonOption,
    ObjectiveOption,
    PlatformOption,
    ProfileOption,
    SchedulerOption,
    ShapesOption,
    StagesOption,
    VerifyOption,
    WinogradOption,
    check_outputs,
    shapes_of,
    verify_seconds,
)
from tvm_pipeline.cli.output import decision_json, print_json, show, spinner, warn, with_options
from tvm_pipeline.core.plan import Decision, Plan
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.errors import OptionError
from tvm_pipeline.report import TextTable, candidates_table
from tvm_pipeline.service.workflow import (
    Compiled,
    checked_objective,
    checked_scheduler,
    compile_source,
    decide,
    given_plan,
    measured_profile,
)


def command(
    model: Annotated[str, typer.Argument(help="A model file, or a network of relay.testing such as resnet-50.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The bundle to write, such as model.tar.")],
    plan: Annotated[Path | None, typer.Option("--plan", help="Take this plan instead of searching for one.")] = None,
    objective: ObjectiveOption = "throughput",
    stages: StagesOption = None,
    scheduler: SchedulerOption = "best",
    platform: PlatformOption = None,
    profile: ProfileOption = None,
    preprocessing: Annotated[
        Path | None,
        typer.Option(help="TOML that says how a picture becomes the input; without it, MODEL.toml where that exists."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(help="Plan the work around the model, too, measured on this source: what `run` would take."),
    ] = None,
    decoder: Annotated[
        str | None, typer.Option(help="With --source: the function that reads the outputs, as file.py:function.")
    ] = None,
    video: Annotated[
        str | None, typer.Option(help="With --source: the extension of the annotated video to write, such as .mp4.")
    ] = None,
    verify: VerifyOption = None,
    input_shapes: ShapesOption = None,
    memory_order: Annotated[
        bool,
        typer.Option(
            "--memory-order",
            help="Stages run their operators in the order that needs the least memory, where that takes less; the "
            "bytes of both orders are listed. Always so where a device states its memory_bytes.",
        ),
    ] = False,
    winograd: WinogradOption = False,
    json: JsonOption = False,
) -> None:
    """Compile, measure and plan a model, and write one file with all that `run` needs.

    Example: tvm-pipeline compile model.onnx -o model.tar

    A whole application: tvm-pipeline compile model.onnx -o app.tar --source bikes.mp4 --decoder my:decode
    """
    if source is None and (decoder or video):
        raise OptionError(f"{'--decoder' if decoder else '--video'} goes with --source, which it is measured on")
    chosen = checked_objective(objective)
    checked_scheduler(scheduler)
    check_outputs(output)
    seconds = verify_seconds(verify, f"the plan is that of {plan}" if plan else "")
    beside = Path(model).with_suffix(".toml")
    settings = preprocessing or (beside if beside.exists() else None)
    with spinner() as tell:
        order: Order | None = "memory" if memory_order else None
        made = compile_source(model, shapes_of(input_shapes), platform, tell, warn, order, winograd=winograd)
        memory_order = made.compiled.order == "memory"
        prepared = _preprocessing(made, settings) if settings else None
        measured = measured_profile(made, profile, tell, warn)
        graph, application, run = made.compiled.graph, None, None
        if source:
            from tvm_pipeline.service.host_planning import around  # it needs the libraries of the extra `video`

            rehearsal, measured = around(made, measured, source, prepared, decoder or "", video or "", tell)
            graph, run = rehearsal.graph, rehearsal.runner(made.compiled, made.platform)
            application = {"source": source, "decoder": decoder or "", "setting": asdict(rehearsal.setting)}
        problem = Problem(graph, made.platform, measured, chosen, stages)
        if plan:
            given = given_plan(problem, plan)
            decision = Decision(given, (given,), f"it was given by {plan}")
        else:
            compiled = None if source else made.compiled
            decision, measured = decide(problem, scheduler, compiled, tell, verify_s=seconds, run=run)
        activations = _activations(made, decision.plan) if memory_order else []
        tell(f"writing {output}")
        bundle = Bundle(graph, made.platform, measured, decision.plan, made.compiled, prepared, decision, application)
        write_bundle(output, bundle)
    if json:
        listed: dict[str, Any] = {"tuned": [asdict(found) for found in tuned_kernels(made.compiled)]}
        listed |= {"activations": activations} if memory_order else {}
        print_json({"output": str(output), **decision_json(decision, made.platform), **listed})
    else:
        show(candidates_table(decision), json)
        for found in tuned_kernels(made.compiled):
            show(str(found), json)
        if memory_order:
            show(_activations_table(activations), json)
        show(f"{with_options(decision.why)}\nwritten: {output}", json)


class _Activations(TypedDict):
    """Bytes of the activations of a stage on a device, in the usual order and in that of least memory."""

    stage: int
    device: str
    usual_bytes: int
    ordered_bytes: int


def _preprocessing(made: Compiled, settings: Path) -> dict[str, Any]:
    """Return how a picture becomes the model's input, by a TOML file."""
    from tvm_pipeline.service.video_extra import preprocessing_for

    return preprocessing_for(made.compiled.graph, settings).to_dict()


def _activations(made: Compiled, plan: Plan) -> list[_Activations]:
    """Return the bytes of the activations of each stage on each of its devices."""
    rows: list[_Activations] = []
    own = made.compiled.graph.edges.index
    for index, stage in enumerate(plan.stages):
        operators = [name for name in stage.operators if name in own]
        for device in stage.devices if operators else ():
            before, after = made.compiled.activation_bytes(operators, made.platform.device(device))
            rows.append({"stage": index, "device": device, "usual_bytes": before, "ordered_bytes": after})
    return rows


def _activations_table(rows: list[_Activations]) -> TextTable:
    cells = tuple(
        (
            f"{row['stage']}",
            row["device"],
            f"{row['usual_bytes']:,}",
            f"{row['ordered_bytes']:,}",
            f"{row['ordered_bytes'] / row['usual_bytes'] - 1:+.1%}" if row["usual_bytes"] else "-",
        )
        for row in rows
    )
    columns = ("stage", "device", "usual order", "memory order", "change")
    return TextTable("Bytes of activations, as allocated", columns, cells)
