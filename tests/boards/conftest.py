from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.power_modes import FakeNvpmodel, board


@pytest.fixture
def nvpmodel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvpmodel:
    """A program `nvpmodel` on the path, and an empty folder of records."""
    fake = FakeNvpmodel(tmp_path / "nvpmodel")
    monkeypatch.setenv("PATH", f"{fake.folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TVM_PIPELINE_STATE", str(fake.state))
    return fake


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return board(tmp_path / "root")
