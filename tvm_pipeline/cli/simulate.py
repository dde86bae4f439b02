"""`tvm-pipeline simulate`: run a plan as discrete events, predicted beside simulated, without the hardware."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from tvm_pipeline.backends.bundle import open_bundle
from tvm_pipeline.cli.options import JsonOption, PlatformOption, RateOption, check_outputs
from tvm_pipeline.cli.output import print_json, show, spinner
from tvm_pipeline.core.frame_energy import energy_json
from tvm_pipeline.core.in_mode import for_mode
from tvm_pipeline.core.plan import Plan, check_one_model, read_plan
from tvm_pipeline.cost.busy_energy import at_pace, energy_by_watts
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.cost.simulate import SATURATED, fixed_rate, poisson
from tvm_pipeline.cost.simulate import simulate as run
from tvm_pipeline.cost.under_load import Times, spread
from tvm_pipeline.documents import blamed
from tvm_pipeline.errors import OptionError, PlanError
from tvm_pipeline.report import DRAWN_FRAMES, TextTable, check_picture, draw_gantt, stages_table, statistics_table
from tvm_pipeline.workflow.merged import merged
from tvm_pipeline.workflow.steps import plan_json, planned


def command(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="An operator graph (.json), or a bundle (.tar); several for a plan of all of them. Nothing is run.",
        ),
    ],
    plan: Annotated[
        Path | None, typer.Option("--plan", help="The plan, as `plan -o` writes it; a bundle has its own.")
    ] = None,
    gantt: Annotated[Path | None, typer.Option(help="Draw the first frames into this picture.")] = None,
    platform: PlatformOption = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option("--profile", help="Measured before with `profile`; of several models, one for each, in order."),
    ] = None,
    rate: RateOption = None,
    poisson_rate: Annotated[
        float | None, typer.Option("--poisson", help="The same, at random times (a Poisson process).")
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="A frame that finds the pipeline full is dropped; else it waits.")
    ] = False,
    frames: Annotated[int, typer.Option(help="How many frames arrive.")] = 1000,
    in_flight: Annotated[
        int | None, typer.Option(help="Frames inside at the same time; without it, as many as keep every worker busy.")
    ] = None,
    jitter: Annotated[
        float | None,
        typer.Option(
            help="Variation of the stage times: standard deviation over mean. Without it, they are those that the "
            "frames of a bundle's plan were measured to take, else vary as the profile's did."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random times; the same seed gives the same run.")] = 0,
    json: JsonOption = False,
) -> None:
    """Simulate a plan: throughput, latency, bubbles and dropped frames, without the hardware.

    Example: tvm-pipeline simulate graph.json --plan plan.txt --platform box.toml --rate 30 --live

    A plan of two models: tvm-pipeline simulate faces.json scenes.json --plan plan.txt --platform box.toml
    """
    if rate is not None and poisson_rate is not None:
        raise OptionError("--rate and --poisson both say how frames arrive; give one of them")
    pace_fps = rate if rate is not None else poisson_rate
    if live and pace_fps is None:
        raise OptionError("--live: say with --rate or --poisson how fast frames arrive")
    for model in models:
        if not model.endswith((".json", ".tar")):
            raise OptionError(f"{model} is neither an operator graph (.json) nor a bundle (.tar); `compile` makes one")
    profiles = profile or []
    if len(models) == 1 and len(profiles) > 1:
        raise OptionError(f"--profile was given {len(profiles)} times for one model; give one")
    if gantt:
        check_picture(gantt)
        check_outputs(gantt, inputs=(*models, plan, platform, *(profile or ())))
    arrivals = SATURATED
    if pace_fps is not None:
        arrivals = fixed_rate(pace_fps) if rate is not None else poisson(pace_fps, seed)
    with spinner(), ExitStack() as stack:
        subject = stack.enter_context(
            planned(models[0], None, platform, profiles[0] if profiles else None)
            if len(models) == 1
            else merged(models, platform, profiles)
        )
        problem = subject.problem()
        chosen, times_s = _plan(models, plan)
        with blamed(plan or models[0], PlanError, "plan it anew with `tvm-pipeline plan`"):
            check_one_model(chosen, problem.graph.name)
            chosen = for_mode(chosen, problem.profile.power_mode)
            evaluation = evaluate(problem, chosen.stages)
        chosen = replace(chosen, predicted=evaluation.predicted)
        inside = chosen.calls_inside if in_flight is None else in_flight
        found = run(
            problem,
            chosen.stages,
            frames,
            arrivals,
            in_flight=inside,
            drop=live,
            jitter=spread(problem, chosen) if jitter is None else jitter,
            times_s=times_s if jitter is None else (),
            seed=seed,
        )
    if gantt:
        drawn = {passage.frame for passage in found.passages[:DRAWN_FRAMES]}
        draw_gantt(evaluation, chosen, [bar for bar in found.events if bar.frame in drawn], gantt)
    energy = energy_by_watts(problem, chosen, found.statistics)
    if json:
        simulated = {"latency_s": found.statistics.latency_p50_s, **energy_json(energy), **asdict(found.statistics)}
        print_json({**plan_json(chosen, subject.platform), "simulated": {**simulated, "dropped": len(found.dropped)}})
        return
    predicted = chosen.predicted
    if pace_fps is not None and predicted.throughput_fps is not None:
        predicted = replace(at_pace(problem, predicted, pace_fps), throughput_fps=predicted.throughput_fps)
    frames_inside = chosen.batch * inside
    table = statistics_table(predicted, found.statistics, energy, frames_inside, paced=pace_fps is not None)
    show(_simulated(table), json)
    show(_simulated(stages_table(evaluation, chosen, found.statistics)), json)
    show(f"simulated: nothing was run on a device; {len(found.dropped)} of {frames} frames were dropped", json)


def _plan(models: list[str], plan: Path | None) -> tuple[Plan, Times]:
    """Return the plan, and the seconds that its stages were measured to take; none for the plan of a file."""
    if plan:
        return read_plan(plan), ()
    if len(models) > 1 or not models[0].endswith(".tar"):
        named = " ".join(models)
        raise OptionError(f"--plan: which plan of {named}? `tvm-pipeline plan {named} -o plan.txt` makes one")
    with open_bundle(Path(models[0])) as bundle:
        return bundle.plan, bundle.decision.times_s(bundle.plan) if bundle.decision else ()


def _simulated(table: TextTable) -> TextTable:
    """Return the table of a real run with the word `simulated` in place of `measured`."""
    columns = tuple(column.replace("measured", "simulated") for column in table.columns)
    return replace(table, title=table.title.replace("measured", "simulated"), columns=columns)
