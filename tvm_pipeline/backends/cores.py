"""The CPU cores of this machine: their processor, whether a device may use them, and threads that keep to some of them.

Next: `contract.py`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import PlatformError

T = TypeVar("T")


def check_cores(device: Device) -> None:
    """Raise PlatformError where the device names no cores, or some that this process may not use."""
    available = sorted(os.sched_getaffinity(0))
    if not device.cores or not set(device.cores) <= set(available):
        raise PlatformError(
            f"device {device.name} names cores {list(device.cores)}; this process may use "
            f"{', '.join(map(str, available))}. Mend `cores` in the platform file, or see `tvm-pipeline devices`"
        )


def bind(cores: Sequence[int]) -> None:
    """Bind the calling thread to these cores, if there are any; threads that it starts begin there, too."""
    if cores:
        os.sched_setaffinity(0, cores)


def made_on(cores: Sequence[int], make: Callable[[], T]) -> T:
    """Return what `make` returns in a new thread that is bound to these cores; threads that it starts stay there."""
    with ThreadPoolExecutor(1, initializer=bind, initargs=(cores,)) as pool:
        return pool.submit(make).result()


def processor() -> str:
    """Return the name of the processor, or its architecture where the system does not tell it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.machine()
