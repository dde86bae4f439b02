"""Which sensors this machine has, which of them is the best one, and the one that a user asks for.

Read before: sensor.py, the contract. Each kind of sensor has a file of its own, with a function that finds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from tvm_pipeline.errors import PowerError
from tvm_pipeline.power.rapl import rapl_sensors
from tvm_pipeline.power.sensor import Found, Reading, Sensor

# Of two sensors that cover as much, the one found earlier is the better one.
KINDS: tuple[Callable[[Path], Found], ...] = (rapl_sensors,)
ORDER = ("board", "unit", "part")


class Sum(Sensor):
    """Several sensors as one, which cover different things.

    The joules of the parts are read one after the other, within microseconds.

    Args:
        parts: sensors that have one reading whenever they are read.
    """

    def __init__(self, name: str, covers: str, parts: Sequence[Sensor]) -> None:
        self.name, self.covers, self.parts = name, covers, parts
        self.period_s = max(part.period_s for part in parts)

    def read(self) -> Sequence[Reading]:
        """Return one reading; raise what a part raises."""
        readings = [part.read()[-1] for part in self.parts]
        return [Reading(readings[-1].time_s, math.fsum(reading.energy_j for reading in readings))]

    def close(self) -> None:
        """Release what the parts hold."""
        for part in self.parts:
            part.close()


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
        wanted: the name of a sensor; empty for the best one: that of the board, else the sum of all processors that
            have one.
        root: the folder that holds `sys/`.

    Returns:
        The sensor, not yet read; None where none is wanted by name and the machine has none.

    Raises:
        PowerError: no sensor has this name; the message lists those that exist, and why others cannot be read.
    """
    found = survey(root)
    for sensor in found.sensors:
        if sensor.name == wanted:
            return sensor
    if wanted:
        raise PowerError(f"{wanted}: no sensor of this machine has this name; {_listed(found)}")
    units = [sensor for sensor in found.sensors if sensor.scope == "unit"]
    if len(units) > 1 and found.sensors[0].scope != "board":
        return Sum(" + ".join(unit.name for unit in units), " and ".join(unit.covers for unit in units), units)
    return found.sensors[0] if found.sensors else None


def _listed(found: Found) -> str:
    names = ", ".join(f"{sensor.name} ({sensor.covers})" for sensor in found.sensors)
    refused = "; ".join(f"{name} cannot be read: {reason}" for name, reason in found.obstacles.items())
    return "; ".join(part for part in (f"there are {names}" if names else "there is none", refused) if part)
