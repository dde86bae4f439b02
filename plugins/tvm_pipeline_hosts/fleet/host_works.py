"""How fast each host of a fleet is: the best plan of every model on it, from what fleet.toml names.

The frames a second that the file gives (`fps`) count first, if the model has no deadline. Where a host runs a bundle,
its plan counts, by the host's profile or else by the bundle's. Else a profile is planned for. Equal hosts, which have
the same devices and the same profile, are planned once. With a deadline, the frames a second are those of as many
cameras as keep it, by the simulator (`cost/under_load.py`), so placements and takeovers never give a host more. Nothing
is measured and nothing runs; a model file is compiled here for its operators alone.

Next: placement.py, which takes the seconds.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import msgspec

from tvm_pipeline import OperatorGraph, Problem, planning, read_graph, read_platform, read_profile
from tvm_pipeline.backends.bundle import read_documents
from tvm_pipeline.core.in_mode import in_mode
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.cost.under_load import FrameDeadline, most_cameras
from tvm_pipeline.errors import InfeasibleError, NoPlanError, OptionError
from tvm_pipeline.frontends import is_relay
from tvm_pipeline.planning.deployment import Demand, deploy
from tvm_pipeline.workflow.steps import compile_source
from tvm_pipeline_hosts.fleet.description import Fleet, Placement
from tvm_pipeline_hosts.fleet.fleet_file import FleetFile, FleetHost

_log = logging.getLogger(__name__)

# Seconds in which the models of one host are planned together.
TOGETHER_S = 5.0
# Cameras that share a host with a model that no camera of the file wants.
MANY = 10


@dataclass(slots=True)
class HostWorks:
    """What is known of the hosts.

    Attributes:
        work_s: host -> model -> seconds of the busiest device for a frame, see `description.Host`.
        missing: host -> model -> why the model does not run there, or that nothing is known of it.
        problems: (host, model) -> what was planned; of hosts whose frames a second the file gives there is none.
    """

    work_s: dict[str, dict[str, float]] = field(default_factory=dict)
    missing: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: dict[tuple[str, str], Problem] = field(default_factory=dict)


def host_works(file: FleetFile) -> HostWorks:
    """Return how fast each host is with each model.

    Raises:
        PipelineError: a file that fleet.toml names cannot be read, or does not fit the others.
    """
    works = HostWorks({host.name: {} for host in file.hosts}, {host.name: {} for host in file.hosts})
    reader = _FileCache(file)
    known: dict[tuple[str, bytes], float | str] = {}
    for host in file.hosts:
        for model in file.models:
            if model.name in host.fps and model.deadline_s is None:
                works.work_s[host.name][model.name] = 1 / host.fps[model.name]
                continue
            problem, key = reader.problem(host, model.name)
            if problem is None:
                fps = "no fps, " if model.deadline_s is None else ""
                works.missing[host.name][model.name] = f"fleet.toml gives {fps}no profile and no bundle of it"
                continue
            if (model.name, key) not in known:
                _log.info(f"planning {model.name} on {host.name}")
                known[model.name, key] = reader.seconds(host, model.name, problem)
            found = known[model.name, key]
            if isinstance(found, str):
                works.missing[host.name][model.name] = found
            else:
                works.work_s[host.name][model.name] = found
                works.problems[host.name, model.name] = problem
    return works


def together(fleet: Fleet, placement: Placement, works: HostWorks) -> dict[str, float]:
    """Return host -> its utilisation where the models that it has are planned together, by `deploy`.

    Hosts with one model, or of whose models no profile is known, are left out. The rates of a model's cameras are added
    up. The utilisation may be less than the placement's, which adds up the models' best plans, one by one.
    """
    rates: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for camera in fleet.cameras:
        if camera.name in placement.host_of:
            for model, rate in camera.rates_fps.items():
                rates[placement.host_of[camera.name]][model] += rate
    found = {}
    for host, wanted in rates.items():
        problems = [works.problems.get((host, model)) for model in wanted]
        demands = [Demand(problem, rate) for problem, rate in zip(problems, wanted.values(), strict=True) if problem]
        if len(demands) < max(2, len(problems)):
            continue
        _log.info(f"planning {', '.join(wanted)} together on {host}")
        try:
            utilisation = deploy(demands, TOGETHER_S).utilisation
        except (NoPlanError, OptionError):
            continue  # a limit of memory that the models keep one by one alone, or bundles of different platforms
        found[host] = max(utilisation.values(), default=0.0)
    return found


class _FileCache:
    """Reads the files of a fleet, each once."""

    def __init__(self, file: FleetFile) -> None:
        self._file = file
        self._graphs: dict[Path, OperatorGraph] = {}

    def problem(self, host: FleetHost, model: str) -> tuple[Problem | None, bytes]:
        """Return what is to be planned, None where nothing is known, and what is equal for equal hosts."""
        bundle = self._file.bundle(host, model)
        profile = read_profile(host.profiles[model]) if model in host.profiles else None
        if bundle:
            described = read_documents(bundle)
            graph, platform, profile = described.graph, described.platform, profile or described.profile
        elif profile is None:
            return None, b""
        elif host.platform is None:
            raise OptionError(
                f"{self._file.path}: host {host.name} has a profile of {model} and no platform; give its file, which "
                "`tvm-pipeline devices -o FILE` writes there"
            )
        else:
            graph, platform = self._graph(model), read_platform(host.platform)
        problem = Problem(graph, in_mode(platform, profile.power_mode), profile)
        equal = replace(problem.platform, name="host"), profile, str(bundle)
        return problem, msgspec.json.encode(equal)

    def seconds(self, host: FleetHost, model: str, problem: Problem) -> float | str:
        """Return the seconds of the busiest device for a frame, or why there is no plan."""
        bundle = self._file.bundle(host, model)
        try:
            plan = judged(problem, read_documents(bundle).plan) if bundle else planning.plan(problem).plan
        except InfeasibleError as error:
            return str(error)
        fps = plan.predicted.throughput_fps
        if not fps:
            return "its plan makes no frames"
        found = self._file.find_model(model)
        if found.deadline_s is None:
            return 1 / fps
        rates_fps = [camera.rates_fps[model] for camera in self._file.cameras if model in camera.rates_fps]
        deadline = FrameDeadline(found.deadline_s, found.miss_share, median(rates_fps) if rates_fps else fps / MANY)
        count = most_cameras(problem, plan, (), deadline)
        alone = f"a frame that is alone takes {1e3 * (plan.predicted.latency_s or 0.0):.3g} ms"
        return 1 / (count * deadline.rate_fps) if count else f"its plan does not keep `deadline` {deadline}: {alone}"

    def _graph(self, model: str) -> OperatorGraph:
        """Return the operators of a model's file."""
        file = self._file.find_model(model).file
        if file is None:
            raise OptionError(
                f"{self._file.path}: model {model} has no file, and hosts have profiles of it; name the operator graph "
                "(.json) that they were measured for, or the model"
            )
        if file not in self._graphs:
            if file.suffix == ".json" and not is_relay(str(file)):
                self._graphs[file] = read_graph(file)
            else:
                _log.info(f"compiling {file} here for its operators alone")
                self._graphs[file] = compile_source(file).compiled.graph
        return self._graphs[file]
