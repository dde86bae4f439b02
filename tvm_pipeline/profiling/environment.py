"""Describe the circumstances of a measurement: processor, board, clocks, versions, load and date.

Next: `operators.py`.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tvm_pipeline.backends.cores import processor
from tvm_pipeline.power import power_modes
from tvm_pipeline.system_files import file_text

GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def environment(versions: Mapping[str, str]) -> dict[str, str]:
    """Return a description to store beside measured figures."""
    load, *_ = os.getloadavg()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processor": processor(),
        **power_modes().environment(),
        "cores": str(os.cpu_count()),
        "governor": file_text(GOVERNOR) or "unknown",
        "load": f"{load:.2f}",
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        **versions,
    }
