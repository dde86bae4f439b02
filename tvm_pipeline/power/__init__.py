"""Power and energy, measured: the sensors of a machine, and the joules between two moments.

sensor.py        the contract of sensors: joules that have been drawn, at a moment
meter.py         samples a sensor in a thread, and tells the joules between two moments
choice.py        of the sensors of a machine, the best one, or the one that a user asks for
modes.py         the contract of power modes: listing, setting and putting back
doors.py         the packages that find sensors and know power modes
machine_sensors.py  the sensors of this machine
hwmon.py         INA3221 and other chips, the rails of Jetson boards
rapl.py          counters of Intel's and AMD's processors
nvml.py          NVIDIA's GPUs
jtop.py          the service of that name on a Jetson
log_file.py      the log of a meter outside of the machine
figure_files.py  figures that the kernel tells in files, and why it does not

A device without a sensor has none here: a caller then says "not measured", or states the platform's own figures
(`idle_w`, `active_w`) as such.
"""

from tvm_pipeline.power.choice import MeanPower, chosen_sensor, mean_watts
from tvm_pipeline.power.doors import power_modes, survey
from tvm_pipeline.power.meter import Energy, Meter
from tvm_pipeline.power.modes import PowerModes
from tvm_pipeline.power.sensor import EnergyCounter, Found, PowerSensor, Reading, Scope, Sensor

__all__ = [
    "Energy",
    "EnergyCounter",
    "Found",
    "MeanPower",
    "Meter",
    "PowerModes",
    "PowerSensor",
    "Reading",
    "Scope",
    "Sensor",
    "chosen_sensor",
    "mean_watts",
    "power_modes",
    "survey",
]
