"""Profiles of devices that are not plugged in: their seconds are predicted from shapes, and called so.

A platform file names for such a device a file of layer times, seen from the folder of the platform file:

    [[device]]
    name = "big"
    layer_times = "../layer_times/zen5-1-core.json"

`profiling/layer_times.py` predicts. Next: `steps.py`, which plans with such a profile.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.platform import Device, Platform, read_platform
from tvm_pipeline.core.profile import Profile
from tvm_pipeline.errors import PlatformError
from tvm_pipeline.profiling.layer_times import LayerTimes, read_layer_times

_log = logging.getLogger(__name__)

FROM_SHAPES = "predicted from shapes"


def names_layer_times(platform: Platform) -> bool:
    """Return whether a device of the platform has a file of layer times."""
    return any(device.layer_times for device in platform.devices)


def with_predictions(profile: Profile, graph: OperatorGraph, platform_file: Path | None) -> Profile:
    """Return the profile with predicted figures of the devices that it lacks and that have layer times.

    Measured figures stay. One warning for each file tells which devices it stands for and how good it is.

    Args:
        platform_file: without it nothing is predicted.

    Raises:
        PlatformError: a device has both layer times and a model, which may contradict each other.
        ProfileError: a file of layer times cannot be read, or knows no operator like those of the graph.
    """
    if platform_file is None:
        return profile
    platform = read_platform(platform_file)
    missing: dict[str, list[Device]] = {}
    for device in platform.devices:
        if device.layer_times and device.model is not None:
            raise PlatformError(
                f"platform {platform.name}, device {device.name}: it has both `layer_times` and a [device.model]; "
                "leave one of them out"
            )
        if device.layer_times and device.name not in profile.devices:
            missing.setdefault(device.layer_times, []).append(device)
    predicted = dict(profile.devices)
    for name, devices in missing.items():
        times = read_layer_times(platform_file.parent / name)
        figures = times.predict(graph, name)
        predicted.update((device.name, figures) for device in devices)
        _log.warning(_how_good(name, times, graph, devices))
        for device in devices:
            if doubt := _other_device(times, device):
                _log.warning(f"device {device.name}: {doubt}")
    return replace(profile, devices=predicted)


def from_shapes(profile: Profile) -> dict[str, str]:
    """Return the devices whose figures are predicted from shapes, by name, with the file of each."""
    return {name: device.predicted_from for name, device in profile.devices.items() if device.predicted_from}


def _how_good(name: str, times: LayerTimes, graph: OperatorGraph, devices: list[Device]) -> str:
    listed = ", ".join(device.name for device in devices)
    error = times.median_error
    known = "of unknown error" if error is None else f"median error {error:.0%} for operators of networks left out"
    unseen = times.unseen(graph)
    rest = (
        f"; {unseen} of {len(graph)} operators are of kinds that it does not have, and may be far off" if unseen else ""
    )
    return (
        f"{listed}: seconds are {FROM_SHAPES} by {name} ({times.device}), not measured; {known}{rest}. Links are those "
        "of the platform file, and devices are taken not to slow one another down"
    )


def _other_device(times: LayerTimes, device: Device) -> str:
    """Return how the device differs from the one that was measured; empty where nothing says so."""
    differing = []
    if times.device.cores and device.cores and len(device.cores) != times.device.cores:
        differing.append(f"{times.device.cores} cores were measured, and it has {len(device.cores)}")
    if times.device.target and device.target and device.target != times.device.target:
        differing.append(f"target {times.device.target} was measured, and it has {device.target}")
    return "; ".join(differing) and f"its layer times are of another device: {'; '.join(differing)}"
