"""OpenCL through the add-on, on what platform is here; continuous integration has PoCL, which computes on the CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te

from tests.support.networks import relay_module
from tests.support.parts import needs
from tvm_pipeline.files import cache_folder
from tvm_pipeline_tvm.devices import programs
from tvm_pipeline_tvm.devices.addons import OWN, tvm_sources
from tvm_pipeline_tvm.devices.runtimes import OPENCL, ready_to_compile, ready_to_run
from tvm_pipeline_tvm.relay.fold import fast_build

COUNT = 1 << 10
# Without schedules of its own: TOPI's for Intel are what PoCL runs fast.
TARGET = "opencl -device=intel_graphics"


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The first OpenCL device, with TVM made ready to run on it."""
    needs("OpenCL")
    with pytest.MonkeyPatch.context() as patch:
        # PoCL compiles into a cache of its user's, which another process may be clearing.
        patch.setenv("POCL_CACHE_DIR", str(tmp_path_factory.mktemp("pocl")))
        ready_to_run("opencl")
        yield tvm.device("opencl", 0)


def adder(summand: int) -> Any:
    """Return a module of one kernel, which adds a number; its name is the same for all of them."""
    a = te.placeholder((COUNT,), name="a")
    b = te.compute((COUNT,), lambda i: a[i] + summand, name="b")
    schedule = te.create_schedule(b.op)
    block, thread = schedule[b].split(b.op.axis[0], factor=64)
    schedule[b].bind(block, te.thread_axis("blockIdx.x"))
    schedule[b].bind(thread, te.thread_axis("threadIdx.x"))
    ready_to_compile(TARGET)
    return tvm.build(schedule, [a, b], tvm.target.Target(TARGET, "llvm"), name="adder")


