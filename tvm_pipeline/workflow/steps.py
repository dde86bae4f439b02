"""The steps from a model file to a plan, as one call each: for the command line, and for programs.

    from tvm_pipeline.workflow.steps import decide, planned

    with planned("model.onnx") as subject:
        decision, profile = decide(subject.problem("latency"), compiled=subject.compiled)
        print(decision.plan)

Each step logs what it does (INFO), and why a figure may be doubtful (WARNING). Read next: planning/ (how plans are
found), compiled_pipeline.py (the verbs, which run a plan).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tvm_pipeline import planning
from tvm_pipeline.backends.bundle import Bundle
from tvm_pipeline.backends.carried import with_carry
from tvm_pipeline.backends.contract import CompiledModel, Order
from tvm_pipeline.backends.registry import platform_backend
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.core.in_mode import for_mode, in_mode
from tvm_pipeline.core.instance import is_instance, read_instance
from tvm_pipeline.core.model import Model, with_tolerance, with_weights
from tvm_pipeline.core.plan import Decision, Plan, check_one_model, read_plan
from tvm_pipeline.core.platform import Platform, read_platform
from tvm_pipeline.core.problem import Objective, Problem, counts_edges, is_lexicographic
from tvm_pipeline.core.profile import Profile, read_profile, unmeasured
from tvm_pipeline.core.state_loops import Carry
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.cost.under_load import FrameDeadline, in_time, under_load
from tvm_pipeline.documents import blamed
from tvm_pipeline.errors import ModelError, OptionError, PlanError
from tvm_pipeline.frontends import Shapes, Values, is_relay, load
from tvm_pipeline.runtime.comparison import Run
from tvm_pipeline.runtime.isolation import isolated
from tvm_pipeline.runtime.verification import VERIFY_S, check_seconds, verified, with_fewest_inside
from tvm_pipeline.workflow.compiling import Compiled as Compiled
from tvm_pipeline.workflow.compiling import CompileOptions, compiled_on
from tvm_pipeline.workflow.doubts import stand_in_warnings
from tvm_pipeline.workflow.engines import with_engines
from tvm_pipeline.workflow.machine import HERE, Machine
from tvm_pipeline.workflow.modelled import absence, stood_in, to_measure
from tvm_pipeline.workflow.power_meter import NONE, opened_meter
from tvm_pipeline.workflow.predicted import FROM_SHAPES, names_layer_times, with_predictions
from tvm_pipeline.workflow.predicted import plan_from_shapes as plan_from_shapes

REPEATS = 24  # passes over the model for each device

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlanningInput:
    """A graph, platform and profile to plan for.

    Attributes:
        compiled: the model; None for an operator graph alone.
        not_here: why its plans cannot run on this machine; empty where they can.
    """

    graph: OperatorGraph
    platform: Platform
    profile: Profile
    compiled: CompiledModel | None = None
    not_here: str = ""

    def problem(
        self,
        objective: Objective = "throughput",
        stages: int | None = None,
        *,
        children_together: bool = False,
        min_throughput_fps: float | None = None,
        max_latency_s: float | None = None,
        time_limit_s: float | None = None,
    ) -> Problem:
        """Return the problem for a scheduler, in the profile's power mode; see `Problem`, also for what is raised."""
        return Problem(
            self.graph,
            in_mode(self.platform, self.profile.power_mode),
            self.profile,
            objective,
            stages,
            children_together,
            min_throughput_fps,
            max_latency_s,
            time_limit_s,
        )


@contextmanager
def opened_bundle(path: Path, profile: Path | None = None, machine: Machine = HERE) -> Iterator[Bundle]:
    """Open a bundle, which is unpacked while the block lasts; warn of stand-ins, and of a profile of other devices.

    Args:
        profile: a file with a profile to use in place of the bundle's.
        machine: the one that it was made for.
    """
    with machine.opened(path) as bundle:
        if profile:
            bundle = replace(bundle, profile=read_profile(profile))
        for line in stand_in_warnings(bundle.platform):
            _log.warning(line)
        for line in machine.doubts(profile or path, bundle.profile, bundle.platform):
            _log.warning(line)
        if other := machine.other_mode(bundle.platform, bundle.profile.power_mode):
            _log.warning(f"{profile or path}: {other}; measured figures will be others")
        yield bundle


