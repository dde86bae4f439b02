"""Arrays and devices of the TVM that is installed: 0.19 and 0.27 name the same things differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm

HAS_ND = hasattr(tvm, "nd")  # TVM 0.19
_made_of = tvm.nd if HAS_ND else tvm.runtime


def numbers_of(device: tvm.runtime.Device) -> tuple[int, int]:
    """Return the kind of a device, as DLPack numbers it, and which of its kind it is."""
    return (device.device_type, device.device_id) if HAS_ND else (device.dlpack_device_type(), device.index)


def empty(shape: Sequence[int], dtype: str, device: tvm.runtime.Device) -> Any:
    """Return an array on a device, of any content."""
    return _made_of.empty(tuple(shape), dtype, device)


def copy_of(array: Any, device: tvm.runtime.Device) -> Any:
    """Return a copy of an array on a device."""
    return (_made_of.array if HAS_ND else _made_of.tensor)(array, device)


def same_memory(array: Any) -> Any:
    """Return an array of the host, aligned to 64 bytes, as TVM's; nothing is copied."""
    return _made_of.from_dlpack(array)


def of_capsule(capsule: Any, device: tvm.runtime.Device) -> Any:
    """Return the array in a capsule of DLPack."""
    return _made_of.from_dlpack(capsule if HAS_ND else _Exporter(capsule, device))


def address_of(array: Any) -> int:
    """Return where an array begins in the memory of its device."""
    return int((array.handle.contents.data or 0) if HAS_ND else array.data_ptr())


class _Exporter:
    """A capsule as what DLPack's importers of TVM 0.27 take."""

    def __init__(self, capsule: Any, device: tvm.runtime.Device) -> None:
        self._capsule, self._device = capsule, device

    def __dlpack__(self, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return numbers_of(self._device)
