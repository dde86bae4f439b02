"""`tvm-pipeline show`: draw a bundle's plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvm_pipeline.cli.options import JsonOption
from tvm_pipeline.cli.output import print_json, warn
from tvm_pipeline.cli.output import show as show_table
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import OptionError
from tvm_pipeline.report import draw_gantt, draw_graph, first_frames, stage_memories, stages_memory_table, stages_table
from tvm_pipeline.service.workflow import chosen_plan, opened_bundle, plan_json


def command(
    bundle: Annotated[Path, typer.Argument(help="A bundle of `compile`.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for gantt and graph.")] = Path("out"),
    format: Annotated[str, typer.Option(help="png or svg.")] = "png",
    plan: Annotated[Path | None, typer.Option("--plan", help="Show this plan instead of the bundle's own.")] = None,
    json: JsonOption = False,
) -> None:
    """Draw the Gantt chart of the first frames, and the operator graph coloured by stage.

    Example: tvm-pipeline show model.tar -o out --format svg
    """
    if format not in ("png", "svg"):
        raise OptionError(f"--format {format!r} is neither png nor svg")
    with opened_bundle(bundle, warn) as opened:
        problem, chosen = chosen_plan(opened, plan)
        evaluation = evaluate(problem, chosen.stages)
    memories = stage_memories(problem.graph, problem.platform, chosen)
    output.mkdir(parents=True, exist_ok=True)
    pictures = [output / f"gantt.{format}", output / f"graph.{format}"]
    draw_gantt(evaluation, chosen, first_frames(problem, chosen.stages), pictures[0])
    draw_graph(opened.graph, chosen, pictures[1])
    if json:
        drawn = [str(picture) for picture in pictures]
        print_json({**plan_json(chosen, opened.platform), "memory": memories, "pictures": drawn})
    else:
        show_table(stages_table(evaluation, chosen), json)
        show_table(stages_memory_table(memories), json)
        show_table(f"written: {', '.join(map(str, pictures))}", json)
