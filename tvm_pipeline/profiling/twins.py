"""Equal devices: same backend, target, number of cores and kind of core. What differs between them is doubted.

`rounds.py` measures them together; this file says which devices are equal, and whether one of them is slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tvm_pipeline.core.platform import Device
from tvm_pipeline.profiling import disturbance
from tvm_pipeline.profiling.timings import TrustedTimings, median_interval
from tvm_pipeline.system_files import file_text

SYSTEM = Path("/sys/devices/system/cpu")
DIFFERENCE = 0.02  # equal devices that differ by less are alike

_KIND = ("model name", "CPU implementer", "CPU part", "CPU variant")


def equal_devices(devices: Iterable[Device]) -> list[list[Device]]:
    """Return the devices in groups of equal ones. A device that names no cores is equal to no other."""
    kinds = core_kinds()
    groups: dict[object, list[Device]] = {}
    for device in devices:
        cores = tuple(sorted(kinds.get(core, ()) for core in device.cores))
        speed = device.backend, device.target, device.stand_in, cores
        groups.setdefault(speed if cores else device.name, []).append(device)
    return list(groups.values())


def core_kinds() -> dict[int, tuple[str, ...]]:
    """Return of each core what tells its speed: the processor's name, its highest clock and its capacity."""
    try:
        paragraphs = (disturbance.PROC / "cpuinfo").read_text().split("\n\n")
    except OSError:
        return {}
    found = {}
    for paragraph in paragraphs:
        fields = {
            key.strip(): value.strip() for key, _, value in (line.partition(":") for line in paragraph.splitlines())
        }
        if not fields.get("processor", "").isdigit():
            continue
        core = int(fields["processor"])
        speeds = (SYSTEM / f"cpu{core}" / file for file in ("cpufreq/cpuinfo_max_freq", "cpu_capacity"))
        found[core] = (*(fields.get(key, "") for key in _KIND), *map(file_text, speeds))
    return found


def slower(group: Mapping[Device, TrustedTimings]) -> dict[Device, float]:
    """Return by how much devices of a group are slower than its fastest one, beyond their confidence intervals.

    Devices without enough undisturbed timings are left out: nothing is known of them.
    """
    known = {device: timings for device, timings in group.items() if not timings.is_doubtful}
    if not known:
        return {}
    fastest = min(known.values(), key=lambda timings: timings.median)
    _, high = median_interval(fastest.seconds)
    return {
        device: timings.median / fastest.median - 1
        for device, timings in known.items()
        if median_interval(timings.seconds)[0] > high and timings.median > fastest.median * (1 + DIFFERENCE)
    }
