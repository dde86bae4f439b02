"""Find the Edge TPUs that are plugged in, and load the delegate through which TFLite runs on one of them.

Google's library libedgetpu reaches the device; no package registry has it. Google's pycoral is used if it is installed,
but nothing here needs it (the package called pycoral on PyPI is another one; that of github.com/feranick/pycoral is for
today's Python). Nothing falls back to the CPU silently:
a caller that prefers the CPU calls `absence` and reports the reason. Next: `interpreter.py`.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import platform
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from tvm_pipeline.errors import PlatformError
from tvm_pipeline.processes import status_of_copy
from tvm_pipeline.system_files import file_number, file_text

_log = logging.getLogger(__name__)

LIBRARY = "libedgetpu.so.1"
BUILDS = "https://github.com/feranick/libedgetpu/releases"
TRIAL_S = 60.0  # for a first use, which loads the firmware
USB = Path("/sys/bus/usb/devices")
# Vendor and product before the first use, which loads the firmware, and after it.
_COLD, _WARM = ("1a6e", "089a"), ("18d1", "9302")


def edge_tpus(usb: Path = USB, dev: Path = Path("/dev")) -> list[str]:
    """Return the addresses of the Edge TPUs that are plugged in: `usb:0`, `usb:1`, `pci:0`.

    If pycoral is installed, it lists them. Otherwise they are found in the kernel's list of USB devices (the folder
    `usb`) and among the PCIe driver's device files (in the folder `dev`).
    """
    if pycoral := _pycoral():
        kinds = [device["type"] for device in pycoral.list_edge_tpus()]
    else:
        kinds = ["usb" for numbers in _usb_numbers(usb) if numbers in (_COLD, _WARM)]
        kinds += ["pci" for device in dev.glob("apex_*") if re.fullmatch(r"apex_\d+", device.name)]
    return [f"{kind}:{index}" for kind, count in Counter(kinds).items() for index in range(count)]


_opening = threading.Lock()  # pycoral knows devices by numbers, which move while a stick loads its firmware
# This variable of the environment has, as JSON, the paths of the devices that addresses had when they were first used:
# the processes of stages then mean the same devices, also while one of them is away.
PATHS = "TVM_PIPELINE_EDGE_TPUS"
APEX = Path("/sys/class/apex")
_ADDRESS = re.compile(r"((?:usb|pci)?(?::\d+)?)(?: Performance=(Low|Medium|High|Max))?")
_HIGH_SPEED = 480  # Mbit/s of USB 2, as the kernel tells it


def tflite() -> Any:
    """Return the module `ai_edge_litert.interpreter`.

    Raises:
        PlatformError: this system cannot load it. Its wheels 2.1.4 to 2.3.0 for aarch64 need glibc 2.34 (`readelf -V`),
            whatever their tags say; JetPack 5 and Debian 11 have 2.31.
    """
    try:
        return importlib.import_module("ai_edge_litert.interpreter")
    except ImportError as error:
        raise PlatformError(
            f"TFLite cannot be loaded: {' '.join(str(error).split())}; the system has {' '.join(platform.libc_ver())}. "
            "Where glibc is older than 2.34, run `pip install ai-edge-litert==2.1.0`"
        ) from error


class EdgeTpuDelegate:
    """The delegate of the Edge TPU at a path, for an interpreter of ai-edge-litert; the last one closes the device.

    libedgetpu's numbers of sticks change when one of them loads its firmware; their paths, which name the ports, stay.
    ai-edge-litert's own Delegate knows numbers alone, and holds the interpreter's lock for the seconds of an open.
    """

    _pointer = None  # until the device is open

    def __init__(self, kind: str, path: str, options: Mapping[str, str]) -> None:
        self._library = _library()
        told = (_Option * len(options))(*(_Option(name.encode(), value.encode()) for name, value in options.items()))
        self._pointer = self._library.edgetpu_create_delegate(_KINDS.index(kind), path.encode(), told, len(told))
        if not self._pointer:
            raise ValueError(f"at {path}")

    def _get_native_delegate_pointer(self) -> int:
        return int(self._pointer)

    def __del__(self) -> None:  # an interpreter lets go of its delegates last
        if self._pointer:
            self._library.edgetpu_free_delegate(self._pointer)


def load(address: str) -> Any:
    """Return the delegate of one Edge TPU; it opens the device, and closes it when the delegate is collected.

    Args:
        address: `usb:0` or `pci:1` by the index among those of a kind in the order of their ports, `:2` by the index
            among all, PCIe first, `usb` or `pci` for the first of a kind, and the empty string for the first of all.
            It stays with the port that it had first. ` Performance=Low`, `Medium`, `High` or `Max` may follow: the
            clock of a stick, in the words of libedgetpu. Without it, libedgetpu1-std and -max have one each.

    Raises:
        PlatformError: the address is none, libedgetpu is not installed, or it cannot open such a device.
    """
    check_address(address)
    where = f"Edge TPU {address}" if address else "any Edge TPU"
    try:
        kind, path = _place(address)
        options = {"Performance": level} if (level := performance(address)) else {}
        if not (pycoral := _pycoral()):
            return EdgeTpuDelegate(kind, path, options)
        with _opening:
            number = [path for its_kind, path in _listed() if its_kind == kind].index(path)
            return pycoral.load_edgetpu_delegate({"device": f"{kind}:{number}", **options})
    except (OSError, AttributeError) as error:
        raise PlatformError(
            f"{where}: the library {LIBRARY} cannot be loaded ({error}); install the package libedgetpu1-std of "
            f"{BUILDS}, or name the library's folder in LD_LIBRARY_PATH"
        ) from error
    except ValueError as error:
        there = ", ".join(edge_tpus()) or "none"
        raise PlatformError(
            f"{where}: {LIBRARY} cannot open it ({' '.join(str(error).split())}); plugged in: {there}; plug it in, "
            "name one that is there, end the process that uses it, or let this user open it (the groups plugdev for "
            "USB, apex for PCIe)"
        ) from error


_trial = threading.Lock()
_works = threading.Event()  # libedgetpu has run in a copy of this process


def check_library(use: Callable[[], object], address: str) -> None:
    """Let a copy of this process use libedgetpu before this process does so for the first time.

    TFLite receives the struct TfLiteRegistration by value from a delegate that takes operators. The struct has three
    more fields today than in TensorFlow 2.5, with which Google built its libedgetpu 16.0, so that this library ends
    the process. The delegate takes operators `edgetpu-custom-op` alone (tflite/edgetpu_delegate_for_custom_op.cc of
    google-coral/libedgetpu). To create a delegate or to run another model would therefore show nothing.

    Args:
        use: runs a model that edgetpu_compiler made. What it raises is left to the caller's own use.
        address: of the Edge TPU, for the error.

    Raises:
        PlatformError: the copy ended or hung.
    """
    with _trial:  # two copies would meet at one device
        if _works.is_set():
            return
        for _ in range(2):
            status = status_of_copy(use, TRIAL_S)
            if status == 0:
                _works.set()
                return
            if status != -signal.SIGABRT:  # which a USB fault may have been, too
                break
    how = f"hung for {TRIAL_S:.0f} s" if status is None else f"ended by {signal.Signals(-status).name}"
    raise PlatformError(
        f"Edge TPU {address or '(any)'}: a copy of this process that used {LIBRARY}{_library_version()} {how}. The "
        f"library must fit ai-edge-litert {version('ai-edge-litert')}; Google's libedgetpu1-std 16.0 of 2021 does not. "
        f"Install the newest one of {BUILDS}"
    )


def _library_version() -> str:
    with suppress(OSError, AttributeError):
        tell = ctypes.CDLL(LIBRARY).edgetpu_version
        tell.restype = ctypes.c_char_p
        return f" ({tell().decode(errors='replace')})"
    return ""


def check_address(address: str) -> None:
    """Raise PlatformError where libedgetpu does not accept the address."""
    if not _ADDRESS.fullmatch(address):
        raise PlatformError(
            f"{address!r} is no address of an Edge TPU; write usb:0, pci:1, usb, pci or nothing for any, and behind it "
            "Performance=Low, Medium, High or Max if you want"
        )


def performance(address: str) -> str:
    """Return the level of performance that an address asks for; empty without one."""
    found = _ADDRESS.fullmatch(address)
    return (found[2] or "") if found else ""


def known_path(address: str) -> str:
    """Return the path of the device that an address had first; empty where it had none."""
    return str(json.loads(os.environ.get(PATHS, "{}")).get(address.partition(" ")[0], ""))


def usb_mbit_per_s(address: str) -> int | None:
    """Return the speed of the port of a stick, 480 for USB 2 and 5000 for USB 3; None where it is not known."""
    path = known_path(address)
    return file_number(USB / Path(path).name / "speed") if path.startswith("/sys/") else None


def is_usb_2(address: str) -> bool:
    return (usb_mbit_per_s(address) or _HIGH_SPEED + 1) <= _HIGH_SPEED


def heat(address: str) -> str:
    """Return the temperature of a PCIe Edge TPU and where its driver slows it down; empty where nobody tells.

    Source: https://coral.ai/docs/pcie-parameters, `temp` and `trip_point0_temp` to `trip_point2_temp`, in millidegrees.
    """
    folder = APEX / Path(known_path(address)).name
    now = file_number(folder / "temp")
    if not known_path(address).startswith("/dev/") or now is None:
        return ""
    trips = [file_number(folder / f"trip_point{number}_temp") for number in range(3)]
    known = [trip / 1000 for trip in trips if trip is not None]
    slowed = sum(now / 1000 >= trip for trip in known)
    steps = f", slowed down from {', '.join(f'{trip:g}' for trip in known)} °C on" if known else ""
    return f"{now / 1000:g} °C{steps}{', and so it is now' if slowed else ''}"


def absence(address: str) -> str | None:
    """Return in one line why the Edge TPU at this address cannot be used; None where it can be opened."""
    try:
        load(address)
    except PlatformError as error:
        return str(error)
    return None


def _pycoral() -> Any | None:
    """Return Google's `pycoral.utils.edgetpu`; None where it is not installed, or cannot be loaded, which is logged."""
    try:
        return importlib.import_module("pycoral.utils.edgetpu")
    except ImportError as error:
        if error.name not in ("pycoral", "pycoral.utils", "pycoral.utils.edgetpu"):
            _log.warning(
                "pycoral is left out, since it cannot be loaded (%s): ai-edge-litert opens the Edge TPUs. Google's "
                "wheels of pycoral end with Python 3.9; https://github.com/feranick/pycoral has newer ones",
                " ".join(str(error).split()),
            )
        return None


