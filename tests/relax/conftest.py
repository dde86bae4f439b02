"""The software CUDA device as TVM 0.27 sees it, and PoCL, which is OpenCL on CPU cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from tests.support import software_cuda as device
from tests.support.parts import needs
from tests.support.software_cuda import SoftwareCuda
from tvm_pipeline.core.platform import Device
from tvm_pipeline_tvm.gpu.detection import survey
from tvm_pipeline_tvm.gpu.targets import target_for


@pytest.fixture(scope="session")
def software_cuda_folder(folder_of_the_run: Path) -> Path:
    """Return the folder of the libraries, built once for all processes; skips the test where there is no g++."""
    needs("g++")
    return device.built_once(folder_of_the_run / "software_cuda", device.CUDA_13)


@pytest.fixture(scope="session")
def _software_cuda(software_cuda_folder: Path) -> SoftwareCuda:
    """Make the device this process's CUDA, until it ends: a device of Jetson Orin's architecture."""
    os.environ["SOFTWARE_CUDA_CAPABILITY"] = "87"
    return _loaded(software_cuda_folder)


@cache
def _loaded(folder: Path) -> SoftwareCuda:  # once in a process, also where another conftest.py imports the fixture
    return device.load(folder, device.CUDA_13)


@pytest.fixture
def software_cuda(_software_cuda: SoftwareCuda) -> Iterator[SoftwareCuda]:
    """Provide the device; no test meets the faults of another one."""
    yield _software_cuda
    _software_cuda.reset()


@pytest.fixture(scope="session")
def software_cuda_device(_software_cuda: SoftwareCuda) -> Device:
    return Device("gpu", "gpu", (), "cuda -arch=sm_87", stand_in="software CUDA")


@pytest.fixture(scope="session")
def pocl(folder_of_the_run: Path) -> Device:
    """Return PoCL's device; it compiles into a cache of the run, since another process may clear that of its user."""
    needs("PoCL")
    needs("pyopencl")
    import_module("pyopencl")  # which sets PYOPENCL_HOME, and so must be imported before a test begins
    os.environ["POCL_CACHE_DIR"] = str(folder_of_the_run / "pocl")
    found = next((gpu for gpu in survey().gpus if gpu.product == "PoCL"), None)
    if found is None:
        pytest.skip("PoCL is not listed beside a GPU of OpenCL: set OCL_ICD_VENDORS to the folder of its .icd file")
    return Device("gpu", "gpu", (), target_for(found), stand_in="PoCL")
