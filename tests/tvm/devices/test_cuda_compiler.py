"""Kernels for NVIDIA's GPUs, compiled without one."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tvm

from tests.support.networks import relay_module
from tests.support.parts import needs, nvidia_file
from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.devices.cuda_toolkit import NVRTC
from tvm_pipeline_tvm.devices.nvrtc import Nvrtc, nvrtc
from tvm_pipeline_tvm.devices.runtimes import ready_to_compile
from tvm_pipeline_tvm.relay.fold import fast_build

# Jetson Nano and Orin, the oldest and the newest.
ARCHS = ("sm_53", "sm_87")
SOURCE = """
extern "C" __global__ void __launch_bounds__(32) first(float* out) { out[threadIdx.x] = 1; }
extern "C" __global__ void second(float* out) { out[threadIdx.x] = unknown; }
"""
# An nvrtc that knows one architecture, as one of a CUDA that is too new or too old for a GPU.
ONE_ARCH = """
int nvrtcVersion(int* major, int* minor) { *major = 13; *minor = 0; return 0; }
int nvrtcGetNumSupportedArchs(int* count) { *count = 1; return 0; }
int nvrtcGetSupportedArchs(int* archs) { *archs = 999; return 0; }
"""


NETWORKS = ("branching", "shapes")
# Builds that write other kernels for some architectures: int8 has an instruction of its own from sm_61 on.
CHOSEN = (("mobile", "sm_87"), *(("int8", arch) for arch in ARCHS))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what NVIDIA's nvrtc makes of the networks' kernels; it must not meet the software CUDA."""
    needs("NVRTC")
    folder = tmp_path_factory.mktemp("kernels")
    code = f"import pathlib, tests.tvm.devices.test_cuda_compiler as t; t.write(pathlib.Path({str(folder)!r}))"
    environment = {name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "LD_LIBRARY_PATH")}
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], env=environment, check=True)
    return folder


def write(folder: Path) -> None:
    """Write each network's kernels as CUDA C++ and as PTX for each architecture, a library, and what nvrtc refuses."""
    for network in NETWORKS:
        kernels = compiled(network, "sm_72")
        (folder / f"{network}.cu").write_text(kernels.get_source("cu"))
        for arch in ARCHS:
            form, code = nvrtc(arch).compile(str(kernels.get_source("cu")), arch)
            assert form == "ptx"
            (folder / f"{network}-{arch}.ptx").write_bytes(code)
    for network, arch in CHOSEN:
        kernels = compiled(network, arch)
        (folder / f"{network}-{arch}-chosen.cu").write_text(kernels.get_source("cu"))
        (folder / f"{network}-{arch}-chosen.ptx").write_text(kernels.get_source("ptx"))
    host = tvm.build(tvm.te.create_prim_func([tvm.te.placeholder((1,), name="a")]), target="llvm")
    host.import_module(compiled("branching", "sm_72"))
    host.export_library(str(folder / "library.so"))
    try:
        nvrtc("sm_72").compile(SOURCE, "sm_72")
    except ModelError as error:
        (folder / "refused.txt").write_text(str(error))


@cache
def compiled(network: str, arch: str) -> Any:
    """Return the module of a network's kernels."""
    target = f"cuda -arch={arch}"
    ready_to_compile(target)
    mod, params = relay_module(network)
    module = fast_build(mod, tvm.target.Target(target, "llvm"), params).lib.imported_modules[0]
    assert module.type_key == "cuda"
    return module


