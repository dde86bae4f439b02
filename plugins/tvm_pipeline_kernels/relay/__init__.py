"""Kernels for what Relay compiles.

kernel_set.py    what the engine is given
schedules/       schedules of our own for x86, and what tuning may choose of them
tuning/          the search for faster schedules of a library's kernels
lowered_int8.py  quantised operators as those that compute them, with less between two convolutions
"""
