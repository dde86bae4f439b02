"""Of the sensors of a machine, the best one, or the one that a user asks for. Read before: sensor.py, the contract."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tvm_pipeline.errors import PowerError
from tvm_pipeline.power.log_file import LogFile
from tvm_pipeline.power.sensor import Reading, Sensor, Sum, Survey


class MeanPower(NamedTuple):
    """The mean power of sensors over some seconds.

    Attributes:
        watts: by name of the sensor.
        obstacles: by name, why others could not be read.
    """

    watts: dict[str, float]
    obstacles: dict[str, str]


def chosen_sensor(found: Survey, wanted: str = "") -> Sensor | None:
    """Return the sensor that is wanted, or the best one.

    Args:
        found: the sensors of the machine, the best first (`survey`).
        wanted: the name of a sensor, or the path of a meter's log (see `LogFile`); empty for the best sensor: that of
            the board, else the sum of all processors that have one.

    Returns:
        The sensor, not yet read; None where none is wanted by name, and the machine has none but of parts of
        processors or boards: which of these would matter, only a user knows.

    Raises:
        PowerError: neither a sensor nor a file has this name; the message lists the sensors, and why others cannot
            be read. Or the log cannot be read.
    """
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


def _listed(found: Survey) -> str:
    names = ", ".join(f"{sensor.name} ({sensor.covers})" for sensor in found.sensors)
    refused = "; ".join(f"{name} cannot be read: {reason}" for name, reason in found.obstacles.items())
    return "; ".join(part for part in (f"there are {names}" if names else "it has no sensor to read", refused) if part)
