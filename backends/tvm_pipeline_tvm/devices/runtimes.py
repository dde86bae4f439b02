"""Make TVM able to compile for a kind of device, and to run on it.

A TVM that a user built with CUDA or OpenCL is left as it is. The TVM of PyPI gets add-ons (`addons.py`), built when
they are first needed and never when devices are searched for.

CUDA ran on a real GPU, an H100 with CUDA 13; OpenCL ran on PoCL only.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace

import tvm

from tvm_pipeline.errors import PlatformError
from tvm_pipeline_tvm.devices import cuda_toolkit
from tvm_pipeline_tvm.devices.addons import Addon, load_addon
from tvm_pipeline_tvm.devices.cuda_compiler import add_compiler
from tvm_pipeline_tvm.devices.nvrtc import arch_of, nvrtc
from tvm_pipeline_tvm.devices.targets import DEVICE_TYPES, compiler_target, kind_of

_PARTS = tuple(
    f"tvm_pipeline.opencl.{name}"
    for name in ("part", "alignment", "programs", "use_programs", "told", "in_place", "give_to_device", "give_to_host")
)
# TVM's sources for OpenCL, and functions of our own that see into them.
OPENCL = Addon(
    "TVM's OpenCL runtime",
    functions=("device_api.opencl", "runtime.module.loadbinary_opencl", *_PARTS),
    folders=("runtime", "runtime/opencl", "runtime/spirv"),
    sources=tuple(f"runtime/opencl/{name}.cc" for name in ("opencl_device_api", "opencl_module", "texture_pool")),
    own=(("runtime/opencl/opencl_parts.cc", "opencl_parts.cc"),),
    # The executor of TVM 0.19 refuses an array as an input where the address of its descriptor is no multiple of 64,
    # and `new` gives one of 16 (apache/tvm issue 16753).
    replaced=(
        ("runtime/opencl/opencl_common.h", "\nstruct BufferDescriptor {", "\nstruct alignas(64) BufferDescriptor {"),
        # A device that is lost refuses every call. TVM would raise that out of destructors, which ends the process.
        (
            "runtime/opencl/opencl_device_api.cc",
            "OPENCL_CALL(clFinish(this->GetQueue(dev)));\n\n  cl::BufferDescriptor* desc = static_cast<cl::Buffer"
            "Descriptor*>(ptr);\n  if (desc->host_ptr) {",
            "clFinish(this->GetQueue(dev));\n\n  cl::BufferDescriptor* desc = static_cast<cl::BufferDescriptor*>(ptr);"
            "\n  if (desc->host_ptr) {",
        ),
        (
            "runtime/opencl/opencl_device_api.cc",
            "OPENCL_CALL(clReleaseMemObject(desc->buffer));\n  delete desc;\n}\n\ncl_mem",
            "clReleaseMemObject(desc->buffer);\n  delete desc;\n}\n\ncl_mem",
        ),
    ),
    third_party=("dlpack/include", "dmlc-core/include", "OpenCL-Headers"),
    options=("-DCL_TARGET_OPENCL_VERSION=120",),
)
# For a TVM that has OpenCL: our own functions alone, against its sources as they are.
OPENCL_PARTS = replace(OPENCL, title="what tvm-pipeline adds to OpenCL", functions=_PARTS, sources=(), replaced=())
CUDA = Addon(
    "TVM's CUDA runtime",
    functions=("device_api.cuda", "runtime.module.loadbinary_cuda"),
    folders=("runtime", "runtime/cuda"),
    sources=("runtime/cuda/cuda_device_api.cc", "runtime/cuda/cuda_module.cc", "runtime/workspace_pool.cc"),
    replaced=(  # as above, for destructors on a device that is lost
        (
            "runtime/cuda/cuda_device_api.cc",
            'CUDA_CALL(cudaSetDevice(dev.device_id));\n      VLOG(1) << "freeing device memory";\n      '
            "CUDA_CALL(cudaFree(ptr));",
            "if (cudaSetDevice(dev.device_id) == cudaSuccess) cudaFree(ptr);",
        ),
        (
            "runtime/cuda/cuda_module.cc",
            "CUDA_CALL(cudaSetDevice(static_cast<int>(i)));\n        CUDA_DRIVER_CALL(cuModuleUnload(module_[i]));",
            "if (cudaSetDevice(static_cast<int>(i)) == cudaSuccess) cuModuleUnload(module_[i]);",
        ),
    ),
)
# Two threads that load an add-on at the same time would register it twice, which ends the process.
_one_at_a_time = threading.RLock()
_prepared: set[str] = set()  # kinds that need nothing more


def ready_to_compile(target: str) -> None:
    """Make TVM able to compile for a target; raise PlatformError with what is missing where it cannot."""
    try:
        kind = tvm.target.Target(compiler_target(target)).kind.name
    except (ValueError, TypeError, tvm.TVMError):
        return  # no target of TVM's, which compiling for it says best
    if kind in DEVICE_TYPES and kind != kind_of(target):  # one of TVM's tags, such as nvidia/jetson-tx2
        raise PlatformError(
            f"the target `{target}` is one of a GPU; write it out, such as `{kind} ...`, with its options"
        )
    with _one_at_a_time:
        if kind == "cuda":
            arch = arch_of(target)
            if not _has("target.build.cuda"):
                nvrtc(arch)
                add_compiler()
            elif _has("tvm_pipeline.cuda.source"):  # the compiler is ours
                nvrtc(arch)
        elif kind == "opencl" and not _has("target.build.opencl"):
            raise PlatformError(
                f"this TVM ({tvm.__version__}) cannot compile for OpenCL; use the TVM of "
                "`pip install tvm-pipeline[relay]`, or one that was built with USE_OPENCL"
            )
        elif kind not in DEVICE_TYPES and not _on_cpu(kind):
            _demand(kind, f"target.build.{kind}", f"device_api.{kind}")


def ready_to_run(kind: str) -> None:
    """Make TVM able to run on devices of a kind; raise PlatformError with what is missing where it cannot.

    A device is looked for, and OpenCL's context is made, by the thread that calls this: PoCL's workers run on the cores
    that this thread may use, so call it before threads are bound to cores.
    """
    with _one_at_a_time:
        if kind in _prepared:
            return
        if kind == "cuda":
            _prepare_cuda()
        elif kind == "opencl":
            _prepare_opencl()
        elif kind in tvm.target.Target.list_kinds() and not _on_cpu(kind):
            _demand(kind, f"device_api.{kind}")
        _prepared.add(kind)


def _prepare_opencl() -> None:
    _load_opencl()
    if not _has("device_api.opencl"):
        load_addon(OPENCL)
    elif not _has(_PARTS[0]):
        load_addon(OPENCL_PARTS)
    if not tvm.device("opencl", 0).exist:
        raise PlatformError(
            "OpenCL is here, but TVM finds no GPU in it, and no CPU either; see what `clinfo` lists (TVM takes devices "
            "of OpenCL 1.2 and later)"
        )


def _load_opencl() -> None:
    """Load OpenCL's loader for all libraries that follow."""
    try:
        loader = ctypes.CDLL("libOpenCL.so.1", ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise PlatformError(
            f"OpenCL devices need OpenCL's loader, and it cannot be loaded ({error}); install it (Debian and Ubuntu: "
            "apt install ocl-icd-libopencl1)"
        ) from error
    count = ctypes.c_uint()
    if loader.clGetPlatformIDs(0, None, ctypes.byref(count)) or not count.value:
        raise PlatformError(
            "OpenCL's loader is here, but no platform behind it; install the driver of the GPU's vendor, or PoCL, "
            "which computes on the CPU (Debian and Ubuntu: apt install pocl-opencl-icd)"
        )


def _prepare_cuda() -> None:
    driver = cuda_toolkit.driver()
    if _has("device_api.cuda"):
        cuda_toolkit.wait_without_spinning(driver)
        return
    toolkit, library = cuda_toolkit.runtime()
    count = cuda_toolkit.check_devices(library)
    cuda_toolkit.wait_without_spinning(driver, library if count == 1 else None)
    load_addon(replace(CUDA, includes=toolkit.includes, includes_version=str(toolkit.version)))


def _has(function: str) -> bool:
    return tvm.get_global_func(function, allow_missing=True) is not None


def _on_cpu(kind: str) -> bool:
    """Return whether code of a kind of target runs on the CPU."""
    return tvm.target.Target(kind).get_target_device_type() == tvm.cpu().device_type


def _demand(kind: str, *functions: str) -> None:
    missing = [name for name in functions if not _has(name)]
    if missing:
        raise PlatformError(
            f"tvm-pipeline adds cuda and opencl to TVM, and this TVM ({tvm.__version__}) has no {kind} of its own "
            f"({', '.join(missing)} is missing); use a target of kind llvm, cuda or opencl, or a TVM that was built "
            f"with {kind}"
        )
