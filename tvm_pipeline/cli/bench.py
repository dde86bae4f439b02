"""`tvm-pipeline bench`: the candidates side by side, predicted against measured."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tvm_pipeline.backends.bundle import Bundle
from tvm_pipeline.backends.tuning import tuned_kernels
from tvm_pipeline.cli.options import (
    JsonOption,
    ObjectiveOption,
    PlatformOption,
    ShapesOption,
    ValuesOption,
    shapes_of,
    values_of,
)
from tvm_pipeline.cli.output import measured_json, print_json, show, spinner, warn
from tvm_pipeline.core.plan import Prediction
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.errors import OptionError
from tvm_pipeline.report import comparison_table
from tvm_pipeline.runtime.comparison import Run, runner, side_by_side
from tvm_pipeline.service.workflow import checked_objective, compile_source, decide, opened_bundle, planned, silent


def command(
    model: Annotated[str, typer.Argument(help="A bundle (.tar), or a model to compile and measure first.")],
    seconds: Annotated[float, typer.Option(help="How long each candidate runs in each round.")] = 2.0,
    rounds: Annotated[int, typer.Option(help="Number of rounds in which the candidates take turns.")] = 3,
    objective: ObjectiveOption = "throughput",
    platform: PlatformOption = None,
    input_shapes: ShapesOption = None,
    input_values: ValuesOption = None,
    json: JsonOption = False,
) -> None:
    """Run every candidate on this machine, interleaved, and print predicted against measured.

    A model runs on noise. The bundle of an application runs on the source that it was compiled with. The best plan of a
    model that was tuned also runs without what tuning found.

    Example: tvm-pipeline bench model.tar --seconds 5
    """
    chosen = checked_objective(objective)
    if not seconds > 0 or rounds < 1:
        raise OptionError("--seconds must be positive and --rounds at least 1")
    if model.endswith(".tar") and (platform or input_shapes or input_values):
        raise OptionError(
            "a bundle has its own platform and inputs: leave --platform, --input-shapes and --input-values out"
        )
    shapes, values = shapes_of(input_shapes), values_of(input_values)
    with ExitStack() as stack:
        tell = stack.enter_context(spinner())
        if model.endswith(".tar"):
            bundle = stack.enter_context(opened_bundle(Path(model), warn))
            problem, compiled = Problem(bundle.graph, bundle.platform, bundle.profile, chosen), bundle.compiled
            run = _application_run(bundle) if bundle.application else None
        else:
            opened = planned(model, shapes, platform, None, tell, warn, values=values)
            subject = stack.enter_context(opened)
            if subject.compiled is None:
                raise OptionError(subject.not_here)
            problem, compiled, run = subject.problem(chosen), subject.compiled, None
        decision, _ = decide(problem, "best", None, tell, verify_s=0.0)
        run = run or runner(compiled, problem.platform)
        runs = [(plan, run) for plan in decision.candidates]
        if tuned_kernels(compiled) and not model.endswith(".tar"):
            untuned = compile_source(model, shapes, platform, tell, silent, tuned=False, values=values)
            plan = replace(decision.plan, predicted=Prediction())
            runs.append((plan, runner(untuned.compiled, untuned.platform)))
        results = side_by_side(runs, seconds=seconds, rounds=rounds, progress=tell)
    notes = [""] * len(decision.candidates) + ["not tuned"] * (len(results) - len(decision.candidates))
    if json:
        stand_ins = problem.platform.stand_ins
        candidates = [{**measured_json(result), "note": note} for result, note in zip(results, notes, strict=True)]
        print_json({"candidates": candidates, "stand_ins": stand_ins})
    else:
        show(comparison_table(results, notes), json)


def _application_run(bundle: Bundle) -> Run | None:
    """Return what runs a plan of the bundle's application on its own source."""
    from tvm_pipeline.service.host_planning import Described  # it needs the libraries of the extra `video`

    described = Described.of(bundle)
    return described.rehearsal(bundle).runner(bundle.compiled, bundle.platform) if described else None
