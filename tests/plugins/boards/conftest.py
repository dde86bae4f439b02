from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins.boards.fake_nvpmodel import FakeNvpmodel, board


@pytest.fixture
def nvpmodel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvpmodel:
    """A program `nvpmodel` on the path, and an empty folder of records."""
    return FakeNvpmodel.on_the_path(tmp_path / "nvpmodel", monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return board(tmp_path / "root")
