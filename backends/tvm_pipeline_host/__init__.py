"""The backend of this machine's CPU cores, through TVM and LLVM.

One device per cluster of equal cores; where all cores are equal, two halves (`cpu0`, `cpu1`) and, beside them,
`cpu` with all. Read `detection.py` for how they are found and `host.py` for how a thread is tied to one.
"""

from tvm_pipeline_host.host import HostBackend

backend = HostBackend()

__all__ = ["HostBackend", "backend"]
