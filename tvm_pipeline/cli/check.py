"""`tvm-pipeline check`: tries what we claim about the devices of this machine, and writes a report for an issue.

Each device is tried in a process of its own, and so is the pipeline: one that crashes or hangs there fails its claim,
and the report says how. What devices compute are the networks of `testing/whole_numbers.py`, on which all devices must
give the bits that numpy gives. So a result of the pipeline tells which frame it belongs to.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
import numpy as np
import typer
from packaging.requirements import Requirement

from tvm_pipeline.backends.contract import Backend, CompiledModel, StageRunner
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
from tvm_pipeline.power import mean_watts, power_modes, survey
from tvm_pipeline.power.log_file import MOST_W
from tvm_pipeline.processes import Child
from tvm_pipeline.profiling.bound import in_bound_thread
from tvm_pipeline.profiling.environment import environment
from tvm_pipeline.profiling.throttling import ThrottleWatch
from tvm_pipeline.runtime import LivePipeline
from tvm_pipeline.runtime.isolation import isolated, making_limit_s
from tvm_pipeline.testing import ContractError, check_backend
from tvm_pipeline.testing.cut_cases import buffers, fill, logical
from tvm_pipeline.testing.whole_numbers import ADDITION, BRANCHES, CONVOLUTION, FORMATS, Network, as_input, as_numbers
from tvm_pipeline.workflow.compiling import CompileOptions, compiled_on
from tvm_pipeline.workflow.machine_modes import this_machine
from tvm_pipeline.workflow.steps import measured_profile

LIMIT_S = 600.0  # for one claim: a small board compiles for minutes
WATCHDOG_S = 20.0  # for a stage at one frame
FRAMES = 64  # of the pipeline that differ
LEAST_FRAMES = 2 * FRAMES
REPEATS = 5
COPIED_BYTES = 1 << 12, 1 << 26  # of the second, a copy takes more than twice as long on any link


class Claim(msgspec.Struct, frozen=True):
    """What was tried of a device, of a sensor or of the machine, and what came of it."""

    subject: str
    claim: str
    state: Literal["passed", "failed", "not tried"]
    told: str
    figures: dict[str, float] = {}


class NotTriedError(Exception):
    """A claim cannot be tried here; the message is the reason."""


Finding: TypeAlias = tuple[str, dict[str, float]]  # what holds, with figures


class CheckRequest(msgspec.Struct):
    """What a child is to try: the device of that name; without a name the pipeline over all devices.

    Attributes:
        unused: devices that the pipeline is not to use, each with the reason.
    """

    machine: Platform
    device: str
    unused: dict[str, str]
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
    machine = replace(read_platform(platform) if platform else this_machine(None), power_modes=())
    claims = []
    for claim in _claims(CheckRequest(machine, "", {}, 60 * minutes, pull, stand_ins)):
        show(with_options(f"{claim.state:9}  {claim.subject}: {claim.claim}: {claim.told}"), False)
        claims.append(claim)
    about = {**environment(versions_of(machine)), OWN_PACKAGE: version(OWN_PACKAGE)}
    write_bytes(output, msgspec.json.format(msgspec.json.encode({"environment": about, "claims": claims})))
    states = [claim.state for claim in claims]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("passed", "failed", "not tried"))
    show(f"{counts}; written: {output}", False)
    raise typer.Exit(int("failed" in states))


def _claims(order: CheckRequest) -> Iterator[Claim]:
    watch = ThrottleWatch()
    watch.look_now()
    for line in left_out():
        yield Claim("machine", "detection", "not tried", line)
    yield _tried("machine", "versions", partial(_versions, order.machine))
    yield _tried("machine", "clocks", _clocks)
    yield from _power()
    alike: dict[tuple[str, str], list[str]] = {}  # the same code runs on them; one with all cores tries it
    for device in sorted(order.machine.devices, key=lambda device: -len(device.cores)):
        alike.setdefault((device.backend, device.target), []).append(device.name)
    for names in alike.values():
        for claim in _answers(msgspec.structs.replace(order, device=names[0]), ", ".join(names)):
            yield claim
            if claim.state == "failed":
                order.unused |= dict.fromkeys(names, f"{claim.claim} failed")
        watch.look_now()
    yield from _answers(order, "machine")
    watch.look_now()
    yield _tried("machine", "throttling", partial(_throttling, watch))


def _answers(order: CheckRequest, subject: str) -> Iterator[Claim]:
    """Yield what a child tells of each claim; once it crashes or hangs, the claims that are left are not tried."""
    claims = ("detection", *ON_DEVICE) if order.device else ("pipeline", "pulled device")
    limit_s = LIMIT_S + (0 if order.device else order.seconds)
    child = Child(f"{__name__}:serve", msgspec.json.encode(order), keeps_words=True)
    with ExitStack() as stack:
        stack.callback(child.end)
        if not order.device and order.pull:
            say("pull a device out now, and plug it in again after some seconds")
        for position, claim in enumerate(claims):
            how = f"took more than {limit_s:g} s and was ended; plug the device in again, or reboot"
            with suppress(TimeoutError):
                answer, _ = child.receive(time.monotonic() + limit_s)
                if answer:
                    yield msgspec.structs.replace(msgspec.json.decode(answer, type=Claim), subject=subject)
                    continue
                how = f"{child.how()}; `dmesg` may say why"
            words = " ".join(child.words.split())[-400:]
            yield Claim(subject, claim, "failed", f"its process {how}{words and f': {words}'}")
            yield from (Claim(subject, other, "not tried", f"{claim} failed") for other in claims[position + 1 :])
            return


def serve(request: bytes, channel: socket.socket) -> None:
    """Be a child that tries what it is told, and sends a message for each claim."""
    order = msgspec.json.decode(request, type=CheckRequest)
    for claim in (_device_claims if order.device else _pipeline_claims)(order):
        channel.send(msgspec.json.encode(claim))


def _tried(subject: str, claim: str, attempt: Callable[[], Finding]) -> Claim:
    try:
        return Claim(subject, claim, "passed", *attempt())
    except NotTriedError as error:
        return Claim(subject, claim, "not tried", str(error))
    except (PipelineError, ContractError) as error:
        return Claim(subject, claim, "failed", str(error))
    except Exception as error:  # whatever a device or its driver does, the report tells it
        return Claim(subject, claim, "failed", f"{type(error).__name__}: {error}")


# The machine


def _versions(machine: Platform) -> Finding:
    """Compare what is installed with the extras of this package. An extra counts if all that it names is installed."""
    extras: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, requires(OWN_PACKAGE) or ()):
        extras.setdefault(str(requirement.marker).rpartition("extra == ")[2], []).append(requirement)
    wrong = []
    for needs in extras.values():
        with suppress(PackageNotFoundError):
            for need, here in [(need, version(need.name)) for need in needs]:
                if not need.specifier.contains(here, prereleases=True):
                    wrong.append(f"{need.name} {here} is installed; run `pip install '{need.name}{need.specifier}'`")
    if wrong:
        raise PlatformError("; ".join(wrong))
    named = ", ".join(f"{name} {found}" for name, found in versions_of(machine).items())
    return named or "the packages of each extra have its versions", {}


def _clocks() -> Finding:
    modes = power_modes()
    if unsteady := modes.unsteady():
        raise PlatformError(unsteady)
    if not modes.environment():
        raise NotTriedError("no installed package knows the clocks of this machine")
    return "nothing shows that they follow the load", {}


def _power() -> Iterator[Claim]:
    """Yield a claim for each sensor of power: it gives figures."""
    found = survey()
    seconds = max([0.5, *(2.5 * sensor.period_s for sensor in found.sensors)])
    now = mean_watts(found.sensors, seconds)
    obstacles = found.obstacles | now.obstacles
    for sensor in found.sensors:
        watts = now.watts.get(sensor.name)
        if watts is None:
            obstacles.setdefault(sensor.name, f"no second reading came within {seconds:g} s")
        elif watts == 0 and sensor.scope != "part":
            obstacles[sensor.name] = f"{sensor.covers} cannot draw 0 W: its sensor stands still, or is not wired"
        elif watts > MOST_W:
            obstacles[sensor.name] = f"{watts:.3g} W are more than a socket gives; attach this report to an issue"
        else:
            yield Claim(sensor.name, "power", "passed", f"{watts:.2f} W, {sensor.covers}", {"watts": watts})
    for name, reason in obstacles.items():
        yield Claim(name, "power", "failed", reason)
    if not found.sensors and not obstacles:
        yield Claim("machine", "power", "not tried", f"no sensor was found of {', '.join(found.looked_for)}")


def _throttling(watch: ThrottleWatch) -> Finding:
    if watch.begun:
        raise PlatformError(f"the machine was throttled: {watch.begun}; cool it, or feed it more current")
    if not watch.can_tell:
        raise NotTriedError("this system shows no cooling device, no thermal zone and no counter")
    celsius = watch.hottest_c()
    return "no sign of it" + (f"; the hottest zone has {celsius:.0f} °C" if celsius else ""), {}


# One device, in a child


def _device_claims(order: CheckRequest) -> Iterator[Claim]:
    device = order.machine.device(order.device)
    settled: list[Device] = []

    def detected() -> Finding:
        found = find_backend(device.backend).settle(device)
        if found.stand_in and not order.stand_ins:
            raise PlatformError(f"{found.stand_in} stands in for it")
        settled.append(found)
        return found.stand_in or description(found) or found.target, {}

    yield _tried("", "detection", detected)
    for name, attempt in ON_DEVICE.items():
        if settled:
            yield _tried("", name, partial(attempt, find_backend(device.backend), *settled))
        else:
            yield Claim("", name, "not tried", "detection failed")


def _operator(backend: Backend, device: Device) -> Finding:
    frames = [CONVOLUTION.frame(number) for number in range(REPEATS)]
    with _computed(backend, device, CONVOLUTION, frames, "update the device's driver"):
        return "a convolution gives what numpy gives", {}


def _transfers(backend: Backend, device: Device) -> Finding:
    """Have numbers doubled, which changes no bit of a float but its exponent, and time how they travel."""
    limit = 2**23 if _format([device])[0] == "onnx" else 2**6
    frame = np.random.default_rng(0).integers(-limit, limit, ADDITION.shape)
    with _computed(backend, device, ADDITION, [frame], "try another cable, port or driver") as (compiled, runner):
        seconds = in_bound_thread(runner, lambda: compiled.time_transfers(device, COPIED_BYTES, REPEATS))
    told = f"{frame.size} numbers came back doubled; it "
    if seconds is None:
        return f"{told}computes in the host's memory", {}
    small_s, large_s = np.median(seconds, 1).T  # each of receiving and of sending
    if (large_s < 2 * small_s).any():  # such as PoCL's and a Jetson's, which use the memory of the host in place
        return f"{told}computes in the host's memory: nothing is copied", {}
    received, sent = ((COPIED_BYTES[1] - COPIED_BYTES[0]) / (large_s - small_s)).tolist()
    rates = {"received_bytes_per_s": received, "sent_bytes_per_s": sent}
    return f"{told}receives {received / 1e9:.3g} GB/s and sends {sent / 1e9:.3g} GB/s", rates


def _slices(backend: Backend, device: Device) -> Finding:
    check_backend(backend, BRANCHES.written(_format([device])[0]), [device])
    return "all cuts, pipelines and a saved model give the bits of the unsplit model", {}


ON_DEVICE: Mapping[str, Callable[[Backend, Device], Finding]] = {
    "operator": _operator,
    "transfers": _transfers,
    "slices": _slices,
}


def _format(devices: Sequence[Device]) -> tuple[str, dict[str, str]]:
    """Return the format of models that most of these devices take, and why each of the others refuses it."""

    def refused(format: str) -> Iterator[tuple[str, str]]:
        for device in devices:
            try:
                reason = find_backend(device.backend).refuses(BRANCHES.written(format))
            except ModelError as error:
                reason = str(error)
            if reason:
                yield device.name, reason

    tried = [(format, dict(refused(format))) for format in FORMATS]
    return min(tried, key=lambda one: len(one[1]))


@contextmanager
def _computed(
    backend: Backend, device: Device, network: Network, frames: Sequence[Array], advice: str
) -> Iterator[tuple[CompiledModel, StageRunner]]:
    """Compile a network for a device; yield it and its one stage, once that has given numpy's values of some frames."""
    format, _ = _format([device])
    with ExitStack() as stack:
        compiled = stack.enter_context(closing(backend.compile(network.written(format), [device])))
        runner = stack.enter_context(closing(compiled.stage(compiled.graph.operator_names, device)))
        for frame in frames:
            inputs, outputs = buffers(runner)
            fill(runner, inputs, {"x": as_input(frame, format)})
            in_bound_thread(runner, partial(runner.run, inputs, outputs))
            [output] = logical(compiled.graph, runner, outputs).values()
            wrong = np.count_nonzero(as_numbers(output, format) != network.expected(frame))
            if wrong:
                raise RunError(
                    f"{wrong} of {output.size} values of the {network.name} are not numpy's; {advice}, and attach this "
                    "report to an issue"
                )
        yield compiled, runner


