"""`tvm-pipeline bench`: the candidates side by side, predicted against measured."""

from __future__ import annotations

from typing import Annotated

import typer

from tvm_pipeline.cli.options import JsonOption, ObjectiveOption, PlatformOption, ShapesOption, shapes_of
from tvm_pipeline.cli.output import measured_json, print_json, show, spinner, warn
from tvm_pipeline.errors import OptionError
from tvm_pipeline.report import comparison_table
from tvm_pipeline.runtime.comparison import compare
from tvm_pipeline.service.workflow import checked_objective, decide, planned


def command(
    model: Annotated[str, typer.Argument(help="A bundle (.tar), or a model to compile and measure first.")],
    seconds: Annotated[float, typer.Option(help="How long each candidate runs in each round.")] = 2.0,
    rounds: Annotated[int, typer.Option(help="Number of rounds in which the candidates take turns.")] = 3,
    objective: ObjectiveOption = "throughput",
    platform: PlatformOption = None,
    input_shapes: ShapesOption = None,
    json: JsonOption = False,
) -> None:
    """Run every candidate on this machine, interleaved, and print predicted against measured.

    Example: tvm-pipeline bench model.tar --seconds 5
    """
    chosen = checked_objective(objective)
    if not seconds > 0 or rounds < 1:
        raise OptionError("--seconds must be positive and --rounds at least 1")
    if model.endswith(".tar") and (platform or input_shapes):
        raise OptionError("a bundle has its own platform and shapes: leave --platform and --input-shapes out")
    with spinner() as tell, planned(model, shapes_of(input_shapes), platform, None, tell, warn) as subject:
        if subject.compiled is None:
            raise OptionError(subject.not_here)
        decision, _ = decide(subject.problem(chosen), "best", subject.compiled, tell, verify_s=0.0)
        results = compare(
            subject.compiled, subject.platform, decision.candidates, seconds=seconds, rounds=rounds, progress=tell
        )
    if json:
        stand_ins = subject.platform.stand_ins
        print_json({"candidates": [measured_json(result) for result in results], "stand_ins": stand_ins})
    else:
        show(comparison_table(results), json)
