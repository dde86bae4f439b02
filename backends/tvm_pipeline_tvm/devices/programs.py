"""Compiled OpenCL programs, kept beside the kernels of a library.

OpenCL compiles a kernel from its source when the kernel is first used, which takes seconds for a network. Programs that
are kept make the first frame like any other. CUDA's driver keeps its own, and LLVM's code is compiled already.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

import tvm

from tvm_pipeline.errors import PipelineError, PlatformError
from tvm_pipeline.files import write_bytes

_CHECKSUM_BYTES = 32


def save_programs(module: tvm.runtime.Module, folder: Path, device: int = 0) -> bool:
    """Keep the compiled programs of a loaded library for an OpenCL device; compile those that are not compiled yet.

    They are for the device and its driver: their file is named after the device's name and the driver's version, and
    another device finds none. Nothing is kept where the folder cannot be written, or where the device shares its
    context with others (several GPUs of one vendor), whose programs TVM 0.19 cannot read; they are compiled again then.

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
    if not programs:
        return False
    try:
        write_bytes(_file(folder, device), hashlib.sha256(programs).digest() + programs)
    except PipelineError:
        return False
    return True


def load_programs(module: tvm.runtime.Module, folder: Path, device: int = 0) -> bool:
    """Give a loaded library the programs that `save_programs` kept for this device and driver.

    A file that is damaged is removed, and the kernels are compiled when they are first used.

    Returns:
        Whether there were any.

    Raises:
        PlatformError: the driver refuses programs of its own; they are removed, so that it can be tried again.
    """
    kernels = _opencl_kernels(module)
    if kernels is None:
        return False
    file = _file(folder, device)
    try:
        content = file.read_bytes()
    except OSError:
        return False
    checksum, programs = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    if hashlib.sha256(programs).digest() != checksum:
        with suppress(OSError):
            file.unlink()
        return False
    try:
        tvm.get_global_func("tvm_pipeline.opencl.use_programs")(kernels, device, bytearray(programs))
    except tvm.TVMError as error:
        # TVM may have taken some of them, so this library must not go on.
        with suppress(OSError):
            file.unlink()
        raise PlatformError(
            f"OpenCL's driver refuses the compiled programs that were kept in {file} "
            f"({str(error).splitlines()[-1]}); they are removed: start again"
        ) from error
    return True


def _opencl_kernels(module: tvm.runtime.Module) -> tvm.runtime.Module | None:
    if module.type_key == "opencl":
        return module
    found = (_opencl_kernels(imported) for imported in module.imported_modules)
    return next((kernels for kernels in found if kernels is not None), None)


def _file(folder: Path, device: int) -> Path:
    told = tvm.device("opencl", device)
    described = f"{told.device_name}|{told.driver_version}"
    return folder / f"programs-{hashlib.sha256(described.encode()).hexdigest()[:16]}.bin"
