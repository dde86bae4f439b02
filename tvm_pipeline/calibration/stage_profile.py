"""The figures of devices that compute a stage as one, from a few stages that are measured whole.

An execution provider of onnxruntime, for example, compiles what it claims as one, and tells no times of operators. So
some stages are measured, those that tell most about the device's constants, and a roofline is fitted to them: it gives
the operators' seconds. Its error on stages that the fit did not see is the profile's uncertainty, so that candidates
whose predictions are too close run side by side. The measured stages stay in the profile, and count as they are.

Next: `measuring.py`, which chooses and measures the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.calibration.fit import Calibration
from tvm_pipeline.calibration.measuring import MOST_SPREAD, STAGES, measured_model
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


def with_stage_times(
    compiled: CompiledModel,
    devices: Sequence[Device],
    profile: Profile,
    timer: Callable[[CompiledModel], SegmentTimer] = stage_timer,
) -> Profile:
    """Return the profile with figures from whole stages for the devices that tell no times of operators.

    Equal devices are measured one by one, since each may be another chip. Where nothing can be fitted to a device's
    stages, the time of the whole model stays shared out by the operators' work, and a warning says why.
    """
    found = profile
    for device in filter(can_time_operators, devices):
        if compiled.has_operator_times(device):
            continue
        before, stages = found.devices[device.name], _Stages(timer)
        try:
            measured = measured_model(device, [compiled], shipped_model(device), STAGES, stages, enough=ENOUGH)
        except (ModelError, ProfileError) as error:
            figures = replace(before, spread={}, uncertainty=dict.fromkeys(before.seconds, UNKNOWN))
            how = f"they are shared out by the operators' work, since nothing was fitted to its stages: {error}"
        else:
            figures = _fitted(before, measured.calibration, compiled, device)
            how = (
                f"they follow from {len(measured.times)} measured stages, and are off by "
                f"{measured.calibration.error:.0%} in the mean over stages that were left out of the fit. A bound of "
                "plans is as far off"
            )
        found = replace(
            found,
            devices={**found.devices, device.name: figures},
            segments=(*found.segments, *stages.steady()),
            warnings=(*found.warnings, f"device {device.name} tells no times of operators: {how}"),
        )
    return found


class _Stages:
    """Times stages, and keeps the steadiest figure of each."""

    def __init__(self, timer: Callable[[CompiledModel], SegmentTimer]) -> None:
        self._timer = timer
        self._found: dict[tuple[str, ...], SegmentProfile] = {}

    def __call__(self, compiled: CompiledModel) -> SegmentTimer:
        time = self._timer(compiled)

        def timed(operators: Sequence[str], device: Device) -> SegmentProfile:
            found = time(operators, device)
            known = self._found.setdefault(found.operators, found)
            self._found[found.operators] = min(known, found, key=lambda one: one.spread)
            return found

        return timed

    def steady(self) -> list[SegmentProfile]:
        return [found for found in self._found.values() if found.spread <= MOST_SPREAD]


def _fitted(before: DeviceProfile, calibration: Calibration, compiled: CompiledModel, device: Device) -> DeviceProfile:
    """Return a device's figures by the roofline that was fitted to its stages."""
    model, computed = calibration.model, set(compiled.computes(device))
    by_name = roofline_seconds(compiled.graph, model)
    return replace(
        before,
        seconds={name: seconds if name in computed else None for name, seconds in by_name.items()},
        spread={},
        receive=Transfer(model.call_s, model.input_bytes_per_s),
        send=Transfer(0.0, model.output_bytes_per_s),
        uncertainty=dict.fromkeys(by_name, WIDTH_OF_ERROR * calibration.error),
    )
