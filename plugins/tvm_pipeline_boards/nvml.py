"""The power of NVIDIA's GPUs, as their driver tells it through its library NVML, which comes with the driver.

GPUs from Volta on count energy in millijoules since the driver was loaded; older ones tell milliwatts. Both are those
of the whole board of the GPU, memory included. A Jetson has the library, which answers "Not Supported" there: its
rails are in hwmon.py.

Source: NVIDIA's NVML API reference, "Device Queries".
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path

from tvm_pipeline.errors import PowerError
from tvm_pipeline.power import EnergyCounter, PowerSensor, Sensor, Survey

LIBRARY = "libnvidia-ml.so.1"
PERIOD_S = 0.1  # the driver renews its figures 10 to 50 times a second, by GPU
UNIT = 1e-3  # millijoules and milliwatts
NAME_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE

Query = Callable[[], int]


class GpuCounter(EnergyCounter):
    """The counter of energy of one GPU.

    Raises:
        PowerError: the driver does not tell it; the message gives the driver's reason.
    """

    period_s = PERIOD_S
    range_j = math.inf
    scope = "unit"

    def __init__(self, name: str, covers: str, millijoules: Query) -> None:
        super().__init__()
        self.name, self.covers = name, covers
        self._millijoules = millijoules
        self.counter_j()

    def counter_j(self) -> float:
        """Return the counter, in joules."""
        return self._millijoules() * UNIT


class GpuPower(PowerSensor):
    """The power of one GPU that counts no energy.

    Raises:
        PowerError: the driver does not tell it; the message gives the driver's reason.
    """

    period_s = PERIOD_S
    scope = "unit"

    def __init__(self, name: str, covers: str, milliwatts: Query) -> None:
        super().__init__()
        self.name, self.covers = name, covers
        self._milliwatts = milliwatts
        self.watts()

    def watts(self) -> float:
        """Return the power that is drawn now."""
        return self._milliwatts() * UNIT


class _Library:
    """NVML, initialised; it stays so until the process ends."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self.call("nvmlInit_v2")

    def call(self, function: str, *arguments: object) -> None:
        try:
            status = getattr(self._library, function)(*arguments)
        except AttributeError:
            raise PowerError(f"{function}: the driver's {LIBRARY} is too old and does not have it") from None
        if status:
            reason = self._library.nvmlErrorString
            reason.restype = ctypes.c_char_p
            raise PowerError(f"{function}: {reason(status).decode(errors='replace')}")

    def gpus(self) -> list[ctypes.c_void_p]:
        count = ctypes.c_uint()
        self.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        handles = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            handles.append(handle)
        return handles

    def name_of(self, gpu: ctypes.c_void_p) -> str:
        name = ctypes.create_string_buffer(NAME_BYTES)
        self.call("nvmlDeviceGetName", gpu, name, ctypes.c_uint(NAME_BYTES))
        return name.value.decode(errors="replace")

    def query(self, function: str, gpu: ctypes.c_void_p, kind: type[ctypes.c_uint] | type[ctypes.c_ulonglong]) -> Query:
        def asked() -> int:
            figure = kind()
            self.call(function, gpu, ctypes.byref(figure))
            return figure.value

        return asked


def nvml_sensors(root: Path, library: str = LIBRARY) -> Survey:
    """Return the GPUs of this machine that tell their energy or power; none for a `root` other than `/`.

    Args:
        library: the driver's library, by its path or by a name that the loader knows.
    """
    found = Survey([], {})
    if root != Path("/") and library == LIBRARY:
        return found
    try:
        nvml = _Library(library)
    except OSError:  # no such library: no driver of NVIDIA's
        return found
    except PowerError as error:
        found.obstacles["nvml"] = str(error)
        return found
    try:
        for index, gpu in enumerate(nvml.gpus()):
            name = f"nvml:{index}"
            try:
                found.sensors.append(_sensor(nvml, gpu, name, f"GPU {index} ({nvml.name_of(gpu)})"))
            except PowerError as error:
                found.obstacles[name] = str(error)
    except PowerError as error:
        found.obstacles["nvml"] = str(error)
    return found


def _sensor(nvml: _Library, gpu: ctypes.c_void_p, name: str, covers: str) -> Sensor:
    try:
        return GpuCounter(name, covers, nvml.query("nvmlDeviceGetTotalEnergyConsumption", gpu, ctypes.c_ulonglong))
    except PowerError:
        return GpuPower(name, covers, nvml.query("nvmlDeviceGetPowerUsage", gpu, ctypes.c_uint))
