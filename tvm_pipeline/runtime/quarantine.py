"""Devices that failed, and how long each is left out of the plans.

A device that fails is left out for a cool-down. If it fails again before it has served for as long as it was out, its
cool-down doubles, so that a broken device interrupts ever less often. Read next: live_pipeline.py, which plans without
the devices that are out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Quarantine:
    """The devices that are left out, by name.

    Args:
        cool_down_s: how long a device is left out after its first failure.
        clock: tells the time in seconds; monotonic.
    """

    def __init__(self, cool_down_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._cool_down_s, self._clock = cool_down_s, clock
        self._until_s: dict[str, tuple[float, float]] = {}  # device -> until when it is out, and for how long
        self._looked_s = -math.inf

    def leave_out(self, device: str) -> None:
        """Leave a device out from now on, because it failed."""
        now_s = self._clock()
        until_s, before_s = self._until_s.get(device, (-math.inf, 0.0))
        out_s = 2 * before_s if now_s - until_s < before_s else self._cool_down_s
        self._until_s[device] = now_s + out_s, out_s

    def out(self) -> set[str]:
        """Return the devices that are left out now."""
        now_s = self._clock()
        return {device for device, (until_s, _) in list(self._until_s.items()) if until_s > now_s}

    def returned(self) -> list[str]:
        """Return the devices whose cool-down ended since the last call."""
        before_s, self._looked_s = self._looked_s, self._clock()
        return [device for device, (until_s, _) in list(self._until_s.items()) if before_s < until_s <= self._looked_s]
