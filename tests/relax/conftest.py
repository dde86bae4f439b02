"""The software CUDA device as TVM 0.27 sees it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support import software_cuda as device
from tests.support.parts import needs
from tests.support.software_cuda import SoftwareCuda


@pytest.fixture(scope="session")
def software_cuda_folder(folder_of_the_run: Path) -> Path:
    """Return the folder of the libraries, built once for all processes; skips the test where there is no g++."""
    needs("g++")
    folder = folder_of_the_run / "software_cuda"
    folder.mkdir(exist_ok=True)
    built = folder / "built"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            device.build(folder, device.CUDA_13)
            built.touch()
    return folder


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
