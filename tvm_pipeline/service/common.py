"""What the commands share: options, where output goes, and how a source becomes something to plan or run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from tvm_pipeline import planning
from tvm_pipeline.backends.bundle import Bundle, open_bundle
from tvm_pipeline.backends.contract import Backend, CompiledModel, detect_platform, settle_platform
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.core.plan import OBJECTIVES, Decision, Objective, Plan, Problem, is_lexicographic, read_plan
from tvm_pipeline.core.platform import Device, Platform, read_platform
from tvm_pipeline.core.profile import Profile, read_profile, unmeasured
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.errors import GraphError, OptionError, PipelineError
from tvm_pipeline.files import read_bytes
from tvm_pipeline.frontends import load, parse_shapes
from tvm_pipeline.planning import MEASURED, SCHEDULERS
from tvm_pipeline.profiling import profile_model, stage_timer

# People read the tables on standard error's twin, programs read one JSON object on standard output.
errors = Console(stderr=True)

PlatformOption = Annotated[
    Path | None,
    typer.Option("--platform", help="TOML file of devices and links; this machine is detected without it."),
]
ShapesOption = Annotated[
    str | None, typer.Option("--input-shapes", help='Where the file leaves them open: "data:[1,3,224,224]".')
]
ProfileOption = Annotated[
    Path | None, typer.Option("--profile", help="Measured before with `profile`; measured now without it.")
]
ObjectiveOption = Annotated[
    str,
    typer.Option(
        "--objective",
        help=f"What is best: {'; '.join(OBJECTIVES)}. Comma-separated is lexicographic, and counts bytes.",
    ),
]
MinThroughputOption = Annotated[
    float | None, typer.Option("--min-throughput", help="Frames a second to keep, for latency or energy.")
]
MaxLatencyOption = Annotated[
    float | None, typer.Option("--max-latency", help="Seconds a frame may take, for throughput.")
]
StagesOption = Annotated[int | None, typer.Option("--stages", help="Exactly so many stages; else the planner chooses.")]
SchedulerOption = Annotated[
    str,
    typer.Option(
        "--scheduler",
        help=f"best (of all exact ones), {MEASURED} (stages are compiled and measured until the plan stands, for "
        f"Edge TPUs), or one of: {', '.join(SCHEDULERS)}.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else there.")]


def show(renderable: Any, as_json: bool) -> None:
    """Prints for people: on standard output, or on standard error where that belongs to JSON."""
    (errors if as_json else Console()).print(renderable)


def say(line: str, style: str | None = None) -> None:
    """One line on standard error, unbroken however long: logs and scripts read it."""
    errors.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """The one JSON object of a command."""
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.flush()


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A spinner on standard error with what is being done; yields the function that says it."""
    with errors.status("starting") as status:
        yield lambda text: status.update(text)


