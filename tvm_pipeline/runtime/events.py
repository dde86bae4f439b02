"""The decisions of a live pipeline as data, so that a log of them can be read back.

Read next: live_pipeline.py, which makes them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was decided or happened, and the plan that runs since then.

    Attributes:
        time_s: seconds since the start, on a clock that never jumps.
        kind: `start`; `switch`; `failure`; `return` (of a device); `refusal` (of a plan); `objective`; `limit` (the
            plan begins to miss one, or keeps it again); `throttled` (the machine is slowed down because of heat or
            current) and `unthrottled` (no longer); `restart` (of a process, by its supervisor).
        reason: why, for people.
        version: of the plan, counted from 0.
        frame: the first frame of that plan; -1 if the plan did not change.
        plan: the devices of its stages, as `core.plan.shown_stages` writes them.
    """

    time_s: float
    kind: str
    reason: str
    version: int
    frame: int = -1
    plan: str = ""
