"""Which sensors this machine has, which of them is the best one, and the one that a user asks for.

Read before: sensor.py, the contract. Each kind of sensor has a file of its own, with a function that finds them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tvm_pipeline.errors import PowerError
from tvm_pipeline.power.hwmon import hwmon_sensors
from tvm_pipeline.power.jtop import jtop_sensors
from tvm_pipeline.power.log_file import LogFile
from tvm_pipeline.power.nvml import nvml_sensors
from tvm_pipeline.power.rapl import rapl_sensors
from tvm_pipeline.power.sensor import Found, Reading, Sensor, Sum

# Of two sensors that cover as much, the one found earlier is the better one.
KINDS: tuple[Callable[[Path], Found], ...] = (hwmon_sensors, jtop_sensors, rapl_sensors, nvml_sensors)
ORDER = ("board", "unit", "part")


class MeanPower(NamedTuple):
    """The mean power of sensors over some seconds.

    Attributes:
        watts: by name of the sensor.
        obstacles: by name, why others could not be read.
    """

    watts: dict[str, float]
    obstacles: dict[str, str]


def survey(root: Path = Path("/")) -> Found:
    """Return the sensors that can be read now, the best first, and why others cannot.

    A sensor of the whole board is better than one of a processor, which is better than one of a part of it.
    """
    sensors: list[Sensor] = []
    obstacles: dict[str, str] = {}
    for find in KINDS:
        found = find(root)
        sensors += found.sensors
        obstacles |= found.obstacles
    return Found(sorted(sensors, key=lambda sensor: ORDER.index(sensor.scope)), obstacles)


def sensors(root: Path = Path("/")) -> list[Sensor]:
    """Return the sensors that can be read now, the best first."""
    return survey(root).sensors


def chosen_sensor(wanted: str = "", root: Path = Path("/")) -> Sensor | None:
    """Return the sensor that is wanted, or the best one.

    Args:
        wanted: the name of a sensor, or the path of a meter's log (see `LogFile`); empty for the best sensor: that of
            the board, else the sum of all processors that have one.
        root: the folder that holds `sys/`.

    Returns:
        The sensor, not yet read; None where none is wanted by name, and the machine has none but of parts of
        processors or boards: which of these would matter, only a user knows.

    Raises:
        PowerError: neither a sensor nor a file has this name; the message lists the sensors, and why others cannot
            be read. Or the log cannot be read.
    """
    found = survey(root)
    for sensor in found.sensors:
        if sensor.name == wanted:
            return sensor
    if wanted and Path(wanted).exists():
        return LogFile(Path(wanted))
    if wanted:
        raise PowerError(f"{wanted}: no sensor of this machine has this name, and no file is there; {_listed(found)}")
    units = [sensor for sensor in found.sensors if sensor.scope == "unit"]
    if len(units) > 1 and found.sensors[0].scope != "board":
        return Sum(" + ".join(unit.name for unit in units), " and ".join(unit.covers for unit in units), units)
    best = next(iter(found.sensors), None)
    return best if best and best.scope != "part" else None


def mean_watts(sensors: Sequence[Sensor], seconds: float = 0.5) -> MeanPower:
    """Return the mean power of each sensor over some seconds, by name, and why others could not be read meanwhile."""
    measured = MeanPower({}, {})
    first: dict[str, Reading] = {}
    for is_last in (False, True):
        for sensor in sensors:
            try:
                reading = sensor.read()[-1]
            except PowerError as error:
                measured.obstacles[sensor.name] = str(error)
                continue
            before = first.setdefault(sensor.name, reading)
            if is_last and reading.time_s > before.time_s:
                measured.watts[sensor.name] = (reading.energy_j - before.energy_j) / (reading.time_s - before.time_s)
        if sensors and not is_last:
            time.sleep(seconds)
    return measured


def _listed(found: Found) -> str:
    names = ", ".join(f"{sensor.name} ({sensor.covers})" for sensor in found.sensors)
    refused = "; ".join(f"{name} cannot be read: {reason}" for name, reason in found.obstacles.items())
    return "; ".join(part for part in (f"there are {names}" if names else "it has no sensor to read", refused) if part)
