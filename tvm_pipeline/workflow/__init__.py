"""The road from a model to a plan that runs: compile, measure, decide, and keep it.

compiled_pipeline.py  the whole road in one call, for programs
steps.py            from a model file to a plan, as one call each
compiling.py        a model compiled for a platform, with what is tried and left out
engines.py          engines that compete on the same cores
engine_fallback.py  what TVM refuses, on an engine that takes it
rewriting_trial.py  operators in parts, accepted where memory falls and outputs stay the same
applications.py     models with work of the host around them, which plug-ins know
machine.py          the machine whose devices a model is compiled for: this one, or a board
machine_modes.py    the power modes of this machine, and being in one with permission
power_meter.py      the sensor of power that a command measures with
batches.py          how many frames a call is to compute
doubts.py           why figures may not be those of this machine
merged.py           several models that run at one rate, planned as one graph
modelled.py         devices that plan from calibrated models, and are not measured
predicted.py        profiles of devices that are not plugged in, predicted from shapes
mode_profiles.py    a profile for each power mode, and a plan over these
calibrating.py      models of a platform's devices, refitted to stages measured on those that are here
tune_targets.py     faster kernels of a model for each target of a platform
tune_plan.py        faster kernels for what bounds the best plan, while it is planned anew
"""
