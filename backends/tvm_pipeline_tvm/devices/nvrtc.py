"""NVIDIA's compiler as a library: CUDA source becomes code for a device, on machines with no GPU. Free of TVM."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tvm_pipeline.errors import ModelError, PlatformError
from tvm_pipeline_tvm.devices.cuda_toolkit import NVRTC, driver_version, libraries, toolkits

_OF_JETSONS = frozenset({53, 62, 72, 87, 101, 110})
_ARCH = re.compile(r"-arch[= ]?(sm_\d+[a-z]?)\b")


def runs_machine_code(own: int, here: int) -> bool:
    """Return whether machine code of an architecture runs on a GPU, both by their numbers.

    >>> runs_machine_code(80, 86), runs_machine_code(86, 80), runs_machine_code(75, 86), runs_machine_code(80, 87)
    (True, False, False, False)
    """
    return own == here or (own // 10 == here // 10 and own < here and not {own, here} & _OF_JETSONS)


def arch_of(target: str) -> str:
    """Return the architecture in a CUDA target, such as `sm_87`.

    Raises:
        PlatformError: it has none, and TVM would guess one.
    """
    found = _ARCH.search(target)
    if found is None:
        raise PlatformError(
            f"the target `{target}` does not say which GPU it is for; give its architecture, such as "
            "`cuda -arch=sm_87` (Jetson Nano sm_53, TX2 sm_62, Xavier sm_72, Orin sm_87; NVIDIA lists the compute "
            "capability of all its GPUs, where 8.6 is sm_86)"
        )
    return found[1]


class Nvrtc:
    """NVIDIA's compiler as a library.

    Attributes:
        version: that of CUDA which it is of, such as 12090.
        archs: the numbers of the architectures that it compiles for; empty where it is too old to say.
        log: what it said of the source that it compiled last.
    """

    log = ""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "version")
        self.version = major.value * 1000 + minor.value * 10
        self.archs: tuple[int, ...] = ()
        if hasattr(library, "nvrtcGetSupportedArchs"):  # from CUDA 11.2 on
            count = ctypes.c_int()
            self._check(library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "number of architectures")
            archs = (ctypes.c_int * count.value)()
            self._check(library.nvrtcGetSupportedArchs(archs), "architectures")
            self.archs = tuple(archs)

    def compile(
        self, source: str, arch: str, wanted: Literal["cubin"] | None = None, options: Sequence[str] = ()
    ) -> tuple[str, bytes]:
        """Return the format of the code, `ptx` or `cubin`, and the code.

        Args:
            wanted: the format; without it what the driver of this machine takes, and PTX where there is none.
            options: more options of nvrtc's.

        Raises:
            ModelError: nvrtc cannot compile it; the message has its first errors and the kernel.
        """
        # PTX is compiled by the driver, for its own GPU, and a driver refuses PTX of a newer CUDA than its own. There
        # the machine's code is made at once, which a driver of the same major version takes.
        newer = 0 < driver_version() < self.version and hasattr(self._library, "nvrtcGetCUBIN")
        format_, meant = ("cubin", arch) if wanted or newer else ("ptx", arch.replace("sm_", "compute_"))
        standard = "c++17" if self.version >= 11000 else "c++14"
        options = [f"-arch={meant}", f"-std={standard}", *options]
        options += [f"-I{folder}" for folder in self._includes()]
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None),
            "program",
        )
        try:
            failed = self._library.nvrtcCompileProgram(program, len(options), encoded)
            self.log = self._got(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if failed:
                raise ModelError(_refusal(self.log, source, arch))
            code = self._got(program, format_.upper())
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))
        return format_, code.rstrip(b"\0") if format_ == "ptx" else code

    def _includes(self) -> tuple[Path, ...]:
        """Return the folders of headers that kernels include, with the standard library for them (`cccl`)."""
        own = Path(self._library._name).parent
        known = [toolkit for toolkit in toolkits() if toolkit.version // 1000 == self.version // 1000]
        known.sort(key=lambda toolkit: own not in toolkit.libraries)
        folders = known[0].includes if known else ()
        return *folders, *(folder / "cccl" for folder in folders if (folder / "cccl").is_dir())

    def _got(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"{what} size")
        content = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, content), what)
        return content.raw

    def _check(self, status: int, what: str) -> None:
        if status:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            reason = self._library.nvrtcGetErrorString(status).decode()
            raise ModelError(f"nvrtc ({self._library._name}) failed with {reason} when asked for its {what}")


def nvrtc(arch: str) -> Nvrtc:
    """Return the first nvrtc of this machine that compiles for an architecture.

    Raises:
        PlatformError: there is none.
    """
    known: list[str] = []
    for library in libraries("nvrtc", list(NVRTC.values())):
        found = Nvrtc(library)
        if not found.archs or int(re.sub(r"\D", "", arch)) in found.archs:
            return found
        archs = ", ".join(f"sm_{number}" for number in found.archs)
        known.append(f"that of CUDA {found.version // 1000}.{found.version % 1000 // 10} knows {archs}")
    names = ", ".join(f"libnvrtc.so.{version}" for version in NVRTC.values())
    what = f"none here compiles for {arch}: {'; '.join(known)}" if known else f"none of {names} can be loaded"
    old = "; CUDA 13 has no GPU before sm_75" if known else ""
    raise PlatformError(
        f"kernels for CUDA are compiled by NVIDIA's nvrtc, and {what}{old}; `pip install tvm-pipeline[cuda]` "
        "(with Relay `tvm-pipeline[relay-cuda]`), or install the CUDA toolkit (it is searched for in CUDA_HOME, too)"
    )


def _refusal(log: str, source: str, arch: str) -> str:
    """Return what is said of kernels that nvrtc refused."""
    line = re.search(r"kernels\.cu\((\d+)\)", log)
    before = "\n".join(source.splitlines()[: int(line[1])]) if line else ""
    kernels = re.findall(r'extern "C" __global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\(', before)
    where = f"kernel {kernels[-1]}" if kernels else "the kernels"
    lines = [text for text in log.splitlines() if text.strip()]
    first = next((index for index, text in enumerate(lines) if "error" in text), 0)  # behind warnings
    said = "\n".join(f"  {text}" for text in lines[first : first + 6])
    return f"nvrtc cannot compile {where} for {arch}:\n{said}"