def assembled(source: Path, ptx: Path, arch: str) -> str:
    """Return what NVIDIA's assembler says of PTX that is to have all kernels of the source."""
    command = [str(nvidia_file("cuda_nvcc/bin/ptxas")), f"-arch={arch}", "-v", str(ptx), "-o", str(ptx) + ".cubin"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wanted = re.findall(r"^extern .* (\w+)\(.*\) \{$", source.read_text(), re.MULTILINE)
    assert sorted(re.findall(r"Compiling entry function '(\w+)'", done.stderr)) == sorted(wanted) != []
    return done.stderr


@pytest.mark.thorough
def test_kernels_are_code_for_the_gpu(written: Path) -> None:
    """NVIDIA's assembler takes them for these Jetsons, and no kernel is out of registers."""
    for network, arch in itertools.product(NETWORKS, ARCHS):
        said = assembled(written / f"{network}.cu", written / f"{network}-{arch}.ptx", arch)
        assert set(re.findall(r"(\d+) bytes spill stores", said)) == {"0"}


@pytest.mark.parametrize(("network", "arch"), CHOSEN)
def test_kernels_that_an_architecture_chooses(network: str, arch: str, written: Path) -> None:
    name = f"{network}-{arch}-chosen"
    assembled(written / f"{name}.cu", written / f"{name}.ptx", arch)


def test_a_library_of_cuda_is_saved(written: Path) -> None:
    """A machine without a GPU writes it, with the kernels in it."""
    assert b".target sm_72" in (written / "library.so").read_bytes()


def test_what_nvrtc_refuses(written: Path) -> None:
    """The error has nvrtc's own words and names the kernel."""
    said = (written / "refused.txt").read_text()
    assert re.search(r'kernel second for sm_72:\n.*kernels.cu\(3\).*"unknown" is undefined', said)


def test_a_driver_that_is_older_than_nvrtc_gets_no_ptx(tmp_path: Path) -> None:
    """It would refuse that; it gets the machine's code, an ELF file, which TVM can tell up to its first zero byte."""
    needs("NVRTC")
    code = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1]); from tvm_pipeline_tvm.devices.nvrtc import nvrtc; "
        "source = 'extern \"C\" __global__ void first(float* out) { out[threadIdx.x] = 1; }'; "
        "form, code = nvrtc('sm_87').compile(source, 'sm_87'); print(form, code[:4], code.split(b'\\0')[0].isascii())"
    )
    for version, made in ((12020, "cubin b'\\x7fELF' True\n"), (99000, "ptx b'//\\n/' True\n")):
        library = build(tmp_path, "libcuda.so.1", f"int cuDriverGetVersion(int* v) {{ *v = {version}; return 0; }}")
        done = subprocess.run([sys.executable, "-c", code, str(library)], capture_output=True, text=True, check=True)
        assert done.stdout == made


def build(folder: Path, name: str, source: str) -> Path:
    (folder / "source.c").write_text(source)
    options = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", "-o", str(folder / name)]
    subprocess.run(["gcc", str(folder / "source.c"), *options], check=True)
    return folder / name


def test_no_nvrtc_for_an_architecture(tmp_path: Path) -> None:
    """Those that are here are named, with what they compile for.

    A process of its own loads them: NVIDIA's, beside the software CUDA of other tests, would call functions of that.
    """
    (tmp_path / "lib64").mkdir()
    build(tmp_path / "lib64", f"libnvrtc.so.{NVRTC[13]}", ONE_ARCH)
    code = """
from tvm_pipeline.errors import PlatformError
from tvm_pipeline_tvm.devices.nvrtc import nvrtc
try:
    nvrtc("sm_1")
except PlatformError as error:
    print(error)
print(nvrtc("sm_999").version)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"CUDA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    said = r".*none here compiles for sm_1: .*that of CUDA 13.0 knows sm_999.*pip install.*\n13000\n"
    assert re.fullmatch(said, done.stdout)


def test_an_nvrtc_that_fails(tmp_path: Path) -> None:
    """As one whose own libraries are missing."""
    source = """int nvrtcVersion(int* major, int* minor) { return 11; }
    const char* nvrtcGetErrorString(int error) { return "NVRTC_ERROR_INTERNAL_ERROR"; }"""
    library = build(tmp_path, "libnvrtc-broken.so", source)
    with pytest.raises(ModelError, match=r"libnvrtc-broken.so.* failed with NVRTC_ERROR_INTERNAL_ERROR"):
        Nvrtc(ctypes.CDLL(str(library)))
