from __future__ import annotations

from tests.profiling.machine import clock, kernel

__all__ = ["clock", "kernel"]