@pytest.fixture(scope="module")
def added(device: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`added(summand)`: a library that adds it, loaded from a file of its own: one file is loaded once in a process."""
    folder = tmp_path_factory.mktemp("adders")

    def load(summand: int) -> Any:
        if not (folder / f"{summand}.so").exists():
            adder(summand).export_library(str(folder / f"{summand}.so"))
        path = folder / f"{len(list(folder.iterdir()))}-{summand}.so"
        shutil.copyfile(folder / f"{summand}.so", path)
        return tvm.runtime.load_module(str(path))

    return load


def run(library: Any, device: Any) -> np.ndarray:
    a = tvm.nd.array(np.arange(COUNT, dtype="float32"), device)
    b = tvm.nd.empty((COUNT,), "float32", device)
    library(a, b)
    device.sync()
    return b.numpy()


def test_a_part_of_an_array_is_an_array(device: Any, added: Any) -> None:
    """Kernels take it, it shows the memory of the whole, and it keeps that alive."""
    part = tvm.get_global_func("tvm_pipeline.opencl.part")
    offset = tvm.get_global_func("tvm_pipeline.opencl.alignment")(0)
    assert offset % 4 == 0
    whole = tvm.nd.array(np.zeros(offset // 4 + COUNT, dtype="float32"), device)
    inside = part(whole, offset, tvm.runtime.ShapeTuple((COUNT,)), tvm.DataType("float32"))
    added(3)(tvm.nd.array(np.ones(COUNT, dtype="float32"), device), inside)
    np.testing.assert_array_equal(whole.numpy(), np.r_[np.zeros(offset // 4), np.full(COUNT, 4)])
    del whole
    np.testing.assert_array_equal(inside.numpy(), np.full(COUNT, 4))
    with pytest.raises(tvm.TVMError, match="OpenCL Error"):  # beyond the whole
        part(inside, offset, tvm.runtime.ShapeTuple((COUNT,)), tvm.DataType("float32"))


@pytest.mark.thorough
def test_arrays_become_inputs_without_a_copy(device: Any, tmp_path: Path) -> None:
    """TVM's executor checks the alignment of a descriptor, which `new` gives at random: 40 arrays, and 40 parts."""
    mod, params = relay_module("shapes")
    fast_build(mod, tvm.target.Target(TARGET, "llvm"), params).export_library(str(tmp_path / "library.so"))
    executor = tvm.runtime.load_module(str(tmp_path / "library.so"))["default"](device)
    (name,) = (p.name_hint for p in mod["main"].params if p.name_hint not in params)
    like = executor["get_input"](name)
    bytes_ = int(np.prod(like.shape)) * 4
    part = tvm.get_global_func("tvm_pipeline.opencl.part")
    kept = []
    for _ in range(40):
        whole = tvm.nd.empty((bytes_,), "uint8", device)
        inside = part(whole, 0, tvm.runtime.ShapeTuple(like.shape), tvm.DataType(like.dtype))
        kept += [tvm.nd.empty(like.shape, like.dtype, device), inside]
        for array in kept[-2:]:
            executor["set_input_zero_copy"](name, array)


def test_a_device_tells_of_itself(device: Any) -> None:
    name, vendor, extensions, kind, memory = tvm.get_global_func("tvm_pipeline.opencl.told")(0).split("\n")
    assert name == device.device_name
    assert vendor
    assert extensions
    assert kind in ("gpu", "cpu", "other")
    assert memory in ("unified", "own")


@pytest.mark.thorough
def test_kept_programs_are_taken(device: Any, added: Any, tmp_path: Path) -> None:
    """The programs of a kernel that adds 5, given to one of the same name that adds 7, add 5: nothing was compiled."""
    assert programs.save_programs(added(5), tmp_path)
    library = added(7)
    assert programs.load_programs(library, tmp_path)
    np.testing.assert_array_equal(run(library, device), np.arange(COUNT) + 5)
    np.testing.assert_array_equal(run(added(7), device), np.arange(COUNT) + 7)


def test_programs_of_another_driver_are_not_taken(device: Any, added: Any, tmp_path: Path) -> None:
    """A file has the name of its device and driver."""
    assert programs.save_programs(added(5), tmp_path)
    (file,) = tmp_path.iterdir()
    file.rename(file.with_name("programs-0123456789abcdef.bin"))
    assert not programs.load_programs(added(7), tmp_path)


def test_damaged_programs_are_removed(device: Any, added: Any, tmp_path: Path) -> None:
    """A driver might end the process on them; the kernels are compiled as if there had been none."""
    assert programs.save_programs(added(5), tmp_path)
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    library = added(7)
    assert not programs.load_programs(library, tmp_path)
    assert list(tmp_path.iterdir()) == []
    np.testing.assert_array_equal(run(library, device), np.arange(COUNT) + 7)


def test_a_folder_that_cannot_be_written_keeps_none(device: Any, added: Any, tmp_path: Path) -> None:
    assert not programs.save_programs(added(5), tmp_path / "none")


def test_code_of_the_cpu_has_no_programs(tmp_path: Path) -> None:
    a = te.placeholder((COUNT,), name="a")
    b = te.compute((COUNT,), lambda i: a[i] + 1.0, name="b")
    library = tvm.build(te.create_schedule(b.op), [a, b], "llvm")
    assert not programs.save_programs(library, tmp_path)
    assert not programs.load_programs(library, tmp_path)
    assert list(tmp_path.iterdir()) == []


OWN_OPENCL = """
import ctypes, logging, sys, numpy, tvm_pipeline_tvm, tvm
ctypes.CDLL("libOpenCL.so.1", ctypes.RTLD_GLOBAL)
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
before = tvm.get_global_func("device_api.opencl")
from tvm_pipeline_tvm.devices.runtimes import ready_to_run
logging.getLogger("tvm_pipeline_tvm").setLevel("INFO")
logging.getLogger("tvm_pipeline_tvm").addHandler(logging.StreamHandler(sys.stdout))
ready_to_run("opencl")
whole = tvm.nd.array(numpy.arange(1024, dtype="float32"), tvm.device("opencl", 0))
part = tvm.get_global_func("tvm_pipeline.opencl.part")
print(part(whole, 2048, tvm.runtime.ShapeTuple((2,)), tvm.DataType("float32")).numpy())
"""


@pytest.mark.thorough
def test_a_tvm_with_opencl_of_its_own(device: Any, tmp_path: Path) -> None:
    """It keeps its runtime, and gets only what slices need besides, compiled against its own sources."""
    root = tvm_sources("OpenCL")
    headers = [root / "include", *(root / "3rdparty" / name for name in OPENCL.third_party), OWN / "include"]
    command = [
        *("g++", "-shared", "-fPIC", "-O0", "-std=c++17", "-w", *OPENCL.options, "-o", str(tmp_path / "own.so")),
        "-DDMLC_USE_LOGGING_LIBRARY=<tvm/runtime/logging.h>",
        *(f"-I{path}" for path in headers),
        *("-Wl,-Bsymbolic", "-x", "c++", "-"),  # libtvm.so has some of the same names
    ]
    one = "".join(f'#include "{root / "src" / name}"\n' for name in OPENCL.sources)  # g++ reads the headers once
    subprocess.run(command, input=one, text=True, check=True)
    environment = {**os.environ, "TVM_PIPELINE_CACHE": str(cache_folder())}
    done = subprocess.run(
        [sys.executable, "-c", OWN_OPENCL, str(tmp_path / "own.so")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "building what tvm-pipeline adds to OpenCL (some seconds, once)",
        "[512. 513.]",
    ]
