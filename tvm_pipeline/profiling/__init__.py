"""Operators and links measured: `profile_model` is the whole of it.

operators.py    seconds of each operator on each device, and how devices slow one another down
links.py        what it costs to read a tensor that another device wrote
environment.py  what a figure depends on besides the model
"""

from tvm_pipeline.profiling.operators import profile_model

__all__ = ["profile_model"]
