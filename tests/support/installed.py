"""Backends, and entries of other groups, as if packages had installed them, for as long as a test lasts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvm_pipeline.backends import registry
from tvm_pipeline.backends.contract import Backend
from tvm_pipeline.testing import installed


def install(monkeypatch: pytest.MonkeyPatch, *backends: Backend, own: str = "") -> None:
    """Make these the installed backends, in this order; `own` is the name of that which comes with tvm-pipeline."""
    with installed(*backends, own=own):
        found = registry.entry_points
    monkeypatch.setattr(registry, "entry_points", found)


def install_entries(folder: Path, group: str, *entries: str, package: str = "fair") -> None:
    """Write a package's entries, such as `fair = "module:NAME"`; they are installed where `folder` is on the path."""
    info = folder / f"{package}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info / "entry_points.txt").write_text("\n".join((f"[{group}]", *(entry.replace('"', "") for entry in entries))))
