"""Where the parts of CUDA are on this machine: libraries and headers.

They come with NVIDIA's toolkit, which a Jetson has in /usr/local/cuda, or with its packages on PyPI
(`pip install tvm-pipeline[relay-cuda]`). Only the driver's library, `libcuda.so.1`, comes with the driver alone.

If several are there, what the user names goes first, then the machine's own, whose version fits the driver, and
PyPI's last.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tvm_pipeline.errors import PlatformError

# The endings of sonames, the newest version first. From CUDA 11 on a library keeps one through all minor versions.
CUDART = {13: "13", 12: "12", 11: "11.0", 10: "10.2"}
NVRTC = {13: "13", 12: "12", 11: "11.2", 10: "10.2"}
# What `targets/` of a toolkit calls the processor. `sbsa` is that of Arm servers and, from Thor on, of Jetsons.
_TARGETS = {"x86_64": ("x86_64-linux",), "aarch64": ("aarch64-linux", "sbsa-linux")}
# What TVM's runtime includes, and what NVIDIA's second includes: on PyPI that comes with the compiler.
_HEADERS = ("cuda.h", "cuda_runtime.h", "crt/host_config.h")
_BLOCKING_SYNC = 4  # cudaDeviceScheduleBlockingSync, CU_CTX_SCHED_BLOCKING_SYNC


@dataclass(frozen=True, slots=True)
class Toolkit:
    """Folders of headers and of libraries that belong together."""

    includes: tuple[Path, ...]
    libraries: tuple[Path, ...]

    @property
    def version(self) -> int:
        """The version of its headers, such as 12090; 0 where it has not all that TVM's runtime includes."""
        driver, runtime = self._header(_HEADERS[0]), self._header(_HEADERS[1])
        if driver is None or runtime is None:
            return 0
        if _HEADERS[2] in runtime.read_text(errors="replace") and self._header(_HEADERS[2]) is None:
            return 0
        found = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", driver.read_text(errors="replace"))
        return int(found[1]) if found else 0

    def _header(self, name: str) -> Path | None:
        return next((folder / name for folder in self.includes if (folder / name).is_file()), None)


def toolkits() -> Iterator[Toolkit]:
    """Yield the toolkits of this machine, those that the user names first and PyPI's last."""
    yield from _named()
    yield from (_in_folder(Path(root)) for root in ("/usr/local/cuda", "/opt/cuda", "/usr"))
    spec = importlib.util.find_spec("nvidia")
    for folder in map(Path, (spec.submodule_search_locations or ()) if spec else ()):
        yield Toolkit(
            (folder / "cuda_runtime/include", folder / "cuda_nvcc/include"),
            (folder / "cuda_runtime/lib", folder / "cuda_nvrtc/lib"),
        )
        for unified in sorted(folder.glob("cu[0-9]*"), reverse=True):  # from CUDA 13 on
            yield Toolkit((unified / "include",), (unified / "lib",))


