"""Compile kernels for CUDA devices: `target.build.cuda` for the TVM of PyPI.

The TVM of PyPI has CUDA's schedules and the code generator, but not the function that a build calls. That function is
here: the code generator, reached through an add-on (`cuda_codegen.cc`), writes the source of all kernels, and NVIDIA's
compiler library, nvrtc, compiles them. No GPU and no driver is needed for that, so a PC compiles for a Jetson.

The kernels of six networks were compiled so and checked by NVIDIA's assembler; none has run on a real GPU.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import te, tir

from tvm_pipeline.errors import ModelError, PlatformError
from tvm_pipeline.tvm.devices.addons import Addon, load_addon
from tvm_pipeline.tvm.devices.cuda_toolkit import NVRTC, driver_version, libraries, toolkits
from tvm_pipeline.tvm.devices.targets import index_of

# The add-on declares the generator's class by hand, which holds for this version alone.
TVM_VERSION = "0.19.0"
CODE_GENERATOR = Addon(
    "TVM's CUDA code generator",
    functions=("tvm_pipeline.cuda.source", "tvm_pipeline.cuda.module"),
    own=(("cuda_codegen.cc", "cuda_codegen.cc"),),
)
_OF_JETSONS = frozenset({53, 62, 72, 87, 101, 110})
_ARCH = re.compile(r"-arch[= ]?(sm_\d+[a-z]?)\b")


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
    if not _runs_machine_code(own, here):
        raise PlatformError(
            f"the kernels for `{target}` are machine code of {arch}, which this GPU, sm_{here}, does not run (they are "
            "no PTX, because they were compiled where the driver is older than nvrtc); compile the model again on this "
            f"machine, with `-arch=sm_{here}` in the target"
        )


def _runs_machine_code(own: int, here: int) -> bool:
    """Return whether machine code of an architecture runs on a GPU.

    >>> _runs_machine_code(80, 86), _runs_machine_code(86, 80), _runs_machine_code(75, 86), _runs_machine_code(80, 87)
    (True, False, False, False)
    """
    return own == here or (own // 10 == here // 10 and own < here and not {own, here} & _OF_JETSONS)


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


def add_compiler(progress: Callable[[str], None]) -> None:
    """Give TVM `target.build.cuda`.

    Raises:
        PlatformError: the add-on cannot be built, or does not fit this TVM.
    """
    if tvm.__version__ != TVM_VERSION:
        raise PlatformError(
            f"this TVM ({tvm.__version__}) cannot compile for CUDA, and tvm-pipeline can add that to TVM {TVM_VERSION} "
            "alone; `pip install tvm-pipeline[relay]`, or build TVM with USE_CUDA"
        )
    load_addon(CODE_GENERATOR, progress)
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


class Nvrtc:
    """NVIDIA's compiler as a library.

    Attributes:
        version: that of CUDA which it is of, such as 12090.
        archs: the numbers of the architectures that it compiles for; empty where it is too old to say.
    """

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

    def compile(self, source: str, arch: str) -> tuple[str, bytes]:
        """Return the format of the code, `ptx` or `cubin`, and the code.

        Raises:
            ModelError: nvrtc cannot compile it; the message has its first errors and the kernel.
        """
        # PTX is compiled by the driver, for its own GPU, and a driver refuses PTX of a newer CUDA than its own. There
        # the machine's code is made at once, which a driver of the same major version takes.
        newer = 0 < driver_version() < self.version and hasattr(self._library, "nvrtcGetCUBIN")
        format_, meant = ("cubin", arch) if newer else ("ptx", arch.replace("sm_", "compute_"))
        standard = "c++17" if self.version >= 11000 else "c++14"
        options = [f"-arch={meant}", f"-std={standard}"]
        options += [f"-I{folder}" for folder in self._includes()]
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None),
            "program",
        )
        try:
            if self._library.nvrtcCompileProgram(program, len(options), encoded):
                log = self._got(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                raise ModelError(_refusal(log, source, arch))
            code = self._got(program, format_.upper())
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))
        return format_, code.rstrip(b"\0") if format_ == "ptx" else code

    def _includes(self) -> tuple[Path, ...]:
        """Return the folders of headers that kernels include where they compute in half precision."""
        major = self.version // 1000
        return next((toolkit.includes for toolkit in toolkits() if toolkit.version // 1000 == major), ())

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
        f"kernels for CUDA are compiled by NVIDIA's nvrtc, and {what}{old}; `pip install tvm-pipeline[cuda]`, or "
        "install the CUDA toolkit (it is searched for in CUDA_HOME, too)"
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
