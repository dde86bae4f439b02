"""Why figures may not be those of this machine: devices that are missing, and profiles that were measured elsewhere."""

from __future__ import annotations

from pathlib import Path

from tvm_pipeline.backends.registry import description
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.profile import Profile
from tvm_pipeline.profiling.environment import environment


def stand_in_warnings(platform: Platform) -> list[str]:
    """Return a line for each kind of device that is not here itself, so that none of its figures passes for its own."""
    alike: dict[str, list[Device]] = {}
    for device in platform.devices:
        if device.stand_in:
            alike.setdefault(device.stand_in.replace(device.target, "*"), []).append(device)
    return [
        f"not here: {', '.join(device.name for device in devices)}. Stages run on {devices[0].stand_in}"
        for devices in alike.values()
    ]


def known_devices(platform: Platform) -> dict[str, str]:
    """Return what each settled device is, for the environment of a profile, where its backend can tell."""
    told = {f"device {device.name}": description(device) for device in platform.devices}
    return {name: known_as for name, known_as in told.items() if known_as}


def elsewhere_warnings(source: Path, profile: Profile, platform: Platform) -> list[str]:
    """Return a line where a profile was measured on another processor, board or devices, or in another power mode.

    A profile of one of the platform's power modes is of that mode wherever it is read (see `machine_modes.py`).

    Args:
        source: the file that has the profile.
    """
    found = environment({})
    kept = ("processor", "board") if profile.power_mode else ("processor", "board", "power mode")
    told = {key: value for key, value in found.items() if key in kept}
    here = {"board": "another board", **told, **known_devices(platform)}
    differing = [name for name, now in here.items() if profile.environment.get(name, now) != now]
    if not differing:
        return []
    modes = {"power mode": "power mode "}
    there, now = (
        ", ".join(modes.get(name, "") + values[name] for name in differing) for values in (profile.environment, here)
    )
    return [
        f"the profile of {source} was measured on {there}, and here is {now}: predictions "
        "may be far off. Profile again with `tvm-pipeline profile`, or compile the model again"
    ]