def compile_source(
    source: str | Path | Model,
    shapes: Shapes | None = None,
    platform: Path | None = None,
    order: Order | None = "listed",
    *,
    devices: str = "",
    engines: str = "",
    tuned: bool = True,
    tolerance: float | None = None,
    weights: str | None = None,
    values: Values | None = None,
    carry: Carry = (),
    power_mode: str = "",
    memory_rewrite: bool = False,
    machine: Machine = HERE,
) -> Compiled:
    """Read a model and compile it for the platform of a file, or for this machine without one.

    Devices that were only detected are left out, with a warning, where a backend cannot compile for them as well. Where
    TVM refuses the model and no platform is given, an engine runs what TVM does not (`engine_fallback.py`).

    Args:
        source: what `load` takes, or a Model that it returned.
        shapes: of the inputs, where the file leaves them open.
        order: the order in which stages run their operators. None is that of least memory where a device states its
            memory, because a plan counts what its stages take in their best order.
        devices: which devices of the platform are used, as `Platform.with_devices`; all if it is empty.
        engines: which engines have devices, as `engines.with_engines`; the platform's own if it is empty.
        tuned: False leaves out what tuning has found.
        tolerance: the error that faster algorithms may have, see `Model.tolerance`; the model's own without it.
        weights: the type in which weights are stored, see `Model.weights`; the model's own without it.
        values: of inputs that become constants.
        carry: pairs of an input, and the output that is this input for the next frame; see `core/state_loops.py`.
        power_mode: of the platform, whose devices it is compiled for as they are in this mode; empty for all.
        memory_rewrite: do concatenations in parts where that lowers the peak of the order of least memory, in which
            stages then run; warn where nothing is gained. See `rewriting_trial.py`, also for what is raised.
        machine: the one that has the devices.
    """
    model = source if isinstance(source, Model) else load(source, shapes, values)
    name = model.name if isinstance(source, Model) else str(source)
    model = with_weights(with_tolerance(model, tolerance), weights)
    for note in model.notes:
        _log.warning(f"{model.name}: {note}")
    with _naming(name, model):
        given = machine.platform(read_platform(platform) if platform else None, model)
        given = with_engines(given, engines, model.format).with_devices(devices)
        elsewhere = bool(machine.name)
        asked = bool(platform or devices or engines)
        options = CompileOptions(order, tuned, memory_rewrite, asked, elsewhere, machine.processor, machine.compared)
        made = compiled_on(model, in_mode(given, power_mode), options)
    return replace(made, compiled=with_carry(made.compiled, carry), metadata=model.metadata)


@contextmanager
def _naming(source: str, model: Model) -> Iterator[None]:
    """Name the file in errors of the model, which its compilers know by the model's name alone."""
    try:
        yield
    except ModelError as error:
        if source in str(error):
            raise
        raise ModelError(f"{source}: {str(error).removeprefix(f'{model.name}: ')}") from error


def compiled_in(bundle: Bundle) -> Compiled:
    """Return the model of a bundle as `compile_source` gave it, to measure it again."""
    return Compiled(platform_backend(bundle.platform), bundle.compiled, bundle.platform, bundle.metadata)


def measured_profile(
    compiled: Compiled,
    profile: Path | None = None,
    repeats: int = REPEATS,
    strict: bool = False,
    machine: Machine = HERE,
) -> Profile:
    """Return the profile of a file, or measure it now without one; warn of what makes it doubtful.

    If strict, raise ProfileError rather than measure figures that another program disturbed.
    """
    if profile:
        found = read_profile(profile)
        for line in machine.doubts(profile, found, compiled.platform):
            _log.warning(line)
    else:
        found = machine.profile(compiled.backend, compiled.compiled, compiled.platform, repeats, strict)
    for line in found.warnings:
        _log.warning(line)
    return found


