"""Clock limits: the greatest frequencies of CPU cores, of the GPU and of other devices, as Linux takes them.

CPU cores: /sys/devices/system/cpu/cpuN/cpufreq/scaling_max_freq, in kHz (kernel documentation,
admin-guide/pm/cpufreq.rst). GPU and others: /sys/class/devfreq/NAME/max_freq, in Hz (ABI/testing/sysfs-class-devfreq).
A limit is known by the name of its clock, never by a path. Never run on a machine with either. Next: mode_switch.py.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from pathlib import Path

from tvm_pipeline.errors import PowerError
from tvm_pipeline.system_files import GPU_CLOCK, file_text

CPUS = "sys/devices/system/cpu"
DEVFREQ = "sys/class/devfreq"
GPU = "gpu"


def limit_file(clock: str, root: Path = Path("/")) -> Path:
    """Return the file of a clock's limit; raise PowerError where this machine has none."""
    if found := re.fullmatch(r"cpu(\d+)", clock, re.ASCII):
        path = root / CPUS / f"cpu{found[1]}" / "cpufreq" / "scaling_max_freq"
        if not path.exists():
            raise PowerError(
                f"clock {clock} has no limit here: {path} is missing. The core may be offline, or the machine (a "
                "virtual one, mostly) has no cpufreq"
            )
        return path
    names = _devfreq(root)
    chosen = [name for name in names if GPU_CLOCK.fullmatch(name)] if clock == GPU else [n for n in names if n == clock]
    if len(chosen) != 1:
        listed = ", ".join(names) or "none"
        several = f"several could be it ({', '.join(chosen)}); name one" if chosen else "there is none of that name"
        raise PowerError(f"clock {clock}: {several}. Devices in {root / DEVFREQ}: {listed}")
    return root / DEVFREQ / chosen[0] / "max_freq"


def _devfreq(root: Path) -> Sequence[str]:
    try:
        return sorted(path.name for path in (root / DEVFREQ).iterdir() if (path / "max_freq").exists())
    except OSError:
        return []


def read_limit(clock: str, root: Path = Path("/")) -> int:
    """Return the limit of a clock as it is now; raise PowerError where there is none."""
    path = limit_file(clock, root)
    try:
        return int(path.read_text())
    except (OSError, ValueError) as error:
        raise PowerError(f"clock {clock}: {path} cannot be read: {error}") from error


def are_fixed(root: Path = Path("/")) -> bool:
    """Return whether each clock of CPU cores and the GPU may only have its greatest frequency, as `jetson_clocks` does.

    It writes max_freq into min_freq of devfreq, and scaling_max_freq into scaling_min_freq of cpufreq: public listings
    of what it shows have MinFreq=1734000 MaxFreq=1734000. A clock that does not tell both is passed over.
    """
    least = [*(root / CPUS / "cpufreq").glob("policy*/scaling_min_freq")]
    least += [root / DEVFREQ / name / "min_freq" for name in _devfreq(root) if GPU_CLOCK.fullmatch(name)]
    told = [(file_text(path), file_text(path.with_name(path.name.replace("min", "max")))) for path in least]
    return all(low == high for low, high in told if low and high)


def write_limit(clock: str, limit: int, root: Path = Path("/")) -> None:
    """Set the limit of a clock, and check that the kernel took it as it is.

    Raises:
        PowerError: it did not; the message has the frequencies that it takes, where the kernel lists them.
    """
    path = limit_file(clock, root)
    try:
        with path.open("r+") as file:  # never make one
            file.write(f"{limit}\n")
    except OSError as error:
        advice = "; setting clocks needs root: run it with `sudo`" if error.errno in (errno.EACCES, errno.EPERM) else ""
        raise PowerError(
            f"clock {clock} was not limited to {limit}: {error.strerror or error}{advice}{_possible(path)}"
        ) from error
    taken = read_limit(clock, root)
    if taken != limit:
        raise PowerError(f"clock {clock} took {taken} in place of {limit}; give a limit that it takes{_possible(path)}")


def _possible(path: Path) -> str:
    for name in ("scaling_available_frequencies", "available_frequencies"):
        try:
            return f" ({path.parent / name}: {' '.join((path.parent / name).read_text().split())})"
        except OSError:
            continue
    return ""
