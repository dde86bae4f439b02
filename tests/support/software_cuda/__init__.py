"""A CUDA device in software, for tests and benchmarks on machines without a GPU.

It is three libraries that pose as CUDA's, so that nothing in the product knows of it: what finds, compiles for and runs
on a GPU also does so here. Kernels run on the CPU: the device shows that code works, and nothing about speed.

cuda.cc      the driver API, and what is modelled of a device and what is not
driver13.cc  what TVM 0.27 calls of it besides
runtime.cc   the runtime API, which TVM calls
runtime13.cc what TVM 0.27 calls of it besides
nvrtc.cc     the compiler of CUDA source
devices.cc   which devices there are, and their faults
memory.cc    their memory
kernels.cc   compile, load and launch kernels
fibers.cc    threads of a block that wait for each other
include/     CUDA's headers, as far as TVM needs them, for host code and for kernels

`build` makes the libraries, `load` makes them this process's CUDA, and `environment` that of another process. A folder
of them is a CUDA toolkit as far as TVM needs one: TVM's CUDA runtime builds where nothing of NVIDIA's is installed.

These variables are read at each call:

SOFTWARE_CUDA_DEVICES          how many there are (1)
SOFTWARE_CUDA_MEMORY_BYTES     of each device (8 GiB)
SOFTWARE_CUDA_CAPABILITY       what architecture they are (72)
SOFTWARE_CUDA_INTEGRATED       1 where they share the memory of the host (0)
SOFTWARE_CUDA_HOST_REGISTER    0 where they cannot register the host's memory, as Jetsons before Xavier (1)
SOFTWARE_CUDA_DRIVER_VERSION   the driver's version of CUDA (12090)
SOFTWARE_CUDA_CACHE            the folder of compiled kernels

SOFTWARE_CUDA_FAULT is read when the libraries are loaded, for example `crash_launch:3`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

_HERE = Path(__file__).parent
_DRIVER = ("cuda.cc", "devices.cc", "memory.cc", "kernels.cc", "fibers.cc")
Libraries = Mapping[str, tuple[str, ...]]
# Each library with its sources, in the order in which they are loaded: the first holds what the others share. TVM 0.19
# is built for the first set, and TVM 0.27 comes built for the second.
CUDA_12: Libraries = {
    "libcuda.so.1": _DRIVER,
    "libcudart.so.12": ("runtime.cc",),
    "libnvrtc.so.12": ("nvrtc.cc",),
}
CUDA_13: Libraries = {
    "libcuda.so.1": (*_DRIVER, "driver13.cc"),
    "libcudart.so.13": ("runtime.cc", "runtime13.cc"),
    "libnvrtc.so.13": ("nvrtc.cc",),
}
# Modules of networks compile twice as fast as with -O2, and run no slower; with -O0 they run three times slower.
_KERNEL_FLAGS = "-O1"

Direction = Literal["to device", "to host", "on device"]
_DIRECTIONS: dict[Direction, int] = {"to device": 1, "to host": 2, "on device": 3}


def compiler() -> str | None:
    """Return the C++ compiler that builds the libraries and kernels; None where there is none."""
    return shutil.which("g++")


def build(folder: Path, made: Libraries = CUDA_12) -> None:
    """Build the libraries into `folder`, laid out like a CUDA toolkit: include/ and lib64/.

    Raises RuntimeError with the compiler's output.
    """
    found = compiler()
    if found is None:
        raise RuntimeError("the software CUDA device needs g++, which is not installed")
    folder = folder.resolve()
    libraries = folder / "lib64"
    libraries.mkdir(parents=True, exist_ok=True)
    shutil.copytree(_HERE / "include", folder / "include", dirs_exist_ok=True)
    for name, sources in made.items():
        version = libraries / f"{name}.version"
        version.write_text(f"{name} {{ global: *; }};\n")
        command = [
            found,
            *("-O1", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"),
            f'-DSOFTWARE_CUDA_FOLDER="{folder}"',
            f'-DSOFTWARE_CUDA_COMPILER="{found}"',
            f'-DSOFTWARE_CUDA_KERNEL_FLAGS="{_KERNEL_FLAGS}"',
            f"-I{_HERE / 'include'}",
            *(str(_HERE / source) for source in sources),
            *("-o", str(libraries / name), f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN", f"-L{libraries}"),
            # TVM 0.27 comes linked with NVIDIA's, and asks for its functions by this version.
            *((f"-Wl,--version-script={version}",) if name == "libcudart.so.13" else ()),
            *(() if name == "libcuda.so.1" else ("-l:libcuda.so.1",)),
            "-ldl",
        ]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{name} of the software CUDA device does not compile:\n{result.stderr}")


def built_once(folder: Path, made: Libraries = CUDA_12) -> Path:
    """Return a folder that all processes of a run share; the first of them builds the libraries into it."""
    folder.mkdir(exist_ok=True)
    built = folder / "built"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            build(folder, made)
            built.touch()
    return folder


def load(folder: Path, made: Libraries = CUDA_12) -> SoftwareCuda:
    """Make the libraries in `folder` this process's CUDA, for good: the loader finds a loaded library by its name.

    The headers beside them become this process's as well, through the variable CUDA_HOME.

    Raises RuntimeError where the process has loaded others: NVIDIA's would call functions of these, and crash.
    """
    for name in made:
        with contextlib.suppress(OSError):
            other = ctypes.CDLL(name, os.RTLD_NOLOAD)
            raise RuntimeError(f"{other._name} of another CUDA is loaded; use that one in a process of its own")
    os.environ["CUDA_HOME"] = str(folder)
    return SoftwareCuda([ctypes.CDLL(str(folder / "lib64" / name), ctypes.RTLD_GLOBAL) for name in made])


def environment(folder: Path) -> dict[str, str]:
    """Return the variables that make the libraries in `folder` the CUDA of a process that is started with them."""
    others = os.environ.get("LD_LIBRARY_PATH")
    paths = [str(folder / "lib64"), *([others] if others else [])]
    return {"LD_LIBRARY_PATH": os.pathsep.join(paths), "CUDA_HOME": str(folder)}


class Copies(NamedTuple):
    """How often something was copied in one direction, and how many bytes in all."""

    calls: int
    n_bytes: int


class Registered(NamedTuple):
    """How many ranges of the host's memory are registered, and how many bytes they have in all."""

    ranges: int
    n_bytes: int


