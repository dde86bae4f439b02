"""OpenCL with Relax, on PoCL: programs that are kept and refused, launches, memory of the host, and what is missing."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import NoReturn

import numpy as np
import onnxruntime
import pytest
from onnx import helper

from tests.relax.test_slices import bind, check_equal, whole
from tests.support.onnx_models import onnx_bytes
from tests.support.parts import needs
from tvm_pipeline import frontends
from tvm_pipeline.backends.ports import PAGE, aligned_empty
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, PlatformError
from tvm_pipeline.files import seal
from tvm_pipeline_tvm import installed_ir
from tvm_pipeline_tvm.agreement import check_agreement
from tvm_pipeline_tvm.devices.mirrors import mirrors_of
from tvm_pipeline_tvm.devices.targets import compiler_target
from tvm_pipeline_tvm.gpu.gpu import GpuBackend
from tvm_pipeline_tvm.host.detection import host_target
from tvm_pipeline_tvm.relax.compiled import RelaxModel
from tvm_pipeline_tvm.relax.opencl_kernels import FILE

needs("PoCL")
needs("pyopencl")

import pyopencl as cl

CPU = Device("cpu0", "host", (0,), host_target())


FRAME = {"x": np.linspace(-1, 1, 16, dtype="float32").reshape(1, 16)}


def chain(*operators: str) -> Model:
    """Return a network of elementwise operators, which PoCL compiles in about a second each."""
    tensors = ["x", *(f"t{index}" for index in range(1, len(operators))), "y"]
    ends = zip(operators, tensors, tensors[1:], strict=False)
    nodes = [helper.make_node(kind, [read], [made]) for kind, read, made in ends]
    return frontends.onnx.read("chain", "chain.onnx", onnx_bytes(nodes, shape=(1, 16)), {}, {})


def rewrite_sources(folder: Path, old: bytes, new: bytes) -> None:
    """Change the source of the kernels of a library."""
    content = (folder / FILE).read_bytes()
    assert old in content
    (folder / FILE).write_bytes(content.replace(old, new))


def test_kept_programs_are_taken_and_damaged_ones_are_not(pocl: Device, own_cache: Path, tmp_path: Path) -> None:
    """The source that a bundle holds beside them is spoilt, so what runs was kept, and nothing else can run."""
    compiled = RelaxModel.compile(chain("Relu"), [pocl.target], bind)  # for one target, so it runs once and is kept
    right = whole(compiled, pocl, FRAME)
    compiled.save(tmp_path)
    rewrite_sources(tmp_path / "0", b"__kernel", b"__kernul")
    check_equal(whole(RelaxModel.load(tmp_path, bind), pocl, FRAME), right, "kept")
    (file,) = (tmp_path / "0").glob("programs-*.bin")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(
        PlatformError,
        match=r"the OpenCL driver of .* does not compile the kernel \w+: unknown type .*leave this device",
    ):
        whole(RelaxModel.load(tmp_path, bind), pocl, FRAME)
    assert not file.exists()


def test_an_operator_that_the_driver_does_not_compile_is_left_to_the_cpu(pocl: Device, own_cache: Path) -> None:
    targets = [CPU.target, pocl.target]
    model = chain("Relu", "Softmax")
    folder = RelaxModel.compile(model, targets, bind).libraries[compiler_target(pocl.target)].folder
    rewrite_sources(folder, b"exp(", b"exq(")
    seal(folder)  # else the cache takes it for damaged
    compiled = RelaxModel.compile(model, targets, bind)
    check_agreement(compiled, [CPU, pocl])
    (refused,) = [operator.name for operator in compiled.graph.operators if "softmax" in operator.kind]
    assert compiled.computes(pocl) == [each.name for each in compiled.graph.operators if each.name != refused]
    why = compiled.refused[compiler_target(pocl.target)][refused]
    assert re.search(r"fails there: its driver does not compile the kernel \w*softmax\w*: .*exq", why)
    assert np.isnan(compiled.time_operators(pocl, 1)).sum() == 1


def test_a_kernel_that_does_not_run_is_an_error(pocl: Device, own_cache: Path) -> None:
    """No device has work-groups of 65 536 threads."""
    many = pocl.target.replace("=256", "=65536")
    with pytest.raises(ModelError, match=r"compiles for .* does not run there: a kernel or a copy failed: .*SIZE"):
        RelaxModel.compile(chain("Relu"), [many], bind)


def test_launches(pocl: Device, own_cache: Path) -> None:
    """Several kernels of one function, which need memory between them; arguments of bool; groups of few threads."""
    draw = np.random.default_rng(0)
    weights = {"w": (8, 4, 3, 3), "large": (5, 8, 8, 12)}
    constants = {name: draw.standard_normal(shape).astype("float32") for name, shape in weights.items()}
    nodes = [
        helper.make_node("Softmax", ["x"], ["s"]),
        helper.make_node("Greater", ["s", "x"], ["is_greater"]),
        helper.make_node("Where", ["is_greater", "s", "x"], ["larger"]),
        helper.make_node("Conv", ["larger", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Mul", ["c", "large"], ["y"]),
    ]
    content = onnx_bytes(nodes, constants, shape=(1, 4, 8, 12), outputs=("is_greater", "y"))
    model = frontends.onnx.read("launches", "launches.onnx", content, {}, {})
    few = Device("gpu", "gpu", (), pocl.target.replace("=256", "=32"), stand_in="PoCL")
    compiled = RelaxModel.compile(model, [few.target], bind)
    library = compiled.libraries[compiler_target(few.target)]
    functions = [library.module[call.function] for call in library.calls]
    assert max(prod(launch.threads) for function in functions for launch in function.launches) == 32
    assert any(function.scratch_bytes and len(function.launches) > 1 for function in functions)
    frame = {"x": draw.standard_normal((1, 4, 8, 12)).astype("float32")}
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    for found, right in zip(whole(compiled, few, frame), session.run(None, frame), strict=True):
        np.testing.assert_allclose(found.reshape(right.shape), right, rtol=1e-4, atol=1e-4)


def test_memory_of_the_host_is_used_in_place(pocl: Device) -> None:
    """What the device writes stands in the array once the host has it again, and nothing is copied back."""
    mirrors = mirrors_of(pocl.target)
    array, small = aligned_empty((PAGE,), "uint8"), aligned_empty((PAGE // 2,), "uint8")
    mirror = mirrors.shared(array, kept=False)
    assert mirror is not None
    assert mirrors.shared(array, kept=False) is mirror
    assert mirrors.shared(small, kept=False) is None
    for value in (1, 2):
        array[:] = 0
        mirror.begin(copied=True)
        cl.enqueue_fill_buffer(mirrors.device.queue, mirror.on_device, np.uint8(value), 0, PAGE)
        mirror.end(copied=False)
        mirrors.device.sync()
        assert (array == value).all()


def test_a_device_that_is_not_there(pocl: Device) -> None:
    with pytest.raises(PlatformError, match=r"no OpenCL device 7: \d+ can be used.*`clinfo -l`.*mend `target`"):
        mirrors_of("opencl:7")


def test_no_platform(pocl: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> NoReturn:
        raise cl.Error("clGetPlatformIDs failed: PLATFORM_NOT_FOUND_KHR")

    monkeypatch.setattr(cl, "get_platforms", none)
    with pytest.raises(PlatformError, match=r"finds no platform \(clGet.*KHR\); .*apt install pocl-opencl-icd"):
        mirrors_of("opencl:7")


def test_pyopencl_is_not_installed(pocl: Device, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is not used then, and the command that installs it is told; kernels are compiled nevertheless."""
    find_spec = installed_ir.find_spec
    monkeypatch.setattr(installed_ir, "find_spec", lambda name: None if name == "pyopencl" else find_spec(name))
    backend, install = GpuBackend(), r"pyopencl, .*`pip install 'tvm-pipeline\[opencl\]'`"
    with pytest.raises(PlatformError, match=f"device gpu: .*{install}"):
        backend.settle(Device("gpu", "gpu", (), "opencl"))
    with pytest.raises(PlatformError, match=install):
        RelaxModel.compile(chain("Relu"), [pocl.target], bind)
    assert any("pip install 'tvm-pipeline[opencl]'" in line for line in backend.left_out())
    elsewhere = {compiler_target(pocl.target): "it is for a GPU of another machine"}
    made = RelaxModel.compile(chain("Relu"), [pocl.target], bind, elsewhere=elsewhere)
    assert (made.libraries[compiler_target(pocl.target)].folder / FILE).exists()
