"""Profiles of devices that are not plugged in, or were not measured yet: their seconds are predicted from shapes.

A platform file names for such a device a file of layer times, seen from the folder of the platform file:

    [[device]]
    name = "big"
    layer_times = "../layer_times/zen5-1-core.json"

`profiling/layer_times.py` predicts. A model that runs before it is measured needs less: by `plan_from_shapes`, each
core runs whole frames. Next: `steps.py`, which plans with such a profile.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Plan, Prediction
from tvm_pipeline.core.platform import Device, Platform, read_platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.cost.modelled_stage import roofline_seconds
from tvm_pipeline.errors import NoPlanError, PlatformError
from tvm_pipeline.planning.baselines.whole_model import replicas
from tvm_pipeline.profiling.device_bench import SHARED_OUT_BY
from tvm_pipeline.profiling.layer_times import LayerTimes, read_layer_times
from tvm_pipeline.runtime.replanning import quick_plan

_log = logging.getLogger(__name__)

FROM_SHAPES = "predicted from shapes"
HOST_S = 5e-4  # about what reading, preparing, decoding or writing a frame of a video takes where SHARED_OUT_BY holds


def plan_from_shapes(compiled: CompiledModel, platform: Platform, graph: OperatorGraph) -> tuple[Problem, Plan] | None:
    """Return a plan in which each core runs whole frames, and what it was made for; None where that is not possible.

    The plan has no prediction.

    Args:
        graph: of the model, or of the model and the host work around it.
    """
    everything = len(compiled.graph)
    able = [device for device in platform.devices if device.cores and len(compiled.computes(device)) == everything]
    fewest = min((len(device.cores) for device in able), default=0)
    cores = tuple(device for device in able if len(device.cores) == fewest)
    if len({device.backend for device in cores}) != 1:  # without a measurement, no engine is the faster one
        return None
    shares = roofline_seconds(graph, SHARED_OUT_BY).values()  # which hardly depend on the speed of equal cores
    guessed = DeviceProfile.in_order(graph, [seconds or HOST_S for seconds in shares])
    profile = Profile(graph.name, graph.fingerprint, {device.name: guessed for device in cores})
    problem = Problem(graph, replace(platform, devices=cores, links=()), profile)
    for made in (replicas, quick_plan):  # a cut would be right only if the operators' shares of the work were
        with suppress(NoPlanError):
            return problem, replace(made(problem), predicted=Prediction(), status="feasible", bound=None)
    return None


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
