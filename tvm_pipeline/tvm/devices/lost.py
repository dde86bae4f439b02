"""Memory of a CUDA device that is lost: after a failed kernel CUDA refuses every call until the process ends.

TVM 0.27 raises what CUDA says out of destructors, which ends the process with the memory that is freed next: a run
could not go on without the device. So that memory is never freed, not even when the process ends. The CUDA runtime that
`addons.py` builds for TVM 0.19 has no such fault.
"""

from __future__ import annotations

import ctypes

from tvm_pipeline.tvm.devices.cuda_toolkit import loaded_runtime
from tvm_pipeline.tvm.devices.targets import DEVICE_TYPES
from tvm_pipeline.tvm.devices.tvm_arrays import HAS_ND

_refer_to = ctypes.pythonapi.Py_IncRef
_refer_to.argtypes = (ctypes.py_object,)
_refer_to.restype = None


def is_lost(kind: int, index: int) -> bool:
    """Return whether memory of a device can no longer be freed; it waits until the device has done its work.

    Args:
        kind, index: of the device, as DLPack numbers them.
    """
    runtime = None if HAS_ND or kind != DEVICE_TYPES["cuda"] else loaded_runtime()
    if runtime is None:
        return False
    refused = runtime.cudaSetDevice(index) or runtime.cudaDeviceSynchronize()
    runtime.cudaGetLastError()  # else TVM's next check would find an error of another call
    return bool(refused)


def keep_for_ever(held: object) -> None:
    """Have an object never be destroyed."""
    _refer_to(held)
