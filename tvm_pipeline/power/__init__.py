"""Power and energy, measured: the contracts of sensors and of power modes, and the joules between two moments.

A package that knows hardware imports the names of `__all__` and comes in through an entry point (`doors.py`).

sensor.py    the contract of sensors: joules that have been drawn, at a moment
meter.py     samples a sensor in a thread, and tells the joules between two moments
choice.py    of the sensors of a machine, the best one, or the one that a user asks for
modes.py     the contract of power modes: listing, setting and putting back
doors.py     the packages that find sensors and know power modes
log_file.py  the log of a meter outside of the machine

A device without a sensor has none here: a caller then says "not measured", or states the platform's own figures
(`idle_w`, `active_w`) as such.
"""

from tvm_pipeline.core.power_mode import PowerMode
from tvm_pipeline.power.choice import MeanPower, chosen_sensor, mean_watts
from tvm_pipeline.power.doors import power_modes, survey
from tvm_pipeline.power.meter import Energy, Meter
from tvm_pipeline.power.modes import PowerModes
from tvm_pipeline.power.sensor import EnergyCounter, PowerSensor, Reading, Scope, Sensor, Sum, Survey

__all__ = [
    "Energy",
    "EnergyCounter",
    "MeanPower",
    "Meter",
    "PowerMode",
    "PowerModes",
    "PowerSensor",
    "Reading",
    "Scope",
    "Sensor",
    "Sum",
    "Survey",
    "chosen_sensor",
    "mean_watts",
    "power_modes",
    "survey",
]
