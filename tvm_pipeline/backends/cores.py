"""Check the CPU cores of a device, for `Backend.settle`. Next: `contract.py`."""

from __future__ import annotations

import os

from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import PlatformError


def check_cores(device: Device) -> None:
    """Raise PlatformError where the device names no cores, or some that this process may not use."""
    available = sorted(os.sched_getaffinity(0))
    if not device.cores or not set(device.cores) <= set(available):
        raise PlatformError(
            f"device {device.name} names cores {list(device.cores)}; this process may use "
            f"{', '.join(map(str, available))}. Mend `cores` in the platform file, or see `tvm-pipeline devices`"
        )