class SoftwareCuda:
    """What tests ask of the devices, and what they make go wrong.

    Counts of what happened never go back: take the difference of two calls. A fault happens once, at the n-th call from
    now.
    """

    def __init__(self, libraries: list[ctypes.CDLL]) -> None:
        self.driver, self.runtime, self.compiler = libraries
        for name in ("launches", "allocated", "registered", "copies", "copied_bytes"):
            self.driver[f"software_cuda_{name}"].restype = ctypes.c_long
        self.runtime.software_cuda_recorded.restype = ctypes.c_long

    def launches(self, kernel: str = "") -> int:
        """Return how often a kernel was launched; without a name, how often any was."""
        return int(self._call("launches", kernel.encode()))

    def allocated(self) -> int:
        """Return how many bytes of the devices' memory are in use."""
        return int(self._call("allocated"))

    def registered(self) -> Registered:
        """Return what of the host's memory is registered now."""
        n_bytes = ctypes.c_long()
        return Registered(int(self._call("registered", ctypes.byref(n_bytes))), n_bytes.value)

    def recorded(self) -> int:
        """Return how often an event was recorded."""
        return int(self.runtime.software_cuda_recorded(ctypes.byref(ctypes.c_long())))

    def handles(self) -> int:
        """Return how many events and streams there are now."""
        alive = ctypes.c_long()
        self.runtime.software_cuda_recorded(ctypes.byref(alive))
        return alive.value

    def copies(self, direction: Direction) -> Copies:
        """Return what was copied in a direction."""
        number = _DIRECTIONS[direction]
        return Copies(int(self._call("copies", number)), int(self._call("copied_bytes", number)))

    def copied(self) -> tuple[int, int]:
        """Return how many bytes were copied to the devices, and from them to the host."""
        return self.copies("to device").n_bytes, self.copies("to host").n_bytes

    def fail_launch(self, n: int = 1) -> None:
        """Let the n-th launch fail, and with it everything that reaches the same device, until `reset`."""
        self._fault("fail_launch", n)

    def fail_allocation(self, n: int = 1) -> None:
        """Let the n-th allocation find no memory; the next one may."""
        self._fault("fail_allocation", n)

    def hang_launch(self, n: int = 1) -> None:
        """Let the n-th launch wait, and with it everything that reaches the same device, until `release`."""
        self._fault("hang_launch", n)

    def hangs(self) -> bool:
        """Return whether a launch hangs now."""
        return bool(self._call("hangs"))

    def release(self) -> None:
        """End a hang; the kernel then runs."""
        self._call("release")

    def reset(self) -> None:
        """End all faults, those to come as well. Memory that is in use stays so."""
        self._call("reset")

    def _fault(self, what: str, n: int) -> None:
        if self._call("fault", what.encode(), ctypes.c_long(n)):
            raise ValueError(f"no launch or allocation is number {n} from now")

    def _call(self, name: str, *arguments: object) -> int:
        result: int = self.driver[f"software_cuda_{name}"](*arguments)
        return result
