"""Libraries for another processor are linked by any linker that is there, and load without one's C library."""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.log_lines import log_lines
from tests.support.parts import needs

needs("tvm")

from tests.support.elf import AARCH64, read_library
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError, PlatformError
from tvm_pipeline_tvm import linking
from tvm_pipeline_tvm.linking import check_linker, export_library, linker_for
from tvm_pipeline_tvm.relay.build import build_library, compile_module
from tvm_pipeline_tvm.target_text import other_processor

import tvm  # isort: skip
from tvm import relay  # isort: skip

TARGET = "llvm -keys=cpu -mtriple=aarch64-linux-gnu -mcpu=cortex-a72"
LINKERS = ("aarch64-linux-gnu-ld", "ld.lld", "ziglang")
# In TVM's runtime, beside the functions whose addresses it writes into a library, and in libm.
GIVEN = {"__gnu_f2h_ieee", "__gnu_h2f_ieee", "logf", "powf"}
not_arm = pytest.mark.skipif(platform.machine() == "aarch64", reason="it is this machine's own code")


def module() -> tvm.IRModule:
    """Return what calls libm, halves, and TVM's runtime: its threads and its workspace."""
    x, weight = relay.var("x", shape=(1, 8, 16, 16)), relay.var("w", shape=(8, 8, 3, 3))
    y = relay.nn.conv2d(x, weight, padding=(1, 1), channels=8, kernel_size=(3, 3))
    y = relay.cast(relay.cast(relay.nn.softmax(y), "float16"), "float32")
    y = relay.power(y, relay.const(1.5)) + relay.log(y)
    return relay.transform.InferType()(tvm.IRModule.from_expr(y))


def only(linker: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave one linker on the PATH; skip the test where it is not installed."""
    needs(linker)
    programs = folder / "programs"
    programs.mkdir()
    if linker == "ziglang":
        monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", str(folder / "zig"))
    else:
        (programs / linker).symlink_to(str(shutil.which(linker)))
    monkeypatch.setenv("PATH", str(programs))


@pytest.mark.quick_cases(1)
@not_arm
@pytest.mark.parametrize("linker", LINKERS)
def test_a_linker_alone_makes_a_library_for_another_processor(
    linker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(linker, tmp_path, monkeypatch)
    compile_module("net", module(), {}, TARGET, tmp_path)
    made = read_library(tmp_path / "kernels.so")
    assert (made.machine, made.needed) == (AARCH64, [linking.LIBM])
    assert {"logf", "powf"} <= made.undefined <= GIVEN
    assert not made.has_versions, "a board whose C library is older would refuse it"


@pytest.mark.needs("x86_64-linux-gnu-ld")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="it is the linker of another processor")
def test_such_a_library_loads_and_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own code, linked as if this were another machine."""
    x = relay.var("x", shape=(64,))
    factory = relay.build(tvm.IRModule.from_expr(relay.erf(relay.exp(x))), "llvm -mtriple=x86_64-linux-gnu")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(platform, "machine", lambda: "aarch64")
        export_library(factory.lib, tmp_path / "kernels.so", "llvm -mtriple=x86_64-linux-gnu")
    assert read_library(tmp_path / "kernels.so").needed == [linking.LIBM], "the C compiler linked it"
    own = tmp_path / "own.so"
    export_library(factory.lib, own, "llvm")
    given, results = np.linspace(-2, 2, 64, dtype="float32"), []
    for path in (tmp_path / "kernels.so", own):
        result = tvm.nd.empty((64,))
        (name,) = {str(name) for name in factory.function_metadata} - {"__tvm_main__"}
        tvm.runtime.load_module(str(path))[name](tvm.nd.array(given), result)
        results.append(result.numpy())
    np.testing.assert_array_equal(*results)
    assert results[0].std() > 0.1


@not_arm
def test_without_a_linker_nothing_is_compiled(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(linking, "find_spec", lambda _: None)
    said = log_lines("INFO")
    for target, named in ((TARGET, "binutils-aarch64-linux-gnu"), ("llvm -mtriple=mips64-linux-gnu", "install lld")):
        with pytest.raises(PlatformError, match=rf"code for (aarch64|mips64) cannot be linked .*{named}.*\[cross\]"):
            build_library(Model("net", "relay", b""), target)
    assert not said
    check_linker("llvm")
    check_linker("no-such-target")


@pytest.mark.thorough
@not_arm
def test_what_a_linker_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linker = tmp_path / "aarch64-linux-gnu-ld"
    linker.write_text("#!/bin/sh\necho no room for $1\necho more\nexit 3\n")
    linker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(ModelError, match=r"kernels for llvm .*aarch64-linux-gnu-ld failed with status 3: no room for"):
        compile_module("net", module(), {}, TARGET, tmp_path)


def test_the_processor_of_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, others in (("x86_64", ["aarch64", "aarch64", "arm"]), ("aarch64", ["arm", "x86_64"])):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        triples = ("aarch64-linux-gnu", "arm64-linux-gnu", "armv7l-linux-gnueabihf", "x86_64-linux-gnu")
        named = [other_processor(f"llvm -mtriple={triple}") for triple in triples]
        assert [name for name in named if name] == others
        assert other_processor("llvm -mcpu=cortex-a72") == other_processor("cuda -arch=sm_72") == ""


def test_the_toolchain_comes_before_lld_and_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(linking, "find_spec", lambda _: True)
    assert linker_for("aarch64") == [sys.executable, "-m", "ziglang", "ld.lld"]
    for name in ("ld.lld", "aarch64-linux-gnu-ld"):
        (tmp_path / name).touch(mode=0o755)
        assert linker_for("aarch64") == [str(tmp_path / name)]
