"""Arrays on a device: parameters that all its slices share, and arrays within one arena.

TVM's own view of a part of an array carries a byte offset, which compiled kernels refuse. An array within a CUDA array
is a pointer, and one within an OpenCL array is a sub-buffer, which the add-on makes (`opencl_parts.cc`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tvm

from tvm_pipeline_tvm.devices.releasing import release_with
from tvm_pipeline_tvm.devices.targets import DEVICE_TYPES
from tvm_pipeline_tvm.devices.tvm_arrays import address_of, numbers_of, of_capsule

if TYPE_CHECKING:
    from tvm_pipeline_tvm.devices.mirrors import Mirrors


class DeviceParams:
    """The parameters of one library on one device; each is copied there when it is first asked for."""

    def __init__(self, params: Mapping[Any, Any], mirrors: Mirrors) -> None:
        self.mirrors, self.device = mirrors, mirrors.device
        self._params = params
        self._arrays: dict[Any, Any] = {}
        release_with(self, self.device, self._arrays)

    def __getitem__(self, name: Any) -> Any:
        if name not in self._arrays:
            self._arrays[name] = self.mirrors.holding(self._params[name])
        return self._arrays[name]

    def __len__(self) -> int:
        """Return how many parameters are on the device."""
        return len(self._arrays)


def part(arena: Any, offset: int, shape: Sequence[int], dtype: str) -> Any:
    """Return an array within `arena`, an array of bytes on a device, from `offset` on; it keeps the arena alive."""
    if numbers_of(arena.device)[0] == DEVICE_TYPES["opencl"]:
        sub_buffer = tvm.get_global_func("tvm_pipeline.opencl.part")
        return sub_buffer(arena, offset, tvm.runtime.ShapeTuple(shape), tvm.DataType(dtype))
    return pointed_at(address_of(arena) + offset, arena.device, shape, dtype, arena)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]
# What each array that was made here needs while it lives, by the address of its DLManagedTensor.
_alive: dict[int, tuple[Any, ...]] = {}


@_Deleter
def _delete(managed: Any) -> None:
    _alive.pop(ctypes.addressof(managed.contents), None)


def pointed_at(address: int, device: Any, shape: Sequence[int], dtype: str, keeps: Any) -> Any:
    """Return an array at an address of a device, which keeps `keeps` alive; by DLPack."""
    extents, type_ = (ctypes.c_int64 * len(shape))(*shape), tvm.DataType(dtype)
    managed = _DLManagedTensor(
        _DLTensor(address, *numbers_of(device), len(shape), int(type_.type_code), type_.bits, 1, extents, None, 0),
        None,
        _delete,
    )
    _alive[ctypes.addressof(managed)] = managed, extents, keeps
    capsule = _new_capsule(ctypes.addressof(managed), b"dltensor", None)
    return of_capsule(capsule, device)


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
