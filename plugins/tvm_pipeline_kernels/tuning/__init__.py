"""Tuning on CPU cores: measure other schedules than the static rule's, and keep what is faster in the whole network.

tuner.py            the search: what is worth it first, within a budget of seconds; `Emitter` is what it asks of an IR
candidates.py       the workloads of a network, and the processor time of candidates
race.py             two libraries of a network side by side, kernel by kernel
tuning_records.py   what was measured, as AutoTVM's JSON lines in the cache, for each target and processor
targets.py          a target's cores, and how records name it
device_child.py     a process for the search on a GPU, whose candidates may hang or lose the device

`choices.py` of the package says what a choice may be; `relay/tuning/emitter.py` and `relax/emitter.py` are the two
emitters. GPUs are tuned for Relay only: `relay/tuning/`. No tile changes a value.
"""
