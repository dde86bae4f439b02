"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], object], limit_s: float = 60.0) -> bool:
    """Wait until something holds; return whether it does."""
    end_s = time.monotonic() + limit_s
    while not holds() and time.monotonic() < end_s:
        time.sleep(0.01)
    return bool(holds())
