"""Tuning for Relay: what the search of `tvm_pipeline_kernels.tuning` asks of it, and the search for GPUs.

tasks.py              the fused functions of a network that hold what is tuned
emitter.py            candidates of CPU cores as kernels, in one module of code
runners.py            a network that runs node by node, on a core or on a GPU

For GPUs:

device_records.py     what was measured, for each target and GPU
device_candidates.py  candidates compiled, run, compared bit for bit and timed
device_tuner.py       the search: AutoTVM's, in the schedules that TOPI has templates for
device_child.py       what the process of the search does

`schedules/device_choices.py` says which knobs a GPU's kernels have, and `build.py` applies the records to a model. No
choice changes a value.
"""
