"""Kernels for CUDA devices are machine code of their architecture, and say what is missing to run them."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tvm

from tests.relax.fused import module_of
from tests.support.software_cuda import SoftwareCuda
from tvm_pipeline.errors import PlatformError
from tvm_pipeline_tvm.devices import cuda_toolkit
from tvm_pipeline_tvm.relax.build import functions_of
from tvm_pipeline_tvm.relax.cuda_kernels import (
    Resources,
    check_code,
    compiled_source,
    cuda_target,
    ready_to_run,
    resources,
)
from tvm_pipeline_tvm.relax.gpu_schedules import gpu_fused, gpu_kernels

# In a process of its own, which has no software CUDA device: what NVIDIA's compiler makes, and what is said of a
# machine without a driver.
PROGRAM = """
import json, sys
from pathlib import Path
from tests.relax.test_cuda_kernels import convolution_and_softmax
from tvm_pipeline.errors import PlatformError
from tvm_pipeline_tvm.relax.cuda_kernels import DEVICE_FILE, cuda_target, load_cuda_kernels, write_cuda_kernels
import tvm
folder, found = Path(sys.argv[1]), {}
for arch in ("sm_80", "sm_87"):
    target = cuda_target(arch, tvm.target.Target({"kind": "llvm"}))
    try:
        found[arch] = write_cuda_kernels(convolution_and_softmax(target), target, folder)
        found[arch + " code"] = (folder / DEVICE_FILE).read_bytes().hex()
    except PlatformError as error:
        found["no compiler"] = str(error)
try:
    load_cuda_kernels(folder)
except PlatformError as error:
    found["no driver"] = str(error)
print(json.dumps(found))
"""


def convolution_and_softmax(target: tvm.target.Target) -> tvm.IRModule:
    from tvm.relax.op import nn

    module = module_of(
        lambda emit, x, w: emit(nn.softmax(emit(nn.conv2d(x, w, padding=1)))), (1, 16, 28, 28), (64, 16, 3, 3)
    )
    return functions_of(gpu_kernels(gpu_fused(module, target), target))


@pytest.fixture(scope="module")
def without_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("kernels")
    root = Path(__file__).parents[2]
    variables = {name: os.environ[name] for name in os.environ.keys() - {"CUDA_HOME", "LD_LIBRARY_PATH"}}
    variables["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "backends"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], env=variables, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("arch", "number"), [("sm_80", 80), ("sm_87", 87)])
def test_nvidias_compiler_makes_machine_code(without_device: dict[str, Any], arch: str, number: int) -> None:
    if arch not in without_device:
        pytest.skip(without_device["no compiler"])
    code = bytes.fromhex(without_device[f"{arch} code"])
    elf = code[code.index(b"\x7fELF") :]
    assert int.from_bytes(elf[18:20], "little") == 190  # EM_CUDA
    assert number in (elf[48], elf[49])  # the architecture is in e_flags: its lowest byte, or the next with CUDA 13
    assert b"__global__" not in code
    for kernel in ("conv2d_kernel", "softmax_kernel"):
        assert kernel.encode() in elf
        used = Resources(*without_device[arch][kernel])
        assert 32 <= used.threads <= 1024
        assert 8 <= used.registers <= 255
        assert used.spilled_bytes == 0
    assert Resources(*without_device[arch]["conv2d_kernel"]).shared_bytes > 0


def test_a_machine_without_a_driver_says_what_to_do(without_device: dict[str, Any]) -> None:
    if "no driver" not in without_device:
        pytest.skip("this machine has NVIDIA's driver")
    said = without_device["no driver"]
    assert "NVIDIA's driver" in said
    assert "run it on the machine that has the GPU" in said


@pytest.mark.needs("kernels")
@pytest.mark.parametrize(("arch", "vectors"), [("sm_80", 0), ("sm_87", 1)])
def test_the_source_has_all_kernels(arch: str, vectors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there without a driver, and an option of TVM's is left as it was.

    A large device gets more threads for so small a convolution, and no thread then computes four neighbours.
    """
    target = cuda_target(arch, tvm.target.Target({"kind": "llvm"}))
    monkeypatch.setenv("TVM_COMPILE_FORCE_FALLBACK", "0")
    (kernels,) = compiled_source(convolution_and_softmax(target), target).imports
    source = str(kernels.inspect_source("cuda"))
    assert os.environ["TVM_COMPILE_FORCE_FALLBACK"] == "0"
    for kernel in ("conv2d_kernel", "softmax_kernel"):
        assert f" {kernel}(" in source
    assert "__shared__" in source
    assert ("float4" in source) >= vectors


def test_resources_are_read_from_the_assemblers_log() -> None:
    log = (
        "ptxas info    : Compiling entry function 'first' for 'sm_87'\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 0 barriers, 384 bytes cmem[0]\n"
        "ptxas info    : Compiling entry function 'second' for 'sm_87'\n"
        "    16 bytes stack frame, 24 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 72 registers, used 1 barriers, 3200 bytes smem, 392 bytes cmem[0]\n"
    )
    source = "__global__ void __launch_bounds__(128) first(float* a);\n__global__ void __launch_bounds__(64) second();"
    assert resources(log, source) == {"first": Resources(128, 40, 0, 0), "second": Resources(64, 72, 3200, 24)}


def test_code_for_another_gpu_is_refused(software_cuda: SoftwareCuda) -> None:
    """Machine code of a Jetson runs on that architecture alone."""
    ready_to_run()
    check_code("cuda -arch=sm_87")
    with pytest.raises(PlatformError, match=r"machine code of sm_80, which this GPU, sm_87, .*-arch=sm_87"):
        check_code("cuda -arch=sm_80")


def test_a_device_is_named(software_cuda: SoftwareCuda) -> None:
    """TVM 0.27 asks the driver for it, which nothing of TVM's has initialised."""
    ready_to_run()
    assert tvm.runtime.device("cuda", 0).device_name == "software CUDA"
    assert cuda_toolkit.check_devices(ctypes.CDLL("libcudart.so.13")) == 1
