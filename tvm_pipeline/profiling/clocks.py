"""The present clocks of the cores and of the GPU, with the limits that are set for them.

Cores: `/sys/devices/system/cpu/cpufreq/policyN`, in kHz (Linux, Documentation/admin-guide/pm/cpufreq.rst). GPU: an
entry of `/sys/class/devfreq`, in Hz (Documentation/ABI/testing/sysfs-class-devfreq). Next: `throttling.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tvm_pipeline.core.platform import core_ranges
from tvm_pipeline.system_files import GPU_CLOCK, entries, file_number, file_text, listed_cores


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
