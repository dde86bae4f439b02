"""Tuning: measure other tiles than those of the static rule, and keep those that are faster in the whole network.

tuning_records.py  what was measured, as AutoTVM's JSON lines in the cache, for each target and processor
tasks.py           the fused functions of a network that hold a convolution of ours
candidates.py      candidates of a function in one module of code, and the processor time of each
race.py            two libraries of a network side by side, kernel by kernel
tuner.py           the search: what is worth it first, within a budget of seconds

`schedules/choices.py` says what a tile may be, and `build.py` applies the records to a model. No choice changes a
value.
"""
