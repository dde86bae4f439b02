"""`tvm-pipeline plan`: every candidate with its prediction, and why the winner won."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from tvm_pipeline.cli.options import (
    DeadlineOption,
    DeviceOption,
    JsonOption,
    MaxLatencyOption,
    MinThroughputOption,
    MissOption,
    ObjectiveOption,
    PlatformOption,
    ProfilesOption,
    RateOption,
    RemoteOption,
    SchedulerOption,
    ShapesOption,
    StagesOption,
    TimeLimitOption,
    ValuesOption,
    VerifyOption,
    check_outputs,
    deadline_of,
    shapes_of,
    values_of,
    verify_seconds,
)
from tvm_pipeline.cli.output import decision_json, print_json, show, spinner, warn, with_options
from tvm_pipeline.core.instance import is_instance, read_instance
from tvm_pipeline.core.plan import Decision, cost_key
from tvm_pipeline.core.problem import Problem, check_limits, checked_objective, is_lexicographic
from tvm_pipeline.core.profile import read_profile
from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import write_bytes
from tvm_pipeline.planning import check_scheduler
from tvm_pipeline.planning.certificate import certificate_of, check_certifiable
from tvm_pipeline.planning.search.pareto import pareto
from tvm_pipeline.report import candidates_table, stage_memories, stages_memory_table
from tvm_pipeline.report.tables import percent
from tvm_pipeline.workflow.machine import opened_machine
from tvm_pipeline.workflow.merged import merged
from tvm_pipeline.workflow.mode_profiles import decide_modes
from tvm_pipeline.workflow.modelled import how_good, modelled
from tvm_pipeline.workflow.predicted import FROM_SHAPES, from_shapes
from tvm_pipeline.workflow.steps import decide, planned


def pareto_decision(problem: Problem) -> Decision:
    """Return the Pareto front as candidates; the one that is best by the objective is chosen."""
    plans = sorted(pareto(problem), key=cost_key)
    why = f"none of these {len(plans)} plans is beaten in everything by another" if len(plans) > 1 else "the only one"
    return Decision(plans[0], tuple(plans), why)


def command(
    context: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="A model, a bundle (.tar), or an operator graph or an instance (.json), which need no TVM. An "
            "instance is planned as its file tells, but for what options tell. Several are merged into one graph, a "
            "frame of which is a frame of each.",
        ),
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan, as text.")] = None,
    objective: ObjectiveOption = "throughput",
    stages: StagesOption = None,
    scheduler: SchedulerOption = "best",
    platform: PlatformOption = None,
    device: DeviceOption = "",
    profile: ProfilesOption = None,
    children_together: Annotated[
        bool, typer.Option("--children-together", help="Put all readers of an operator's outputs into one stage.")
    ] = False,
    min_throughput: MinThroughputOption = None,
    max_latency: MaxLatencyOption = None,
    rate: RateOption = None,
    deadline: DeadlineOption = None,
    miss: MissOption = 0.001,
    time_limit: TimeLimitOption = None,
    front: Annotated[
        bool,
        typer.Option("--pareto", help="All plans that no other beats in throughput, latency and energy together."),
    ] = False,
    verify: VerifyOption = None,
    remote: RemoteOption = None,
    input_shapes: ShapesOption = None,
    input_values: ValuesOption = None,
    certificate: Annotated[
        Path | None,
        typer.Option(help="Write what `tools/check_certificate.py` or `check_bound.py` needs to prove a bound again."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Plan a model: which device runs which operators.

    Devices whose models were calibrated (`calibrate`) are not measured, unless --profile has figures of them.

    Example: tvm-pipeline plan model.onnx --objective latency -o plan.txt

    Two models at one rate: tvm-pipeline plan faces.json scenes.json --platform box.toml -o plan.txt
    """
    if len(models) == 1 and is_instance(models[0]):
        own = read_instance(models[0]).problem
        origin = context.get_parameter_source("objective")
        if origin is None or origin.name == "DEFAULT":
            objective = own.objective
        if objective == own.objective:  # another one has other limits
            min_throughput, max_latency = min_throughput or own.min_throughput_fps, max_latency or own.max_latency_s
        stages, children_together = stages or own.stages, children_together or own.children_together
        time_limit = own.time_limit_s if time_limit is None else time_limit
    chosen = checked_objective(objective)
    check_limits(chosen, stages, min_throughput, max_latency, time_limit)
    check_scheduler(scheduler)
    check_outputs(output, certificate, inputs=(*models, platform, *(profile or ())))
    if front and is_lexicographic(chosen):
        raise OptionError(f"--pareto compares throughput, latency and energy; --objective {chosen} counts bytes")
    profiles = profile or []
    together, modes = len(models) > 1, len(models) == 1 and len(profiles) > 1
    if together and (input_shapes or input_values):
        option = "--input-shapes" if input_shapes else "--input-values"
        raise OptionError(f"{option} goes with one model; compile each into a bundle, and plan the bundles")
    if remote is not None and together:
        raise OptionError("`remote` goes with one model; plan each on the board", option="remote")
    if front and modes:
        raise OptionError("--pareto lists the plans of one power mode; give the --profile of one")
    several = "plans of several power modes are compared by their predictions" if modes else ""
    obstacle = "--pareto lists plans and compares none" if front else several
    verify_seconds(verify, obstacle)
    promised = deadline_of(deadline, miss, rate, obstacle)
    shapes, values = shapes_of(input_shapes), values_of(input_values)
    first = profiles[0] if profiles else None
    with spinner(), opened_machine(remote) as machine, ExitStack() as stack:
        subject = stack.enter_context(
            merged(models, platform, profiles, devices=device, from_models=True)
            if together
            else planned(
                models[0],
                shapes,
                platform,
                first,
                devices=device,
                values=values,
                from_models=True,
                machine=machine,
            )
        )
        problem = subject.problem(
            chosen,
            stages,
            children_together=children_together,
            min_throughput_fps=min_throughput,
            max_latency_s=max_latency,
            time_limit_s=time_limit,
        )
        if certificate:
            check_certifiable(problem, scheduler)
        if front:
            decision = pareto_decision(problem)
        elif modes:
            known = list(map(read_profile, profiles))
            decision, problem = decide_modes(problem, subject.platform, known, scheduler)
        else:
            seconds = verify_seconds(
                verify, subject.not_here or machine.other_mode(problem.platform, subject.profile.power_mode)
            )
            decision, _ = decide(
                problem,
                scheduler,
                subject.compiled,
                verify_s=seconds,
                machine=machine,
                rate_fps=rate,
                deadline=promised,
            )
        memories = stage_memories(problem.graph, problem.platform, decision.plan)
    errors = modelled(problem.platform, problem.profile)
    if errors:
        warn(how_good(errors))
    if certificate:
        write_bytes(certificate, certificate_of(problem, decision.plan, scheduler).encode())
    if output:
        write_bytes(output, str(decision.plan).encode())
    if json:
        predicted = {FROM_SHAPES.replace(" ", "_"): from_shapes(subject.profile)}
        print_json({**decision_json(decision, problem.platform), "memory": memories, **predicted, "modelled": errors})
    else:
        show(candidates_table(decision), json)
        for name, file in from_shapes(subject.profile).items():
            show(f"{name}: {FROM_SHAPES} by {file}, not measured", json)
        if (errors or from_shapes(subject.profile)) and decision.plan.predicted.uncertainty is not None:
            doubt = percent(decision.plan.predicted.uncertainty)
            show(f"the chosen plan's figures may be off by {doubt}, if the errors of all operators add up", json)
        show(stages_memory_table(memories), json)
        show(with_options(decision.why), json)
        if together:
            show(f"a frame is a frame of each model; not run here: {subject.not_here}", json)
