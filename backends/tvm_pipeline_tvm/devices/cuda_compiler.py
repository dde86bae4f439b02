"""Compile kernels for CUDA devices: `target.build.cuda` for the TVM of PyPI.

The TVM of PyPI has CUDA's schedules and the code generator, but not the function that a build calls. That function is
here: the code generator, reached through an add-on (`cuda_codegen.cc`), writes the source of all kernels, and NVIDIA's
compiler library, nvrtc, compiles them. No GPU and no driver is needed for that, so a PC compiles for a Jetson.

The kernels of three networks ran on an H100, by CUDA 13; those of six were checked by NVIDIA's assembler for Jetsons.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import tvm
from tvm import te, tir

from tvm_pipeline.errors import PlatformError
from tvm_pipeline_tvm.devices.addons import Addon, load_addon
from tvm_pipeline_tvm.devices.nvrtc import arch_of, nvrtc, runs_machine_code
from tvm_pipeline_tvm.devices.targets import index_of

# The add-on declares the generator's class by hand, which holds for this version alone.
TVM_VERSION = "0.19.0"
CODE_GENERATOR = Addon(
    "TVM's CUDA code generator",
    functions=("tvm_pipeline.cuda.source", "tvm_pipeline.cuda.module"),
    own=(("cuda_codegen.cc", "cuda_codegen.cc"),),
)


def check_code(module: tvm.runtime.Module, target: str) -> None:
    """Check that a device takes the kernels of a library, as it was loaded, before one of them is launched.

    PTX is compiled by the driver for any newer GPU, machine code (a cubin) is not. NVIDIA's CUDA C++ Programming Guide,
    "Binary compatibility": it runs on GPUs of the same major version, from its minor version on, and that of a Jetson
    on the very same architecture.

    Args:
        target: that of the device, for which they were compiled.

    Raises:
        PlatformError: they are machine code for another GPU.
    """
    if not any(map(_is_machine_code, _cuda_kernels(module))):
        return
    arch = arch_of(target)
    version = str(tvm.device("cuda", index_of(target)).compute_version)
    own, here = int(re.sub(r"\D", "", arch)), int(version.replace(".", ""))
    if not runs_machine_code(own, here):
        raise PlatformError(
            f"the kernels for `{target}` are machine code of {arch}, which this GPU, sm_{here}, does not run (they are "
            "no PTX, because they were compiled where the driver is older than nvrtc); compile the model again on this "
            f"machine, with `-arch=sm_{here}` in the target"
        )


def _cuda_kernels(module: tvm.runtime.Module) -> Iterator[tvm.runtime.Module]:
    if module.type_key == "cuda":
        yield module
    for imported in module.imported_modules:
        yield from _cuda_kernels(imported)


def _is_machine_code(kernels: tvm.runtime.Module) -> bool:
    try:
        return str(kernels.get_source("cubin")).startswith("\x7fELF")  # TVM ends it at the first zero byte
    except UnicodeDecodeError:
        return False  # the code for several GPUs that a TVM built with CUDA may make, with PTX in it


def add_compiler() -> None:
    """Give TVM `target.build.cuda`.

    Raises:
        PlatformError: the add-on cannot be built, or does not fit this TVM.
    """
    if tvm.__version__ != TVM_VERSION:
        raise PlatformError(
            f"this TVM ({tvm.__version__}) cannot compile for CUDA, and tvm-pipeline can add that to TVM {TVM_VERSION} "
            "alone; `pip install tvm-pipeline[relay]`, or build TVM with USE_CUDA"
        )
    load_addon(CODE_GENERATOR)
    _check_generator()
    tvm.register_func("target.build.cuda", _build)


def _check_generator() -> None:
    """Have the generator write a small kernel: another class than the add-on declares would write something else."""
    out = tir.Var("out", tvm.ir.PointerType(tvm.ir.PrimType("float32")))
    buffer = tir.decl_buffer((32,), "float32", data=out)
    thread = te.thread_axis("threadIdx.x")
    store = tir.BufferStore(buffer, thread.var.astype("float32") * tir.const(2, "float32"), [thread.var])
    function = tir.PrimFunc([out], tir.AttrStmt(thread, "thread_extent", tir.const(32, "int32"), store))
    function = function.with_attr({"global_symbol": "probe", "tir.noalias": True})
    source = _source([tvm.ir.GlobalVar("probe")], [function])
    wanted = r'extern "C" __global__ void .*\bprobe\(float\* __restrict__ out\) \{\s*out\[.*threadIdx\.x.*2\.0+e\+00f'
    if re.search(wanted, source, re.DOTALL) is None:
        raise PlatformError(
            f"the CUDA code generator of this TVM ({tvm.__version__}) is not the one that tvm-pipeline knows: for a "
            f"small kernel it wrote {source[-300:]!r}; use the TVM of `pip install tvm-pipeline[relay]`"
        )


def _source(names: Sequence[Any], functions: Sequence[Any]) -> str:
    return str(tvm.get_global_func("tvm_pipeline.cuda.source")(list(names), list(functions)))


def _build(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.runtime.Module:
    """Compile the kernels of a module: `target.build.cuda`."""
    names, functions = zip(*mod.functions_items(), strict=True)
    source, arch = _source(names, functions), arch_of(str(target))
    format_, code = nvrtc(arch).compile(source, arch)
    described = {}
    for function in functions:
        symbol = str(function.attrs["global_symbol"])
        described[symbol] = {
            "name": symbol,
            "arg_types": [parameter.dtype for parameter in function.params],
            "launch_param_tags": [str(tag) for tag in function.attrs["tir.kernel_launch_params"]],
        }
    create = tvm.get_global_func("tvm_pipeline.cuda.module")
    return create(format_, bytearray(code), json.dumps(described), source)
