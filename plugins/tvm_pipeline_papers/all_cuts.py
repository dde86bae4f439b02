"""`tvm-pipeline all-cuts`: every cut in two of two devices, predicted beside measured, as a table and as a picture."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tvm_pipeline.cli.bench import opened
from tvm_pipeline.cli.options import (
    JsonOption,
    ObjectiveOption,
    PlatformOption,
    PowerSensorOption,
    RemoteOption,
    ShapesOption,
    ValuesOption,
    check_outputs,
)
from tvm_pipeline.cli.output import measured_json, print_json, say, show, spinner
from tvm_pipeline.errors import OptionError
from tvm_pipeline.report import check_picture
from tvm_pipeline.report.drawing import new_figure
from tvm_pipeline_papers.cut_tables import cuts_table, draw_cuts
from tvm_pipeline_papers.every_cut import every_cut
from tvm_pipeline_papers.measured_cuts import TURN_S, CutComparison, MeasuredCut, expected_s, measured_cuts


def command(
    model: Annotated[str, typer.Argument(help="A bundle (.tar), or a model to compile and measure first.")],
    devices: Annotated[str, typer.Argument(help="Two devices, as cpu0,cpu1.")],
    draw: Annotated[Path | None, typer.Option(help="Draw predicted and measured figures; .png or .svg.")] = None,
    seconds: Annotated[float, typer.Option(help="How long each cut runs in each round.")] = TURN_S,
    rounds: Annotated[int, typer.Option(help="Number of rounds in which the cuts take turns.")] = 3,
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
    """Run every cut of a graph's order in two stages, in both orders of two devices, and print predicted and measured.

    Each of the devices runs all of the graph, too. The best few run once more, to tell them apart. It shows whether the
    cut that is predicted to be the best is really the best.

    Example: tvm-pipeline all-cuts model.tar cpu0,cpu1
    """
    if not 0 < seconds < math.inf or rounds < 1:
        raise OptionError("`seconds` must be positive and rounds at least 1")
    pair = [name.strip() for name in devices.split(",")]
    if len(pair) != 2:
        raise OptionError(f"all cuts of {devices}: give two devices, as cpu0,cpu1")
    if draw:
        check_picture(draw)
        check_outputs(draw, inputs=[model])
        new_figure(1, 1)  # where matplotlib is missing, this tells it before anything runs
    with ExitStack() as stack:
        stack.enter_context(spinner())
        subject = stack.enter_context(
            opened(model, objective, power_sensor, remote, platform, input_shapes, input_values, source)
        )
        cuts = every_cut(subject.problem, *pair)
        say(f"{len(cuts)} cuts, about {expected_s(cuts, seconds, rounds):.0f} s by their predictions")
        comparison = measured_cuts(cuts, subject.run, seconds=seconds, rounds=rounds)
    if draw:
        draw_cuts(comparison, draw, f"{subject.problem.graph.name}, every cut in two")
    if json:
        print_json(_comparison_json(comparison, draw))
    else:
        show(cuts_table(comparison), json)


def _comparison_json(comparison: CutComparison, picture: Path | None) -> dict[str, Any]:
    """Return every cut for JSON; `operators` are numbers: the first ones of the graph, and the others."""
    return {
        "objective": comparison.objective,
        "cuts": [_cut_json(found) for found in comparison.cuts],
        "predicted_best": _cut_json(comparison.chosen),
        "measured_best": _cut_json(comparison.best),
        "ratio": comparison.ratio,
        "picture": picture and str(picture),
    }


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
