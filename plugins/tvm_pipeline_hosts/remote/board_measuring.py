"""What a board measures of a bundle that was sent: the same calls as the commands make on their own machine.

Each method is one of `methods.METHODS`. Times are taken here, never over the connection. Read next: remote_machine.py,
which calls these from the workstation.
"""

from __future__ import annotations

import platform as python_platform
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tvm_pipeline import Bundle, Model, Plan, Platform, Problem, Profile, settle_platform
from tvm_pipeline.backends.contract import Array, TuningReport
from tvm_pipeline.backends.cores import processor
from tvm_pipeline.backends.registry import find_backend, platform_backend, versions_of
from tvm_pipeline.core.profile import SegmentProfile
from tvm_pipeline.errors import BundleError
from tvm_pipeline.runtime.comparison import Turn
from tvm_pipeline.workflow.machine import HERE
from tvm_pipeline.workflow.tune_targets import tune_model
from tvm_pipeline_hosts.remote.board_check import outputs_on
from tvm_pipeline_hosts.remote.session import Session, warnings_meanwhile


class BoardPlatform(msgspec.Struct, frozen=True):
    """A board's platform, and what a model for it has to fit.

    Attributes:
        machine: the kind of processor, as `aarch64`.
        processor: its name.
        versions: of the software that decides whether a compiled model loads.
    """

    platform: Platform
    machine: str
    processor: str
    versions: dict[str, str]
    warnings: list[str] = []


class CheckedProfile(msgspec.Struct, frozen=True):
    """A profile, and what makes it doubtful beside its own warnings."""

    profile: Profile
    warnings: list[str] = []


class TuningResult(msgspec.Struct, frozen=True):
    """What tuning found for the target of a device: the report, and the lines that a compiler for it takes."""

    device: str
    report: TuningReport
    records: list[str]


class TuningRequest(msgspec.Struct, frozen=True):
    """A model to tune, without its file and parameters, which are arrays of bytes."""

    network: Model
    seconds: float
    platform: Platform | None = None


def settle(_: Session, arguments: dict[str, Any], __: list[Array]) -> tuple[BoardPlatform, list[Array]]:
    """Settle the platform that is given on this board, or the one that is found."""
    given = msgspec.convert(arguments.get("platform"), Platform | None)
    with warnings_meanwhile() as warned:
        settled = settle_platform(HERE.platform(given, None))[1]
    kind = python_platform.machine()
    return BoardPlatform(settled, kind, processor(), versions_of(settled), warned), []


def profile(session: Session, arguments: dict[str, Any], _: list[Array]) -> tuple[Profile, list[Array]]:
    """Measure every operator on every device, and the links."""
    bundle = _opened(session, arguments)
    backend, repeats, strict = platform_backend(bundle.platform), int(arguments["repeats"]), bool(arguments["strict"])
    return HERE.profile(backend, bundle.compiled, bundle.platform, repeats, strict), []


def joules(session: Session, arguments: dict[str, Any], _: list[Array]) -> tuple[CheckedProfile, list[Array]]:
    """Add joules to a profile, by a sensor of this board."""
    bundle = _opened(session, arguments)
    known = msgspec.convert(arguments["profile"], Profile)
    with warnings_meanwhile() as warned:
        found = HERE.with_joules(bundle.compiled, bundle.platform, known, arguments["sensor"])
    return CheckedProfile(found, warned), []


def check_sensor(_: Session, arguments: dict[str, Any], __: list[Array]) -> tuple[None, list[Array]]:
    """Raise where this board has no sensor of a name."""
    HERE.check_sensor(arguments["sensor"])
    return None, []


def doubts(session: Session, arguments: dict[str, Any], _: list[Array]) -> tuple[list[str], list[Array]]:
    """Return why a profile may not be one of this board."""
    known = msgspec.convert(arguments["profile"], Profile)
    settled = msgspec.convert(arguments["platform"], Platform)
    return HERE.doubts(Path(arguments["source"]), known, settled), []


def turn(session: Session, arguments: dict[str, Any], _: list[Array]) -> tuple[Turn, list[Array]]:
    """Run a plan for so many seconds on noise; with a sensor, or without one by the watts of the platform, its joules.

    Moments of `Turn.full_s` are of this board's clock.
    """
    bundle, plan = _opened(session, arguments), Plan.parse(arguments["plan"])
    sensor, seconds = arguments.get("sensor"), float(arguments["seconds"])
    if sensor is None:
        return HERE.run(bundle.compiled, bundle.platform)(plan, seconds), []
    known = msgspec.convert(arguments["profile"], Profile)  # which has the power of the idle board
    problem = Problem(bundle.graph, bundle.platform, known, plan.objective)
    with ExitStack() as stack:
        measuring = stack.enter_context(HERE.metering(problem, sensor))
        return measuring(bundle.compiled, bundle.platform)(plan, seconds), []


def stage_time(session: Session, arguments: dict[str, Any], _: list[Array]) -> tuple[SegmentProfile, list[Array]]:
    """Time operators as one stage on a device."""
    bundle = _opened(session, arguments)
    timed = HERE.stage_timer(bundle.compiled, bundle.platform)
    return timed(arguments["operators"], bundle.platform.device(arguments["device"])), []


def compare(
    session: Session, arguments: dict[str, Any], _: list[Array]
) -> tuple[Mapping[str, Mapping[str, str]], list[Array]]:
    """Run every operator on each kind of device of this board; return what some must not compute."""
    bundle = _opened(session, arguments)
    return bundle.compiled.compare(bundle.platform.devices), []


def compute(session: Session, arguments: dict[str, Any], arrays: list[Array]) -> tuple[None, list[Array]]:
    """Return the outputs of the unsplit model on a device, for the inputs of these names."""
    bundle = _opened(session, arguments)
    frame = dict(zip(arguments["inputs"], arrays, strict=True))
    return None, outputs_on(bundle.compiled, bundle.platform.device(arguments["device"]), frame)


def tune(_: Session, arguments: dict[str, Any], arrays: list[Array]) -> tuple[list[TuningResult], list[Array]]:
    """Search for faster kernels by this board's own compiler; return what a compiler elsewhere takes."""
    asked = msgspec.convert(arguments, TuningRequest)
    content, params = (array.tobytes() for array in arrays)
    model = replace(asked.network, content=content, params=params)
    found = tune_model(model, asked.platform, asked.seconds)
    return [TuningResult(d.name, report, find_backend(d.backend).tuning_records(d)) for d, report in found], []


def _opened(session: Session, arguments: dict[str, Any]) -> Bundle:
    bundle = session.opened(arguments["bundle"])
    if bundle.application:
        raise BundleError("the bundle holds a whole application, whose source is not here; run it on the board itself")
    return bundle


MEASURING = {
    "check_sensor": check_sensor,
    "compare": compare,
    "compute": compute,
    "doubts": doubts,
    "joules": joules,
    "profile": profile,
    "settle": settle,
    "stage_time": stage_time,
    "tune": tune,
    "turn": turn,
}