# The pipeline, in a child


def _pipeline_claims(order: CheckRequest) -> Iterator[Claim]:
    """Yield that no frame is lost, and that none is where a device is pulled out."""
    failures: list[str] = []
    yield (whole := _tried("", "pipeline", partial(_pipeline, order, failures)))

    def pulled() -> Finding:
        if not order.pull:
            raise NotTriedError("it takes --pull, and somebody who pulls a device out")
        if whole.state != "passed" or not failures:
            raise NotTriedError("no device was pulled out" if whole.state == "passed" else "the pipeline did not pass")
        return f"no frame was lost: {failures[0]}", {}

    yield _tried("", "pulled device", pulled)


def _pipeline(order: CheckRequest, failures: list[str]) -> Finding:
    """Run frames through a pipeline over all devices that can be used; tell which it does not use, and why."""
    usable = [device for device in order.machine.devices if device.name not in order.unused]
    format, refused = _format(usable)
    unused = order.unused | refused
    names = [device.name for device in usable if device.name not in refused]
    if not names:
        raise NotTriedError(f"no device can be used: {_listed(unused)}")
    options = CompileOptions(None, tuned=True, rewrite=False, asked=True)  # no device is left out without an error
    made = compiled_on(BRANCHES.written(format), order.machine.with_devices(",".join(names)), options)
    graph, compiled = made.compiled.graph, made.compiled
    problem = Problem(graph, made.platform, measured_profile(made, repeats=REPEATS))
    plan = _over_all(problem)
    used = [device for device in made.platform.devices if any(device.name in stage.devices for stage in plan.stages)]
    for device in made.platform.devices:
        if device not in used:
            shared = [other.name for other in used if device.overlaps(other)]
            unused[device.name] = f"{shared[0]} has its cores" if shared else "no plan has a stage on each device"
    on = f"on {describe(plan)}" + (f"; without {_listed(unused)}" if unused else "")
    frames = [BRANCHES.frame(number) for number in range(FRAMES)]
    inputs, expected = [{"x": as_input(frame, format)} for frame in frames], [*map(BRANCHES.expected, frames)]
    sent, came, fault = 0, 0, ""

    def stream(until_s: float) -> Iterator[dict[str, Array]]:
        nonlocal sent
        while time.monotonic() < until_s or sent < LEAST_FRAMES:  # however slow the devices are
            yield inputs[sent % FRAMES]
            sent += 1

    with ExitStack() as stack:
        if order.pull:  # a driver may end the process that uses the device
            compiled = stack.enter_context(isolated(compiled, made.platform, plan.stages))
        live = LivePipeline(compiled, problem, plan, watchdog_s=WATCHDOG_S, making_s=making_limit_s(graph))
        pipeline = stack.enter_context(live)
        for result in pipeline.map(stream(time.monotonic() + order.seconds)):
            [output] = result.outputs.values()
            values = as_numbers(output.reshape(graph.tensors[graph.outputs[0]].shape), format)
            if not fault and (values != expected[came % FRAMES]).any():
                alike = [number for number in range(FRAMES) if (values == expected[number]).all()]
                away = [(number - came + FRAMES // 2) % FRAMES - FRAMES // 2 for number in alike]
                fault = f"; frame {came} has the values of {f'frame {came + away[0]}' if away else 'no frame'}"
            came += 1
        failures += [event.reason for event in pipeline.events if event.kind == "failure"]
    told = f"{sent} frames in, {came} out"
    if fault or came != sent or not came or (failures and not order.pull):
        raise RunError(f"{told}{fault}, {on}; {'; '.join(failures) or 'attach this report to an issue'}")
    return f"{told}, in order, with numpy's values, {on}", {"frames": came, "fps": came / order.seconds}


def _listed(unused: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({reason})" for name, reason in unused.items())


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
