"""Compile scheduled functions for CUDA devices on any machine, and load them where the device is.

TVM writes CUDA source, and NVIDIA's compiler makes machine code of it (`devices/nvrtc.py`): no GPU and no driver is
needed. Two files are kept:

    kernels.so     code of the host: each function of the library checks its arguments and launches its kernels
    kernels.cuda   a module of TVM's CUDA runtime with the machine code (cubin) of all kernels

TVM's own compile keeps source where its CUDA runtime cannot be loaded, as on a machine without the driver, and would
compile it on the device's machine at each start. So its module is taken apart here, and its source replaced by the
machine code. The format is that of TVM 0.27's `CUDAModuleNode::SaveToBytes`, which a test holds on to.

The kernels of squeezenet, mobilenet and resnet-18 ran on an H100.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import struct
import threading
from pathlib import Path
from typing import Any, NamedTuple

import tvm
import tvm_ffi

from tvm_pipeline.errors import ModelError, PlatformError
from tvm_pipeline_tvm.devices import cuda_toolkit
from tvm_pipeline_tvm.devices.nvrtc import arch_of, nvrtc, runs_machine_code
from tvm_pipeline_tvm.devices.targets import index_of
from tvm_pipeline_tvm.linking import export_library
from tvm_pipeline_tvm.machine_code import load_kernels

_log = logging.getLogger(__name__)

HOST_FILE, DEVICE_FILE = "kernels.so", "kernels.cuda"
_RUNTIME = "libtvm_runtime_cuda.so"  # of TVM's wheel
_CUDART = cuda_toolkit.CUDART[13]  # what that was linked with
_UNKNOWN_FORMAT = (
    f"this TVM ({tvm.__version__}) saves CUDA modules in another way than tvm-pipeline knows; use the TVM of "
    "`pip install 'tvm-pipeline[tvm]'`"
)
_lock = threading.Lock()
_is_ready: list[bool] = []


class Resources(NamedTuple):
    """What one kernel takes of a multiprocessor, as NVIDIA's assembler says.

    Attributes:
        threads: of a block.
        registers: of a thread.
        shared_bytes: of a block.
        spilled_bytes: what a thread keeps in memory for lack of registers.
    """

    threads: int
    registers: int
    shared_bytes: int
    spilled_bytes: int


def cuda_target(arch: str, host: tvm.target.Target) -> tvm.target.Target:
    """Return TVM's target of an architecture, such as `sm_87`.

    Args:
        host: the target of the code that launches kernels: that of the CPU cores.
    """
    # What dlight gives a block at most: with 1024 threads, a block alone is on a multiprocessor of Orin's 1536.
    options = {"max_threads_per_block": 256, "max_shared_memory_per_block": 48 * 1024, "thread_warp_size": 32}
    return tvm.target.Target({"kind": "cuda", "arch": arch, **options}, host=host)


def write_cuda_kernels(
    functions: tvm.IRModule, target: tvm.target.Target, folder: Path, host: str = "llvm"
) -> dict[str, Resources]:
    """Compile scheduled functions and write them into an existing folder.

    Args:
        functions: functions of TIR, each with its `global_symbol`.
        target: a CUDA target with its architecture and host; see `cuda_target`.
        host: the text of that host's target.

    Returns:
        What each kernel takes of a multiprocessor.

    Raises:
        ModelError: NVIDIA's compiler refuses a kernel, which the message names.
        PlatformError: there is no compiler of NVIDIA's that knows the architecture.
    """
    arch = str(target.attrs["arch"])
    compiler = nvrtc(arch)
    module = compiled_source(functions, target)
    kernels = next(iter(module.imports), None)
    if kernels is None:
        raise ModelError("the model has no kernel for a GPU: nothing in it is computed; leave the GPU out")
    source = str(kernels.inspect_source("cuda"))
    _, code = compiler.compile(source, arch, "cubin", ["--ptxas-options=-v", "--device-int128", "-default-device"])
    (folder / DEVICE_FILE).write_bytes(_with_code(_packed(module), source.encode(), code))
    module.clear_imports()
    export_library(module, folder / HOST_FILE, host)
    return resources(compiler.log, source)


def compiled_source(functions: tvm.IRModule, target: tvm.target.Target) -> Any:
    """Return the module of the host's code, which imports one of CUDA source: the same with and without a driver."""
    before = os.environ.get("TVM_COMPILE_FORCE_FALLBACK")
    os.environ["TVM_COMPILE_FORCE_FALLBACK"] = "1"
    try:
        return tvm.compile(functions, target=target).mod
    finally:
        if before is None:
            del os.environ["TVM_COMPILE_FORCE_FALLBACK"]
        else:
            os.environ["TVM_COMPILE_FORCE_FALLBACK"] = before


