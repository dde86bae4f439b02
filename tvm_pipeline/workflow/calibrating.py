"""The models of a platform's devices, refitted to stages that are measured on those that are here.

    found = calibrate_platform(["squeezenet", "mobilenet"], read_platform("board.toml"))
    print(platform_toml(found.platform, found.comments))

Next: `calibration/measuring.py`, which measures one device; `modelled.py`, which says what plans then rest on.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.backends.registry import description, find_backend, settle_platform
from tvm_pipeline.calibration.constants import with_constants
from tvm_pipeline.calibration.fit import LEAST_STAGES, Calibration, Constant
from tvm_pipeline.calibration.measuring import STAGES, Measuring, measured_model
from tvm_pipeline.calibration.shipped import shipped_model
from tvm_pipeline.calibration.stage_choice import report
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device, Link, Platform
from tvm_pipeline.cost.device_costs import can_time_operators
from tvm_pipeline.errors import ModelError, OptionError, PlatformError, ProfileError
from tvm_pipeline.frontends import Shapes, load
from tvm_pipeline.planning.measured import SegmentTimer
from tvm_pipeline.profiling import stage_timer
from tvm_pipeline.profiling.environment import environment
from tvm_pipeline.profiling.links import fit_links
from tvm_pipeline.profiling.twins import equal_devices
from tvm_pipeline.runtime.isolation import DeviceProcesses, isolated
from tvm_pipeline.workflow.machine_modes import this_machine

ADVICE = 3  # badly known constants of which it is said what would tell them
WIDTH = 110  # of a line of comments

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CalibratedDevices:
    """Equal devices, with the model that the measurements on the first of them give.

    Attributes:
        names: of the devices in the platform.
        found: what was measured on the first of them.
        advice: sentences that say what to measure next.
    """

    names: tuple[str, ...]
    found: Measuring
    advice: tuple[str, ...]

    @property
    def badly_known(self) -> dict[str, Constant]:
        """The constants of which the stages tell little, by name."""
        return {name: each for name, each in self.found.calibration.constants.items() if not each.is_known}


@dataclass(frozen=True, slots=True)
class CalibratedPlatform:
    """A platform whose devices have refitted models.

    Attributes:
        platform: as it was given, with these models, and with links between the devices where it stated none.
        groups: of equal devices, those that were calibrated.
        left_out: the devices that were not calibrated, with the reasons.
        comments: for the head of the platform's file.
    """

    platform: Platform
    groups: tuple[CalibratedDevices, ...]
    left_out: Mapping[str, str]
    comments: tuple[str, ...]


def calibrate_platform(
    sources: Sequence[str],
    platform: Platform | None = None,
    shapes: Shapes | None = None,
    count: int = STAGES,
    timer: Callable[[CompiledModel], SegmentTimer] = stage_timer,
) -> CalibratedPlatform:
    """Measure stages of models on the devices of a platform that are here, one device after the other.

    Of equal devices the first is measured. A device that is missing is left out, also where another processor would
    compute its stages: the times of a stand-in are not the device's. So is a device whose measurements cannot be
    fitted, where others can.

    Args:
        sources: what `load` takes; three networks or more that differ say most.
        platform: without it, this machine's devices that take the first model.
        shapes: of the inputs of all models, where their files leave them open.
        count: how many stages are measured on each device.

    Raises:
        OptionError: no model, one model twice, or too few stages.
        PlatformError: no device of the platform is here.
        ModelError: a model cannot be read, or not be compiled for a device.
        ProfileError: the measurements of no device can be fitted; see `calibrated`.
    """
    if not sources:
        raise OptionError("give at least one model whose stages are measured")
    if twice := [source for source in sources if sources.count(source) > 1]:
        raise OptionError(f"{twice[0]} is given twice; give each model once")
    if count < LEAST_STAGES:
        raise OptionError(
            f"`stages_to_measure` {count}: the constants of a device need at least {LEAST_STAGES}",
            option="stages_to_measure",
            value=count,
        )
    models = {source: load(source, shapes) for source in sources}
    platform = platform or this_machine(models[sources[0]])
    here, left_out = _local_devices(platform)
    for line in left_out.values():
        _log.warning(line)
    for device in here:
        if device.layer_times:
            _log.warning(f"{device.name}: its calibrated model takes the place of its layer times")
    if not here:
        raise PlatformError(
            f"no device of platform {platform.name} can be calibrated: {'; '.join(left_out.values())}. Plug one in, or "
            "give the platform of this machine, as `tvm-pipeline devices` writes it"
        )
    groups: list[CalibratedDevices] = []
    refused: list[ProfileError] = []
    for devices in _equal(here):
        first, *others = devices
        names = tuple(device.name for device in devices)
        if others:
            _log.info(f"{', '.join(names)} are equal: {first.name} is measured for all of them")
        try:
            found = _measured(first, models, count, timer)
        except ProfileError as error:
            if len(names) == len(here):
                raise
            refused.append(error)
            left_out |= dict.fromkeys(names, f"not calibrated: {error}")
            _log.warning(f"not calibrated: {error}")
            continue
        *each, last = report(found.calibration, found.rest, found.times)
        groups.append(CalibratedDevices(names, found, (*each[:ADVICE], last)))
    if not groups:
        raise refused[0]
    fitted = {name: group.found.calibration for group in groups for name in group.names}
    refitted = tuple(
        replace(device, layer_times="", model=_written(fitted[device.name])) if device.name in fitted else device
        for device in platform.devices
    )
    links = (*platform.links, *_links(platform, here, models[sources[0]]))
    comments = _comments(list(models.values()), groups, left_out)
    return CalibratedPlatform(replace(platform, devices=refitted, links=links), tuple(groups), left_out, comments)


def _local_devices(platform: Platform) -> tuple[list[Device], dict[str, str]]:
    """Return the devices that are here, settled; and of the others, by name, why they are not calibrated."""
    here, left_out = [], {}
    for device in platform.devices:
        try:
            settled = find_backend(device.backend).settle(device)
        except PlatformError as error:
            left_out[device.name] = f"not calibrated: {device.name}: {error}"
            continue
        if settled.stand_in:
            left_out[device.name] = (
                f"not calibrated: {device.name} is missing; its stages would run on {settled.stand_in}"
            )
        else:
            here.append(settled)
    return here, left_out


def _equal(devices: Sequence[Device]) -> list[list[Device]]:
    """Return the devices in groups of equal ones, so that one of each is measured.

    Devices without cores are equal where their backend describes them alike and their targets differ in an index alone,
    such as usb:0 and usb:1.
    """
    groups: dict[object, list[Device]] = {}
    for number, alike in enumerate(equal_devices(devices)):
        for device in alike:
            bare = device.backend, device.target.partition(":")[0], description(device)
            groups.setdefault((number if device.cores else bare, shipped_model(device)), []).append(device)
    return list(groups.values())


def _measured(
    device: Device, models: Mapping[str, Model], count: int, timer: Callable[[CompiledModel], SegmentTimer]
) -> Measuring:
    with ExitStack() as opened:
        opened.callback((processes := DeviceProcesses()).end)
        compiled = []
        for source, model in models.items():
            _log.info(f"compiling {source} for {device.name}")
            try:
                made = opened.enter_context(closing(_compiled(model, device)))
                apart = isolated(made, Platform(device.name, (device,)), (), processes=processes, every=False)
                compiled.append(opened.enter_context(apart))
            except ModelError as error:
                raise ModelError(
                    f"{source} does not compile for device {device.name}: {error}; give a model that it takes, or "
                    "leave the device out of the platform file"
                ) from error
        return measured_model(device, compiled, shipped_model(device), count, timer)


def _compiled(model: Model, device: Device) -> CompiledModel:
    backend, settled = settle_platform(Platform(device.name, (device,)))
    return backend.compile(model, settled.devices)


def _links(platform: Platform, devices: Sequence[Device], model: Model) -> list[Link]:
    """Measure the links between devices of which the platform states none; an Edge TPU's transfers are its model's."""
    timed = [device for device in devices if can_time_operators(device)]
    stated = {(link.source, link.destination) for link in platform.links}
    _log.info("links between devices")
    with ExitStack() as models, ExitStack() as stages:
        runners = {}
        for device in timed if len(timed) > 1 else ():
            compiled = models.enter_context(closing(_compiled(model, device)))
            [first, *_] = compiled.computes(device)
            runners[device] = stages.enter_context(closing(compiled.stage([first], device)))
        return [link for link in fit_links(runners) if (link.source, link.destination) not in stated]


def _written(calibration: Calibration) -> DeviceModel:
    """Return the refitted model as a file has it: its figures are not known to more than four digits."""
    figures = {name: float(f"{constant.fitted:.4g}") for name, constant in calibration.constants.items()}
    return replace(with_constants(calibration.model, figures), error=float(f"{calibration.error:.2g}"))


def _comments(
    models: Sequence[Model], groups: Sequence[CalibratedDevices], left_out: Mapping[str, str]
) -> tuple[str, ...]:
    """Return what the platform's file says of where its models are from."""
    kept = ("date", "processor", "board", "power mode", "tvm")
    known = environment(find_backend(groups[0].found.device.backend).versions())
    lines = [
        "Written by `tvm-pipeline calibrate`: the models of the devices below were refitted to measured stages.",
        *(f"{key}: {known[key]}" for key in kept if key in known),
        f"networks: {', '.join(model.name for model in models)}",
        "errors: the mean of |predicted - measured| / measured",
    ]
    for group in groups:
        calibration = group.found.calibration
        lines.append(
            f"{', '.join(group.names)}: {calibration.stages} stages; error {calibration.error:.1%}, leaving out "
            f"{calibration.left_out}; {calibration.prior_error:.1%} before"
        )
        if group.badly_known:
            lines.append(f"    badly known: {', '.join(group.badly_known)}")
    lines += dict.fromkeys(left_out.values())
    return tuple(part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="    "))
