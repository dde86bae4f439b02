"""The joules of a frame of a run, and who says so: a sensor, or the watts that a platform states.

Read next: `runtime/metering.py`, which measures them; `cost/busy_energy.py`, which computes them without a sensor.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

BY_WATTS = "the platform's watts"


@dataclass(frozen=True, slots=True)
class FrameEnergy:
    """The joules of a frame.

    Attributes:
        energy_j: with those of the idle machine during the frame's period. By the platform's watts, the idle machine
            counts nothing where its power is not known.
        active_j: above those of the idle machine; None where a sensor counted both and the idle power is not known.
        sensor: the name of the sensor that measured them; empty where they are computed from the platform's watts and
            the measured seconds.
        covers: what draws the joules that the sensor counts.
        uncertainty_j: how far, at most, `energy_j` may be off because frames begin and end between two readings.

    Examples:
        >>> FrameEnergy(0.25, 0.2, "VDD_IN", "the board").by
        'VDD_IN (the board)'
        >>> FrameEnergy(0.25, 0.2).by
        "the platform's watts"
    """

    energy_j: float
    active_j: float | None
    sensor: str = ""
    covers: str = ""
    uncertainty_j: float = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether a sensor measured them."""
        return bool(self.sensor)

    @property
    def by(self) -> str:
        """Who says so, in words."""
        return f"{self.sensor} ({self.covers})" if self.sensor else BY_WATTS


def energy_json(energy: FrameEnergy | None) -> dict[str, Any]:
    """Return for JSON: `energy_j`, which is None unless a sensor measured it, and `energy` with all that is known.

    >>> energy_json(FrameEnergy(0.25, 0.2))["energy_j"], energy_json(FrameEnergy(0.25, 0.2))["energy"]["by"]
    (None, "the platform's watts")
    """
    if energy is None:
        return {"energy_j": None, "energy": None}
    return {
        "energy_j": energy.energy_j if energy.is_measured else None,
        "energy": {**asdict(energy), "by": energy.by, "is_measured": energy.is_measured},
    }