def _place(address: str) -> tuple[str, str]:
    """Return kind and path of the device that has this address, or had it first; raise ValueError if it is away."""
    wanted, _, index = (bare := address.partition(" ")[0]).partition(":")
    there = {path: kind for kind, path in _listed() if wanted in ("", kind)}
    with _naming:
        path = known_path(bare)
        if not path:
            if int(index or 0) >= len(there):
                raise ValueError("there is no such device")
            path = sorted(there, key=_port_order)[int(index or 0)]
            os.environ[PATHS] = json.dumps({**json.loads(os.environ.get(PATHS, "{}")), bare: path})
    if path not in there:
        raise ValueError(f"there is no device at {path} any more")
    return there[path], path


_naming = threading.Lock()


def _port_order(path: str) -> tuple[str, list[int], str]:
    return path[:5], [int(number) for number in re.findall(r"\d+", path)], path


_KINDS = ("pci", "usb")  # enum edgetpu_device_type of tflite/public/edgetpu_c.h


class _Device(ctypes.Structure):  # struct edgetpu_device
    _fields_: ClassVar = [("type", ctypes.c_int), ("path", ctypes.c_char_p)]


class _Option(ctypes.Structure):  # struct edgetpu_option
    _fields_: ClassVar = [("name", ctypes.c_char_p), ("value", ctypes.c_char_p)]


