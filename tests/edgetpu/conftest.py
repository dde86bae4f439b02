"""Edge TPUs that are plugged in and a compiler that is installed, as far as the fakes go."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.edgetpu.fakes import preload_libedgetpu, write_compiler


@pytest.fixture
def nothing_installed(tmp_path, monkeypatch) -> None:
    """Provide no device, no compiler and an empty cache, whatever this machine has."""
    monkeypatch.delenv("FAKE_EDGETPUS", raising=False)
    monkeypatch.setenv("TVM_PIPELINE_CACHE", str(tmp_path / "cache"))
    without = [folder for folder in os.get_exec_path() if not (Path(folder) / "edgetpu_compiler").exists()]
    monkeypatch.setenv("PATH", os.pathsep.join(without))


@pytest.fixture
def plug(monkeypatch) -> Callable[[str], None]:
    """Set which devices the library finds from now on."""
    preload_libedgetpu()
    return lambda listed: monkeypatch.setenv("FAKE_EDGETPUS", listed)


@pytest.fixture
def install_compiler(tmp_path, monkeypatch) -> Callable[[], Callable[[], int]]:
    """Put the fake edgetpu_compiler on the PATH; return a function that returns how often it was called."""

    def install() -> Callable[[], int]:
        (tmp_path / "bin").mkdir()
        write_compiler(tmp_path / "bin")
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
        monkeypatch.setenv("FAKE_EDGETPU_CALLS", str(tmp_path / "calls"))
        return lambda: len((tmp_path / "calls").read_text().splitlines()) if (tmp_path / "calls").exists() else 0

    return install
