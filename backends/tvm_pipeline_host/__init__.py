"""The backend of this machine's CPU cores, through TVM and LLVM.

One device per cluster of equal cores; where all cores are equal, two halves (`cpu0`, `cpu1`) and, beside them,
`cpu` with all.

detection.py   how the devices are found
host.py        the backend: how it compiles, and how a thread is tied to a device
"""

from tvm_pipeline_host.host import HostBackend

backend = HostBackend()

__all__ = ["HostBackend", "backend"]
