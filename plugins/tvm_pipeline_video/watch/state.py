"""The state of a running pipeline as JSON: `run --watch` serves it at /state, and `top` and the page show it.

The side that writes it and the side that reads it share this one struct. Read next: snapshot.py, which fills it;
`commands/top.py`, which draws it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tvm_pipeline import Prediction, Stage
from tvm_pipeline.core.frame_energy import FrameEnergy
from tvm_pipeline.runtime import RunStatistics


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A running pipeline at one moment; fields that are not described here are those of `watch.Snapshot`.

    Attributes:
        now_s: seconds since the start, on the clock of the events' `time_s`.
        plan: the text of the plan, which parses back.
        stages, predicted: of that plan.
        statistics: the figures measured in steady state.
        healthy, why: whether frames come out, and the reason where they do not.
        picture: whether a picture of the last frame is served.
        paced: whether frames come at a rate, that of their sources or `rate`.
    """

    now_s: float
    graph: str
    plan: str
    scheduler: str
    predicted: Prediction
    stages: Sequence[Stage]
    statistics: RunStatistics
    plan_version: int
    objective: str
    frames: int
    since_last_frame_s: float
    queue_depths: Sequence[int]
    in_flight: int
    sources: Mapping[str, Mapping[str, Any]]
    factors: Mapping[str, float]
    stand_ins: Mapping[str, str]
    events: Sequence[Mapping[str, Any]]
    energy_j: float | None
    energy: FrameEnergy | None = None
    healthy: bool
    why: str
    picture: bool
    paced: bool = False
