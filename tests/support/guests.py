"""Packages that know the hardware, as if they were the only ones installed, for as long as a block lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from tvm_pipeline.core.power_mode import PowerMode
from tvm_pipeline.power import PowerModes, PowerSensor, Scope, Survey, doors


@contextmanager
def guests(
    sensors: Callable[[], Survey] | None = None, power_modes: Callable[[], PowerModes | None] | None = None
) -> Iterator[None]:
    """Make these functions the only entry points for sensors and for power modes; without any, no package has one."""
    found = {doors.SENSORS: sensors, doors.POWER_MODES: power_modes}

    def points(group: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="guest", load=lambda: found[group])] if found[group] else []

    with patch.object(doors, "entry_points", points):
        yield


class Lamp(PowerSensor):
    """A lamp of 10 W."""

    name, covers, period_s = "lamp", "the test", 0.002
    scope: Scope = "board"

    def watts(self) -> float:
        """Return the power of the lamp."""
        return 10.0


class TwoModes(PowerModes):
    """A machine with the modes `fast` and `slow`, in the first of them unless another one is set.

    Attributes:
        now: the name of the mode that is set.
        were_set: the names of the modes that were set, and of those that were put back.
    """

    def __init__(self) -> None:
        self.now = "fast"
        self.were_set: list[str] = []

    def modes(self) -> list[PowerMode]:
        return [PowerMode("fast", 0), PowerMode("slow", 1)]

    def is_set(self, mode: PowerMode) -> bool:
        return mode.name == self.now

    @contextmanager
    def mode_set(self, mode: PowerMode) -> Iterator[None]:
        before = self.now
        self._set(mode.name)
        try:
            yield
        finally:
            self._set(before)

    def described(self) -> list[str]:
        return [f"a board of the test, in mode {self.now}"]

    def unsteady(self) -> str:
        return "the clocks follow the load" if self.now == "slow" else ""

    def environment(self) -> dict[str, str]:
        return {"board": "a board of the test", "power mode": self.now}

    def _set(self, name: str) -> None:
        if name != self.now:
            self.were_set.append(name)
        self.now = name
