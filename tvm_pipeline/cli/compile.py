"""`tvm-pipeline compile`: make of a model a bundle that `run` takes."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import typer

from tvm_pipeline.backends.bundle import Bundle, write_bundle
from tvm_pipeline.backends.contract import Order
from tvm_pipeline.cli.options import (
    DeadlineOption,
    DeviceOption,
    EnginesOption,
    JsonOption,
    MaxLatencyOption,
    MemoryRewriteOption,
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
    ToleranceOption,
    ValuesOption,
    VerifyOption,
    WeightsOption,
    check_apart,
    check_outputs,
    check_remote,
    deadline_of,
    shapes_of,
    values_of,
    verify_seconds,
)
from tvm_pipeline.cli.output import decision_json, print_json, say, show, spinner, warn, with_options, without_warnings
from tvm_pipeline.core.in_mode import in_mode
from tvm_pipeline.core.model import FLOAT32, TOLERANCE, Model
from tvm_pipeline.core.plan import Decision, Plan
from tvm_pipeline.core.problem import Problem, check_limits, checked_objective
from tvm_pipeline.core.profile import read_profile
from tvm_pipeline.core.state_loops import Carry, parse_carry
from tvm_pipeline.errors import OptionError, PipelineError
from tvm_pipeline.frontends import Shapes, Values, interface_of, load
from tvm_pipeline.option_names import HELP
from tvm_pipeline.planning import check_scheduler
from tvm_pipeline.report import TextTable, candidates_table
from tvm_pipeline.report.parts_tables import in_parts_table, in_parts_text
from tvm_pipeline.runtime.isolation import isolated
from tvm_pipeline.workflow.applications import applications
from tvm_pipeline.workflow.batches import Planned, batches_of, best_batch
from tvm_pipeline.workflow.machine import HERE, Machine, opened_machine
from tvm_pipeline.workflow.mode_profiles import decide_modes
from tvm_pipeline.workflow.steps import (
    Compiled,
    compile_source,
    decide,
    given_plan,
    measured_profile,
)

_log = logging.getLogger(__name__)


def command(
    model: Annotated[str, typer.Argument(help="A model file, or with Relay a network such as resnet-50.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The bundle to write, such as model.tar.")],
    plan: Annotated[Path | None, typer.Option("--plan", help="Take this plan instead of searching for one.")] = None,
    objective: ObjectiveOption = "throughput",
    stages: StagesOption = None,
    min_throughput: MinThroughputOption = None,
    max_latency: MaxLatencyOption = None,
    rate: RateOption = None,
    deadline: DeadlineOption = None,
    miss: MissOption = 0.001,
    time_limit: TimeLimitOption = None,
    scheduler: SchedulerOption = "best",
    platform: PlatformOption = None,
    device: DeviceOption = "",
    engines: EnginesOption = "",
    profile: ProfilesOption = None,
    remote: RemoteOption = None,
    preprocessing: Annotated[
        str | None,
        typer.Option(help=f"{HELP['preprocessing']} Without it, MODEL.toml where that exists."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(help="Plan the work around the model, too, measured on this source: what `run` would take."),
    ] = None,
    decoder: Annotated[
        str | None,
        typer.Option(help=f"With --source. {HELP['decoder']}"),
    ] = None,
    labels: Annotated[str | None, typer.Option(help=f"With --source. {HELP['labels']}")] = None,
    threshold: Annotated[float | None, typer.Option(help=f"With --source. {HELP['threshold']}")] = None,
    classes: Annotated[str | None, typer.Option(help=f"With --source. {HELP['classes']}")] = None,
    video: Annotated[
        str | None, typer.Option(help="With --source: the extension of the annotated video to write, such as .mp4.")
    ] = None,
    verify: VerifyOption = None,
    input_shapes: ShapesOption = None,
    input_values: ValuesOption = None,
    memory_order: Annotated[
        bool,
        typer.Option(
            "--memory-order",
            help="Stages run their operators in the order that needs the least memory, where that takes less; the "
            "bytes of both orders are listed. Always so where a device states its memory_bytes.",
        ),
    ] = False,
    memory_rewrite: MemoryRewriteOption = False,
    tolerance: ToleranceOption = TOLERANCE,
    weights: WeightsOption = FLOAT32,
    batch: Annotated[
        str,
        typer.Option(
            help="How many frames a call of a stage computes together; auto tries 1, 2, 4 and 8, and takes more than 1 "
            "only if that is faster. Frames wait for one another."
        ),
    ] = "1",
    carry: Annotated[
        list[str] | None,
        typer.Option(
            help="A state that goes from frame to frame, as INPUT:OUTPUT, such as state:stateN: the output of a frame "
            "is the input of the next one, and frame 0 gets zeros. Once for each state."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compile, measure and plan a model, and write one file with all that `run` needs.

    Example: tvm-pipeline compile model.onnx -o model.tar

    A whole application: tvm-pipeline compile model.onnx -o app.tar --source bikes.mp4 --decoder my:decode
    """
    around_it = {"decoder": decoder, "labels": labels, "threshold": threshold, "classes": classes, "video": video}
    for name, value in around_it.items():
        if value is not None and source is None:
            raise OptionError(f"--{name} goes with --source, which it is measured on")
    check_remote(remote, {"source": source}, "the camera is over there; compile the application on the board")
    check_remote(remote, {"engines": engines}, "name the board's engines in a platform file")
    check_remote(remote, {"memory_rewrite": memory_rewrite}, "what it gains is tried on this machine's devices")
    chosen = checked_objective(objective)
    check_limits(chosen, stages, min_throughput, max_latency, time_limit)
    check_scheduler(scheduler)
    batches = batches_of(batch, chosen)
    if batches:
        others = {"plan": plan, "profile": profile, "source": source, "remote": remote, "carry": carry}
        check_apart("batch", {**others, "memory_rewrite": memory_rewrite}, "each batch is compiled and planned anew")
    beside = Path(model).with_suffix(".toml")
    read = (
        model,
        beside,
        plan,
        platform,
        *(profile or ()),
        preprocessing,
        source,
        labels,
        decoder and decoder.rpartition(":")[0],
    )
    check_outputs(output, inputs=read)
    profiles = list(map(read_profile, profile or ()))
    obstacle = f"the plan is that of {plan}" if plan else ""
    if len(profiles) > 1:
        if plan or source:
            other = "--plan is for" if plan else "--source is measured in"
            raise OptionError(f"{other} one power mode; give the --profile of that mode alone")
        obstacle = "plans of several power modes are compared by their predictions"
    verify_seconds(verify, obstacle)
    promised = deadline_of(deadline, miss, rate, obstacle)
    states = tuple(map(parse_carry, carry or ()))
    settings = preprocessing or (str(beside) if beside.exists() else None)
    known = applications("source" if source else "preprocessing") if settings or source else None
    with spinner(), opened_machine(remote) as machine, ExitStack() as stack:
        order: Order | None = "memory" if memory_order else None
        around_it = {**around_it, "preprocessing": settings, "source": source}
        if known:
            loaded = load(model, shapes_of(input_shapes), values_of(input_values))
            if interface := interface_of(loaded):  # mistakes are told now, and not after minutes of compiling
                known.read(interface, loaded.metadata, around_it)

        def compiled_again(source: str | Model, shapes: Shapes | None = None, values: Values | None = None) -> Compiled:
            return compile_source(
                source,
                shapes,
                platform,
                order,
                devices=device,
                engines=engines,
                tolerance=tolerance,
                weights=weights,
                values=values,
                carry=states,
                power_mode=profiles[0].power_mode if len(profiles) == 1 else "",
                memory_rewrite=memory_rewrite,
                machine=machine,
            )

        made = compiled_again(model, shapes_of(input_shapes), values_of(input_values))
        memory_order = made.compiled.order == "memory"
        reading = known.read(made.compiled.graph, made.metadata, around_it) if known else None
        prepared = reading.preprocessing if reading and settings else None
        compared = _compared(machine, made, model, input_shapes, input_values, states, tolerance, weights)
        measured = measured_profile(made, profile[0] if profile else None, machine=machine)
        if elsewhere := machine.other_mode(made.platform, measured.power_mode):
            if source:
                raise OptionError(f"--source is measured in the present power mode: {elsewhere}; set it before")
            obstacle = obstacle or elsewhere
        graph, application, run = made.compiled.graph, None, None
        if source and reading:
            for line in reading.said:
                say(line)
            apart = stack.enter_context(isolated(made.compiled, made.platform, (), every=False))
            whole = reading.measure(replace(made, compiled=apart), measured)
            graph, measured, run, application = whole.graph, whole.profile, whole.run, whole.record
        problem = Problem(
            graph,
            in_mode(made.platform, measured.power_mode),
            measured,
            chosen,
            stages,
            min_throughput_fps=min_throughput,
            max_latency_s=max_latency,
            time_limit_s=time_limit,
        )
        if len(profiles) > 1:
            decision, problem = decide_modes(problem, made.platform, profiles, scheduler)
            measured = problem.profile
        elif plan:
            given = given_plan(problem, plan)
            decision = Decision(given, (given,), f"it was given by {plan}", asked=True)
        else:
            seconds = verify_seconds(verify, obstacle)

            def decided(made: Compiled, problem: Problem) -> Planned:
                compiled = None if source else made.compiled
                found, profile = decide(
                    problem,
                    scheduler,
                    compiled,
                    verify_s=seconds,
                    run=run,
                    machine=machine,
                    rate_fps=rate,
                    deadline=promised,
                )
                return Planned(made, replace(problem, profile=profile), found)

            best = decided(made, problem)
            if batches:
                loaded = load(model, shapes_of(input_shapes), values_of(input_values))
                best = best_batch(loaded, best, batches, compiled_again, decided, seconds)
                made, problem, graph = best.made, best.problem, best.problem.graph
            decision, measured = best.decision, best.problem.profile
        activations = _activations(made, decision.plan) if memory_order else []
        _log.info(f"writing {output}")
        bundle = Bundle(
            graph,
            problem.platform,
            measured,
            decision.plan,
            made.compiled,
            prepared,
            decision,
            application,
            made.metadata,
            made.rewriting,
        )
        write_bundle(output, bundle)
    if json:
        listed: dict[str, Any] = {"tuned": [asdict(found) for found in made.compiled.tuned()]}
        listed |= {"weights": [asdict(found) for found in made.compiled.stored_weights()]}
        listed |= {"activations": activations} if memory_order else {}
        listed |= {"rewriting": asdict(made.rewriting)} if made.rewriting else {}
        listed |= {"board": machine.name, "compared": compared} if remote else {}
        print_json({"output": str(output), **decision_json(decision, problem.platform), **listed})
    else:
        show(candidates_table(decision), json)
        for found in (*made.compiled.tuned(), *made.compiled.stored_weights()):
            show(str(found), json)
        if memory_order:
            show(_activations_table(activations), json)
        if made.rewriting and made.rewriting.operators:
            show(in_parts_table(made.rewriting), json)
            show(in_parts_text(made.rewriting), json)
        for line in compared:
            show(line, json)
        show(f"{with_options(decision.why)}\nwritten: {output}", json)


