"""Compiled OpenCL programs, kept beside the kernels of a library.

OpenCL compiles a kernel from its source when the kernel is first used, which takes seconds for a network. Programs that
are kept make the first frame like any other. CUDA's driver keeps its own, and LLVM's code is compiled already.

`keep` and `kept` write and read them; the other functions are for modules of TVM 0.19.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import tvm

from tvm_pipeline.errors import PipelineError, PlatformError
from tvm_pipeline.files import write_bytes

_CHECKSUM_BYTES = 32


def keep(programs: bytes, folder: Path, device: Any) -> bool:
    """Write programs into the folder of their library; return whether they could be written.

    They are for the device and its driver: their file is named after both, and another device finds none.

    Args:
        device: tells its `device_name` and `driver_version`.
    """
    try:
        write_bytes(_file(folder, device), hashlib.sha256(programs).digest() + programs)
    except PipelineError:
        return False
    return True


def kept(folder: Path, device: Any) -> bytes | None:
    """Return the programs that `keep` wrote for this device and driver, if any; a damaged file is removed."""
    file = _file(folder, device)
    try:
        content = file.read_bytes()
    except OSError:
        return None
    checksum, programs = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    if hashlib.sha256(programs).digest() == checksum:
        return programs
    forget(folder, device)
    return None


def forget(folder: Path, device: Any) -> None:
    """Remove the programs that were kept for this device and driver."""
    with suppress(OSError):
        _file(folder, device).unlink()


def save_programs(module: tvm.runtime.Module, folder: Path, device: int = 0) -> bool:
    """Keep the compiled programs of a loaded library for an OpenCL device; compile those that are not compiled yet.

    Nothing is kept where the folder cannot be written, or where the device shares its context with others (several GPUs
    of one vendor), whose programs TVM 0.19 cannot read; they are compiled again then.

    Args:
        module: the library as it was loaded; one without OpenCL kernels has no programs.
        folder: the folder of the library, which must be that of these kernels.
        device: which of the OpenCL devices.

    Returns:
        Whether they are kept.
    """
    kernels = _opencl_kernels(module)
    if kernels is None:
        return False
    programs = bytes(tvm.get_global_func("tvm_pipeline.opencl.programs")(kernels, device))
    return bool(programs) and keep(programs, folder, tvm.device("opencl", device))


def load_programs(module: tvm.runtime.Module, folder: Path, device: int = 0) -> bool:
    """Give a loaded library the programs that `save_programs` kept for this device and driver.

    Returns:
        Whether there were any. If not, the kernels are compiled when they are first used.

    Raises:
        PlatformError: the driver refuses programs of its own; they are removed, so that it can be tried again.
    """
    kernels, there = _opencl_kernels(module), tvm.device("opencl", device)
    programs = None if kernels is None else kept(folder, there)
    if programs is None:
        return False
    try:
        tvm.get_global_func("tvm_pipeline.opencl.use_programs")(kernels, device, bytearray(programs))
    except tvm.TVMError as error:
        # TVM may have taken some of them, so this library must not go on.
        forget(folder, there)
        raise PlatformError(
            f"OpenCL's driver refuses the compiled programs that were kept in {folder} "
            f"({str(error).splitlines()[-1]}); they are removed: start again"
        ) from error
    return True


def _opencl_kernels(module: tvm.runtime.Module) -> tvm.runtime.Module | None:
    if module.type_key == "opencl":
        return module
    found = (_opencl_kernels(imported) for imported in module.imported_modules)
    return next((kernels for kernels in found if kernels is not None), None)


def _file(folder: Path, device: Any) -> Path:
    described = f"{device.device_name}|{device.driver_version}"
    return folder / f"programs-{hashlib.sha256(described.encode()).hexdigest()[:16]}.bin"
