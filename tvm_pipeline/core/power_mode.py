"""Power modes: what a machine can be set to, each with its own speed, power and cores.

A platform file lists those that may be planned with:

    [[power_mode]]
    name = "5W"
    nvpmodel = 1                # the number of a mode of NVIDIA's `nvpmodel`
    offline_cores = [2, 3]      # they do not work in this mode
    idle_w = 1.1
    active_w = { cpu = 1.4, gpu = 2.2 }

    [[power_mode]]
    name = "slow"
    clock_limits = { cpu0 = 1113600, gpu = 420750000 }

A clock limit `cpuN` is the greatest frequency of core N and of the cores that share its clock, in kHz; `gpu` that of
the GPU, in Hz; any other name is that of a devfreq device (/sys/class/devfreq), in Hz. Next: in_mode.py, the
platform in a mode; `power/modes.py`, what reads and sets the modes of this machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tvm_pipeline.errors import PlatformError

# They become words of a plan and parts of file names.
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,63}", re.ASCII)
# These become parts of paths below /sys.
CLOCK = re.compile(r"[A-Za-z0-9][\w.:-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class PowerMode:
    """One power mode of a machine. Raise PlatformError where its figures are impossible.

    Attributes:
        name: unique on the platform; letters, digits and `_.+-`.
        nvpmodel: the number of the mode of NVIDIA's `nvpmodel` that is set; None where none is.
        clock_limits: greatest frequencies that are set after that, by clock: kHz for `cpuN`, Hz for others.
        offline_cores: the cores that do not work in this mode.
        idle_w: power that the machine draws in this mode while no device computes; None where it is not known.
        active_w: power that a device draws in this mode while it computes, above idle, by the device's name.

    Examples:
        >>> PowerMode("5W", nvpmodel=1, offline_cores=(2, 3)).name
        '5W'
    """

    name: str
    nvpmodel: int | None = None
    clock_limits: Mapping[str, int] = field(default_factory=dict)
    offline_cores: tuple[int, ...] = ()
    idle_w: float | None = None
    active_w: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise PlatformError(f"a power mode is called {self.name!r}; its name has letters, digits and _.+- only")
        where = f"power mode {self.name}"
        if self.nvpmodel is None and not self.clock_limits:
            raise PlatformError(f"{where} sets nothing; give it nvpmodel, clock_limits or both")
        if self.nvpmodel is not None and not 0 <= self.nvpmodel < 1 << 31:
            raise PlatformError(f"{where}: nvpmodel is {self.nvpmodel}; /etc/nvpmodel.conf lists the numbers, as ID")
        for clock, limit in self.clock_limits.items():
            if not CLOCK.fullmatch(clock):
                raise PlatformError(f"{where}: {clock!r} is no clock; there are cpu0, gpu and names of devfreq devices")
            if not 0 < limit < 1 << 63:
                raise PlatformError(f"{where}: the limit of {clock} is {limit}; it must be positive")
        if len(set(self.offline_cores)) != len(self.offline_cores) or any(core < 0 for core in self.offline_cores):
            raise PlatformError(f"{where}: offline_cores {list(self.offline_cores)}")
        if self.idle_w is not None and not 0 <= self.idle_w < math.inf:
            raise PlatformError(f"{where}: idle_w is {self.idle_w}; it must not be negative")
        for device, watts in self.active_w.items():
            if not 0 < watts < math.inf:
                raise PlatformError(f"{where}: active_w of device {device} is {watts}; it must be positive")
