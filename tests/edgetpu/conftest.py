"""Edge TPUs that are plugged in and a compiler that is installed, as far as the fakes go."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.edgetpu.fakes import libedgetpu, preload_libedgetpu, usb_device, write_compiler
from tvm_pipeline_edgetpu import delegate


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
    monkeypatch.setenv(delegate.PATHS, "{}")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libedgetpu().parent))  # of processes that are started
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


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Callable[..., Callable[[], list[str]]]:
    """Plug sticks in, cold ones with their boot loader; return the names of those that are opened from then on."""
    preload_libedgetpu()
    usb = tmp_path / "usb"
    monkeypatch.setattr(delegate, "USB", usb)
    monkeypatch.setenv(delegate.PATHS, "{}")
    monkeypatch.setenv("FAKE_EDGETPU_USB", str(usb))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libedgetpu().parent))  # of processes that are started

    def plug(**cold: bool) -> Callable[[], list[str]]:
        shutil.rmtree(usb, ignore_errors=True)
        for number, (name, is_cold) in enumerate(cold.items()):
            usb_device(usb, name, *(("1a6e", "089a") if is_cold else ("18d1", "9302")), devnum=str(number + 3))
            os.mkfifo(usb / name / "fault")
        return lambda: (usb / "opened").read_text().split()

    return plug
