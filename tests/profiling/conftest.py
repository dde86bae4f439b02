from __future__ import annotations

from tests.profiling.machine import clock

__all__ = ["clock"]
