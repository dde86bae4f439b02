"""Mirrors: what a device has of arrays of the host, such as the tensors in the slots of a pipeline.

A device that computes in the host's memory, as a Jetson's from Xavier on, uses the array itself, without a copy. Its
mirror is an `InPlaceOpenCL` or an `InPlaceCUDA`. Any other device has memory of its own and gets copies. Its mirror is
a `DeviceCopy`. `pin` tells CUDA's driver which arrays are copied, so that the driver needs no buffer between.

Copies ran on a real GPU, an H100. Arrays in place ran on PoCL and on software CUDA, and on no Jetson yet.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar, Protocol

import tvm

from tvm_pipeline.backends.contract import Array
from tvm_pipeline.backends.ports import PAGE
from tvm_pipeline_tvm.devices import cuda_toolkit
from tvm_pipeline_tvm.devices.device_arrays import part, pointed_at
from tvm_pipeline_tvm.devices.targets import DEVICE_TYPES, index_of, kind_of
from tvm_pipeline_tvm.devices.tvm_arrays import HAS_ND, copy_of, empty, numbers_of, same_memory
from tvm_pipeline_tvm.tvm_errors import TVMError

_FOR_ALL = 1 | 2  # cudaHostRegister for all devices, and into their address space
# Attributes of a CUDA device.
_INTEGRATED, _MAJOR, _MINOR, _CAN_REGISTER = 18, 75, 76, 99
# From this compute capability on (Xavier), a Jetson's CPU and GPU see each other's writes. Before, the CPU would
# read and write such memory without its caches.
_COHERENT = (7, 2)


class Mirror(Protocol):
    """What stands on a device for an array of the host.

    Attributes:
        on_device: its bytes there.
    """

    on_device: Any

    def begin(self, *, copied: bool) -> None:
        """Give the array to the device, before a run; `copied` has its values brought there."""

    def end(self, *, copied: bool) -> None:
        """Give the array back to the host, after a run; `copied` has its values brought back. They may come later."""


class DeviceCopy:
    """Memory of the device's own for the values of an array."""

    def __init__(self, array: Array, on_device: Any, pinned: PinnedMemory | None = None) -> None:
        self.on_device = on_device
        self._host = same_memory(_as_bytes(array))
        self._pinned = pinned

    def begin(self, *, copied: bool) -> None:
        if copied:
            self._host.copyto(self.on_device)

    def end(self, *, copied: bool) -> None:
        if copied:
            self.on_device.copyto(self._host)


class InPlaceOpenCL:
    """The array itself, which the host and the device have in turn."""

    def __init__(self, array: Array, device: tvm.runtime.Device) -> None:
        """Raise TVMError where the driver refuses it."""
        use = tvm.get_global_func("tvm_pipeline.opencl.in_place")
        self.on_device = use(device.device_id, ctypes.c_void_p(array.ctypes.data), array.nbytes)
        self._array = array  # freed after `on_device`
        self._to_device = tvm.get_global_func("tvm_pipeline.opencl.give_to_device")
        self._to_host = tvm.get_global_func("tvm_pipeline.opencl.give_to_host")

    def begin(self, *, copied: bool) -> None:
        self._to_device(self.on_device)

    def end(self, *, copied: bool) -> None:
        self._to_host(self.on_device)


class InPlaceCUDA:
    """The array itself under its address on the device; both see each other's writes once a run has ended."""

    def __init__(self, array: Array, device: tvm.runtime.Device, pinned: PinnedMemory) -> None:
        self.on_device = pointed_at(pinned.on_device, device, (array.nbytes,), "uint8", pinned)

    def begin(self, *, copied: bool) -> None:
        pass

    def end(self, *, copied: bool) -> None:
        pass


class Mirrors:
    """The mirrors of one device, and its arrays. Stages that use the same array of the host share what is kept of it.

    This is for TVM's devices; `opencl_device.py` has those of pyopencl.

    Attributes:
        failures: what calls of the device raise.
    """

    failures: ClassVar[tuple[type[Exception], ...]] = (TVMError,)
    device: Any

    def __init__(self, device: Any) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._known: weakref.WeakValueDictionary[tuple[int, int], Mirror] = weakref.WeakValueDictionary()

    def on_a_queue_of_their_own(self) -> Mirrors:
        """Return mirrors whose copies run beside kernels; those of CUDA do so, where kernels have another stream."""
        return self

    def shared(self, array: Array, *, kept: bool) -> Mirror | None:
        """Return the mirror that all stages share which use this array.

        Args:
            kept: whether the values stay on the device between two stages.

        Returns:
            None where the array is best copied to and from memory that the stage has for all arrays.
        """
        key = array.ctypes.data, array.nbytes
        with self._lock:
            mirror = self._known.get(key)
            if mirror is None:
                mirror = self._in_place(array)
                if mirror is None and kept:
                    mirror = self.copied(array, self.empty(array.nbytes))
                if mirror is not None:
                    self._known[key] = mirror
            return mirror

    def copied(self, array: Array, on_device: Any) -> Mirror:
        """Return a mirror that copies to and from memory of the device, given as an array of bytes."""
        kind, index = numbers_of(self.device)
        pinned = pin(array, index) if kind == DEVICE_TYPES["cuda"] and is_whole_pages(array) else None
        return DeviceCopy(array, on_device, pinned)

    def empty(self, n_bytes: int) -> Any:
        """Return an array of bytes on the device, of any content."""
        return empty((n_bytes,), "uint8", self.device)

    def part(self, arena: Any, offset: int, shape: Sequence[int], dtype: str) -> Any:
        """Return an array within one of bytes, from `offset` on; it keeps that alive."""
        return part(arena, offset, shape, dtype)

    def holding(self, array: Any) -> Any:
        """Return a copy of an array of the host on the device."""
        return copy_of(array, self.device)

    def _in_place(self, array: Array) -> Mirror | None:
        kind, index = numbers_of(self.device)
        if not is_whole_pages(array) or not shares_memory(kind, index):
            return None
        if kind == DEVICE_TYPES["opencl"]:
            with suppress(tvm.TVMError):  # the driver refuses this memory
                return InPlaceOpenCL(array, self.device)
        elif pinned := pin(array, index):
            return InPlaceCUDA(array, self.device, pinned)
        return None


