"""Compiled code becomes a shared library: this machine's by its C compiler, another processor's by a linker alone.

TVM's LLVM writes objects for every processor, so a linker for it is all that may be missing here. The code calls
functions of mathematics, which the C library has over there, and TVM's runtime, whose addresses the runtime writes into
the library when it is loaded. So the library is linked without any C library: it names libm, and leaves the functions
open, without the versions that a C library gives them. A board whose C library is older than one here can load it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tvm_pipeline.errors import ModelError, PlatformError
from tvm_pipeline_tvm.target_text import other_processor
from tvm_pipeline_tvm.tvm_errors import reason

LIBM = "libm.so.6"  # glibc's, on every processor
_TOOLCHAINS = {
    "aarch64": "aarch64-linux-gnu",
    "arm": "arm-linux-gnueabihf",
    "riscv64": "riscv64-linux-gnu",
    "x86_64": "x86_64-linux-gnu",
}  # as Debian and most others name those of a processor


def export_library(module: Any, path: Path, target: str, objects: Sequence[Path] = ()) -> None:
    """Write what TVM compiled, and other objects of TVM, as a shared library.

    Args:
        module: of TVM: what `relay.build` or `tvm.compile` returns.
        path: ends in `.so`.
        target: that the code is for, the one of the host's code where the kernels are a device's. It names another
            processor than this machine's by its `-mtriple`.

    Raises:
        ModelError: the code cannot be linked.
        PlatformError: there is no linker for that processor here.

    Examples:
        export_library(factory.lib, folder / "kernels.so", "llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72")
    """
    processor, addons = other_processor(target), [*map(str, objects)]
    try:
        if not processor:
            module.export_library(str(path), addons=addons)
            return
        linker = linker_for(processor)

        def link(output: str, objects: Sequence[str], **_: Any) -> None:
            _link(linker, [*objects], output)

        module.export_library(str(path), fcompile=link, addons=addons)
    except (RuntimeError, OSError) as error:
        advice = "" if processor else "; a C compiler (gcc or clang) must be on the PATH"
        raise ModelError(f"cannot link the compiled kernels for {target}: {reason(error)}{advice}") from error


def check_linker(target: str) -> None:
    """Raise PlatformError where code for a target could be compiled here, but not linked."""
    with suppress(ValueError):  # no target of TVM's, which compiling for it says best
        processor = other_processor(target)
        if processor:
            linker_for(processor)


def linker_for(processor: str) -> list[str]:
    """Return the command of a linker for another processor; all take the same options.

    Raises:
        PlatformError: there is none.
    """
    toolchain = _TOOLCHAINS.get(processor)
    for name in ([f"{toolchain}-ld"] if toolchain else []) + ["ld.lld"]:
        found = shutil.which(name)
        if found:
            return [found]
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "ld.lld"]
    packages = [f"`apt-get install binutils-{toolchain}`"] if toolchain else []
    raise PlatformError(
        f"code for {processor} cannot be linked on this machine; any one of these gives it a linker: "
        f"{', '.join([*packages, '`apt-get install lld`'])} or `pip install 'tvm-pipeline[cross]'`"
    )


def _link(linker: list[str], objects: list[str], output: str) -> None:
    """Link objects into a library that needs libm.

    A library is said to be needed by linking against it. The C library of the other machine is not here, and of libm
    no more than its name matters; so a library of that name is made of the same objects, and left behind.
    """
    shared = [*linker, "-shared", "-z", "noexecstack"]
    with tempfile.TemporaryDirectory() as folder:
        named = str(Path(folder) / LIBM)
        _run([*shared, "-soname", LIBM, "-o", named, *objects])
        _run([*shared, "--eh-frame-hdr", "--no-as-needed", "-o", output, *objects, named])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        said = done.stdout.strip().splitlines() or ["it says nothing"]
        raise RuntimeError(f"{Path(command[0]).name} failed with status {done.returncode}: {said[0]}")