@contextmanager
def planned(
    source: str,
    shapes: Shapes | None = None,
    platform: Path | None = None,
    profile: Path | None = None,
    *,
    devices: str = "",
    values: Values | None = None,
    from_models: bool = False,
    machine: Machine = HERE,
) -> Iterator[PlanningInput]:
    """Open what a plan is to be made for.

    Args:
        source: a bundle (.tar), an operator graph or an instance (.json, for which nothing is run), or a model, which
            is compiled and measured. Where a device of the platform file has layer times, the model is compiled on this
            machine for its operators alone, and their seconds are predicted; see `predicted.py`.
        devices: which devices of the platform are used, as `Platform.with_devices`; all if it is empty.
        from_models: without a profile, do not measure devices that have a calibrated model; see `modelled.py`. If all
            have one, and one is not here, the model is compiled for its operators alone.
        machine: the one that has the devices.
    """
    with ExitStack() as stack:
        is_model = not source.endswith(".tar") and (not source.endswith(".json") or is_relay(source))
        if shapes and not is_model:
            raise OptionError(f"`input_shapes` goes with a model; {source} has its shapes", option="input_shapes")
        if source.endswith(".tar"):
            own = None if platform else profile
            bundle = stack.enter_context(opened_bundle(Path(source), own, machine))
            obstacle = f"{source} was compiled for another platform than {platform}" if platform else ""
            if bundle.application:
                obstacle = obstacle or f"{source} holds a whole application, which `run` and `bench` run on its source"
            known = read_profile(profile) if profile else bundle.profile
            yield PlanningInput(
                bundle.graph,
                (read_platform(platform) if platform else bundle.platform).with_devices(devices),
                with_predictions(known, bundle.graph, platform),
                None if bundle.application else bundle.compiled,
                obstacle,
            )
        elif is_instance(source):
            own_problem = read_instance(source).problem
            known = read_profile(profile) if profile else own_problem.profile
            given = (read_platform(platform) if platform else own_problem.platform).with_devices(devices)
            yield PlanningInput(own_problem.graph, given, known, not_here=f"{source} is an instance, and nothing runs")
        elif not is_model:
            graph = read_graph(source)
            known = with_predictions(read_profile(profile) if profile else unmeasured(graph), graph, platform)
            given = machine.platform(read_platform(platform) if platform else None, None).with_devices(devices)
            nothing_runs = f"{source} holds an operator graph alone, and nothing that could run"
            yield PlanningInput(graph, given, known, not_here=nothing_runs)
        elif platform and not machine.name and (absent := _absence(platform, from_models)):
            _log.info(f"compiling {source} here for its operators alone: {absent}")
            graph = compile_source(source, shapes, None, values=values).compiled.graph
            known = with_predictions(read_profile(profile) if profile else unmeasured(graph), graph, platform)
            yield PlanningInput(graph, read_platform(platform).with_devices(devices), known, not_here=absent)
        else:
            made = compile_source(source, shapes, platform, devices=devices, values=values, machine=machine)
            measured_on = to_measure(made.platform) if from_models and not profile else made.platform
            if measured_on:
                known = measured_profile(replace(made, platform=measured_on), profile, machine=machine)
            else:
                known = unmeasured(made.compiled.graph)
            absent = stood_in(made.platform, known) if from_models else ""
            yield PlanningInput(made.compiled.graph, made.platform, known, None if absent else made.compiled, absent)


def _absence(platform: Path, from_models: bool) -> str:
    """Return why nothing can be compiled for a platform, where its figures need no measurement; empty else."""
    machine = read_platform(platform)
    if names_layer_times(machine):
        return f"{platform} has devices that are {FROM_SHAPES}"
    return absence(machine) if from_models else ""