_all: dict[tuple[int, int], Mirrors] = {}


def mirrors_on(device: tvm.runtime.Device) -> Mirrors:
    """Return the mirrors of a device of TVM's, the same for all models of this process."""
    return _all.setdefault(numbers_of(device), Mirrors(device))


def mirrors_of(target: str) -> Mirrors:
    """Return the mirrors of the device of a target, the same for all models of this process.

    Raises:
        PlatformError: there is no such OpenCL device.
    """
    if kind_of(target) == "opencl" and not HAS_ND:
        from tvm_pipeline_tvm.devices.opencl_device import opencl_mirrors  # which needs pyopencl

        return opencl_mirrors(index_of(target))
    return mirrors_on(tvm.device(kind_of(target), index_of(target)))


def _as_bytes(array: Array) -> Array:
    return array.reshape(-1).view("uint8")


def is_whole_pages(array: Array) -> bool:
    """Return whether an array begins at a page and, by `ports.aligned_empty`, shares none with another one."""
    return bool(array.flags.c_contiguous) and array.nbytes >= PAGE and array.ctypes.data % PAGE == 0


@cache
def shares_memory(kind: int, index: int) -> bool:
    """Return whether a device (of a kind of DLPack's) computes in the host's memory, and sees what the host writes."""
    if kind == DEVICE_TYPES["opencl"]:
        told: str = tvm.get_global_func("tvm_pipeline.opencl.told")(index)
        return told.endswith("unified")
    capability = _attribute(_MAJOR, index), _attribute(_MINOR, index)
    return _attribute(_INTEGRATED, index) == 1 and capability >= _COHERENT


def _attribute(number: int, index: int) -> int:
    """Return an attribute of a CUDA device; -1 where the library does not know it, or is not here."""
    value = ctypes.c_int()
    library = cuda_toolkit.loaded_runtime()
    if library is None or library.cudaDeviceGetAttribute(ctypes.byref(value), number, index):
        return -1
    return value.value


class PinnedMemory:
    """Memory of the host that CUDA's driver knows, for as long as this object lives.

    Attributes:
        on_device: its address for the device.
    """

    def __init__(self, array: Array, library: ctypes.CDLL, index: int) -> None:
        """Raise OSError where the driver refuses it."""
        self._array, self._library, self._address = array, library, array.ctypes.data
        size = array.nbytes + -array.nbytes % PAGE
        library.cudaSetDevice(index)
        self._known = not library.cudaHostRegister(ctypes.c_void_p(self._address), ctypes.c_size_t(size), _FOR_ALL)
        there = ctypes.c_void_p()
        if not self._known or library.cudaHostGetDevicePointer(ctypes.byref(there), ctypes.c_void_p(self._address), 0):
            library.cudaGetLastError()  # else TVM's next check would find that
            raise OSError("the driver does not register this memory")
        self.on_device = there.value or 0

    def __del__(self) -> None:
        if self._known:  # a device that was lost refuses; its memory goes with it
            self._library.cudaHostUnregister(ctypes.c_void_p(self._address))


_all_pinned: weakref.WeakValueDictionary[int, PinnedMemory] = weakref.WeakValueDictionary()  # by address
_pinning = threading.Lock()


def pin(array: Array, index: int) -> PinnedMemory | None:
    """Tell the driver of an array that is whole pages; None where it cannot know it, and copies it as it is."""
    library = cuda_toolkit.loaded_runtime()
    if library is None or _attribute(_CAN_REGISTER, index) == 0:
        return None
    with _pinning:
        pinned = _all_pinned.get(array.ctypes.data)
        if pinned is None:
            with suppress(OSError):
                pinned = _all_pinned[array.ctypes.data] = PinnedMemory(array, library, index)
        return pinned
