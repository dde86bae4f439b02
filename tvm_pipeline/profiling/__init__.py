"""Operators and links measured (`profile_model`), and whole stages where times do not add up (`stage_timer`).

operators.py    seconds of each operator on each device, and how devices slow one another down
links.py        what it costs to read a tensor that another device wrote
stage_timer.py  seconds of one stage, compiled and measured as a whole
bound.py        work in a thread that is tied to a device
environment.py  what a figure depends on besides the model
"""

from tvm_pipeline.profiling.operators import profile_model
from tvm_pipeline.profiling.stage_timer import stage_timer

__all__ = ["profile_model", "stage_timer"]
