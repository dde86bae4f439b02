"""`tvm-pipeline plan`: every candidate with its prediction, and why the winner won."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvm_pipeline.core.plan import Decision, Problem, cost_key
from tvm_pipeline.files import write_bytes
from tvm_pipeline.planning.search.pareto import pareto
from tvm_pipeline.report import candidates_table, stage_memories, stages_memory_table
from tvm_pipeline.service.common import (
    JsonOption,
    MaxLatencyOption,
    MinThroughputOption,
    ObjectiveOption,
    PlatformOption,
    ProfileOption,
    SchedulerOption,
    ShapesOption,
    StagesOption,
    checked_objective,
    decide,
    decision_json,
    planned,
    print_json,
    progress,
    show,
)


def pareto_decision(problem: Problem) -> Decision:
    """The front as candidates; the one that is best by the objective is chosen."""
    plans = sorted(pareto(problem), key=cost_key)
    return Decision(plans[0], tuple(plans), f"none of these {len(plans)} plans is beaten in everything by another")


def command(
    model: Annotated[
        str, typer.Argument(help="A model, a bundle (.tar), or an operator graph (.json), which needs no TVM.")
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan, as text.")] = None,
    objective: ObjectiveOption = "throughput",
    stages: StagesOption = None,
    scheduler: SchedulerOption = "best",
    platform: PlatformOption = None,
    profile: ProfileOption = None,
    children_together: Annotated[
        bool, typer.Option("--children-together", help="All readers of an operator's outputs stand in one stage.")
    ] = False,
    min_throughput: MinThroughputOption = None,
    max_latency: MaxLatencyOption = None,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", help="Seconds to search; then the best plan known, with its gap.")
    ] = None,
    front: Annotated[
        bool, typer.Option("--pareto", help="All plans that none beats in throughput, latency and energy at once.")
    ] = False,
    input_shapes: ShapesOption = None,
    json: JsonOption = False,
) -> None:
    """Plans a model: which device runs which operators.

    Example: tvm-pipeline plan model.onnx --objective latency -o plan.txt
    """
    wanted = checked_objective(objective)
    limits = {
        "children_together": children_together,
        "min_throughput_fps": min_throughput,
        "max_latency_s": max_latency,
        "time_limit_s": time_limit,
    }
    with progress() as tell, planned(model, input_shapes, platform, profile, tell) as what:
        problem = what.problem(wanted, stages, **limits)
        if front:
            decision = pareto_decision(problem)
        else:
            decision, _ = decide(problem, scheduler, what.compiled, tell)
        memories = stage_memories(problem.graph, problem.platform, decision.plan)
    if output:
        write_bytes(output, str(decision.plan).encode())
    if json:
        print_json({**decision_json(decision, what.platform), "memory": memories})
    else:
        show(candidates_table(decision), json)
        show(stages_memory_table(memories), json)
        show(decision.why, json)
