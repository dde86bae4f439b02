"""The backend of this machine's CPU cores, through TVM and LLVM.

Each cluster of equal cores is a device. If all cores are equal, the devices are two halves (`cpu0`, `cpu1`) and, as a
third, all cores (`cpu`).

detection.py   finds the clusters, and the LLVM target of the cores
core_kinds.py  kinds of cores, and cores that are switched off
host.py        compiles, and binds threads to devices
"""

from tvm_pipeline_tvm.host.host import HostBackend

backend = HostBackend()

__all__ = ["HostBackend", "backend"]
