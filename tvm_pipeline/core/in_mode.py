"""A platform in one of its power modes, see power_mode.py. Next: planning/power_modes.py, which plans over several."""

from __future__ import annotations

from dataclasses import replace

from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.power_mode import PowerMode
from tvm_pipeline.errors import PlanError, PlatformError


def find_mode(platform: Platform, name: str) -> PowerMode:
    """Return the platform's power mode of that name; raise PlatformError where there is none."""
    for mode in platform.power_modes:
        if mode.name == name:
            return mode
    known = ", ".join(mode.name for mode in platform.power_modes) or "none"
    raise PlatformError(
        f"platform {platform.name} has no power mode {name} (it has {known}); give it as a [[power_mode]] of the file"
    )


def in_mode(platform: Platform, name: str) -> Platform:
    """Return the platform as it is in a power mode; where the name is empty, as it is.

    It has the cores that work then, and the power that the mode states: what the platform states is of no mode. A
    device without any core that works is left out, with its links. The other modes are left out.

    Raises:
        PlatformError: there is no such mode, or no device works in it.

    Examples:
        >>> from tvm_pipeline.core.platform import Device
        >>> low = PowerMode("5W", nvpmodel=1, offline_cores=(2, 3), active_w={"cpu": 1.5})
        >>> devices = Device("cpu", cores=(0, 1, 2, 3)), Device("big", cores=(2, 3))
        >>> board = Platform("board", devices, power_modes=(low,))
        >>> [(device.name, device.cores, device.active_w) for device in in_mode(board, "5W").devices]
        [('cpu', (0, 1), 1.5)]
    """
    if not name:
        return platform
    mode = find_mode(platform, name)
    offline = set(mode.offline_cores)
    devices = tuple(
        replace(
            device,
            cores=tuple(core for core in device.cores if core not in offline),
            active_w=mode.active_w.get(device.name),
        )
        for device in platform.devices
        if not device.cores or not set(device.cores) <= offline
    )
    if not devices:
        raise PlatformError(f"platform {platform.name}: no device has a core that works in power mode {name}")
    names = {device.name for device in devices}
    links = tuple(link for link in platform.links if {link.source, link.destination} <= names)
    return replace(platform, devices=devices, links=links, idle_w=mode.idle_w, power_modes=(mode,))


def for_mode(plan: Plan, name: str) -> Plan:
    """Return a plan for this power mode, where it names none; raise PlanError where it names another one."""
    if plan.power_mode not in ("", name):
        raise PlanError(
            f"the plan is for power mode {plan.power_mode}, the profile is of {name or 'none'}; give both of one mode"
        )
    return replace(plan, power_mode=name)