def _library() -> ctypes.CDLL:
    """Return libedgetpu with its C functions declared, which run without the interpreter's lock."""
    library = ctypes.CDLL(LIBRARY)
    library.edgetpu_list_devices.restype = ctypes.POINTER(_Device)
    library.edgetpu_free_devices.argtypes = [ctypes.POINTER(_Device)]
    library.edgetpu_create_delegate.restype = ctypes.c_void_p
    library.edgetpu_create_delegate.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]
    library.edgetpu_free_delegate.argtypes = [ctypes.c_void_p]
    return library


def _listed() -> list[tuple[str, str]]:
    """Return kind and path of each device in libedgetpu's order, such as /sys/bus/usb/devices/2-1.4 and /dev/apex_0."""
    library, count = _library(), ctypes.c_size_t()
    devices = library.edgetpu_list_devices(ctypes.byref(count))
    found = [(_KINDS[device.type], device.path.decode()) for device in devices[: count.value]]
    if devices:  # a null pointer where there is none
        library.edgetpu_free_devices(devices)
    return found


def _usb_numbers(usb: Path) -> list[tuple[str, str]]:
    """Return vendor and product of what is plugged in."""
    devices = usb.iterdir() if usb.is_dir() else ()
    return [(file_text(device / "idVendor"), file_text(device / "idProduct")) for device in devices]
