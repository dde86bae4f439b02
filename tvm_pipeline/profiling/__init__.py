"""Measure operators, transfers and links (`profile_model`), and whole stages where times do not add up (`stage_timer`).

operators.py     seconds of each operator and of transfers on each device, and how devices slow one another down
rounds.py        what is timed when, and again where it was disturbed
device_bench.py  one device with all that it computes of the model
computed.py      all that a device computes, as one runnable stage
twins.py         equal devices, and differences between them
patience.py      how long to try again
disturbance.py   what other programs take, as the kernel and a reference kernel tell
timings.py       timed calls, which of them to believe, and the confidence interval of their median
estimates.py     the figures of a device from its timings
evidence.py      what a profile says of its own circumstances
joules.py        joules of operators on each device, and the power of the idle machine
calls.py         seconds of any work on a device's cores
links.py         seconds to read a tensor that another device wrote
stage_timer.py   seconds of one stage, compiled and measured as a whole
merging.py       the profile of several models that are planned as one graph
layer_times.py   seconds that nobody measured, predicted from shapes
settling.py      waits until clocks have settled, after a switch of the power mode
bound.py         work in threads that are bound to devices
throttling.py    tells when the clocks are lowered because of heat or current, and when that ends
environment.py   the machine, the software and the load during a measurement
"""

from tvm_pipeline.profiling.operators import profile_model
from tvm_pipeline.profiling.stage_timer import stage_timer

__all__ = ["profile_model", "stage_timer"]
