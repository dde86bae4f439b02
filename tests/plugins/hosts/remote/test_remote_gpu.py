"""The GPU of a board: compiled for here, compared there. On loopback it is PoCL, OpenCL on cores of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.log_lines import log_lines
from tests.support.parts import needs

needs("tvm")
needs("onnx")

from tests.plugins.hosts.remote.conftest import serving_board
from tests.support.onnx_models import write_pooling_net
from tvm_pipeline.backends.registry import find_backend, settle_platform
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.errors import PlatformError
from tvm_pipeline.planning import plan as planned
from tvm_pipeline.workflow.steps import compile_source
from tvm_pipeline_hosts.remote import serving
from tvm_pipeline_hosts.remote.board import Board
from tvm_pipeline_hosts.remote.remote_machine import RemoteMachine
from tvm_pipeline_hosts.remote.serving import BoardServer
from tvm_pipeline_tvm.gpu.detection import survey

BOTH = """
name = "board"
[[device]]
name = "cpu"
backend = "host"
cores = [0]
[[device]]
name = "gpu"
backend = "gpu"
target = "{}"
"""
# A session that computes an operator wrongly on the GPU, as one whose driver does.
WRONG = """
from tvm_pipeline_tvm import agreement
compute = agreement._BoundDevice.compute
def wrong(self, operators, tensors):
    made = compute(self, operators, tensors)
    if self.has_own_memory and len(operators) == 1 and "pool" in operators[0]:
        for _, array in made.values():
            array += 1
    return made
agreement._BoundDevice.compute = wrong
"""


@pytest.fixture(scope="module")
def gpu() -> str:
    """The target of the software GPU."""
    needs("PoCL")
    found = [gpu for gpu in survey().gpus if gpu.kind == "opencl" and gpu.is_software]
    return str(found[0].address)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pooling_net(tmp_path_factory.mktemp("model") / "net.onnx")


@pytest.fixture
def both(gpu: str, tmp_path: Path) -> Path:
    """A platform file of a core and the GPU."""
    file = tmp_path / "board.toml"
    file.write_text(BOTH.format(gpu))
    return file


@pytest.fixture
def server(tmp_path: Path) -> Iterator[BoardServer]:
    with serving_board(tmp_path / "parcels", serving.SESSION) as server:
        yield server


@pytest.mark.thorough
def test_what_a_gpu_computes_wrongly_stays_on_other_devices(net, both, server, monkeypatch, tmp_path):
    """The board finds it when a model was compiled for it, and its profile has no times of it."""
    (tmp_path / "wrong.py").write_text(f"from tvm_pipeline_hosts.remote.session import serve\n{WRONG}")
    monkeypatch.setattr(serving, "SESSION", f"{tmp_path / 'wrong.py'}:serve")
    warned = log_lines("WARNING")
    with Board.connect(str(server.address)) as board:
        machine = RemoteMachine(board)
        made = compile_source(net, platform=both, machine=machine)
        gpu = made.platform.device("gpu")
        left = [o.name for o in made.compiled.graph.operators if o.name not in made.compiled.computes(gpu)]
        assert len(left) == 1
        assert any(f"gpu of board {board.name}: 1 of " in line and left[0] in line for line in warned)
        profile = machine.profile(made.backend, made.compiled, made.platform, 2, False)
    assert profile.devices["gpu"].receive is not None
    assert [name for name, seconds in profile.devices["gpu"].seconds.items() if seconds is None] == left
    plan = planned(Problem(made.compiled.graph, made.platform, replace(profile, segments=()), stages=2)).plan
    assert plan.devices == ("gpu", "cpu")


@pytest.mark.thorough
def test_a_gpu_alone_says_what_is_missing(gpu, net, server, tmp_path):
    """No cores, no processor for the code that launches its kernels."""
    file = tmp_path / "gpu.toml"
    file.write_text(f'name = "board"\n[[device]]\nname = "gpu"\nbackend = "gpu"\ntarget = "{gpu}"\n')
    with Board.connect(str(server.address)) as board:
        machine = RemoteMachine(board)
        with pytest.raises(PlatformError, match="device gpu: kernels of a GPU are launched by code for CPU cores"):
            compile_source(net, platform=file, machine=machine)


def test_a_gpu_of_another_machine_needs_none_here():
    """Its target is enough; one that TVM does not know is an error here, too."""
    cpu = Device("cpu", "host", (0,), "llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a57")
    jetson = Platform("jetson", (cpu, Device("gpu", "gpu", target="opencl:3 -device=mali")))
    backend, settled = settle_platform(jetson, elsewhere=True)
    assert backend is find_backend("gpu")
    assert settled == jetson
    unknown = Platform("jetson", (cpu, Device("gpu", "gpu", target="opencl -colour=red")))
    with pytest.raises(PlatformError, match="device gpu: TVM does not know the target"):
        settle_platform(unknown, elsewhere=True)
