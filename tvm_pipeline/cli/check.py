"""`tvm-pipeline check`: tries what we claim about the devices of this machine, and writes a report for an issue.

Each device is tried in a process of its own, and so is the pipeline: one that crashes or hangs there fails its claim,
and the report says how. What devices compute are the networks of `testing/whole_numbers.py`, on which all devices must
give the bits that numpy gives. So a result of the pipeline tells which frame it belongs to.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import typer
from packaging.requirements import Requirement

from tvm_pipeline.backends.contract import Backend, CompiledModel
from tvm_pipeline.backends.ports import Array
from tvm_pipeline.backends.registry import OWN_PACKAGE, description, find_backend, left_out, versions_of
from tvm_pipeline.cli.options import PlatformOption, check_outputs
from tvm_pipeline.cli.output import say, show, with_options
from tvm_pipeline.core.plan import Plan, describe
from tvm_pipeline.core.platform import Device, Platform, read_platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.errors import ModelError, NoPlanError, OptionError, PipelineError, PlatformError, RunError
from tvm_pipeline.files import write_bytes
from tvm_pipeline.planning import plan as best_plan
from tvm_pipeline.power import mean_watts, survey
from tvm_pipeline.processes import Child
from tvm_pipeline.profiling.bound import in_bound_thread
from tvm_pipeline.profiling.environment import environment
from tvm_pipeline.profiling.links import SIZES, fit_transfer
from tvm_pipeline.profiling.throttling import ThrottleWatch
from tvm_pipeline.runtime import LivePipeline
from tvm_pipeline.runtime.isolation import isolated, making_limit_s
from tvm_pipeline.testing import ContractError, check_backend
from tvm_pipeline.testing.cut_cases import buffers, fill, logical, operator_names
from tvm_pipeline.testing.whole_numbers import BRANCHES, FORMATS, OPERATOR, UNCHANGED, Network, as_input, as_numbers
from tvm_pipeline.workflow.machine_modes import this_machine
from tvm_pipeline.workflow.steps import compile_source, measured_profile

LIMIT_S = 600.0  # for one claim: a small board compiles for minutes
WATCHDOG_S = 20.0  # for a stage at one frame
FRAMES = 64  # of the pipeline that differ
REPEATS = 5


class Claim(msgspec.Struct, frozen=True):
    """What was tried of a device, of a sensor or of the machine, and what came of it."""

    subject: str
    claim: str
    state: Literal["passed", "failed", "not tried"]
    told: str
    figures: dict[str, float] = {}


class NotTriedError(Exception):
    """A claim cannot be tried here; the message is the reason."""


# Tries one claim: says what holds, with figures, or raises what does not.
Attempt = Callable[[], tuple[str, dict[str, float]]]


class Order(msgspec.Struct):
    """What a child is to try: a device, or the pipeline over those of a platform file or of this machine."""

    device: Device | None
    platform: str
    seconds: float
    pull: bool
    stand_ins: bool


def command(
    platform: PlatformOption = None,
    minutes: Annotated[float, typer.Option(help="How long the pipeline over all devices runs.")] = 2.0,
    pull: Annotated[
        bool, typer.Option("--pull", help="You pull a device out while the pipeline runs: no frame may be lost.")
    ] = False,
    stand_ins: Annotated[
        bool, typer.Option("--stand-ins", help="Accept software that stands in for a device, such as PoCL.")
    ] = False,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The file for the report, as JSON, to attach to an issue.")
    ] = Path("check.json"),
) -> None:
    """Try every claim about the devices of this machine, and write a report that can be attached to an issue.

    Each claim passed, failed or was not tried, with the reason. The status is 1 if one failed.

    Example: tvm-pipeline check --minutes 2 -o check.json
    """
    if not minutes > 0:
        raise OptionError(f"--minutes {minutes:g}: the pipeline runs for a positive time")
    check_outputs(output, inputs=(platform,))
    machine = read_platform(platform) if platform else this_machine(None)
    claims = []
    for claim in _claims(machine, Order(None, str(platform or ""), 60 * minutes, pull, stand_ins)):
        show(with_options(f"{claim.state:9}  {claim.subject}: {claim.claim}: {claim.told}"), False)
        claims.append(claim)
    about = {**environment(versions_of(machine)), OWN_PACKAGE: version(OWN_PACKAGE)}
    write_bytes(output, msgspec.json.format(msgspec.json.encode({"environment": about, "claims": claims})))
    states = [claim.state for claim in claims]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("passed", "failed", "not tried"))
    show(f"{counts}; written: {output}", False)
    raise typer.Exit(int("failed" in states))


def _claims(machine: Platform, order: Order) -> Iterator[Claim]:
    watch = ThrottleWatch()
    watch.look_now()
    for line in left_out():
        yield Claim("machine", "detection", "not tried", line)
    yield _tried("machine", "versions", partial(_versions, machine))
    yield from _power()
    alike: dict[tuple[str, str], list[Device]] = {}  # the same code runs on them; one with all cores tries it
    for device in sorted(machine.devices, key=lambda device: -len(device.cores)):
        alike.setdefault((device.backend, device.target), []).append(device)
    for devices in alike.values():
        names = ", ".join(device.name for device in devices)
        own = msgspec.structs.replace(order, device=devices[0])
        yield from _answers("on_device", own, names, ("detection", *ON_DEVICE), LIMIT_S)
        watch.look_now()
    yield from _answers("in_pipeline", order, "machine", ("pipeline", "pulled device"), LIMIT_S + order.seconds)
    watch.look_now()
    yield _tried("machine", "throttling", partial(_throttling, watch))


def _answers(function: str, order: Order, subject: str, claims: Sequence[str], limit_s: float) -> Iterator[Claim]:
    """Yield what a child tells of each claim; once it crashes or hangs, the claims that are left are not tried."""
    child = Child(f"{__name__}:{function}", msgspec.json.encode(order), keeps_words=True)
    with ExitStack() as stack:
        stack.callback(child.end)
        if order.device is None and order.pull:
            say("pull a device out now, and plug it in again after some seconds")
        for position, claim in enumerate(claims):
            how = f"took more than {limit_s:g} s and was ended; plug the device in again, or reboot"
            answer = b""
            with suppress(TimeoutError):
                answer, _ = child.receive(time.monotonic() + limit_s)
                how = f"{child.how()}; `dmesg` may say why" if not answer else ""
            if answer:
                yield msgspec.structs.replace(msgspec.json.decode(answer, type=Claim), subject=subject)
                continue
            words = " ".join(child.words.split())[-400:]
            yield Claim(subject, claim, "failed", f"its process {how}{words and f': {words}'}")
            yield from (Claim(subject, other, "not tried", f"{claim} failed") for other in claims[position + 1 :])
            return


def _tried(subject: str, claim: str, attempt: Attempt) -> Claim:
    try:
        return Claim(subject, claim, "passed", *attempt())
    except NotTriedError as error:
        return Claim(subject, claim, "not tried", str(error))
    except (PipelineError, ContractError) as error:
        return Claim(subject, claim, "failed", str(error))
    except Exception as error:  # whatever a device or its driver does, the report tells it
        return Claim(subject, claim, "failed", f"{type(error).__name__}: {error}")


# The machine


def _versions(machine: Platform) -> tuple[str, dict[str, float]]:
    """Compare what is installed with the extras of this package. An extra counts if all that it names is installed."""
    extras: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, requires(OWN_PACKAGE) or ()):
        extras.setdefault(str(requirement.marker).rpartition("extra == ")[2], []).append(requirement)
    wrong = []
    for requirements in extras.values():
        with suppress(PackageNotFoundError):
            installed = [(requirement, version(requirement.name)) for requirement in requirements]
            wrong += [both for both in installed if not both[0].specifier.contains(both[1], prereleases=True)]
    if wrong:
        mend = (
            f"{need.name} {here} is installed; run `pip install '{need.name}{need.specifier}'`" for need, here in wrong
        )
        raise PlatformError("; ".join(mend))
    named = ", ".join(f"{name} {found}" for name, found in versions_of(machine).items())
    return named or "the packages of each extra have its versions", {}


def _power() -> Iterator[Claim]:
    """Yield a claim for each sensor of power: it gives figures."""
    found = survey()
    seconds = max([0.5, *(2.5 * sensor.period_s for sensor in found.sensors)])
    now = mean_watts(found.sensors, seconds)
    for name, reason in (found.obstacles | now.obstacles).items():
        yield Claim(name, "power", "failed", reason)
    for sensor in found.sensors:
        watts = now.watts.get(sensor.name)
        if watts is None and sensor.name not in now.obstacles:
            yield Claim(sensor.name, "power", "failed", f"no second reading came within {seconds:g} s")
        elif watts == 0 and sensor.scope == "board":
            yield Claim(sensor.name, "power", "failed", f"{sensor.covers} cannot draw 0 W; is the sensor wired?")
        elif watts is not None:
            yield Claim(sensor.name, "power", "passed", f"{watts:.2f} W, {sensor.covers}", {"watts": watts})
    if not found.sensors and not found.obstacles:
        yield Claim("machine", "power", "not tried", f"no sensor was found of {', '.join(found.looked_for)}")


def _throttling(watch: ThrottleWatch) -> tuple[str, dict[str, float]]:
    if watch.begun:
        raise PlatformError(f"the machine was throttled: {watch.begun}; cool it, or feed it more current")
    if not watch.can_tell:
        raise NotTriedError("this system shows no cooling device, no thermal zone and no counter")
    celsius = watch.hottest_c()
    return "no sign of it" + (f"; the hottest zone has {celsius:.0f} °C" if celsius else ""), {}


# One device, in a child


def on_device(told: bytes, channel: socket.socket) -> None:
    """Tell the claims about a device, one message each."""
    order = msgspec.json.decode(told, type=Order)
    assert order.device
    device = order.device

    def detected() -> tuple[str, dict[str, float]]:
        nonlocal device
        device = find_backend(device.backend).settle(device)
        if device.stand_in and not order.stand_ins:
            raise PlatformError(f"{device.stand_in} stands in for it")
        return device.stand_in or description(device) or device.target, {}

    found = _tried("", "detection", detected)
    channel.send(msgspec.json.encode(found))
    for name, attempt in ON_DEVICE.items():
        claim = Claim("", name, "not tried", "the device cannot be used")
        if found.state == "passed":
            claim = _tried("", name, partial(attempt, find_backend(device.backend), device))
        channel.send(msgspec.json.encode(claim))


def _operator(backend: Backend, device: Device) -> tuple[str, dict[str, float]]:
    frames = [OPERATOR.frame(number) for number in range(REPEATS)]
    with _opened(backend, OPERATOR, device) as (_, run):
        for frame in frames:
            apart = np.abs(run(frame) - OPERATOR.expected(frame))
            if apart.any():
                raise RunError(
                    f"a convolution of whole numbers is not numpy's: {np.count_nonzero(apart)} of {apart.size} values "
                    f"differ, by up to {apart.max():g}; update the device's driver, and attach this report to an issue"
                )
    return "a convolution gives what numpy gives", {}


def _transfers(backend: Backend, device: Device) -> tuple[str, dict[str, float]]:
    """Send numbers through an operator that changes none, and time how the device receives and sends them."""
    with _opened(backend, UNCHANGED, device) as (compiled, run):
        limit = 2**23 if _format([backend]) == "onnx" else 2**7
        frame = np.random.default_rng(0).integers(-limit, limit, UNCHANGED.shape)
        changed = np.count_nonzero(run(frame) != frame)
        if changed:
            raise RunError(
                f"{changed} of {frame.size} numbers came back changed; try another cable, port or driver, and attach "
                "this report to an issue"
            )
        with closing(compiled.stage(operator_names(compiled.graph), device)) as runner:
            seconds = in_bound_thread(runner, lambda: compiled.time_transfers(device, SIZES, REPEATS))
    told = f"{frame.size} numbers came back unchanged; it "
    if seconds is None:
        return f"{told}computes in the host's memory", {}
    received, sent = (fit_transfer(SIZES, np.median(one, 0)).bandwidth_bytes_per_s or 0.0 for one in seconds)
    rates = {"received_bytes_per_s": received, "sent_bytes_per_s": sent}
    return f"{told}receives {received / 1e9:.3g} GB/s and sends {sent / 1e9:.3g} GB/s", rates


def _slices(backend: Backend, device: Device) -> tuple[str, dict[str, float]]:
    check_backend(backend, BRANCHES.written(_format([backend])), [device])
    return "all cuts, pipelines and a saved model give the bits of the unsplit model", {}


ON_DEVICE: Mapping[str, Callable[[Backend, Device], tuple[str, dict[str, float]]]] = {
    "operator": _operator,
    "transfers": _transfers,
    "slices": _slices,
}


def _format(backends: Iterable[Backend]) -> str:
    """Return the first format of models that all backends take; raise ModelError where there is none."""
    reasons: list[str] = []
    for format in FORMATS:
        try:
            refused = [backend.refuses(BRANCHES.written(format)) for backend in backends]
        except ModelError as error:
            refused = [str(error)]
        if not any(refused):
            return format
        reasons += filter(None, refused)
    raise ModelError("; ".join(reasons))


@contextmanager
def _opened(
    backend: Backend, network: Network, device: Device
) -> Iterator[tuple[CompiledModel, Callable[[Array], Array]]]:
    """Compile a network for a device; yield it, and a function that computes it whole, as `Network.expected` does."""
    format = _format([backend])
    with ExitStack() as stack:
        compiled = stack.enter_context(closing(backend.compile(network.written(format), [device])))
        runner = stack.enter_context(closing(compiled.stage(operator_names(compiled.graph), device)))

        def run(frame: Array) -> Array:
            inputs, outputs = buffers(runner)
            fill(runner, inputs, {"x": as_input(frame, format)})
            runner.run(inputs, outputs)
            return as_numbers(logical(compiled.graph, runner, outputs)[compiled.graph.outputs[0]], format)

        yield compiled, lambda frame: in_bound_thread(runner, lambda: run(frame))


# The pipeline, in a child


def in_pipeline(told: bytes, channel: socket.socket) -> None:
    """Tell the claims about a pipeline over all devices: that no frame is lost, also where a device is pulled out."""
    order, failures = msgspec.json.decode(told, type=Order), list[str]()
    whole = _tried("", "pipeline", partial(_pipeline, order, failures))

    def pulled() -> tuple[str, dict[str, float]]:
        if not order.pull:
            raise NotTriedError("it takes --pull, and somebody who pulls a device out")
        if whole.state == "failed" or not failures:
            raise NotTriedError("the pipeline failed" if whole.state == "failed" else "no device was pulled out")
        return f"no frame was lost: {failures[0]}", {}

    for claim in (whole, _tried("", "pulled device", pulled)):
        channel.send(msgspec.json.encode(claim))


def _pipeline(order: Order, failures: list[str]) -> tuple[str, dict[str, float]]:
    path = Path(order.platform) if order.platform else None
    machine = read_platform(path) if path else this_machine(None)
    format = _format([find_backend(name) for name in sorted({device.backend for device in machine.devices})])
    made = compile_source(BRANCHES.written(format), platform=path)
    graph, compiled = made.compiled.graph, made.compiled
    problem = Problem(graph, made.platform, measured_profile(made, repeats=REPEATS))
    plan = _over_all(problem)
    frames = [BRANCHES.frame(number) for number in range(FRAMES)]
    inputs = [{"x": as_input(frame, format)} for frame in frames]
    numbers = {BRANCHES.expected(frame).astype(float).tobytes(): number for number, frame in enumerate(frames)}
    sent, came = 0, list[int | None]()

    def stream(until_s: float) -> Iterator[dict[str, Array]]:
        nonlocal sent
        while time.monotonic() < until_s:
            yield inputs[sent % FRAMES]
            sent += 1

    with ExitStack() as stack:
        if order.pull:  # a driver may end the process that uses the device
            compiled = stack.enter_context(isolated(compiled, made.platform, plan.stages))
        live = LivePipeline(compiled, problem, plan, watchdog_s=WATCHDOG_S, making_s=making_limit_s(graph))
        pipeline = stack.enter_context(live)
        for result in pipeline.map(stream(time.monotonic() + order.seconds)):
            [output] = result.outputs.values()
            whole = as_numbers(output.reshape(graph.tensors[graph.outputs[0]].shape), format)
            came.append(numbers.get((whole + 0.0).astype(float).tobytes()))  # -0 becomes 0
        failures += [event.reason for event in pipeline.events if event.kind == "failure"]
    faults = frame_faults(came, sent)
    told = f"{sent} frames in, {len(came)} out: {', '.join(f'{n} {what}' for what, n in faults.items())}"
    if any(faults.values()) or not came or (failures and not order.pull):
        raise RunError(f"{told}, on {describe(plan)}; {'; '.join(failures) or 'attach this report to an issue'}")
    return f"{told}, on {describe(plan)}", {"frames": len(came), "fps": len(came) / order.seconds}


def _over_all(problem: Problem) -> Plan:
    """Return the best plan with a stage on each device that has no cores of another one, accelerators first."""
    apart: list[Device] = []
    for device in sorted(problem.platform.devices, key=lambda device: len(device.cores)):
        if not any(device.overlaps(other) for other in apart):
            apart.append(device)
    for count in range(min(len(apart), len(problem.graph)), 1, -1):
        platform = replace(problem.platform, devices=tuple(apart[:count]), links=())
        with suppress(NoPlanError):
            return best_plan(replace(problem, platform=platform, stages=count)).plan
    return best_plan(problem).plan


def frame_faults(came: Sequence[int | None], sent: int) -> dict[str, int]:
    """Return how many frames were lost, repeated, out of order, or had wrong values.

    Args:
        came: of each frame that came out, its number modulo FRAMES; None for one with wrong values.
        sent: how many went in.
    """
    seen: list[int] = []
    following = 0
    for number in came:
        if number is not None:  # the frame of this number that is next to the one which should follow
            ahead = (number - following + FRAMES // 2) % FRAMES - FRAMES // 2
            seen.append(following + ahead)
            following = max(following, seen[-1])
        following += number is None or seen[-1] == following
    wrong = len(came) - len(seen)
    return {
        "lost": max(0, sent - wrong - len(set(seen))),
        "repeated": len(seen) - len(set(seen)),
        "out of order": sum(after < before for before, after in itertools.pairwise(seen)),
        "with wrong values": wrong,
    }