class _Activations(TypedDict):
    """Bytes of the activations of a stage on a device, in the usual order and in that of least memory."""

    stage: int
    device: str
    usual_bytes: int
    ordered_bytes: int


def _compared(
    machine: Machine,
    made: Compiled,
    model: str,
    input_shapes: str | None,
    input_values: str | None,
    states: Carry,
    tolerance: float,
    weights: str,
) -> list[str]:
    """Compare a model on a board with the same model compiled for this machine; return a line for each kind of device.

    Raises what `Machine.check` raises.
    """
    if machine is HERE:
        return []
    _log.info(f"compiling {model} for this machine, to compare with board {machine.name}")
    shapes, values = shapes_of(input_shapes), values_of(input_values)
    try:
        with without_warnings():
            own = compile_source(model, shapes, None, tolerance=tolerance, weights=weights, values=values, carry=states)
    except PipelineError as error:
        warn(f"what board {machine.name} computes is not compared with this machine: {error}")
        return []
    lines = machine.check(made.compiled, made.platform, own.compiled, own.platform)
    if not lines:
        warn(f"what board {machine.name} computes is not compared: no device alone computes all of {model}")
    return lines


def _activations(made: Compiled, plan: Plan) -> list[_Activations]:
    """Return the bytes of the activations of each stage on each of its devices."""
    rows: list[_Activations] = []
    own = made.compiled.graph.edges.index
    for index, stage in enumerate(plan.stages):
        operators = [name for name in stage.operators if name in own]
        for device in stage.devices if operators else ():
            before, after = made.compiled.activation_bytes(operators, made.platform.device(device))
            rows.append({"stage": index, "device": device, "usual_bytes": before, "ordered_bytes": after})
    return rows


def _activations_table(rows: list[_Activations]) -> TextTable:
    cells = tuple(
        (
            f"{row['stage']}",
            row["device"],
            f"{row['usual_bytes']:,}",
            f"{row['ordered_bytes']:,}",
            f"{row['ordered_bytes'] / row['usual_bytes'] - 1:+.1%}" if row["usual_bytes"] else "-",
        )
        for row in rows
    )
    columns = ("stage", "device", "usual order", "memory order", "change")
    return TextTable("Bytes of activations, as allocated", columns, cells)
