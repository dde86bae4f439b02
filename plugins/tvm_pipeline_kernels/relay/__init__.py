"""Kernels for what Relay compiles.

kernel_set.py    what the engine is given
schedules/       schedules of our own for x86
tuning/          what tuning asks of Relay, and the search for GPUs
lowered_int8.py  quantised operators as those that compute them, with less between two convolutions
"""
