"""Tuning: measure other schedules than those of a model's default, and keep what is faster in the whole network.

tuning_records.py     what was measured, as AutoTVM's JSON lines in the cache, for each target and processor
tasks.py              the fused functions of a network that hold what is tuned
race.py               two libraries of a network side by side, kernel by kernel

For CPU cores:

candidates.py         candidates of a function in one module of code, and the processor time of each
tuner.py              the search: what is worth it first, within a budget of seconds

For GPUs:

device_records.py     what was measured, for each target and GPU
device_candidates.py  candidates compiled, run, compared bit for bit and timed
device_tuner.py       the search: AutoTVM's, in the schedules that TOPI has templates for
device_child.py       the process of the search, which may die or hang, and its parent

`schedules/choices.py` says what a tile of CPU cores may be, `schedules/device_choices.py` which knobs a GPU's kernels
have, and `build.py` applies the records to a model. No choice changes a value.
"""