def decide(
    problem: Problem,
    scheduler: str = "best",
    compiled: CompiledModel | None = None,
    *,
    verify_s: float = VERIFY_S,
    run: Run | None = None,
    machine: Machine = HERE,
    rate_fps: float | None = None,
    deadline: FrameDeadline | None = None,
) -> tuple[Decision, Profile]:
    """Plan with the scheduler of that name; return also the profile with what was measured on the way.

    Args:
        scheduler: `best`, or one of `planning.SCHEDULERS`.
        compiled: the model, where there is one, for the problem's platform.
        verify_s: seconds, at most, in which candidates whose predictions are too close run side by side, and half as
            many more for `with_fewest_inside`; see `runtime.verification`. 0 chooses by prediction.
        run: runs a plan for a turn, where that takes more than `compiled`: with the work of an application, for
            instance. Without both, nothing runs and the prediction decides.
        machine: the one that `compiled` runs on.
        rate_fps: the frames a second for which the latencies under load are told; None for a full pipeline.
        deadline: to be kept; see `cost.under_load.in_time`, also for what is raised where no candidate does.

    Where the objective is energy, the best sensor of power of this machine measures these runs; on another machine the
    prediction decides.

    Raises what `planning.plan` raises, and OptionError where `verify_s` is no time.
    """
    check_seconds(verify_s)
    with ExitStack() as stack:
        if compiled is not None and not machine.name:
            compiled = stack.enter_context(isolated(compiled, problem.platform, (), every=False))
        measure = None if compiled is None else machine.stage_timer(compiled, problem.platform)
        decision = planning.plan(problem, scheduler, measure=measure)
        if run is None and compiled is not None:
            run = machine.run(compiled, problem.platform)
        measures = problem.objective == "energy" and run is not None and verify_s > 0 and not machine.name
        with opened_meter("" if measures else NONE) as meter:
            decision = verified(problem, decision, run, verify_s, meter)
        decision = with_fewest_inside(problem, decision, run, verify_s)
    profile = replace(problem.profile, segments=(*problem.profile.segments, *decision.segments))
    problem = replace(problem, profile=profile)
    if deadline is not None:
        decision = in_time(problem, decision, deadline)
    return under_load(problem, decision, rate_fps), profile


def chosen_plan(bundle: Bundle, plan: Path | None = None) -> tuple[Problem, Plan]:
    """Return the bundle's problem with its plan, or with the plan of a file, whose figures are computed again."""
    problem = Problem(bundle.graph, bundle.platform, bundle.profile, bundle.plan.objective)
    return problem, given_plan(problem, plan) if plan else judged(problem, bundle.plan)


def given_plan(problem: Problem, path: Path, judge: Callable[[Problem, Plan], Plan] = judged) -> Plan:
    """Return the plan of a file, with its figures computed again; raise PlanError, which names the file."""
    with blamed(path, PlanError, "plan it anew with `tvm-pipeline plan`"):
        plan = read_plan(path)
        check_one_model(plan, problem.graph.name)
        return judge(problem, for_mode(plan, problem.profile.power_mode))


def plan_json(plan: Plan, platform: Platform | None = None) -> dict[str, Any]:
    """Return a plan for JSON; with its platform, also which of the devices are not here themselves."""
    return {
        "graph": plan.graph,
        "scheduler": plan.scheduler,
        "power_mode": plan.power_mode or None,
        "batch": plan.batch,
        "status": plan.status,
        "bound": plan.bound[0] if plan.bound and len(plan.bound) == 1 else plan.bound,
        "gap": plan.gap,
        "objectives": _objectives(plan),
        "stages": [{"devices": stage.devices, "operators": stage.operators} for stage in plan.stages],
        "predicted": asdict(plan.predicted),
        **({"stand_ins": platform.stand_ins} if platform else {}),
    }


def _objectives(plan: Plan) -> dict[str, float | None]:
    """Return the figure of the objective; where bytes are the objective, memory, overflow and its communication."""
    if not is_lexicographic(plan.objective):
        return {plan.objective: plan.value[0] if plan.value else None}
    figures = asdict(plan.predicted)
    communication = "edge_communication_bytes" if counts_edges(plan.objective) else "communication_bytes"
    return {name: figures[name] for name in ("memory_bytes", "dram_bytes", communication)}
