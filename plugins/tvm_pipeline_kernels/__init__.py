"""Kernels that are faster than TVM's own, and the search for still faster ones: a guest of `tvm_pipeline.kernels`.

tiles.py       register tiles: how much of a convolution one pass over the weights computes
gpu_tiles.py   tiles of a convolution on a GPU
winograd.py    Winograd's algorithm: its transforms, and how far its values are off
elementary.py  exp, sigmoid, tanh and erf as expressions that become vectors
choices.py     what tuning may choose of a convolution
tuning/        the search for faster choices
relay/         schedules for Relay, and its tuning for GPUs
relax/         schedules for Relax, and `cpu_pipeline` for scripts

The engine compiles without this package by TVM's own schedules. An environment has one of the two IRs.
"""
