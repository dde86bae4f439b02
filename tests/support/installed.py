"""Backends as if packages had installed them, for as long as a test lasts."""

from __future__ import annotations

import pytest

from tvm_pipeline.backends import registry
from tvm_pipeline.backends.contract import Backend
from tvm_pipeline.testing import installed


def install(monkeypatch: pytest.MonkeyPatch, *backends: Backend, own: str = "") -> None:
    """Make these the installed backends, in this order; `own` is the name of that which comes with tvm-pipeline."""
    with installed(*backends, own=own):
        found = registry.entry_points
    monkeypatch.setattr(registry, "entry_points", found)
