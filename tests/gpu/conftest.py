"""The software CUDA device, built once for all processes of a run of the tests."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support import software_cuda as device
from tests.support.networks import as_model, relay_module
from tests.support.parts import needs
from tests.support.software_cuda import SoftwareCuda
from tvm_pipeline.core.platform import Device
from tvm_pipeline_tvm.devices.releasing import wait_until_released
from tvm_pipeline_tvm.gpu.detection import survey
from tvm_pipeline_tvm.gpu.gpu import bind
from tvm_pipeline_tvm.host.detection import host_target
from tvm_pipeline_tvm.relay.compiled import RelayModel

import tvm  # isort: skip


@pytest.fixture(scope="session")
def software_cuda_folder(folder_of_the_run: Path) -> Path:
    """Return the folder of the libraries, for processes of their own; skips the test where there is no g++."""
    needs("g++")
    return device.built_once(folder_of_the_run / "software_cuda")


@pytest.fixture(scope="session")
def software_cuda(software_cuda_folder: Path) -> SoftwareCuda:
    """Provide the device as this process's CUDA, until it ends."""
    return _loaded(software_cuda_folder)


@cache
def _loaded(folder: Path) -> SoftwareCuda:  # once in a process, also where another conftest.py imports the fixture
    return device.load(folder)


@pytest.fixture
def nothing_to_free() -> None:
    """Wait until the device's memory that objects of earlier tests held is free."""
    gc.collect()
    assert wait_until_released(tvm.device("cuda", 0))


@pytest.fixture(autouse=True)
def _faults_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let no test meet the faults of another one."""
    yield
    if "software_cuda" in request.fixturenames:
        request.getfixturevalue("software_cuda").reset()


@pytest.fixture(autouse=True)
def _cuda_is_software(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let what is built and what is found be the software device, in child processes too."""
    if "software_cuda" not in request.fixturenames:
        yield
        return
    folder: Path = request.getfixturevalue("software_cuda_folder")
    for name, value in {**device.environment(folder), "CUDA_HOME": str(folder)}.items():
        monkeypatch.setenv(name, value)
    survey.cache_clear()
    yield
    survey.cache_clear()


@pytest.fixture(scope="session")
def cpu() -> Device:
    return Device("cpu0", "host", (0,), host_target())


@pytest.fixture
def gpu(software_cuda: SoftwareCuda) -> Device:
    return Device("gpu", "gpu", (), "cuda -arch=sm_72 -max_num_threads=256", stand_in="software CUDA")


@pytest.fixture(scope="session")
def compiled() -> Callable[..., RelayModel]:
    @cache
    def compile_(name: str, host: str, *targets: str) -> RelayModel:
        model = as_model(name, *relay_module(name))
        return RelayModel.compile(model, targets, bind, host=host)

    return compile_


@pytest.fixture
def mixed(compiled: Callable[..., RelayModel], cpu: Device, gpu: Device) -> Callable[[str], RelayModel]:
    """`mixed(name)`: one of the small networks, compiled for the CPU and the GPU when it is first asked for."""
    return lambda name: compiled(name, cpu.target, cpu.target, gpu.target)


@pytest.fixture
def model(mixed: Callable[[str], RelayModel]) -> RelayModel:
    """Provide a network with branches, whose tensors skip operators."""
    return mixed("branching")
