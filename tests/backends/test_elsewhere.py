"""Models for a processor that is not this one are compiled, cut on paper and saved, and nothing of them is loaded."""

from __future__ import annotations

import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.log_lines import log_lines
from tests.support.parts import needs

needs("tvm")
needs("onnx")

from tests.support.installed import install
from tests.support.onnx_models import write_picture_net
from tvm_pipeline import Bundle, Plan, Prediction, Stage, settle_platform, write_bundle
from tvm_pipeline.backends.registry import find_backend
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.errors import PlatformError
from tvm_pipeline.frontends import load
from tvm_pipeline.testing import FakeBackend
from tvm_pipeline_tvm.host import backend
from tvm_pipeline_tvm.host.detection import host_target

AARCH64 = "llvm -keys=cpu -mtriple=aarch64-linux-gnu -mcpu=cortex-a72"
AMX = "llvm -mcpu=sapphirerapids"
FAR = (4000, 4001)  # cores that no machine here has


def _convolutions(compiled):
    return sum(operator.kind.count("conv2d") for operator in compiled.graph.operators)


@pytest.fixture
def net(tmp_path):
    return load(write_picture_net(tmp_path / "net.onnx"))


@pytest.mark.thorough
@pytest.mark.needs("linker for AArch64")
def test_code_for_an_arm_board_beside_code_for_this_processor(net, own_cache, tmp_path):
    board = Platform("board", (Device("arm", "host", FAR, AARCH64), Device("x86", "host", FAR[:1], host_target())))
    lead, settled = settle_platform(board, elsewhere=True)
    assert settled == board
    compiled = lead.compile_elsewhere(net, board.devices)
    arm, x86 = compiled.libraries[AARCH64], compiled.libraries[host_target()]
    assert arm.module is None
    assert x86.module is not None
    header = (arm.folder / "kernels.so").read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[18:20], "little") == 183
    own = backend.compile(net, [Device("cpu0", "host", (), host_target())])
    assert (compiled.graph.inputs, _convolutions(compiled)) == (own.graph.inputs, _convolutions(own))
    with pytest.raises(PlatformError, match=r"device arm cannot run here: it is code for aarch64, and this machine"):
        compiled.stage(compiled.graph.operator_names, board.devices[0])
    with pytest.raises(PlatformError, match="cannot run here"):
        compiled.time_operators(board.devices[0], 2)
    assert compiled.activation_bytes(compiled.graph.operator_names, board.devices[0])[0] > 0
    compiled.stage(compiled.graph.operator_names[:1], board.devices[1]).close()

    said = log_lines("INFO")
    again = lead.compile_elsewhere(net, board.devices[:1])
    assert again.libraries[AARCH64].folder == arm.folder
    assert not said  # it was in the cache
    plan = Plan(
        compiled.graph.name, "x", "throughput", (Stage(("arm",), tuple(compiled.graph.operator_names)),), Prediction()
    )
    bundle = Bundle(compiled.graph, board, unmeasured(compiled.graph), plan, compiled)
    write_bundle(tmp_path / "net.tar", bundle)
    with tarfile.open(tmp_path / "net.tar") as tar:
        assert tar.extractfile("compiled/0/kernels.so").read()[:20] == header


@pytest.mark.thorough
@pytest.mark.needs("Relax")
def test_instructions_that_this_processor_lacks_are_not_run(net):
    flags = Path("/proc/cpuinfo").read_text()
    if "x86" not in os.uname().machine or "amx_tile" in flags:
        pytest.skip("needs an x86-64 processor without AMX")
    device = Device("cpu0", "host", FAR, AMX)
    with pytest.raises(PlatformError):
        backend.settle(device)
    compiled = backend.compile_elsewhere(net, [backend.settle_elsewhere(device)])
    with pytest.raises(PlatformError, match=r"its code may use amx-.*, which this processor has not"):
        compiled.stage(compiled.graph.operator_names, device)


def test_targets_that_no_compiler_here_knows():
    with pytest.raises(PlatformError, match="TVM of this machine does not know the target 'llvm -mcpu=next'"):
        settle_platform(Platform("board", (Device("cpu0", "host", (0,), "llvm -mcpu=next"),)), elsewhere=True)


def test_backends_that_compile_where_the_device_is(monkeypatch):
    device = Device("npu", "fake")
    install(monkeypatch, FakeBackend([device]))
    with pytest.raises(PlatformError, match="device npu: the backend fake compiles on the machine that has the device"):
        settle_platform(Platform("board", (device,)), elsewhere=True)


def test_engines_serve_boards_and_edge_tpus_are_said_to_need_their_machine():
    needs("onnxruntime")
    engine, tpus = find_backend("onnxruntime"), find_backend("edgetpu")
    device = Device("cpu0", "onnxruntime", FAR, "cpu")
    assert engine.settle_elsewhere(device) == device
    kernels = Device("cpu0", "edgetpu", FAR, "tflite")
    assert tpus.settle_elsewhere(kernels) == kernels
    with pytest.raises(PlatformError, match=r"is an Edge TPU \(usb:0\) of another machine"):
        tpus.settle_elsewhere(replace(kernels, target="usb:0"))