def checked_objective(text: str) -> Objective:
    for objective in OBJECTIVES:
        if text == objective:
            return objective
    raise OptionError(f"--objective {text!r} is none of {', '.join(OBJECTIVES)}")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A model that can be planned and run here."""

    backend: Backend
    compiled: CompiledModel
    platform: Platform


def say_stand_ins(platform: Platform) -> None:
    """No figure of a stand-in may pass for one of the device: says which devices are not here themselves."""
    alike: dict[str, list[Device]] = {}
    for device in platform.devices:
        if device.stand_in:
            alike.setdefault(device.stand_in.replace(device.target, "*"), []).append(device)
    for devices in alike.values():
        names = ", ".join(device.name for device in devices)
        say(f"warning: not here: {names}. Stages run on {devices[0].stand_in}", "yellow")


@contextmanager
def opened_bundle(path: Path) -> Iterator[Bundle]:
    """A bundle, unpacked while the block lasts; what stands in for its devices is said."""
    with open_bundle(path) as bundle:
        say_stand_ins(bundle.platform)
        yield bundle


def compile_source(source: str, shapes: str | None, platform: Path | None, tell: Callable[[str], None]) -> Compiled:
    """Reads a model and compiles it for the platform of a file, or for this machine."""
    model = load(source, parse_shapes(shapes) if shapes else None)
    backend, settled = settle_platform(read_platform(platform) if platform else detect_platform(model))
    say_stand_ins(settled)
    return Compiled(backend, backend.compile(model, settled.devices, tell), settled)


def measured_profile(
    compiled: Compiled, profile: Path | None, tell: Callable[[str], None], repeats: int = 24
) -> Profile:
    """The profile of a file, else measured now; what made it doubtful is said."""
    if profile:
        found = read_profile(profile)
    else:
        found = profile_model(compiled.backend, compiled.compiled, compiled.platform, repeats, tell)
    for warning in found.warnings:
        say(f"warning: {warning}", "yellow")
    return found


@dataclass(frozen=True, slots=True)
class Planned:
    """What can be planned, and run where `compiled` is not None."""

    graph: OperatorGraph
    platform: Platform
    profile: Profile
    compiled: CompiledModel | None = None

    def problem(self, objective: Objective = "throughput", stages: int | None = None, **limits: Any) -> Problem:
        return Problem(self.graph, self.platform, self.profile, objective, stages, **limits)


@contextmanager
def planned(
    source: str, shapes: str | None, platform: Path | None, profile: Path | None, tell: Callable[[str], None]
) -> Iterator[Planned]:
    """A bundle (.tar), an operator graph (.json, nothing is run for it), or a model to compile and measure."""
    with ExitStack() as stack:
        if source.endswith(".tar"):
            bundle = stack.enter_context(opened_bundle(Path(source)))
            yield Planned(
                bundle.graph,
                read_platform(platform) if platform else bundle.platform,
                read_profile(profile) if profile else bundle.profile,
                bundle.compiled,
            )
        elif source.endswith(".json") and not is_relay(source):
            graph = read_graph(source)
            known = read_profile(profile) if profile else unmeasured(graph)
            yield Planned(graph, read_platform(platform) if platform else detect_platform(), known)
        else:
            made = compile_source(source, shapes, platform, tell)
            yield Planned(made.compiled.graph, made.platform, measured_profile(made, profile, tell), made.compiled)


def decide(
    problem: Problem, scheduler: str, compiled: CompiledModel | None, tell: Callable[[str], None]
) -> tuple[Decision, Profile]:
    """Plans with the scheduler of that name; the profile comes back with whatever was measured on the way."""
    measure = None if compiled is None else stage_timer(compiled)
    decision = planning.plan(problem, scheduler, measure=measure, progress=tell)
    profile = problem.profile
    if decision.segments:
        profile = replace(profile, segments=(*profile.segments, *decision.segments))
    return decision, profile


def is_relay(source: str) -> bool:
    """Whether a .json holds a Relay module, which TVM begins with its root, and not an operator graph."""
    return b'"root"' in read_bytes(source, GraphError)[:100]


def chosen_plan(bundle: Bundle, plan: Path | None) -> tuple[Problem, Plan]:
    """The bundle's problem and its plan, or the plan of a file, judged anew."""
    problem = Problem(bundle.graph, bundle.platform, bundle.profile, bundle.plan.objective)
    return problem, judged(problem, read_plan(plan) if plan else bundle.plan)


def plan_json(plan: Plan, platform: Platform | None = None) -> dict[str, Any]:
    """A plan as `--json` gives it; with its platform, also which of the devices are not here themselves."""
    return {
        "graph": plan.graph,
        "scheduler": plan.scheduler,
        "status": plan.status,
        "bound": plan.bound[0] if plan.bound and len(plan.bound) == 1 else plan.bound,
        "gap": plan.gap,
        "objectives": _objectives(plan),
        "stages": [{"devices": stage.devices, "operators": stage.operators} for stage in plan.stages],
        "predicted": asdict(plan.predicted),
        **({"stand_ins": platform.stand_ins} if platform else {}),
    }


def _objectives(plan: Plan) -> dict[str, Any]:
    """What was asked to be best; where bytes are, all three figures of them."""
    if not is_lexicographic(plan.objective):
        return {plan.objective: plan.value[0] if plan.value else None}
    figures = asdict(plan.predicted)
    return {name: figures[name] for name in ("memory_bytes", "dram_bytes", "communication_bytes")}


def decision_json(decision: Decision, platform: Platform) -> dict[str, Any]:
    """The winner, why it won, and every candidate."""
    return {
        **plan_json(decision.plan, platform),
        "why": decision.why,
        "candidates": [plan_json(p) for p in decision.candidates],
    }


def video_room() -> Any:
    """The video room, whose libraries are an extra."""
    try:
        from tvm_pipeline import video
    except ImportError as error:
        raise PipelineError(f"video needs an extra: pip install 'tvm-pipeline[video]' ({error})") from error
    return video
