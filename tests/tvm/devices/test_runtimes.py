"""Which targets TVM is made ready for, and what is said where something is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tvm_pipeline.errors import PlatformError
from tvm_pipeline_tvm.devices.runtimes import ready_to_compile, ready_to_run

# Libraries that pose as CUDA's, as far as these tests go.
DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int* count) { *count = 0; return 0; }
int cuDriverGetVersion(int* version) { *version = 12020; return 0; }
"""
RUNTIME = """
int cudaGetDeviceCount(int* count) { return 35; }
const char* cudaGetErrorString(int error) { return "CUDA driver version is insufficient"; }
"""


def refusals(tmp_path: Path, **environment: str) -> str:
    """Return the reasons that a new process gives why it can run neither OpenCL nor CUDA.

    What is loaded into this process, and registered with its TVM, is not there.
    """
    code = (
        "from tvm_pipeline.errors import PlatformError\n"
        "from tvm_pipeline_tvm.devices.runtimes import ready_to_run\n"
        "for kind in ('opencl', 'cuda'):\n"
        "    try: ready_to_run(kind)\n"
        "    except PlatformError as error: print(error)\n"
    )
    environment = {**os.environ, "TVM_PIPELINE_CACHE": str(tmp_path / "cache"), **environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def posing(folder: Path, name: str, source: str = "") -> str:
    """Make a library of a name in a folder, or a file that is none; return the folder."""
    folder.mkdir(exist_ok=True)
    if not source:
        (folder / name).write_text("not a library")
    else:
        (folder / "source.c").write_text(source)
        options = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run(["gcc", str(folder / "source.c"), *options], check=True)
    return str(folder)


@pytest.mark.parametrize("target", ["llvm", "llvm -mcpu=x86-64-v3", "c", "raspberry-pi/4b-aarch64", "no-such-kind"])
def test_cpu_cores_need_nothing(target: str) -> None:
    """What is no target at all is left to TVM, which says it best."""
    ready_to_compile(target)
    ready_to_run(target.split()[0])
    ready_to_run("")


@pytest.mark.parametrize("kind", ["vulkan", "metal", "rocm"])
def test_kinds_that_nothing_is_added_for(kind: str) -> None:
    with pytest.raises(PlatformError, match=rf"no {kind} of its own .*llvm, cuda or opencl"):
        ready_to_compile(kind)
    with pytest.raises(PlatformError, match=rf"no {kind} of its own .*llvm, cuda or opencl"):
        ready_to_run(kind)


def test_a_cuda_target_names_its_gpu() -> None:
    """TVM would take sm_50 and say nothing."""
    with pytest.raises(PlatformError, match=r"cuda:1 -max_num_threads=256.*-arch=sm_87"):
        ready_to_compile("cuda:1 -max_num_threads=256")
    with pytest.raises(PlatformError, match=r"write it out, such as `cuda"):
        ready_to_compile("nvidia/jetson-agx-xavier")


@pytest.mark.thorough
def test_no_loader_of_opencl_and_no_driver_of_nvidia(tmp_path: Path) -> None:
    """The message names the package that has it."""
    posing(tmp_path / "lib", "libcuda.so.1")
    said = refusals(tmp_path, LD_LIBRARY_PATH=posing(tmp_path / "lib", "libOpenCL.so.1"))
    assert "apt install ocl-icd-libopencl1" in said
    assert "NVIDIA's driver" in said


def test_no_platform_of_opencl_and_no_device_of_nvidia(tmp_path: Path) -> None:
    """OpenCL's loader says -1001. The reason of CUDA's runtime is told; CUDA_HOME has its headers and libraries."""
    toolkit = tmp_path / "toolkit"
    (toolkit / "include").mkdir(parents=True)
    (toolkit / "include/cuda.h").write_text("#define CUDA_VERSION 12020\n")
    (toolkit / "include/cuda_runtime.h").write_text("")
    posing(toolkit / "lib64", "libcudart.so.12", RUNTIME)
    posing(tmp_path / "lib", "libOpenCL.so.1", "int clGetPlatformIDs(int a, void* b, void* c){return -1001;}")
    folder = posing(tmp_path / "lib", "libcuda.so.1", DRIVER)
    said = refusals(tmp_path, LD_LIBRARY_PATH=folder, CUDA_HOME=str(toolkit))
    assert "apt install pocl-opencl-icd" in said
    assert "no device can be used: CUDA driver version is insufficient" in said
    assert not (tmp_path / "cache" / "addons").exists()  # nothing was built in vain
