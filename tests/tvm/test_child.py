"""A compile that ends its process is an error with the operator, the target and the signal; nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.log_lines import on_line
from tests.support.parts import needs

needs("tvm")

from tests.tvm.test_build import text_model
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.kernel_sets import Choices
from tvm_pipeline_tvm.relay import build, compiled
from tvm_pipeline_tvm.relay.build import build_library
from tvm_pipeline_tvm.relay.compiled import RelayModel
from tvm_pipeline_tvm.relay.importer import import_model
from tvm_pipeline_tvm.relay.library import Library

TARGET = "llvm -mcpu=znver5"
# Stock TVM in the child: LLVM meets an intrinsic with operands of other types.
STOCK = (
    "import contextlib, tvm_pipeline_tvm.relay.int8 as int8, tvm_pipeline_tvm.kernel_sets as kernel_sets\n"
    "int8.exact_int8, kernel_sets.relay_kernels = contextlib.nullcontext, kernel_sets.RelayKernels\n"
)
# A schedule that ends the process.
SCHEDULE = (
    "import os, tvm_pipeline_tvm.relay\nfrom tvm.relay.backend import te_compiler\n"
    "stock = te_compiler.select_implementation\n"
    "def select(op, *rest, **options):\n"
    "    return os.kill(os.getpid(), 11) if op.name == 'tanh' else stock(op, *rest, **options)\n"
    "te_compiler.select_implementation = select\n"
)

CONVOLUTION = 'nn.conv2d(%x, %w, channels=16, kernel_size=[1, 1], out_dtype="int32")'
BYTES = "%x: Tensor[(1, 16, 4, 4), uint8], %w: Tensor[(16, 16, 1, 1), int8]"

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TVM_PIPELINE_CACHE", str(tmp_path / "cache"))
    before = children()
    yield tmp_path / "cache"
    assert children() == before, "a child outlives its compile"
    assert not list((tmp_path / "cache").rglob(".*")), "a library cut short"


def children() -> set[str]:
    found = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {child for file in found for child in file.read_text().split()}


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Children that begin with the code that the test names."""
    (tmp_path / "sitecustomize.py").write_text(request.param)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))


@pytest.mark.thorough
@pytest.mark.parametrize("broken", [STOCK], ids=["stock"], indirect=True)
@pytest.mark.usefixtures("broken")
def test_llvm_aborts_and_the_operator_is_named() -> None:
    with pytest.raises(ModelError) as raised:
        build_library(text_model(CONVOLUTION, BYTES), TARGET)
    said = str(raised.value)
    assert (
        f"net: the process that compiled it for {TARGET} was killed by SIGABRT while making code in operator nn_co"
        in said
    )
    assert "conv2d_NCHWc" in said
    assert "Calling a function with a bad signature" in said
    assert "-mattr=-FEATURE" in said


@pytest.mark.parametrize("broken", [SCHEDULE], ids=["schedule"], indirect=True)
@pytest.mark.usefixtures("broken")
def test_a_schedule_ends_the_process_and_its_operator_is_named() -> None:
    with pytest.raises(ModelError, match="killed by SIGSEGV while choosing a schedule in operator tanh"):
        build_library(text_model("tanh(exp(%x))"), TARGET)


@pytest.mark.thorough
def test_the_system_kills_it() -> None:
    before = children()

    def kill(line: str) -> None:
        if line.startswith("compiling"):
            (child,) = children() - before
            os.kill(int(child), signal.SIGKILL)

    on_line(kill, "INFO")
    with pytest.raises(ModelError, match=r"was killed by SIGKILL .*takes too much memory"):
        build_library(text_model("tanh(%x)"), TARGET)


@pytest.mark.thorough
def test_ctrl_c_ends_the_child() -> None:
    def interrupt(line: str) -> None:
        if line.startswith("compiling"):
            os.kill(os.getpid(), signal.SIGINT)

    on_line(interrupt, "INFO")
    with pytest.raises(KeyboardInterrupt):
        build_library(text_model("tanh(%x)"), TARGET)


@pytest.mark.thorough
def test_only_what_is_new_to_the_cache_is_compiled_in_a_child(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def compile_here(
        model: Model, target: str, folder: Path, host: str, choices: Choices, *, elsewhere: bool
    ) -> set[str]:
        started[-1] = 1
        mod, params = import_model(model)
        build.compile_module(model.name, mod, params, target, folder, host, choices, elsewhere=elsewhere)
        return build.element_types(mod)

    def build_library(model: Model, target: str) -> None:
        started.append(0)
        build.build_library(model, target)

    monkeypatch.setattr(build, "compile_in_child", compile_here)
    words = "%x: Tensor[(1, 8), int32]"
    build_library(text_model("tanh(%x)"), TARGET)
    build_library(text_model("exp(%x)"), TARGET)  # nothing is new
    build_library(text_model("add(%x, %x)", words), TARGET)  # the element type is
    build_library(text_model("multiply(%x, %x)", words), TARGET)
    build_library(text_model("tanh(%x)"), "llvm -mcpu=znver4")  # the target is
    assert started == [1, 0, 1, 0, 1]
    for record in (cache / "targets").iterdir():
        record.write_text("no JSON")
    build_library(text_model("sigmoid(%x)"), TARGET)
    assert started[-1] == 1


def build_all(targets: list[str]) -> list[Library]:
    return RelayModel.build(text_model("tanh(%x)"), targets, "", {}, tuned=False, processor="")


@pytest.mark.thorough
def test_a_large_model_is_compiled_for_several_targets_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both children live when the second one begins to compile; the libraries are those of one after the other."""
    monkeypatch.setattr(compiled, "WORTH_A_CHILD", 0)
    before, alive = children(), []
    targets = [TARGET, "llvm -mcpu=znver4"]

    def watch(line: str) -> None:
        if line.startswith("compiling"):
            alive.append(len(children() - before))

    on_line(watch, "INFO")
    several = build_all(targets)
    assert max(alive) == 2
    assert [library.target for library in several] == targets
    again = [build_library(text_model("tanh(%x)"), target) for target in targets]
    assert [library.folder for library in several] == [library.folder for library in again]


@pytest.mark.thorough
def test_where_one_target_fails_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "WORTH_A_CHILD", 0)
    with pytest.raises(ModelError, match="TVM cannot compile it for llvm -no-such=1"):
        build_all(["llvm -no-such=1", TARGET])
