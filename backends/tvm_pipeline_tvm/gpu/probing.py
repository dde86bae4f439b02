"""Ask one driver for its devices, in a child: a driver may hang, or end the process that it is in.

`detection.py` starts `tell` with `cuda` or `opencl` and receives one JSON object: the devices, or why there are none.
Only the standard library is imported, so that the answer comes in some hundredths of a second, and only the drivers'
own libraries are asked: TVM is not needed here.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

CUDA, OPENCL = "libcuda.so.1", "libOpenCL.so.1"

# CUresult and CUdevice_attribute of cuda.h.
_NO_DEVICE = 100
_INTEGRATED, _PCI_BUS, _PCI_DEVICE, _PCI_DOMAIN, _MAJOR, _MINOR = 18, 33, 34, 50, 75, 76

# Constants of CL/cl.h and CL/cl_ext.h.
_NO_PLATFORM = -1001
_PLATFORM_NAME = 0x0902
_TYPES = {"gpu": 1 << 2, "cpu": 1 << 1}
_THREADS, _ALIGNMENT_BITS, _MEMORY, _UNIFIED = 0x1004, 0x1019, 0x101F, 0x1035
_NAME, _VENDOR, _DRIVER, _VERSION, _EXTENSIONS = 0x102B, 0x102C, 0x102D, 0x102F, 0x1030
_PCI_KHR, _TOPOLOGY_AMD, _PCI_BUS_NV, _PCI_SLOT_NV, _PCI_DOMAIN_NV = 0x410F, 0x4037, 0x4008, 0x4009, 0x400A

Described = dict[str, Any]


class _AbsentError(Exception):
    """There is no driver, or it has no device: usual, and no fault."""


class _FaultError(Exception):
    """The driver is there and does not work."""


def cuda() -> Iterator[Described]:
    """Yield the devices of CUDA's driver, in its order, which is that of TVM's CUDA runtime."""
    driver = _load(CUDA)
    status = driver.cuInit(0)
    if status == _NO_DEVICE:
        raise _AbsentError(f"{CUDA} finds no device")
    _check_cuda(driver, "cuInit", status)
    version, count = ctypes.c_int(), ctypes.c_int()
    _check_cuda(driver, "cuDriverGetVersion", driver.cuDriverGetVersion(ctypes.byref(version)))
    _check_cuda(driver, "cuDeviceGetCount", driver.cuDeviceGetCount(ctypes.byref(count)))
    for index in range(count.value):
        device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
        _check_cuda(driver, "cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), index))
        _check_cuda(driver, "cuDeviceGetName", driver.cuDeviceGetName(name, len(name), device))
        _check_cuda(driver, "cuDeviceTotalMem", driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device))

        def attribute(number: int, device: ctypes.c_int = device) -> int:
            value = ctypes.c_int()
            return -1 if driver.cuDeviceGetAttribute(ctypes.byref(value), number, device) else value.value

        where = [attribute(number) for number in (_PCI_DOMAIN, _PCI_BUS, _PCI_DEVICE)]
        yield {
            "kind": "cuda",
            "index": index,
            "name": name.value.decode(errors="replace"),
            "vendor": "NVIDIA",
            "driver": f"{version.value // 1000}.{version.value % 1000 // 10}",
            "memory_bytes": memory.value,
            "is_shared": attribute(_INTEGRATED) == 1,
            "pci": "" if -1 in where else _pci(*where),
            "capability": (attribute(_MAJOR), attribute(_MINOR)),
        }


def _check_cuda(driver: ctypes.CDLL, call: str, status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        known = not driver.cuGetErrorName(status, ctypes.byref(name)) and name.value
        raise _FaultError(f"{CUDA}: {call} gives {known.decode(errors='replace') if known else status}")


def opencl() -> Iterator[Described]:
    """Yield the devices of all OpenCL platforms, each with the number of its platform; GPUs and CPUs, as TVM asks."""
    loader = _load(OPENCL)
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    loader.clGetPlatformIDs.argtypes = [number, ctypes.POINTER(pointer), ctypes.POINTER(number)]
    loader.clGetDeviceIDs.argtypes = [
        pointer, ctypes.c_ulong, number, ctypes.POINTER(pointer), ctypes.POINTER(number),
    ]  # fmt: skip
    for call in (loader.clGetPlatformInfo, loader.clGetDeviceInfo):
        call.argtypes = [pointer, number, ctypes.c_size_t, pointer, ctypes.POINTER(ctypes.c_size_t)]
    count = number()
    status = loader.clGetPlatformIDs(0, None, ctypes.byref(count))
    if status == _NO_PLATFORM or (not status and not count.value):
        raise _AbsentError(f"{OPENCL} finds no platform: no driver is registered in /etc/OpenCL/vendors")
    platforms = (pointer * count.value)()
    status = status or loader.clGetPlatformIDs(count, platforms, None)
    if status:
        raise _FaultError(f"{OPENCL}: clGetPlatformIDs gives {status}")
    for position, platform in enumerate(platforms):
        platform_name = _text(_driver_info(loader.clGetPlatformInfo, platform, _PLATFORM_NAME))
        for type_, bits in _TYPES.items():
            if loader.clGetDeviceIDs(platform, bits, 0, None, ctypes.byref(count)):
                continue  # no device of the type: TVM also leaves the platform out, whatever the status
            devices = (pointer * count.value)()
            status = loader.clGetDeviceIDs(platform, bits, count, devices, None)
            if status:
                raise _FaultError(f"{OPENCL}: clGetDeviceIDs of the platform {platform_name} gives {status}")
            for device in devices:
                told = {"platform": position, "platform_name": platform_name, "type": type_}
                yield {**told, **_opencl_device(loader, device)}


def _opencl_device(loader: ctypes.CDLL, device: int | None) -> Described:
    def told(key: int) -> bytes:
        return _driver_info(loader.clGetDeviceInfo, device, key)

    def figure(key: int) -> int:
        return int.from_bytes(told(key), sys.byteorder)

    pci, topology = told(_PCI_KHR), told(_TOPOLOGY_AMD)
    if len(pci) == 16:
        where = _pci(*(int.from_bytes(pci[at : at + 4], sys.byteorder) for at in (0, 4, 8)))
    elif len(topology) == 24:  # cl_device_topology_amd: a type, 17 bytes that are not used, bus, device, function
        where = _pci(0, topology[21], topology[22])
    elif told(_PCI_BUS_NV):
        where = _pci(figure(_PCI_DOMAIN_NV), figure(_PCI_BUS_NV), figure(_PCI_SLOT_NV) >> 3)
    else:
        where = ""
    return {
        "kind": "opencl",
        "name": _text(told(_NAME)),
        "vendor": _text(told(_VENDOR)),
        "driver": _text(told(_DRIVER)),
        "version": _text(told(_VERSION)),
        "memory_bytes": figure(_MEMORY),
        "is_shared": bool(figure(_UNIFIED)),
        "pci": where,
        "most_threads": figure(_THREADS),
        "alignment_bytes": figure(_ALIGNMENT_BITS) // 8,
        "has_half": "cl_khr_fp16" in _text(told(_EXTENSIONS)).split(),
    }


def _driver_info(call: Callable[..., int], handle: int | None, key: int) -> bytes:
    """Return what a platform or a device tells under a key; nothing where it does not know the key."""
    size = ctypes.c_size_t()
    if call(handle, key, 0, None, ctypes.byref(size)) or not size.value:
        return b""
    room = ctypes.create_string_buffer(size.value)
    return b"" if call(handle, key, size, room, None) else room.raw


def _text(told: bytes) -> str:
    return told.partition(b"\0")[0].decode(errors="replace").strip()


def _pci(domain: int, bus: int, device: int) -> str:
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def _load(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        # The loader names the file that it does not find, which may also be one that the library needs.
        kind = _AbsentError if str(error).startswith(f"{name}: cannot open shared object file") else _FaultError
        raise kind(f"{name} cannot be loaded ({error})") from error


def tell(kind: bytes, channel: socket.socket) -> None:
    """Send the answer; what drivers print goes to standard error."""
    os.dup2(2, 1)
    answer: Described = {"devices": []}
    try:
        answer["devices"] = list({b"cuda": cuda, b"opencl": opencl}[kind]())
    except _AbsentError as error:
        answer["absent"] = str(error)
    except (_FaultError, AttributeError) as error:  # AttributeError: the library lacks a function
        answer["fault"] = str(error)
    channel.send(json.dumps(answer).encode())
