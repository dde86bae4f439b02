"""`tvm-pipeline show`: a bundle's plan, why it was chosen, and pictures of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tvm_pipeline.cli.options import JsonOption, check_outputs
from tvm_pipeline.cli.output import choice_json, print_json, with_options
from tvm_pipeline.cli.output import show as show_table
from tvm_pipeline.core.plan import describe
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.cost.frame_time import frame_time
from tvm_pipeline.errors import OptionError
from tvm_pipeline.report import (
    candidates_table,
    draw_frame_time,
    draw_gantt,
    draw_graph,
    first_frames,
    stage_memories,
    stages_memory_table,
    stages_table,
)
from tvm_pipeline.report.parts_tables import in_parts_table, in_parts_text
from tvm_pipeline.workflow.steps import chosen_plan, opened_bundle, plan_json


def command(
    bundle: Annotated[Path, typer.Argument(help="A bundle of `compile`.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for gantt, graph and frame.")] = Path("out"),
    format: Annotated[str, typer.Option(help="png or svg.")] = "png",
    plan: Annotated[Path | None, typer.Option("--plan", help="Show this plan instead of the bundle's own.")] = None,
    json: JsonOption = False,
) -> None:
    """Say why a bundle's plan was chosen, and draw it: its first frames, the graph by stage, the time of a frame.

    Example: tvm-pipeline show model.tar -o out --format svg
    """
    if format not in ("png", "svg"):
        raise OptionError(f"--format {format!r} is neither png nor svg")
    check_outputs(folder=output)
    with opened_bundle(bundle) as opened:
        problem, chosen = chosen_plan(opened, plan)
        evaluation = evaluate(problem, chosen.stages)
        tuned, weights = opened.compiled.tuned(), opened.compiled.stored_weights()
    memories = stage_memories(problem.graph, problem.platform, chosen)
    output.mkdir(parents=True, exist_ok=True)
    pictures = [output / f"gantt.{format}", output / f"graph.{format}"]
    draw_gantt(evaluation, chosen, first_frames(problem, chosen.stages), pictures[0])
    draw_graph(opened.graph, chosen, pictures[1])
    if evaluation.costs:
        pictures.append(output / f"frame.{format}")
        title = f"{chosen.graph}, {describe(chosen)}: where the time of a frame goes, as predicted"
        draw_frame_time(frame_time(problem, chosen.stages), title, pictures[2])
    decision = None if plan else opened.decision
    if json:
        drawn = [str(picture) for picture in pictures]
        choice = choice_json(decision) if decision else {}
        print_json(
            {
                **plan_json(chosen, opened.platform),
                **choice,
                "memory": memories,
                "tuned": [asdict(found) for found in tuned],
                "weights": [asdict(found) for found in weights],
                "rewriting": asdict(opened.rewriting) if opened.rewriting else None,
                "pictures": drawn,
            }
        )
    else:
        if decision:
            show_table(candidates_table(decision), json)
            show_table(with_options(decision.why), json)
        show_table(stages_table(evaluation, chosen), json)
        show_table(stages_memory_table(memories), json)
        for found in (*tuned, *weights):
            show_table(str(found), json)
        if opened.rewriting:
            if opened.rewriting.operators:
                show_table(in_parts_table(opened.rewriting), json)
            show_table(in_parts_text(opened.rewriting), json)
        show_table(f"written: {', '.join(map(str, pictures))}", json)
