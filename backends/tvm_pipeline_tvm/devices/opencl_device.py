"""OpenCL devices by pyopencl, for TVM 0.27, which writes OpenCL C and has no runtime of OpenCL.

A device has one queue, in which commands run in the order in which they are given, and another one for copies that run
beside kernels (`Device.concurrent_copies`). What it has of arrays of the host is
as in `mirrors.py`: the array itself where the device computes in the host's memory, and else a copy. An array on such a
device is a buffer of pyopencl, which knows no shape and no type.

It ran on PoCL only.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Any

import pyopencl as cl

from tvm_pipeline.backends.contract import Array
from tvm_pipeline.errors import PlatformError
from tvm_pipeline_tvm.devices.mirrors import Mirror, Mirrors, is_whole_pages
from tvm_pipeline_tvm.devices.targets import DEVICE_TYPES
from tvm_pipeline_tvm.kernels import tensor_bytes

_LEAST_VERSION = (1, 2)
_VERSION = re.compile(r"OpenCL (\d+)\.(\d+)")
_READ_WRITE = cl.mem_flags.READ_WRITE
_lock = threading.Lock()
_all: dict[int, OpenCLMirrors] = {}


class OpenCLDevice:
    """One OpenCL device, with what TVM's devices tell of themselves.

    Attributes:
        index: its number among the OpenCL devices.
        context: of this device alone.
        queue: of all its commands but those that are timed.
        has_host_memory: whether it computes in the memory of the host.
    """

    def __init__(self, device: cl.Device, index: int) -> None:
        self.index = index
        self.device_name, self.driver_version = device.name.strip(), device.driver_version.strip()
        self.has_host_memory = bool(device.host_unified_memory)
        self.context = cl.Context([device])
        self.queue = cl.CommandQueue(self.context, device)

    def with_another_queue(self) -> OpenCLDevice:
        """Return the device in the same context, with a queue of its own."""
        other = copy(self)
        other.queue = cl.CommandQueue(self.context)
        return other

    @cached_property
    def timing_queue(self) -> cl.CommandQueue:
        """A queue whose events tell times, which some drivers make slower."""
        return cl.CommandQueue(self.context, properties=cl.command_queue_properties.PROFILING_ENABLE)

    def sync(self) -> None:
        """Wait until all that was given to the device before is done."""
        cl.enqueue_marker(self.queue).wait()

    def dlpack_device_type(self) -> int:
        """Return the kind of the device, as DLPack numbers it."""
        return DEVICE_TYPES["opencl"]


class OpenCLMirrors(Mirrors):
    """The mirrors of one OpenCL device, and its arrays."""

    failures = (cl.Error,)
    device: OpenCLDevice

    def on_a_queue_of_their_own(self) -> OpenCLMirrors:
        return self._copying

    @cached_property
    def _copying(self) -> OpenCLMirrors:
        return OpenCLMirrors(self.device.with_another_queue())

    def copied(self, array: Array, on_device: Any) -> Mirror:
        return _Copy(array, on_device, self.device)

    def empty(self, n_bytes: int) -> cl.Buffer:
        return cl.Buffer(self.device.context, _READ_WRITE, max(n_bytes, 1))

    def part(self, arena: Any, offset: int, shape: Sequence[int], dtype: str) -> cl.Buffer:
        size = max(tensor_bytes(shape, dtype), 1)
        return arena if size == arena.size else arena.get_sub_region(offset, size)

    def holding(self, array: Any) -> cl.Buffer:
        buffer = self.empty(array.nbytes)
        if array.nbytes:
            cl.enqueue_copy(self.device.queue, buffer, array)
        return buffer

    def _in_place(self, array: Array) -> Mirror | None:
        if not self.device.has_host_memory or not is_whole_pages(array):
            return None
        try:
            return _InPlace(array, self.device)
        except (cl.Error, ValueError):  # the driver refuses this memory, or shows it elsewhere
            return None


class _Copy:
    """Memory of the device's own for the values of an array."""

    def __init__(self, array: Array, on_device: Any, device: OpenCLDevice) -> None:
        self.on_device = on_device
        self._host = array.reshape(-1).view("uint8")
        self._queue = device.queue
        self._moved: Any = None  # the event, at whose end pyopencl waits for the copy

    def begin(self, *, copied: bool) -> None:
        if copied and self._host.nbytes:
            self._moved = cl.enqueue_copy(self._queue, self.on_device, self._host, is_blocking=False)

    def end(self, *, copied: bool) -> None:
        if copied and self._host.nbytes:
            self._moved = cl.enqueue_copy(self._queue, self._host, self.on_device, is_blocking=False)


