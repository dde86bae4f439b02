"""The two doors for packages that know the hardware: entry points of the groups SENSORS and POWER_MODES.

The entry points are loaded when somebody asks for sensors or modes, in the order of their names.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.metadata import EntryPoint

from tvm_pipeline.plugins import entry_points
from tvm_pipeline.power.modes import PowerModes
from tvm_pipeline.power.sensor import Survey

SENSORS = "tvm_pipeline.sensors"  # each is a function without arguments that returns a `Survey`
POWER_MODES = "tvm_pipeline.power_modes"  # each is a function without arguments that returns PowerModes, or None
ORDER = ("board", "unit", "part")

_log = logging.getLogger(__name__)


def survey() -> Survey:
    """Return the sensors that installed packages find now, the best first, and why others cannot be read.

    A sensor of the whole board is better than one of a processor, which is better than one of a part of it. Of two
    sensors that cover as much, the one found earlier is the better one.
    """
    found = Survey([], {})
    for entry in _installed(SENSORS):
        try:
            more: Survey = entry.load()()
        except ImportError as error:
            more = Survey([], {entry.name: str(error)})
        found = Survey(
            [*found.sensors, *more.sensors], found.obstacles | more.obstacles, (*found.looked_for, *more.looked_for)
        )
    found.sensors.sort(key=lambda sensor: ORDER.index(sensor.scope))
    return found


def power_modes() -> PowerModes:
    """Return the power modes of this machine by the first package that knows the machine; else `PowerModes()`.

    If a package cannot be imported, the log warns.
    """
    for entry in _installed(POWER_MODES):
        try:
            modes: PowerModes | None = entry.load()()
        except ImportError as error:
            _log.warning("the power modes of %s are left out: %s", entry.name, error)
        else:
            if modes is not None:
                return modes
    return PowerModes()


def _installed(group: str) -> Iterator[EntryPoint]:
    yield from sorted(entry_points(group=group), key=lambda entry: entry.name)
