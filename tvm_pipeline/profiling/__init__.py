"""Operators and links measured (`profile_model`), and whole stages where times do not add up (`measured_plan`).

operators.py    seconds of each operator on each device, and how devices slow one another down
links.py        what it costs to read a tensor that another device wrote
stages.py       a plan whose stages are compiled and measured until it stands
environment.py  what a figure depends on besides the model
"""

from tvm_pipeline.profiling.measured_stages import NAME as MEASURED
from tvm_pipeline.profiling.measured_stages import measured_plan
from tvm_pipeline.profiling.operators import profile_model

__all__ = ["MEASURED", "measured_plan", "profile_model"]
