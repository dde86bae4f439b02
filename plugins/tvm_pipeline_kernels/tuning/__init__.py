"""Tuning: measure other schedules than the static rule's, and keep what is faster in the whole network.

tuner.py            the search: what is worth it first, within a budget of seconds; `Emitter` is what it asks of an IR
candidates.py       the workloads of a network, and the processor time of candidates
race.py             two libraries of a network side by side, kernel by kernel
tuning_records.py   what was measured, as AutoTVM's JSON lines in the cache, for each target and processor
targets.py          a target's cores or GPU, and how records name it
device_child.py     a process for the search on a GPU, whose candidates may hang or lose the device

`choices.py` of the package says what a choice may be. The emitters are `relay/tuning/emitter.py`, `relax/emitter.py`,
and `relax/device_emitter.py` for GPUs. Relay searches for GPUs in `relay/tuning/`. No tile changes a
value.
"""
