"""`tvm-pipeline bench`: the candidates, or plans of files, side by side; predicted against measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.cli.options import (
    DeviceOption,
    JsonOption,
    ObjectiveOption,
    PlatformOption,
    PowerSensorOption,
    RemoteOption,
    ShapesOption,
    ValuesOption,
    shapes_of,
    values_of,
)
from tvm_pipeline.cli.output import measured_json, print_json, show, spinner, without_warnings
from tvm_pipeline.core.plan import Prediction, read_plan
from tvm_pipeline.core.problem import Problem, checked_objective
from tvm_pipeline.errors import OptionError
from tvm_pipeline.report import comparison_table
from tvm_pipeline.runtime.comparison import Run, side_by_side
from tvm_pipeline.runtime.isolation import isolated
from tvm_pipeline.workflow.applications import applications
from tvm_pipeline.workflow.machine import Machine, opened_machine
from tvm_pipeline.workflow.steps import (
    compile_source,
    decide,
    given_plan,
    opened_bundle,
    planned,
)


class Subject(NamedTuple):
    """A model whose plans can run: `run` runs one, and `measuring` makes the same for another compiled model."""

    problem: Problem
    compiled: CompiledModel
    run: Run
    measuring: Callable[..., Run]
    machine: Machine


def command(
    model: Annotated[str, typer.Argument(help="A bundle (.tar), or a model to compile and measure first.")],
    plan: Annotated[
        list[Path] | None,
        typer.Option(help="A file with a plan, as `plan -o` writes it; may be given again. Only these plans run."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long each plan runs in each round.")] = 2.0,
    rounds: Annotated[int, typer.Option(help="Number of rounds in which the plans take turns.")] = 3,
    objective: ObjectiveOption = "throughput",
    power_sensor: PowerSensorOption = "",
    remote: RemoteOption = None,
    platform: PlatformOption = None,
    device: DeviceOption = "",
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

    With --plan, the plans of these files run instead of the candidates.

    Example: tvm-pipeline bench model.tar --seconds 5
    """
    if not 0 < seconds < math.inf or rounds < 1:
        raise OptionError("--seconds must be positive and --rounds at least 1")
    for path in plan or ():
        read_plan(path)  # a mistake in it is told before anything is compiled
    with ExitStack() as stack:
        stack.enter_context(spinner())
        problem, compiled, run, measuring, machine = stack.enter_context(
            opened(model, objective, power_sensor, remote, platform, input_shapes, input_values, source, device)
        )
        if plan:
            runs, notes = [(given_plan(problem, path), run) for path in plan], [path.name for path in plan]
        else:
            decision, _ = decide(problem, "best", None, verify_s=0.0)
            runs, notes = [(candidate, run) for candidate in decision.candidates], [""] * len(decision.candidates)
            if compiled.tuned() and not model.endswith(".tar"):
                shapes, values = shapes_of(input_shapes), values_of(input_values)
                with without_warnings():
                    untuned = compile_source(
                        model, shapes, platform, devices=device, tuned=False, values=values, machine=machine
                    )
                unpredicted = replace(decision.plan, predicted=Prediction())
                runs.append((unpredicted, measuring(untuned.compiled, untuned.platform)))
                notes.append("not tuned")
        results = side_by_side(runs, seconds=seconds, rounds=rounds)
    if json:
        stand_ins = problem.platform.stand_ins
        candidates = [{**measured_json(result), "note": note} for result, note in zip(results, notes, strict=True)]
        print_json({"candidates": candidates, "stand_ins": stand_ins})
    else:
        show(comparison_table(results, notes), json)


@contextmanager
def opened(
    model: str,
    objective: str,
    power_sensor: str,
    remote: str | None,
    platform: Path | None,
    input_shapes: str | None,
    input_values: str | None,
    source: str | None,
    device: str = "",
) -> Iterator[Subject]:
    """Open a bundle, or compile and measure a model, by the options of this command, so that its plans can run."""
    chosen = checked_objective(objective)
    if model.endswith(".tar") and (platform or device or input_shapes or input_values):
        raise OptionError(
            "a bundle has its own devices and inputs: leave --platform, --device, --input-shapes and --input-values out"
        )
    if source and not model.endswith(".tar"):
        raise OptionError(f"--source: {model} runs on noise; compile it with --source, and give the bundle")
    shapes, values = shapes_of(input_shapes), values_of(input_values)
    with ExitStack() as stack:
        machine = stack.enter_context(opened_machine(remote))
        run: Run | None = None
        if model.endswith(".tar"):
            bundle = stack.enter_context(opened_bundle(Path(model), machine=machine))
            problem, compiled = Problem(bundle.graph, bundle.platform, bundle.profile, chosen), bundle.compiled
            if bundle.application or source:
                apart = stack.enter_context(isolated(compiled, bundle.platform, (), every=False))
                run = applications("source").again(replace(bundle, compiled=apart), source or "")
        else:
            subject = stack.enter_context(
                planned(model, shapes, platform, None, devices=device, values=values, machine=machine)
            )
            if subject.compiled is None:
                raise OptionError(subject.not_here)
            problem, compiled = subject.problem(chosen), subject.compiled
        measuring = stack.enter_context(machine.metering(problem, power_sensor))
        yield Subject(problem, compiled, measuring(compiled, problem.platform, run), measuring, machine)
