"""The sensor that a command measures joules with: the one that is wanted, the best one of the machine, or none.

Read next: `power/doors.py`, which sensors there are; `profiling/joules.py` and `runtime/metering.py`, which measure.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.profile import Profile
from tvm_pipeline.errors import OptionError, PowerError
from tvm_pipeline.power import Meter, Sensor
from tvm_pipeline.power.choice import chosen_sensor
from tvm_pipeline.power.doors import survey
from tvm_pipeline.power.meter import SHORTEST_PERIOD_S
from tvm_pipeline.profiling.joules import Pace, profile_joules

_log = logging.getLogger(__name__)

NONE = "none"


@contextmanager
def opened_meter(wanted: str, least_s: float = SHORTEST_PERIOD_S) -> Iterator[Meter | None]:
    """Sample a sensor of power while the block lasts; yield None where none is wanted, or the machine has none.

    Args:
        wanted: the name of a sensor or the file of a meter's log; empty for the best sensor, `none` for none.
        least_s: seconds between two reads of the sensor, at least.

    Raises:
        OptionError: no sensor and no file has the name that is wanted, or the file is no log of a meter.
        PowerError: a sensor that is wanted by name cannot be read.
    """
    sensor = None if wanted == NONE else _chosen(wanted)
    if sensor is None:
        yield None
        return
    meter = Meter(sensor, least_s)
    try:
        meter.__enter__()
    except PowerError as error:
        if wanted:
            raise
        _log.warning(f"{error}; joules are not measured")
        yield None
        return
    try:
        yield meter
    finally:
        meter.__exit__(None, None, None)


def required_sensor(wanted: str) -> Sensor:
    """Return the sensor that is wanted, or the best one.

    Raises:
        OptionError: none is wanted, which `power` needs; or none is there by the name that is wanted.
        PowerError: there is none; the message says what was looked for, what cannot be read, and what to do.
    """
    if wanted == NONE:
        raise OptionError("`power` measures joules; give another `power_sensor` than none", option="power_sensor")
    sensor = _chosen(wanted)
    if sensor is not None:
        return sensor
    found = survey()
    refused = "; ".join(f"{name} cannot be read: {reason}" for name, reason in found.obstacles.items())
    looked = f"Looked for {', '.join(found.looked_for)}" if found.looked_for else "No installed package looks for any"
    raise PowerError(
        f"`power`: this machine has no sensor of power that can be read. {looked}"
        f"{f'; {refused}' if refused else ''}. Give the log of a meter as `power_sensor` FILE, or state `active_w` of "
        "each device and `idle_w` in the platform file"
    )


def _chosen(wanted: str) -> Sensor | None:
    try:
        return chosen_sensor(survey(), wanted)
    except PowerError as error:
        raise OptionError(f"`power_sensor` {error}", option="power_sensor", value=wanted) from error


def with_joules(
    compiled: CompiledModel, platform: Platform, profile: Profile, sensor: Sensor, pace: Pace | None = None
) -> Profile:
    """Return the profile with joules; as it was, with a warning, where the sensor fails."""
    try:
        found = profile_joules(compiled, platform, profile, sensor, pace)
    except PowerError as error:
        _log.warning(f"{error}. The profile has no joules")
        return profile
    for line in found.warnings[len(profile.warnings) :]:
        _log.warning(line)
    return found
