"""The joules of a frame: of plans that run in turns, and of a run that lasts for weeks.

A meter samples one sensor, which does not tell whose joules they are: they are those of all that it covers, divided by
the frames that came out. Without a meter, the platform's watts say what they can (`cost/busy_energy.py`).

Read before: `power/meter.py`. Next: `comparison.py`, whose turns are measured here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from tvm_pipeline.core.frame_energy import FrameEnergy
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.busy_energy import energy_by_watts
from tvm_pipeline.cost.device_costs import known_idle_w
from tvm_pipeline.errors import PowerError
from tvm_pipeline.power import Energy, Meter
from tvm_pipeline.runtime.comparison import Run, Turn

LATE_S = 5.0  # that a reading may come after its moment
LOST_S = 60.0  # after which a stretch of a run that the sensor told nothing of is left out

_log = logging.getLogger(__name__)


def metered(run: Run, problem: Problem, meter: Meter | None) -> Run:
    """Return the function that runs a plan for a turn and tells the joules of its frames, too.

    Args:
        run: runs a plan for a turn.
        problem: has the platform, and the idle machine's power.
        meter: samples a sensor while the function is in use; None where there is none, so that the platform's watts are
            taken.
    """
    said: set[str] = set()

    def measured(plan: Plan, seconds: float) -> Turn:
        turn = run(plan, seconds)
        if meter is None:
            return replace(turn, energy=energy_by_watts(problem, plan, turn.statistics))
        try:
            drawn = meter.energy(*turn.full_s, LATE_S + meter.period_s) if turn.full_frames else None
            why = f"{meter.sensor.name} told nothing of a turn of {turn.full_s[1] - turn.full_s[0]:.2g} s"
        except PowerError as error:
            drawn, why = None, str(error)
        if drawn is None and why not in said:
            said.add(why)
            _log.warning(f"{why}; the joules of its frames are not measured")
        return replace(
            turn,
            energy=drawn and frame_energy(meter, drawn, turn.full_frames, known_idle_w(problem, meter.sensor.covers)),
        )

    return measured


def frame_energy(meter: Meter, drawn: Energy, frames: int, idle_w: float | None) -> FrameEnergy:
    """Return the joules of each of so many frames, during which so much was drawn."""
    active_j = None if idle_w is None else (drawn.energy_j - idle_w * drawn.seconds) / frames
    sensor = meter.sensor
    return FrameEnergy(drawn.energy_j / frames, active_j, sensor.name, sensor.covers, drawn.uncertainty_j / frames)


class RunEnergy:
    """The joules of the frames of running pipelines, added up in pieces: a meter forgets its oldest readings.

    A piece lies between two frames that came out. Call `update` at least every few minutes, from one thread.

    Args:
        meter: samples the sensor while the pipelines run.
        came_out: returns how many frames have come out, and when the last one did (`time.perf_counter`).
        idle_w: the power of the idle machine; None where it is not known.

    Attributes:
        energy_j: joules that were drawn since the first frame, up to a few moments ago.
        frame: the joules of a frame; None while nothing is known of them.
    """

    def __init__(self, meter: Meter, came_out: Callable[[], tuple[int, float]], idle_w: float | None) -> None:
        self.energy_j = 0.0
        self.frame: FrameEnergy | None = None
        self._meter, self._came_out, self._idle_w = meter, came_out, idle_w
        self._failed = False
        self._from = 0  # the frames that had come out before the first piece
        self._begin: tuple[int, float] | None = None  # of the present piece, and its end where it has one
        self._end: tuple[int, float] | None = None
        self._frames, self._seconds = 0, 0.0

    def update(self, patience_s: float = 0.0) -> None:
        """Add the present piece, if the sensor has come to its end, and begin another one.

        Args:
            patience_s: the longest wait for the sensor.
        """
        now = self._came_out()
        if now[0] <= self._from or self._failed:
            return
        if self._begin is None:
            if self._meter.began_s is None or self._meter.began_s > now[1]:
                return
            self._begin = now
        if self._end is None and now[0] > self._begin[0]:
            self._end = now
        if self._end is None:
            return
        try:
            drawn = self._meter.energy(self._begin[1], self._end[1], patience_s)
        except PowerError as error:
            self._failed = True
            _log.warning(f"{error}; joules are not measured from here on")
            return
        if drawn is not None:
            self._add(drawn, self._end[0] - self._begin[0])
            self._begin, self._end = self._end, None
        elif now[1] - self._end[1] > LOST_S:
            self._begin, self._end = now, None

    def begin_again(self) -> None:
        """Leave out what was drawn since the present piece began, for something else worked than the pipelines."""
        self._begin, self._end, self._from = None, None, self._came_out()[0]

    def finish(self) -> None:
        """Add what is left up to the last frame, after the sensor has come so far."""
        patience_s = min(2 * self._meter.period_s + 0.5, LATE_S)
        self.update(patience_s)
        self.update(patience_s)

    def _add(self, drawn: Energy, frames: int) -> None:
        self.energy_j += drawn.energy_j
        self._frames += frames
        self._seconds += drawn.seconds
        # What a piece gets too much at an edge, its neighbour gets too little: the edges of the run alone count.
        whole = Energy(self.energy_j, drawn.uncertainty_j, self._seconds, 0)
        self.frame = frame_energy(self._meter, whole, self._frames, self._idle_w)
