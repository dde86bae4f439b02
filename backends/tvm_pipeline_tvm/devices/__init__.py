"""Devices that compute in memory of their own: CUDA and OpenCL, through TVM, and with Relax OpenCL through pyopencl.

targets.py         the target of a device: what it is compiled for, and which of several equal devices it is
runtimes.py        make TVM able to compile for a kind of device and to run on it
addons.py          build what the TVM of PyPI lacks, from its own sources, into the cache
cuda_toolkit.py    where CUDA's libraries and headers are on this machine
nvrtc.py           NVIDIA's compiler: source becomes code for a device
cuda_compiler.py   compile kernels for CUDA devices with the TVM of PyPI
cuda_events.py     time kernels by the clock of a CUDA device
opencl_device.py   OpenCL devices by pyopencl, for a TVM that has none
releasing.py       free memory of a device in a thread of its own, since a driver may hang
programs.py        compiled OpenCL programs, kept beside the kernels of a library
tvm_arrays.py      arrays and devices of the TVM that is installed
device_arrays.py   arrays on a device: an arena with arrays in it, and parameters that all slices share
mirrors.py         what a device has of arrays of the host: the same memory, or a copy
crossings.py       tensors that cross the cut of a slice
transfer_times.py  how long copies take

`relay/device_executor.py` and `relax/device_loop.py` run slices on such devices. `gpu/` finds them.
"""
