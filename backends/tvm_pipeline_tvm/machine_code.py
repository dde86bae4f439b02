"""The machine code of a library: which processor it is for, which the loader does not say, and loading it."""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import tvm

from tvm_pipeline.errors import BundleError
from tvm_pipeline.files import cache_folder

_HEADER_BYTES = 20
_MACHINES = {
    3: "x86",
    8: "MIPS",
    20: "PowerPC",
    21: "PowerPC 64",
    40: "ARM",
    62: "x86-64",
    183: "AArch64",
    243: "RISC-V",
}


def load_kernels(path: Path, alone: bool) -> tvm.runtime.Module:
    """Load compiled kernels; `alone` loads a copy that no other module shares.

    Host code that launches kernels of a device keeps their handles in its image. If a process loads one file twice,
    both modules have one image, and the second dies with the first.
    """
    _check_machine(path)
    if not alone:
        return tvm.runtime.load_module(str(path))
    cache_folder().mkdir(parents=True, exist_ok=True)
    # Code can be loaded from the cache, but a temporary folder may forbid it.
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        copy = Path(folder) / path.name
        shutil.copyfile(path, copy)
        return tvm.runtime.load_module(str(copy))  # which keeps what it loaded when the file is gone


def _check_machine(code: Path) -> None:
    """Raise BundleError where a shared library is for another processor than this process runs on."""
    with code.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    if header[:4] != b"\x7fELF":
        return  # the loader refuses it
    own = _own_header()
    if own[:4] == b"\x7fELF" and (header[4:6], header[18:20]) != (own[4:6], own[18:20]):
        number = int.from_bytes(header[18:20], "little" if header[5] == 1 else "big")
        made_for = _MACHINES.get(number, f"ELF machine {number}")
        raise BundleError(
            f"{code.name} was made for another machine ({made_for}; this one is {platform.machine()}); compile the "
            "model again on this machine"
        )


@lru_cache(maxsize=1)
def _own_header() -> bytes:
    try:
        with open(sys.executable, "rb") as file:
            return file.read(_HEADER_BYTES)
    except OSError:
        return b""
