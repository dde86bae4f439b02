"""Problems and profiles as they would be if devices or operators took other seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile


def scaled_profile(profile: Profile, shares: Mapping[str, Mapping[str, float]]) -> Profile:
    """Return the profile with the seconds of some operators multiplied.

    Stages that were measured as a whole are left out, because their seconds contain those of the operators.

    Args:
        shares: by device and operator; others keep their seconds.

    Examples:
        >>> from tvm_pipeline.testing import example_problem
        >>> scaled_profile(example_problem().profile, {"d0": {"double": 0.5}}).device("d0").seconds
        {'double': 0.01, 'increment': 0.04}
    """
    devices = dict(profile.devices)
    for name in devices.keys() & shares.keys():
        seconds = {
            operator: None if taken is None else taken * shares[name].get(operator, 1.0)
            for operator, taken in devices[name].seconds.items()
        }
        devices[name] = replace(devices[name], seconds=seconds)
    return replace(profile, devices=devices, segments=())


def slowed(problem: Problem, factors: Mapping[str, float]) -> Problem:
    """Return the problem with devices that compute `factors` times as long; a device that is not named stays."""
    profile, platform = problem.profile, problem.platform

    def factor(name: str) -> float:
        return factors.get(name, 1.0)

    measured = {name: _slower_profile(device, factor(name)) for name, device in profile.devices.items()}
    segments = tuple(replace(s, seconds=s.seconds * factor(s.device)) for s in profile.segments)
    devices = tuple(replace(d, model=_slower_model(d.model, factor(d.name))) for d in platform.devices)
    return replace(
        problem,
        platform=replace(platform, devices=devices),
        profile=replace(profile, devices=measured, segments=segments),
    )


def with_slower_refill(problem: Problem, factor: float) -> Problem:
    """Return the problem with parameters beyond the caches fetched `factor` times as slowly, and over no bus."""

    def slower(device: Device) -> Device:
        model = device.model
        if model is None or model.refill_bytes_per_s is None:
            return device
        return replace(device, bus="", model=replace(model, refill_bytes_per_s=model.refill_bytes_per_s / factor))

    devices = tuple(map(slower, problem.platform.devices))
    return replace(problem, platform=replace(problem.platform, devices=devices))


def _slower_profile(device: DeviceProfile, factor: float) -> DeviceProfile:
    seconds = {name: None if taken is None else taken * factor for name, taken in device.seconds.items()}
    return replace(device, seconds=seconds)


def _slower_model(model: DeviceModel | None, factor: float) -> DeviceModel | None:
    if model is None:
        return None

    def slower(rate: float | None) -> float | None:
        return None if rate is None else rate / factor

    return replace(
        model,
        macs_per_s=slower(model.macs_per_s),
        bytes_per_s=slower(model.bytes_per_s),
        call_s=model.call_s * factor,
        operator_s=model.operator_s * factor,
    )
