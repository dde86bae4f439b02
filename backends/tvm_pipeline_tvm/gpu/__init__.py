"""The backend of GPUs through TVM: CUDA and OpenCL. It compiles for the CPU cores of the same platform as well.

gpu.py        the backend: it finds GPUs, settles and compiles, and binds threads
targets.py    which TVM target a GPU has, and whether a target fits it
detection.py  lists the GPUs of this machine as TVM numbers them
probing.py    asks one driver for its devices, in a child

CUDA ran on one real GPU, an H100. `detect` needs neither TVM nor anything built.
"""

from tvm_pipeline_tvm.gpu.gpu import GpuBackend

backend = GpuBackend()

__all__ = ["GpuBackend", "backend"]
