"""Backends as if packages had installed them, and no others: entry points without packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from tvm_pipeline.backends import registry
from tvm_pipeline.backends.contract import Backend

# What the entry points name.
backends = SimpleNamespace()


def install(monkeypatch: pytest.MonkeyPatch, *installed: Backend, own: str = "") -> None:
    """Make these the installed backends, in this order; `own` names the one that comes with tvm-pipeline."""
    points = []
    for backend in installed:
        setattr(backends, backend.name, backend)
        point = EntryPoint(backend.name, f"{__name__}:backends.{backend.name}", registry.GROUP)
        package = "tvm-pipeline" if backend.name == own else f"{backend.name}-backend"
        points.append(point._for(SimpleNamespace(name=package)))
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
