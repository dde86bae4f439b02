"""What a live pipeline says of its decisions: data, so that a log of them can be read back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was decided or happened: when, what, why, and the plan that runs since then.

    Attributes:
        time_s: seconds since the start, on a clock that never jumps.
        kind: `start`, `switch`, `failure`, `return` (of a device), `refusal` (of a plan), `objective`, `limit`, which
            the plan begins to miss or keeps again, or `restart` (of a process, by its supervisor).
        version: of the plan, counted from 0.
        frame: the first frame of that plan; -1 where the plan did not change.
    """

    time_s: float
    kind: str
    reason: str
    version: int
    frame: int = -1
    plan: str = ""
