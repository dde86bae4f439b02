"""Tune a model for the targets of a platform: the step behind `tvm-pipeline tune`.

    from tvm_pipeline.workflow.tune_targets import tune_model

    for device, report in tune_model(load("model.onnx"), None, 60.0):
        print(report.target, report.ratio)

What is found is kept on this machine, and every later compilation of the model uses it. Next: `tune_plan.py`, which
plans beside it; `backends/contract.py`.
"""

from __future__ import annotations

import logging
import math

from tvm_pipeline.backends.contract import Backend, TuningReport
from tvm_pipeline.backends.registry import detect_platform, find_backend, settle_platform
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import OptionError, PlatformError

_log = logging.getLogger(__name__)

SECONDS = 120.0  # for each target


def tune_model(model: Model, platform: Platform | None, seconds: float) -> list[tuple[Device, TuningReport]]:
    """Search for faster kernels of a model for each target of a platform, or of this machine without one.

    Args:
        model: one with a tolerance has Winograd's algorithm tried as well; only such models use what is found then.
        seconds: that the search may take for each target, after the model was compiled once.

    Returns:
        A device of each target, and what was found for it.

    Raises:
        PlatformError: no device of the platform can be tuned for.
    """
    _, settled = settle_platform(platform or detect_platform(model))
    return [(device, tuner.tune(model, device, seconds)) for device, tuner in tuners_of(settled)]


def check_seconds(seconds: float) -> None:
    """Raise OptionError where a search cannot take so many seconds."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise OptionError(
            f"`seconds` {seconds:g}: give the time of the search, 0 or more", option="seconds", value=seconds
        )


def tuners_of(platform: Platform) -> list[tuple[Device, Backend]]:
    """Return a device of each target that can be tuned for, with its backend; warn of the others.

    Raises:
        PlatformError: there is none.
    """
    tuners: dict[str, tuple[Device, Backend]] = {}
    others: list[Device] = []
    for device in platform.devices:
        backend = find_backend(device.backend)
        if backend.can_tune:
            tuners.setdefault(device.target, (device, backend))
        else:
            others.append(device)
    if others:
        listed = ", ".join(f"{device.name} (backend {device.backend})" for device in others)
        if not tuners:
            raise PlatformError(
                f"{listed} cannot be tuned: `tune` measures CPU cores and GPUs (backends host and gpu); "
                "leave `platform` out, or give one with such devices"
            )
        _log.warning(f"not tuned: {listed}. `tune` measures CPU cores and GPUs (backends host and gpu)")
    return list(tuners.values())
