"""Describe the circumstances of a measurement: processor, clocks, versions, load and date. Next: `operators.py`."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np


def environment(versions: Mapping[str, str]) -> dict[str, str]:
    """Return a description to store beside measured figures."""
    load, *_ = os.getloadavg()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "governor": _governor(),
        "load": f"{load:.2f}",
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        **versions,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.machine()


def _governor() -> str:
    try:
        return Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text().strip()
    except OSError:
        return "unknown"
