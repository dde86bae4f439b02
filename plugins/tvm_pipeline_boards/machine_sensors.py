"""The sensors of power of this machine. Each kind has a file, with a function that finds the sensors of this kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tvm_pipeline.power import Survey
from tvm_pipeline_boards.hwmon import hwmon_sensors
from tvm_pipeline_boards.jtop import jtop_sensors
from tvm_pipeline_boards.nvml import nvml_sensors
from tvm_pipeline_boards.rapl import rapl_sensors

# Of two sensors that cover as much, the one found earlier is the better one.
KINDS: tuple[Callable[[Path], Survey], ...] = (hwmon_sensors, jtop_sensors, rapl_sensors, nvml_sensors)
LOOKED_FOR = ("INA3221 and INA226 of boards (hwmon, iio)", "RAPL of processors (powercap)", "NVML of GPUs", "jtop")


def machine_sensors(root: Path = Path("/")) -> Survey:
    """Return the sensors that can be read now, and why others cannot; `root` is the folder that holds `sys/`."""
    kinds = [find(root) for find in KINDS]
    obstacles = {name: reason for found in kinds for name, reason in found.obstacles.items()}
    return Survey([sensor for found in kinds for sensor in found.sensors], obstacles, LOOKED_FOR)
