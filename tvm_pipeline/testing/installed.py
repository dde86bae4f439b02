"""Backends as if packages had installed them, without a package: for tests and examples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

from tvm_pipeline.backends import registry
from tvm_pipeline.backends.contract import Backend


@dataclass(frozen=True, slots=True)
class _Installed:
    """What `backends/registry.py` reads of an entry point."""

    backend: Backend
    package: str

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def value(self) -> str:
        return f"{self.package}:backend"

    @property
    def dist(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.package)

    def load(self) -> Backend:
        return self.backend


@contextmanager
def installed(*backends: Backend, own: str = "") -> Iterator[None]:
    """Make these the only installed backends for as long as the block lasts.

    Args:
        own: the name of the backend that counts as one that comes with tvm-pipeline.

    Examples:
        >>> from tvm_pipeline import Device, detect_platform
        >>> from tvm_pipeline.testing import FakeBackend, installed
        >>> with installed(FakeBackend([Device("d0", "fake")])):
        ...     [device.name for device in detect_platform().devices]
        ['d0']
    """

    packages = {backend.name: f"{backend.name}-backend" for backend in backends} | {own: registry.OWN_PACKAGE}
    found = [_Installed(backend, packages[backend.name]) for backend in backends]

    def points(group: str) -> list[_Installed]:
        return found if group == registry.GROUP else []

    with patch.object(registry, "entry_points", points):
        yield
