"""Power and energy, measured: the sensors of a machine, and the joules between two moments.

sensor.py  the contract of sensors: joules that have been drawn, at a moment
meter.py   samples a sensor in a thread, and tells the joules between two moments

A device without a sensor has none here: a caller then says "not measured", or states the platform's own figures
(`idle_w`, `active_w`) as such.
"""

from tvm_pipeline.power.meter import Energy, Meter
from tvm_pipeline.power.sensor import EnergyCounter, PowerSensor, Reading, Sensor

__all__ = ["Energy", "EnergyCounter", "Meter", "PowerSensor", "Reading", "Sensor"]
