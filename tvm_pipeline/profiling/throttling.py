"""Tells when the machine is throttled, which lowers its clocks because of heat or current, and when that has ended.

What counts as throttled, from files that need no permission:

- a cooling device of `/sys/class/thermal` that slows something down is at work (`cur_state` above 0): `cpufreq-*`,
  `devfreq-*` and `Processor` of Linux (Documentation/driver-api/thermal/sysfs-api.rst), `gpu-throttle-alert` and its
  like of Jetsons (Jetson Linux Developer Guide, Platform Power and Performance). Fans are none;
- a thermal zone is at a trip point of the kind `passive` to which such a cooling device is bound (`cdevN` and
  `cdevN_trip_point`). A trip point without one slows nothing down: an Orin has one at 70 degrees that only switches
  `hot-surface-alert` on;
- a counter grows: of the hwmon device `soctherm_oc` of Jetsons, for too much current or too little voltage
  (`oc*_irq_cnt` by NVIDIA's driver for TX2 and Xavier, `oc*_event_cnt` by that for Orin and Thor), or
  `thermal_throttle/*_throttle_count` of Intel's cores.

What this cannot see: throttling by the firmware that shows in debugfs alone, for root, and that of a virtual machine's
host. Clocks alone tell nothing, as idle ones are low. Clocks of cores are read in `/sys/devices/system/cpu/cpufreq`
(Linux, Documentation/admin-guide/pm/cpufreq.rst), in kHz, that of a GPU in `/sys/class/devfreq`
(Documentation/ABI/testing/sysfs-class-devfreq), in Hz.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tvm_pipeline.core.platform import core_ranges
from tvm_pipeline.system_files import GPU_CLOCK, entries, file_number, file_text, listed_cores

PERIOD_S = 2.0  # between two readings
QUIET_S = 10.0  # without a sign, until it counts as ended: events of current come one by one

# What slows down. `hot-surface-alert` is a warning for fingers, from 70 degrees on; `TCC Offset` and the chargers of
# batteries have states of other meanings; `intel_powerclamp` tells -1 where it does nothing.
_SLOWS = re.compile(r"throttle|cpufreq|devfreq|processor|powerclamp|-balanced|thermal-idle", re.IGNORECASE)
# Zones without a true temperature (PMIC-Die always tells 100 degrees), and one whose trip points user programs set.
_UNTRUE = re.compile(r"pmic", re.IGNORECASE)
_SET_BY_USERS = "x86_pkg_temp"
_LIKELY_C = (0.0, 150.0)


@dataclass(frozen=True, slots=True)
class Clock:
    """A clock.

    Attributes:
        name: what it drives, such as `cores 0-3` or `GPU`.
        current: the file of the present frequency.
        limit: the file of the highest frequency that is allowed now.
        hertz: of one unit in these files.
    """

    name: str
    current: Path
    limit: Path
    hertz: int

    def current_hz(self) -> int | None:
        return self._read(self.current)

    def limit_hz(self) -> int | None:
        return self._read(self.limit)

    def _read(self, path: Path) -> int | None:
        number = file_number(path)
        return None if number is None or number <= 0 else number * self.hertz


def gpu_clock_folder(root: Path = Path("/")) -> Path | None:
    """Return the devfreq entry of the GPU; None where there is none. A Thor has one for each of its clock domains."""
    found = [path for path in entries(root / "sys/class/devfreq", "*") if GPU_CLOCK.fullmatch(path.name)]
    return found[0] if found else None


def clocks(root: Path = Path("/")) -> Iterator[Clock]:
    """Yield the clock of each group of cores that has one, and that of the GPU."""
    for policy in entries(root / "sys/devices/system/cpu/cpufreq", "policy*"):
        cores = listed_cores(file_text(policy / "related_cpus")) or listed_cores(policy.name.removeprefix("policy"))
        name = f"core{'s' if len(cores) > 1 else ''} {', '.join(core_ranges(cores))}"
        yield Clock(name, policy / "scaling_cur_freq", policy / "scaling_max_freq", 1000)
    if gpu := gpu_clock_folder(root):
        yield Clock("GPU", gpu / "cur_freq", gpu / "max_freq", 1)


@dataclass(frozen=True, slots=True)
class _Zone:
    """A thermal zone, with the temperatures from which on it slows down."""

    name: str
    folder: Path
    passive_c: tuple[float, ...]

    def celsius(self) -> float | None:
        """Return its temperature; None where it cannot be read, as that of a GPU that is switched off, or is none."""
        return _celsius(self.folder / "temp")


class ThrottleWatch:
    """Looks for signs of throttling, and says when it begins and when it ends, once each.

    Args:
        root: the folder that has `sys`.
        clock: tells the time in seconds.

    Attributes:
        is_throttled: whether it was at the last look, or within QUIET_S before.
        begun: how it began last; empty where it never did.
    """

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self.is_throttled = False
        self.begun = ""
        self._time_s = clock
        thermal = root / "sys/class/thermal"
        self._coolers = {path: file_text(path / "type") for path in entries(thermal, "cooling_device*")}
        self._zones = list(_zones(thermal))
        self._counters = _counters(root)
        self._counts = self._read_counters()
        self._clocks = [(clock, limit_hz) for clock in clocks(root) if (limit_hz := clock.limit_hz())]
        self._next_s = self._since_s = self._last_sign_s = clock()

    def look(self) -> str:
        """Return a sentence where throttling has begun or ended; else nothing. It reads once in PERIOD_S at most."""
        return self.look_now() if self._time_s() >= self._next_s else ""

    def look_now(self) -> str:
        """Return what `look` does, from readings of now."""
        now_s = self._time_s()
        self._next_s = now_s + PERIOD_S
        signs = list(self._signs())
        if signs:
            self._last_sign_s = now_s
            if self.is_throttled:
                return ""
            self.is_throttled, self._since_s = True, now_s
            self.begun = f"{', '.join(signs)}{self._state()}"
            return f"the machine is throttled: {self.begun}"
        if not self.is_throttled or now_s - self._last_sign_s < QUIET_S:
            return ""
        self.is_throttled = False
        return f"throttling has ended after {self._last_sign_s - self._since_s:.0f} s{self._state()}"

    @property
    def can_tell(self) -> bool:
        """Whether this system shows anything that tells of throttling."""
        return bool(self._coolers or self._zones or self._counters)

    def hottest_c(self) -> float | None:
        """Return the highest temperature of the thermal zones, in degrees Celsius; None where none can be read."""
        return max((celsius for zone in self._zones if (celsius := zone.celsius()) is not None), default=None)

    def _signs(self) -> Iterator[str]:
        for path, name in self._coolers.items():
            state = file_number(path / "cur_state")
            if state is not None and state > 0 and _SLOWS.search(name):
                yield f"{name} is at step {state}"
        for zone in self._zones:
            celsius = zone.celsius()
            reached = [limit for limit in zone.passive_c if celsius is not None and celsius >= limit]
            if reached:
                yield f"{zone.name} is slowed down from {min(reached):g} °C on"
        before, self._counts = self._counts, self._read_counters()
        for name, count in self._counts.items():
            if count > before.get(name, count):
                yield f"{count - before[name]} more of {name}"

    def _read_counters(self) -> dict[str, int]:
        return {name: sum(file_number(path) or 0 for path in paths) for name, paths in self._counters.items()}

    def _state(self) -> str:
        """Return the highest temperature and the clocks, in words that follow others."""
        found = [(celsius, zone.name) for zone in self._zones if (celsius := zone.celsius()) is not None]
        parts = [f"; {name} has {celsius:.1f} °C" for celsius, name in [max(found)] if found] if found else []
        lowest: dict[tuple[int, bool], tuple[int, str]] = {}  # of the clocks with one limit, for there may be hundreds
        for clock, limit_hz in self._clocks:
            if hertz := clock.current_hz():
                alike = limit_hz, clock.name == "GPU"
                lowest[alike] = min(lowest.get(alike, (hertz, clock.name)), (hertz, clock.name))
        parts += [f", {name} at {hz / 1e9:.2f} of {limit / 1e9:.2f} GHz" for (limit, _), (hz, name) in lowest.items()]
        return "".join(parts)


def _zones(thermal: Path) -> Iterator[_Zone]:
    for folder in entries(thermal, "thermal_zone*"):
        name = file_text(folder / "type")
        if not name or _UNTRUE.search(name):
            continue
        slowing = {
            file_text(path)
            for path in entries(folder, "cdev*_trip_point")
            if _SLOWS.search(file_text(path.with_name(path.name.removesuffix("_trip_point")) / "type"))
        }
        trips = [number for number in slowing if file_text(folder / f"trip_point_{number}_type") == "passive"]
        told = [_celsius(folder / f"trip_point_{number}_temp") for number in trips]
        yield _Zone(name, folder, tuple(limit for limit in told if limit and name != _SET_BY_USERS))


def _counters(root: Path) -> dict[str, list[Path]]:
    """Return the files of each counter of events, by its name."""
    found: dict[str, list[Path]] = {}
    for folder in entries(root / "sys/class/hwmon", "hwmon*"):
        if file_text(folder / "name") == "soctherm_oc":
            for path in (*entries(folder, "oc*_event_cnt"), *entries(folder, "oc*_irq_cnt")):
                found.setdefault(f"{path.name} (soctherm_oc: too much current, or too little voltage)", []).append(path)
    for name in ("core_throttle_count", "package_throttle_count"):
        paths = entries(root / "sys/devices/system/cpu", f"cpu[0-9]*/thermal_throttle/{name}")
        if paths:
            found[f"{name} (the cores are too hot)"] = paths
    return found


def _celsius(path: Path) -> float | None:
    number = file_number(path)
    celsius = None if number is None else number / 1000
    return celsius if celsius is not None and _LIKELY_C[0] < celsius < _LIKELY_C[1] else None
