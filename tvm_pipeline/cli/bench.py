"""`tvm-pipeline bench`: the candidates side by side, predicted against measured."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tvm_pipeline import planning
from tvm_pipeline.errors import OptionError
from tvm_pipeline.report import comparison_table
from tvm_pipeline.runtime.comparison import Measured, compare
from tvm_pipeline.service.common import (
    JsonOption,
    ObjectiveOption,
    PlatformOption,
    ShapesOption,
    checked_objective,
    plan_json,
    planned,
    print_json,
    progress,
    show,
)


def command(
    model: Annotated[str, typer.Argument(help="A bundle (.tar), or a model to compile and measure first.")],
    seconds: Annotated[float, typer.Option(help="How long each candidate runs in each round.")] = 2.0,
    rounds: Annotated[int, typer.Option(help="Rounds, in which the candidates take turns.")] = 3,
    objective: ObjectiveOption = "throughput",
    platform: PlatformOption = None,
    input_shapes: ShapesOption = None,
    json: JsonOption = False,
) -> None:
    """Runs every candidate on this machine, interleaved, and prints predicted against measured.

    Example: tvm-pipeline bench model.tar --seconds 5
    """
    wanted = checked_objective(objective)
    if not seconds > 0 or rounds < 1:
        raise OptionError("--seconds must be positive and --rounds at least 1")
    if model.endswith(".tar") and (platform or input_shapes):
        raise OptionError("a bundle has its own platform and shapes: leave --platform and --input-shapes out")
    with progress() as tell, planned(model, input_shapes, platform, None, tell) as what:
        if what.compiled is None:
            raise OptionError(f"{model} holds an operator graph alone, and nothing that could run")
        candidates = planning.plan(what.problem(wanted)).candidates
        results = compare(what.compiled, what.platform, candidates, seconds=seconds, rounds=rounds, progress=tell)
    if json:
        stand_ins = what.platform.stand_ins
        print_json({"candidates": [measured_json(result) for result in results], "stand_ins": stand_ins})
    else:
        show(comparison_table(results), json)


def measured_json(result: Measured) -> dict[str, object]:
    """A candidate with what was measured beside what was predicted."""
    return {
        **plan_json(result.plan),
        "measured": {
            "throughput_fps": result.throughput_fps,
            "latency_s": result.latency_s,
            "energy_j": None,
            "spread": result.spread,
            "statistics": asdict(result.statistics),
        },
        "prediction_error": result.prediction_error,
    }
