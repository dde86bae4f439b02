"""Tune a model for the targets of a platform: the step behind `tvm-pipeline tune`.

    from tvm_pipeline.workflow.tune_targets import tune_source

    for report in tune_source("model.onnx", seconds=60):
        print(report.target, report.ratio)

What is found is kept on this machine, and every later compilation of the model uses it. Next: `tune_plan.py`, which
plans beside it; `backends/contract.py`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

from tvm_pipeline.backends.contract import Backend, TuningReport
from tvm_pipeline.backends.registry import detect_platform, find_backend, settle_platform
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device, Platform, read_platform
from tvm_pipeline.errors import OptionError, PlatformError
from tvm_pipeline.frontends import Shapes, Values, load
from tvm_pipeline.workflow.steps import Say, silent

SECONDS = 120.0  # for each target

_log = logging.getLogger(__name__)


def tune_source(
    source: str | Path,
    seconds: float = SECONDS,
    shapes: Shapes | None = None,
    platform: Path | None = None,
    tell: Say = silent,
    warn: Say = _log.warning,
    *,
    winograd: bool = False,
    values: Values | None = None,
) -> list[TuningReport]:
    """Search for faster kernels of a model for each target of a platform, or of this machine without one.

    Args:
        source: what `load` takes.
        seconds: that the search may take for each target, after the model was compiled once.
        winograd: try Winograd's algorithm as well; only models that are compiled with it use what is found.

    Raises:
        OptionError: `seconds` is no time.
        PlatformError: no device of the platform can be tuned for.
    """
    check_seconds(seconds)
    model = replace(load(source, shapes, values), winograd=winograd)
    found = tune_model(model, read_platform(platform) if platform else None, seconds, tell, warn)
    return [report for _, report in found]


def tune_model(
    model: Model, platform: Platform | None, seconds: float, tell: Say, warn: Say
) -> list[tuple[Device, TuningReport]]:
    """Search for faster kernels of a model that was read, as `tune_source`; return a device of each target, too."""
    _, settled = settle_platform(platform or detect_platform(model))
    return [(device, tuner.tune(model, device, seconds, tell)) for device, tuner in tuners_of(settled, warn)]


def check_seconds(seconds: float) -> None:
    """Raise OptionError where a search cannot take so many seconds."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise OptionError(
            f"`seconds` {seconds:g}: give the time of the search, 0 or more", option="seconds", value=seconds
        )


def tuners_of(platform: Platform, warn: Say) -> list[tuple[Device, Backend]]:
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
                f"{listed} cannot be tuned: `tune` measures CPU cores and GPUs (backends host and gpu) only; leave "
                "`platform` out, or give one with such devices"
            )
        warn(f"not tuned: {listed}. `tune` measures CPU cores and GPUs (backends host and gpu) only")
    return list(tuners.values())