def resources(log: str, source: str) -> dict[str, Resources]:
    """Return what kernels take, from the assembler's log (`-v`) and their source, where their threads stand."""
    threads = {name: int(count) for count, name in re.findall(r"__launch_bounds__\((\d+)\) (\w+)\(", source)}
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        name = part[: part.index("'")]
        used = {
            what: int(number[1]) if (number := re.search(pattern, part)) else 0
            for what, pattern in (
                ("registers", r"Used (\d+) registers"),
                ("shared_bytes", r"(\d+) bytes smem"),
                ("spilled_bytes", r"(\d+) bytes spill stores"),
            )
        }
        found[name] = Resources(threads.get(name, 0), **used)
    return found


def _packed(module: Any) -> bytes:
    """Return the imported CUDA module as TVM saves it: its format, what its functions are given, and its code."""
    blob = tvm_ffi.get_global_func("runtime.ModulePackImportsToTensor")(module).numpy().tobytes()
    marked = _string(b"cuda")
    at = blob.find(marked)
    if at < 0:
        raise PlatformError(_UNKNOWN_FORMAT)
    (size,) = struct.unpack_from("<Q", blob, at + len(marked))
    start = at + len(marked) + 8
    return blob[start : start + size]


def _with_code(packed: bytes, source: bytes, cubin: bytes) -> bytes:
    """Return a saved CUDA module with machine code instead of source: its format stands first, and its code last."""
    if not packed.startswith(_string(b"cuda")) or not packed.endswith(_string(source)):
        raise PlatformError(_UNKNOWN_FORMAT)
    functions = packed[len(_string(b"cuda")) : -len(_string(source))]
    return _string(b"cubin") + functions + _string(cubin)


def _string(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def load_cuda_kernels(folder: Path) -> Any:
    """Return the functions that `write_cuda_kernels` wrote, ready to launch.

    Raises:
        PlatformError: TVM cannot use a CUDA device here; the message says what is missing.
    """
    ready_to_run()
    module = load_kernels(folder / HOST_FILE, alone=True)
    read = tvm_ffi.get_global_func("ffi.Module.load_from_bytes.cuda")
    module.import_module(read((folder / DEVICE_FILE).read_bytes()))
    return module


class CudaFunctions:
    """The functions of a library, loaded when the first is asked for: a library is read where no device is, too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._module: Any = None

    def __getitem__(self, name: str) -> Any:
        """Return a function; errors are those of `load_cuda_kernels`."""
        with self._lock:
            if self._module is None:
                self._module = load_cuda_kernels(self._folder)
        return self._module[name]


def check_code(target: str) -> None:
    """Check that a device runs machine code of its target's architecture, before a kernel is launched.

    Raises:
        PlatformError: it is for another GPU.
    """
    arch = arch_of(target)
    version = str(tvm.runtime.device("cuda", index_of(target)).compute_version)
    own, here = int(re.sub(r"\D", "", arch)), int(version.replace(".", ""))
    if not runs_machine_code(own, here):
        raise PlatformError(
            f"the kernels for `{target}` are machine code of {arch}, which this GPU, sm_{here}, does not run; compile "
            f"the model again with `-arch=sm_{here}` in the target"
        )


def ready_to_run() -> None:
    """Make TVM able to run on CUDA devices.

    TVM's wheel has a CUDA runtime, which is loaded when TVM is imported if NVIDIA's driver and CUDA's runtime library
    are where the system looks. The library of NVIDIA's package on PyPI is not, so it is loaded from here.

    Raises:
        PlatformError: the driver, CUDA's runtime library or a device is missing.
    """
    with _lock:
        if not _is_ready:
            _prepare()
            _is_ready.append(True)


def _prepare() -> None:
    try:
        driver = cuda_toolkit.driver()
    except PlatformError as error:
        raise PlatformError(
            f"{error}. The kernels of this model are compiled; run it on the machine that has the GPU"
        ) from error
    library = next(cuda_toolkit.libraries("cudart", [_CUDART], ctypes.RTLD_GLOBAL), None)
    if library is None:
        raise PlatformError(
            f"the CUDA runtime of TVM {tvm.__version__} needs libcudart.so.{_CUDART}, which is not found; "
            "`pip install 'tvm-pipeline[cuda]'`, or install the CUDA 13 toolkit (it is searched for in "
            "CUDA_HOME, too)"
        )
    count = cuda_toolkit.check_devices(library)
    # It initialises the driver as well, without which TVM 0.27 cannot name a device.
    cuda_toolkit.wait_without_spinning(driver, library if count == 1 else None)
    if not _has_runtime():
        _load_runtime()


def _load_runtime() -> None:
    path = Path(tvm.__file__).parent / "lib" / _RUNTIME
    _log.info(f"loading {path}")
    try:
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise PlatformError(
            f"TVM's CUDA runtime cannot be loaded ({error}); use the TVM of `pip install 'tvm-pipeline[tvm]'`"
        ) from error
    if not _has_runtime():
        raise PlatformError(f"{path} was loaded, but has no CUDA devices; see that only one TVM is installed")


def _has_runtime() -> bool:
    return tvm_ffi.get_global_func("device_api.cuda", allow_missing=True) is not None