class _InPlace:
    """The array itself, which the host and the device have in turn: the host has it while it is mapped."""

    def __init__(self, array: Array, device: OpenCLDevice) -> None:
        """Raise an error of pyopencl's, or ValueError, where the driver refuses it."""
        self._array, self._queue = array, device.queue
        self._lock = threading.Lock()  # stages that use the same array share this
        flags = _READ_WRITE | cl.mem_flags.USE_HOST_PTR
        self.on_device = cl.Buffer(device.context, flags, hostbuf=array)
        self._mapped: Any = self._map()  # None while the device has it
        if self._mapped.ctypes.data != array.ctypes.data:
            raise ValueError("the driver maps memory of the host elsewhere")

    def begin(self, *, copied: bool) -> None:
        with self._lock:
            if self._mapped is not None:
                self._mapped.base.release(self._queue)
                self._mapped = None

    def end(self, *, copied: bool) -> None:
        with self._lock:
            if self._mapped is None:
                self._mapped = self._map()

    def _map(self) -> Any:
        flags = cl.map_flags.READ | cl.map_flags.WRITE
        mapped, _ = cl.enqueue_map_buffer(self._queue, self.on_device, flags, 0, (self._array.nbytes,), "uint8")
        return mapped


def opencl_mirrors(index: int) -> OpenCLMirrors:
    """Return the mirrors of an OpenCL device, the same for all models of this process.

    The context is made by the thread that calls this first: PoCL's workers run on the cores that this thread may use.

    Raises:
        PlatformError: there is no such device.
    """
    with _lock:
        if index not in _all:
            devices = _devices()
            if index >= len(devices):
                raise PlatformError(
                    f"there is no OpenCL device {index}: {len(devices)} can be used, of OpenCL 1.2 or later; see what "
                    "`clinfo -l` lists, and mend `target` in the platform file"
                )
            try:
                _all[index] = OpenCLMirrors(OpenCLDevice(devices[index], index))
            except cl.Error as error:
                raise PlatformError(
                    f"the OpenCL device {devices[index].name.strip()} is here, and cannot be used ({error}); see "
                    "whether `clinfo` works, and leave the device out of the platform otherwise"
                ) from error
        return _all[index]


def _devices() -> list[cl.Device]:
    """Return the devices in the order of `gpu/detection.py`, which is that of TVM's OpenCL runtime."""
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        raise PlatformError(
            f"OpenCL's loader finds no platform ({error}); install the driver of the GPU's vendor, or PoCL, which "
            "computes on the CPU (Debian and Ubuntu: apt install pocl-opencl-icd)"
        ) from error
    for kind in (cl.device_type.GPU, cl.device_type.CPU):
        found = [device for platform in reversed(platforms) for device in _of_kind(platform, kind)]
        if found:
            return found
    return []


def _of_kind(platform: cl.Platform, kind: int) -> list[cl.Device]:
    try:
        devices = platform.get_devices(kind)
    except cl.Error:  # there is none
        return []
    versions = [(device, _VERSION.match(device.version)) for device in devices]
    return [device for device, told in versions if told and (int(told[1]), int(told[2])) >= _LEAST_VERSION]
