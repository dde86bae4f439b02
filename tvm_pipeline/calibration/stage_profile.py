"""The figures of devices that compute a stage as one, from a few stages that are measured whole.

An execution provider of onnxruntime, for example, compiles what it claims as one, and tells no times of operators. So
some stages are measured, those that tell most about the device's constants, and a roofline is fitted to them: it gives
the operators' seconds. Its error on stages that the fit did not see is the profile's uncertainty, so that candidates
whose predictions are too close run side by side. The measured stages stay in the profile, and count as they are.

Next: `measuring.py`, which chooses and measures the stages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.calibration.measuring import STAGES, Measuring, measured_model
from tvm_pipeline.calibration.shipped import shipped_model
from tvm_pipeline.core.platform import Device, Transfer
from tvm_pipeline.core.profile import DeviceProfile, Profile, SegmentProfile
from tvm_pipeline.cost.device_costs import WIDTH_OF_ERROR, can_time_operators
from tvm_pipeline.cost.modelled_stage import roofline_seconds
from tvm_pipeline.errors import ModelError, ProfileError
from tvm_pipeline.planning.measured import SegmentTimer
from tvm_pipeline.profiling import stage_timer

ENOUGH = 0.03  # what the constants may contribute to the error of a stage before no further stage is measured
UNKNOWN = 1.0  # the uncertainty of times that only the work of the operators tells

_log = logging.getLogger(__name__)


def with_stage_times(
    compiled: CompiledModel,
    devices: Sequence[Device],
    profile: Profile,
    timer: Callable[[CompiledModel], SegmentTimer] = stage_timer,
) -> Profile:
    """Return the profile with figures from whole stages for the devices that tell no times of operators.

    Equal devices are measured one by one, since each may be another chip. Where a device cannot be measured so, the
    time of the whole model stays shared out by the operators' work, and a warning says why.
    """
    found = profile
    for device in filter(can_time_operators, devices):
        if compiled.has_operator_times(device):
            continue
        try:
            measured = measured_model(device, [compiled], shipped_model(device), STAGES, timer, enough=ENOUGH)
        except (ModelError, ProfileError) as error:
            found = _shared_out(found, device, f"could not be measured in stages: {error}")
        else:
            found = _fitted(found, device, measured, compiled)
    return found


def _fitted(profile: Profile, device: Device, measured: Measuring, compiled: CompiledModel) -> Profile:
    """Return the profile with a device's seconds by the roofline that was fitted to its stages."""
    model, error = measured.calibration.model, measured.calibration.error
    before, computed = profile.devices[device.name], set(compiled.computes(device))
    by_name = roofline_seconds(compiled.graph, model)
    figures = replace(
        before,
        seconds={name: seconds if name in computed else None for name, seconds in by_name.items()},
        spread={},
        receive=Transfer(model.call_s, model.input_bytes_per_s),
        send=Transfer(0.0, model.output_bytes_per_s),
        uncertainty=dict.fromkeys(by_name, WIDTH_OF_ERROR * error),
    )
    stages = [SegmentProfile(device.name, time.operators, time.seconds, time.spread) for time in measured.times]
    line = (
        f"device {device.name} tells no times of operators: they follow from {len(stages)} measured stages, and are "
        f"off by {error:.0%} in the mean over stages that were left out of the fit. A bound of plans is as far off"
    )
    return replace(_with(profile, device, figures, line), segments=(*profile.segments, *stages))


def _shared_out(profile: Profile, device: Device, why: str) -> Profile:
    before = profile.devices[device.name]
    figures = replace(before, spread={}, uncertainty=dict.fromkeys(before.seconds, UNKNOWN))
    line = f"device {device.name} tells no times of operators, and {why}. They are shared out by the operators' work"
    return _with(profile, device, figures, line)


def _with(profile: Profile, device: Device, figures: DeviceProfile, warning: str) -> Profile:
    devices = {**profile.devices, device.name: figures}
    return replace(profile, devices=devices, warnings=(*profile.warnings, warning))