def _named() -> list[Toolkit]:
    roots = dict.fromkeys(os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH"))
    return [_in_folder(Path(root).absolute()) for root in roots if root]


def _in_folder(root: Path) -> Toolkit:
    machine = platform.machine()
    targets = [root / "targets" / name for name in _TARGETS.get(machine, ())]
    return Toolkit(
        (root / "include", *(target / "include" for target in targets)),
        (root / "lib64", *(target / "lib" for target in targets), root / "lib", root / f"lib/{machine}-linux-gnu"),
    )


def libraries(stem: str, versions: Sequence[str], mode: int = ctypes.DEFAULT_MODE) -> Iterator[ctypes.CDLL]:
    """Yield the libraries `lib<stem>.so.<version>` of this machine, each loaded when it is asked for.

    One that the process has loaded already goes first: a second one beside it would be another CUDA. Then what the user
    names (LD_LIBRARY_PATH, CUDA_HOME, CUDA_PATH), what the system's loader knows, other toolkits and PyPI's packages.
    """
    names = [f"lib{stem}.so.{version}" for version in versions]
    named = [Path(folder).absolute() for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    named += [folder for toolkit in _named() for folder in toolkit.libraries]
    others = [folder for toolkit in toolkits() for folder in toolkit.libraries if folder not in named]
    places = [
        *((name, mode | os.RTLD_NOLOAD) for name in names),
        *((str(folder / name), mode) for folder in named for name in names),
        *((name, mode) for name in names),
        *((str(folder / name), mode) for folder in others for name in names),
    ]
    handles = set()
    for place, how in places:
        try:
            found = ctypes.CDLL(place, how)
        except OSError:
            continue
        if found._handle not in handles:  # several places may hold the same file
            handles.add(found._handle)
            yield found


def driver() -> ctypes.CDLL:
    """Return the driver's library, loaded for all libraries that follow.

    Raises:
        PlatformError: there is none.
    """
    try:
        return ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise PlatformError(
            f"CUDA devices need NVIDIA's driver, and its library cannot be loaded ({error}); install the driver, or "
            "take the device out of the platform"
        ) from error


def runtime() -> tuple[Toolkit, ctypes.CDLL]:
    """Return headers of CUDA, and the runtime library of their version, loaded for all libraries that follow.

    Raises:
        PlatformError: there are none, or they do not belong together.
    """
    complete = [(toolkit, toolkit.version // 1000) for toolkit in toolkits() if toolkit.version // 1000 in CUDART]
    needed = "CUDA devices need CUDA's headers and its runtime library"
    advice = "install the CUDA toolkit (CUDA_HOME is searched, too), or `pip install tvm-pipeline[relay-cuda]`"
    if not complete:
        raise PlatformError(f"{needed}, and no folder has all of {', '.join(_HEADERS)}; {advice}")
    # Where the process has loaded a runtime library already, headers of its version come first.
    complete.sort(key=lambda found: _loaded(f"libcudart.so.{CUDART[found[1]]}") is None)
    for toolkit, version in complete:
        for library in libraries("cudart", [CUDART[version]], ctypes.RTLD_GLOBAL):
            return toolkit, library
    names = ", ".join(dict.fromkeys(f"libcudart.so.{CUDART[version]}" for _, version in complete))
    raise PlatformError(f"{needed}: the headers are here, and {names} cannot be loaded; {advice}")


def loaded_runtime() -> ctypes.CDLL | None:
    """Return the runtime library that the process has loaded; None where there is none, or it is a part of TVM."""
    names = [f"libcudart.so.{version}" for version in CUDART.values()]
    return next(filter(None, map(_loaded, names)), None)


def _loaded(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, os.RTLD_NOLOAD)
    except OSError:
        return None


def check_devices(library: ctypes.CDLL) -> int:
    """Return how many devices a runtime library sees.

    Raises:
        PlatformError: none; the message has the library's reason.
    """
    count = ctypes.c_int()
    status = library.cudaGetDeviceCount(ctypes.byref(count))
    if status or not count.value:
        library.cudaGetErrorString.restype = ctypes.c_char_p
        reason = library.cudaGetErrorString(status).decode() if status else "it sees none"
        raise PlatformError(
            f"CUDA's libraries are here, but no device can be used: {reason}; see that `nvidia-smi` (on a Jetson "
            "`tegrastats`) lists it, and that the driver is as new as the CUDA toolkit"
        )
    return count.value


def wait_without_spinning(driver: ctypes.CDLL, runtime: ctypes.CDLL | None = None) -> None:
    """Have threads that wait for a CUDA device sleep, where they would keep a core busy that a CPU stage wants.

    It has an effect on devices that no context was made for yet. Whether it saves a core was never measured on a real
    GPU.

    Args:
        runtime: the runtime library; None where TVM brought its own, or where there are several devices: its call
            may make the context of the current one, which takes memory there.
    """
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return  # without a device nothing waits
    for name in ("cuDevicePrimaryCtxSetFlags_v2", "cuDevicePrimaryCtxSetFlags"):
        if hasattr(driver, name):
            # An older driver refuses it for a context that is there already (708): another library in this process
            # uses the device as it wants, and that costs a core, not results.
            for device in range(count.value):
                getattr(driver, name)(device, _BLOCKING_SYNC)
            break
    if runtime is not None:
        # What CUDA documents for users of its runtime library. "Already set" (36) is not an error, as above.
        runtime.cudaSetDeviceFlags(_BLOCKING_SYNC)
        runtime.cudaGetLastError()  # else TVM's next check would find that


def driver_version() -> int:
    """Return the version of CUDA that the driver of this machine has, such as 12020; 0 where there is none."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value
