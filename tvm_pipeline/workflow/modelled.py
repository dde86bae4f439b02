"""Devices that `plan` does not measure: those whose models were calibrated, by `tvm-pipeline calibrate`.

Measured figures win wherever there are any. Next: `steps.py`, which plans; `calibration/`, which fits the models.
"""

from __future__ import annotations

from dataclasses import replace

from tvm_pipeline.backends.registry import settle_platform
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.profile import Profile
from tvm_pipeline.cost.device_costs import calibrated_error
from tvm_pipeline.errors import PlatformError


def modelled(platform: Platform, profile: Profile | None = None) -> dict[str, float]:
    """Return the devices whose figures are those of a calibrated model, by name, with the error of each model.

    Args:
        profile: devices that it has are measured.
    """
    known = profile.devices if profile else {}
    errors = {device.name: calibrated_error(device) for device in platform.devices if device.name not in known}
    return {name: error for name, error in errors.items() if error is not None}


def how_good(errors: dict[str, float]) -> str:
    """Return a sentence that says which figures are modelled, and how far off they are."""
    alike: dict[float, list[str]] = {}
    for name, error in errors.items():
        alike.setdefault(error, []).append(name)
    listed = "; ".join(f"{', '.join(names)}: calibrated with error {error:.0%}" for error, names in alike.items())
    return (
        f"figures are modelled, not measured ({listed}, the mean over stages that were left out of the fit). Devices "
        "are taken not to slow one another down; `tvm-pipeline profile` measures"
    )


def to_measure(platform: Platform) -> Platform | None:
    """Return the platform without devices that have a calibrated model; None where no device is left."""
    errors = modelled(platform)
    devices = tuple(device for device in platform.devices if device.name not in errors)
    links = tuple(link for link in platform.links if {link.source, link.destination}.isdisjoint(errors))
    return replace(platform, devices=devices, links=links) if devices else None


def absence(platform: Platform) -> str:
    """Return why the platform is not this machine, where each device has a calibrated model; empty else."""
    if to_measure(platform):
        return ""
    try:
        settle_platform(platform)
    except PlatformError as error:
        return str(error)
    return ""


def stood_in(platform: Platform, profile: Profile) -> str:
    """Return why plans must not be tried out: another processor would compute for a modelled device; empty else."""
    missing = [name for name in modelled(platform, profile) if name in platform.stand_ins]
    return f"{', '.join(missing)} not here: figures are modelled, and others would run in its place" if missing else ""
