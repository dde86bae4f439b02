"""Find the Edge TPUs that are plugged in, and load the delegate through which TFLite runs on one of them.

Google's library libedgetpu reaches the device; no package registry has it. Google's pycoral is used if it is installed,
but nothing here needs it (the package called pycoral on PyPI is another one; that of github.com/feranick/pycoral is for
today's Python). Nothing falls back to the CPU silently:
a caller that prefers the CPU calls `absence` and reports the reason. Next: `interpreter.py`.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import platform
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_pipeline.errors import PlatformError
from tvm_pipeline.processes import status_of_copy

if TYPE_CHECKING:
    from ai_edge_litert.interpreter import Delegate

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


_opening = threading.Lock()  # an address means another stick while one loads its firmware
_sticks: dict[str, str] = {}  # the path of the stick that each address had when it was first opened


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


def load(address: str) -> Delegate:
    """Return the delegate of one Edge TPU; it opens the device, and closes it when the delegate is collected.

    Args:
        address: an address in libedgetpu: `usb:0` or `pci:1` by the index among those of a kind, `:2` by the index
            among all, `usb` or `pci` for any of a kind, and the empty string for any.

    Raises:
        PlatformError: the address is none, libedgetpu is not installed, or it cannot open such a device.
    """
    check_address(address)
    where = f"Edge TPU {address}" if address else "any Edge TPU"
    try:
        # The library is loaded alone first, because a Delegate that fails to load it prints a second error later.
        _ = ctypes.CDLL(LIBRARY).tflite_plugin_create_delegate
    except (OSError, AttributeError) as error:
        raise PlatformError(
            f"{where}: the library {LIBRARY} cannot be loaded ({error}); install the package libedgetpu1-std of "
            f"{BUILDS}, or name the library's folder in LD_LIBRARY_PATH"
        ) from error
    try:
        pycoral = _pycoral()
        delegate_of = pycoral.load_edgetpu_delegate if pycoral else partial(tflite().load_delegate, LIBRARY)
        with _opening:
            _load_firmware(delegate_of)
            return delegate_of({"device": _now(address)})
    except ValueError as error:
        there = ", ".join(edge_tpus()) or "none"
        raise PlatformError(
            f"{where}: {LIBRARY} cannot open it ({' '.join(str(error).split())}); plugged in: {there}; plug it in, "
            "name one that is there, or let this user open it (the groups plugdev for USB, apex for PCIe)"
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
        status = status_of_copy(use, TRIAL_S)
        if status == 0:
            _works.set()
            return
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
    if not re.fullmatch(r"(usb|pci)?(:\d+)?", address):
        raise PlatformError(
            f"{address!r} is no address of an Edge TPU; write usb:0, pci:1, usb, pci or nothing for any"
        )


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


def _load_firmware(delegate_of: Callable[[dict[str, str]], object]) -> None:
    """Open each stick once that still has its boot loader, which loads the firmware.

    libedgetpu lists such sticks before all others (driver/beagle/beagle_usb_driver_provider.cc, Enumerate). To open
    `usb:0` would make another stick `usb:0`: of two cold ones, both addresses would reach the second in turn, and one
    process may open a stick twice without an error.
    """
    for _ in range(_usb_numbers(USB).count(_COLD)):
        if _COLD not in _usb_numbers(USB):
            return
        with suppress(ValueError):  # whoever may not open it is told so when the stick itself is opened
            delegate_of({"device": "usb:0"})


def _now(address: str) -> str:
    """Return the present address of the stick that had this address first; a stick that came back may have another one.

    libedgetpu numbers sticks in the order of the bus. Their paths, which name the ports, stay.
    """
    kind, _, index = address.partition(":")
    paths = _usb_paths() if kind == "usb" and index else []
    if int(index or 0) >= len(paths):
        return address
    path = _sticks.setdefault(address, paths[int(index)])
    return f"usb:{paths.index(path)}" if path in paths else address


class _Listed(ctypes.Structure):  # struct edgetpu_device of tflite/public/edgetpu_c.h
    _fields_: ClassVar = [("type", ctypes.c_int), ("path", ctypes.c_char_p)]


_USB_TYPE = 1


def _usb_paths() -> list[str]:
    """Return the paths of the sticks in libedgetpu's order; nothing where the library has no such list."""
    try:
        library = ctypes.CDLL(LIBRARY)
        library.edgetpu_list_devices.restype = ctypes.POINTER(_Listed)
        library.edgetpu_free_devices.argtypes = [ctypes.POINTER(_Listed)]
    except (OSError, AttributeError):
        return []
    count = ctypes.c_size_t()
    listed = library.edgetpu_list_devices(ctypes.byref(count))
    found = [listed[index].path.decode() for index in range(count.value) if listed[index].type == _USB_TYPE]
    library.edgetpu_free_devices(listed)
    return found


def _usb_numbers(usb: Path) -> list[tuple[str, str]]:
    """Return vendor and product of what is plugged in."""
    devices = usb.iterdir() if usb.is_dir() else ()
    return [(_line(device / "idVendor"), _line(device / "idProduct")) for device in devices]


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
