"""The records of a run for others to read: its events, and its figures at the end.

Read next: result_lines.py (a line for each frame), listener.py (the object that hears of a run).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tvm_pipeline import Plan, Platform
from tvm_pipeline.core.frame_energy import FrameEnergy, energy_json
from tvm_pipeline.cost.under_load import FrameDeadline
from tvm_pipeline.errors import OptionError
from tvm_pipeline.runtime import Event, RunStatistics
from tvm_pipeline.workflow.steps import plan_json
from tvm_pipeline_video.service.video_extra import LiveStatistics

_log = logging.getLogger(__name__)

WriteEvent = Callable[[Event, str], None]  # an event, and the label of its model, empty where there is one model


@contextmanager
def event_log(path: Path | None) -> Iterator[WriteEvent]:
    """Open a file of JSON lines that each event is appended to; where that fails, warn and go on.

    Raises OptionError where it cannot be opened.
    """
    if path is None:
        yield lambda _event, _model: None
        return
    try:
        file = path.open("ab", buffering=0)  # what could not be written is not tried again when it is closed
    except OSError as error:
        raise OptionError(
            f"`events` {path}: {error.strerror}; choose another place", option="events", value=path
        ) from error
    with file:

        def write(event: Event, model: str) -> None:
            line = asdict(event) | ({"model": model} if model else {})
            try:
                file.write(msgspec.json.encode(line) + b"\n")
            except (OSError, ValueError) as error:
                _log.warning(f"`events` {path}: {error}; it lacks: {event.reason}")

        yield write


def statistics_json(statistics: RunStatistics, energy: FrameEnergy | None) -> dict[str, Any]:
    """Return a run's statistics under the names of a prediction; the latency includes the queues of a full pipeline."""
    return {"latency_s": statistics.latency_p50_s, **energy_json(energy), **asdict(statistics)}


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The figures of one model of a run, while it runs or at its end.

    Attributes:
        label: of the model; empty where the run has one model.
        source: the names of its sources.
        frame: the index of the last frame that came out.
        plan: that which runs now, with its prediction.
        statistics: what was measured in steady state.
        events: all changes of plan and failures, without the start.
        sources: what became of the frames of each source that is read ahead.
        damaged: pieces of its sources that could not be decoded.
        energy: the joules of a frame, of all models of the run where a sensor measured them; None where nothing tells.
        chosen_by: what chose the plan that the run began with, `prediction` or `measurement` with the rate that was
            measured then; empty if the plan was given.
        found: how often each label was found, of the first hundred labels, in `found_in` frames.
        deadline: of the frames; None where none was asked for.
        late_share: the share of the frames that took longer.
        paced: whether frames come at a rate, that of their source or `rate`, and not when the pipeline takes them.
    """

    label: str
    source: str
    frame: int
    plan: Plan
    platform: Platform
    statistics: RunStatistics
    events: tuple[Event, ...]
    sources: Mapping[str, LiveStatistics]
    damaged: int
    energy: FrameEnergy | None = None
    chosen_by: str = ""
    found: Mapping[str, int] = field(default_factory=dict)
    found_in: int = 0
    deadline: FrameDeadline | None = None
    late_share: float | None = None
    paced: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            **({"model": self.label} if self.label else {}),
            **plan_json(self.plan, self.platform),
            "source": self.source,
            "measured": statistics_json(self.statistics, self.energy),
            "events": [asdict(event) for event in self.events],
            "sources": {name: asdict(statistics) for name, statistics in self.sources.items()},
            **({"deadline": asdict(self.deadline), "late_share": self.late_share} if self.deadline else {}),
            "found": {"frames": self.found_in, "labels": dict(self.found)},
        }
