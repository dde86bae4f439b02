"""Relax's libraries for another processor are linked by a linker alone, and need no C library's versions."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tests.support.elf import AARCH64, read_library
from tests.support.onnx_networks import Net
from tvm_pipeline.errors import PlatformError
from tvm_pipeline_tvm import linking
from tvm_pipeline_tvm.relax.build import compile_module
from tvm_pipeline_tvm.relax.importer import import_model

TARGET = "llvm -keys=cpu -mtriple=aarch64-linux-gnu -mcpu=cortex-a72"
# The symbols of TVM's runtime, which is loaded before any library of kernels, and those of libm that it may leave open.
RUNTIME = ("TVMFFI", "TVMBackend")
LIBM = {"expf", "erff", "powf", "tanhf"}

pytestmark = pytest.mark.skipif(platform.machine() == "aarch64", reason="it is this machine's own code")


def compiled(folder: Path) -> None:
    net = Net()
    hidden = net.op("Softmax", net.dense(net.op("Erf", net.input("x", 1, 32)), 32, 32))
    model = net.model("net", net.op("Pow", net.op("Exp", hidden), net.const(1.7)))
    compile_module("net", import_model(model), TARGET, folder)


@pytest.mark.needs("linker for AArch64")
def test_a_linker_alone_makes_a_library_for_another_processor(tmp_path: Path) -> None:
    compiled(tmp_path)
    made = read_library(tmp_path / "kernels.so")
    assert (made.machine, made.needed, made.has_versions) == (AARCH64, [linking.LIBM], False)
    open_here = {name for name in made.undefined if not name.startswith(RUNTIME)}
    assert open_here
    assert open_here <= LIBM


def test_without_a_linker_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(linking, "find_spec", lambda _: None)
    with pytest.raises(PlatformError, match=r"code for aarch64 cannot be linked .*binutils-aarch64-linux-gnu"):
        compiled(tmp_path)
    assert not list(tmp_path.iterdir())
