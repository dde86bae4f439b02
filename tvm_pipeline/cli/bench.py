"""`tvm-pipeline bench`: the candidates, plans of files, or every cut, side by side; predicted against measured."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tvm_pipeline.cli.options import (
    JsonOption,
    ObjectiveOption,
    PlatformOption,
    PowerSensorOption,
    RemoteOption,
    ShapesOption,
    ValuesOption,
    check_outputs,
    shapes_of,
    values_of,
)
from tvm_pipeline.cli.output import measured_json, print_json, say, show, spinner, warn
from tvm_pipeline.core.plan import Prediction, read_plan
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.errors import OptionError
from tvm_pipeline.planning.every_cut import every_cut
from tvm_pipeline.report import check_picture, comparison_table, cuts_table, draw_cuts
from tvm_pipeline.report.drawing import new_figure
from tvm_pipeline.runtime.comparison import side_by_side
from tvm_pipeline.runtime.measured_cuts import TURN_S, CutComparison, MeasuredCut, expected_s, measured_cuts
from tvm_pipeline.workflow.applications import applications
from tvm_pipeline.workflow.machine import opened_machine
from tvm_pipeline.workflow.steps import (
    checked_objective,
    compile_source,
    decide,
    given_plan,
    opened_bundle,
    planned,
    silent,
)

SECONDS = 2.0  # of each plan in each round; every cut has TURN_S


def command(
    model: Annotated[str, typer.Argument(help="A bundle (.tar), or a model to compile and measure first.")],
    plan: Annotated[
        list[Path] | None,
        typer.Option(help="A file with a plan, as `plan -o` writes it; may be given again. Only these plans run."),
    ] = None,
    all_cuts: Annotated[
        str | None,
        typer.Option(
            help="Two devices, as cpu0,cpu1: every cut between operators runs, in both orders of the devices."
        ),
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(help="Draw predicted and measured figures of --all-cuts; .png or .svg.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help=f"How long each plan runs in each round; without it, 2, and {TURN_S:g} with --all-cuts."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Number of rounds in which the plans take turns.")] = 3,
    objective: ObjectiveOption = "throughput",
    power_sensor: PowerSensorOption = "",
    remote: RemoteOption = None,
    platform: PlatformOption = None,
    input_shapes: ShapesOption = None,
    input_values: ValuesOption = None,
    source: Annotated[
        str | None,
        typer.Option(help="For the bundle of an application: what it runs on, in place of the source of `compile`."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run every candidate on this machine, interleaved, and print predicted against measured.

    A model runs on noise. The bundle of an application runs on the source that it was compiled with. The best plan of a
    model that was tuned also runs without what tuning found. Where a sensor of power is, joules a frame are measured,
    too; without one, they are computed from the measured seconds where the platform states its watts.

    With --plan, the plans of these files run instead of the candidates. With --all-cuts, two devices run every cut of
    the graph's order in two stages, and each of them runs all of it; the best few run once more, to tell them apart.

    Example: tvm-pipeline bench model.tar --seconds 5
    Example: tvm-pipeline bench model.tar --all-cuts cpu0,cpu1 --draw cuts.png
    """
    chosen = checked_objective(objective)
    if (seconds is not None and not seconds > 0) or rounds < 1:
        raise OptionError("--seconds must be positive and --rounds at least 1")
    if plan and all_cuts:
        raise OptionError("--plan and --all-cuts each say which plans run: leave one out")
    if draw and not all_cuts:
        raise OptionError("--draw draws every cut: give --all-cuts too")
    if draw:
        check_picture(draw)
        check_outputs(draw, inputs=[model])
        new_figure(1, 1)  # where matplotlib is missing, this tells it before anything runs
    for path in plan or ():
        read_plan(path)  # a mistake in it is told before anything is compiled
    devices = [name.strip() for name in all_cuts.split(",")] if all_cuts else []
    if len(devices) not in (0, 2):
        raise OptionError(f"--all-cuts {all_cuts}: give two devices, as cpu0,cpu1")
    if model.endswith(".tar") and (platform or input_shapes or input_values):
        raise OptionError(
            "a bundle has its own platform and inputs: leave --platform, --input-shapes and --input-values out"
        )
    shapes, values = shapes_of(input_shapes), values_of(input_values)
    with ExitStack() as stack:
        tell = stack.enter_context(spinner())
        machine = stack.enter_context(opened_machine(remote, tell))
        if model.endswith(".tar"):
            bundle = stack.enter_context(opened_bundle(Path(model), warn, machine=machine))
            problem, compiled = Problem(bundle.graph, bundle.platform, bundle.profile, chosen), bundle.compiled
            run = applications("source").again(bundle, source or "") if bundle.application else None
        else:
            opened = planned(model, shapes, platform, None, tell, warn, values=values, machine=machine)
            subject = stack.enter_context(opened)
            if subject.compiled is None:
                raise OptionError(subject.not_here)
            problem, compiled, run = subject.problem(chosen), subject.compiled, None
        measuring = stack.enter_context(machine.metering(problem, power_sensor, warn))
        run = measuring(compiled, problem.platform, run)
        if devices:
            cuts, turn_s = every_cut(problem, *devices), seconds or TURN_S
            say(f"{len(cuts)} cuts, about {expected_s(cuts, turn_s, rounds):.0f} s by their predictions")
            comparison = measured_cuts(cuts, run, seconds=turn_s, rounds=rounds, progress=tell)
            if draw:
                draw_cuts(comparison, draw, f"{problem.graph.name}, every cut in two")
            _print_cuts(comparison, draw, json)
            return
        if plan:
            runs, notes = [(given_plan(problem, path), run) for path in plan], [path.name for path in plan]
        else:
            decision, _ = decide(problem, "best", None, tell, verify_s=0.0)
            runs, notes = [(candidate, run) for candidate in decision.candidates], [""] * len(decision.candidates)
            if compiled.tuned() and not model.endswith(".tar"):
                untuned = compile_source(
                    model, shapes, platform, tell, silent, tuned=False, values=values, machine=machine
                )
                unpredicted = replace(decision.plan, predicted=Prediction())
                runs.append((unpredicted, measuring(untuned.compiled, untuned.platform)))
                notes.append("not tuned")
        results = side_by_side(runs, seconds=seconds or SECONDS, rounds=rounds, progress=tell)
    if json:
        stand_ins = problem.platform.stand_ins
        candidates = [{**measured_json(result), "note": note} for result, note in zip(results, notes, strict=True)]
        print_json({"candidates": candidates, "stand_ins": stand_ins})
    else:
        show(comparison_table(results, notes), json)


def _print_cuts(comparison: CutComparison, picture: Path | None, json: bool) -> None:
    """Print every cut; in JSON, `operators` are numbers: the first ones of the graph, and the others."""
    if not json:
        show(cuts_table(comparison), json)
        return
    print_json(
        {
            "objective": comparison.objective,
            "cuts": [_cut_json(found) for found in comparison.cuts],
            "predicted_best": _cut_json(comparison.chosen),
            "measured_best": _cut_json(comparison.best),
            "ratio": comparison.ratio,
            "picture": picture and str(picture),
        }
    )


def _cut_json(found: MeasuredCut) -> dict[str, Any]:
    cut, measured = found.cut, measured_json(found.result)["measured"] if found.result else {}
    return {
        "devices": cut.devices,
        "operators": [cut.operators, cut.total - cut.operators],
        "crossing_bytes": cut.crossing_bytes,
        "predicted": asdict(cut.plan.predicted) if cut.plan else None,
        "measured": {name: figure for name, figure in measured.items() if name != "statistics"} or None,
        "obstacle": cut.obstacle or None,
    }
