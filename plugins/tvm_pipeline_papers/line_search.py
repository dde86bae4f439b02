"""The strategy `line-search`: Algorithm 2 of Velasco-Montero et al. (IEEE Access 2023).

One pipeline of two stages on two devices, whose order is fixed, runs the first n of the N operators on the first device
and the others on the second; n = 0 and n = N are one device each. The signal is the period of the whole pipeline, and
nothing is known of stages, operators or loads. A search measures the cut n again. It walks forward, one operator at a
time, until a trial is worse than the best one. If nothing was gained, it walks backward in the same way. Then the best
cut runs. A trial that is no slower is taken, so that a plateau is crossed; what is found is a local optimum.

The printed listing has gaps and slips. This is what was decided:

- The best period begins as that of n under the present load (in print it is an argument), and each trial that is taken
  updates it (in print it stays, so that the walk goes on to the last cut that beats the start).
- A measurement is averaged into m, a period for every cut, with weight alpha (0.5 here; the paper has no value) in both
  walks; the first one of a cut counts in full. In print the forward walk adds alpha times the measurement, and the
  backward walk replaces m.
- m outlives a search, as in the listing, but not a change of load: averages with another load's periods end walks too
  early. `keeps_m` keeps them.
- A measurement is the mean period of at least 20 frames and half a second, after the first 4 frames of a cut.
- A search begins with the run, and when the period of the running cut, averaged in the same way, differs by more than
  10 % from its m at three looks in a row; also where another plan was made, or a device comes or goes. So a load that
  ends on a device on which the running cut does not wait is not noticed.
- While the source is slower than the pipeline every cut has the same period, so nothing is measured.
- A cut that a device cannot run or hold ends the walk, as a slower one does.
- Where the running plan is no such pipeline (replicas, three stages, a cut off the graph's order), that of Algorithm 1
  takes its place.

The search is for throughput, whatever the objective is. `replan` (`runtime/adaptation.py`) has a model, and needs no
trials.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Generator, Sequence
from dataclasses import replace

from tvm_pipeline import Plan, Prediction, Problem, Stage
from tvm_pipeline.errors import NoPlanError, PlanError, ProfileError
from tvm_pipeline.planning import SCHEDULERS
from tvm_pipeline.runtime import COLD_FRAMES, WINDOW_S, StageRecord, Strategy, judged_now, unlimited

_log = logging.getLogger("tvm_pipeline.papers")  # the command line prints what is logged below tvm_pipeline

ALPHA = 0.5
LEAST_FRAMES = 20
CHANGE = 0.1
CHANGED_LOOKS = 3

Search = Generator[int, float, int]


def line_search(n: int, last: int) -> Search:
    """Yield each cut to measure, beginning with n, and take its period; return the chosen cut.

    Args:
        n: the cut to begin with.
        last: the cut that has all operators on the first device; the other end is 0.

    >>> search, periods = line_search(2, 4), {1: 9.0, 2: 8.0, 3: 8.5}
    >>> [next(search), search.send(periods[2]), search.send(periods[3])]
    [2, 3, 1]
    """
    best, best_s = n, (yield n)
    for walk in (range(n + 1, last + 1), range(n - 1, -1, -1)):
        for cut in walk:
            period_s = yield cut
            if period_s > best_s:
                break
            best, best_s = cut, period_s
        if best != n:
            break
    return best


class LineSearch(Strategy):
    """Moves the cut of a pipeline of two stages by trial.

    Args:
        alpha: the weight of a new measurement in the moving average of a cut's period.
        keeps_m: whether periods are remembered over changes of the load, as a reader of the listing may take it.

    Attributes:
        m: the averaged period of each cut that was measured, in seconds.
    """

    def __init__(self, alpha: float = ALPHA, *, keeps_m: bool = False) -> None:
        super().__init__()
        self._keeps_m = keeps_m
        self.m: dict[int, float] = {}
        self._alpha = alpha
        self._devices: tuple[str, str] | None = None
        self._cut: int | None = None  # of the running plan; None where it is no pipeline of these devices
        self._objective = ""
        self._search: Search | None = None
        self._wanted = 0  # the cut under trial
        self._proposed: tuple[Stage, ...] | None = None
        self._able: frozenset[str] = frozenset()
        self._has_none = False  # whether Algorithm 1 has no plan for these devices
        self._forget()

    def begin(self, problem: Problem, plan: Plan) -> None:
        super().begin(problem, plan)
        if problem.objective not in (self._objective, "throughput"):
            _log.warning(
                "line-search searches for throughput, and the objective is %s, for which `adapt` replan plans",
                problem.objective,
            )
        self._objective = problem.objective
        proposed, self._proposed = self._proposed, None
        self._skip = COLD_FRAMES
        self._devices = self._devices or _two_devices(problem, plan)
        self._cut = _cut_of(problem, plan, self._devices) if self._devices else None
        if proposed != plan.stages:  # this plan was chosen by something else
            self._forget()

    def look(self, records: Sequence[StageRecord], problem: Problem) -> tuple[Plan, str] | None:
        self.observe(records, problem.platform.devices)
        able = frozenset(device.name for device in problem.platform.devices)
        if able != self._able:
            self._able, self._has_none = able, False
            self._forget()
        if self._cut is None:
            return self._return_to_two_stages(problem)
        record = records[-1]
        if self.starved:
            self._skip = record.frames
        elif self._search is not None or self._due:
            return self._go_on(problem, record)
        else:
            self._rest(record)
        return None

    def _forget(self) -> None:
        """Begin a search at the next look."""
        self._search, self._due = None, True
        self._smoothed_s: float | None = None
        self._changed = 0

    def _rest(self, record: StageRecord) -> None:
        """Compare the period with what is remembered; begin a search where the load has changed."""
        cut = self._cut
        period_s = period(record, self._skip, latest=True)
        if period_s is None or cut is None:
            return
        if self._smoothed_s is None:  # the first measurement since the search
            self._remember(cut, period_s)
            self._smoothed_s = self.m[cut]
        self._smoothed_s += self._alpha * (period_s - self._smoothed_s)
        changed = abs(self._smoothed_s / self.m[cut] - 1) > CHANGE
        self._changed = self._changed + 1 if changed else 0
        if self._changed >= CHANGED_LOOKS:
            self._forget()
            self._skip = record.frames
            if not self._keeps_m:
                self.m.clear()

    def _go_on(self, problem: Problem, record: StageRecord) -> tuple[Plan, str] | None:
        """Take the measurement of the cut under trial, once there is one, and go to the next cut or the chosen one."""
        cut = self._cut
        assert cut is not None
        if self._search is None:
            self._search, self._due = line_search(cut, len(problem.graph)), False
            self._wanted = next(self._search)
        if self._wanted == cut:
            measured_s = period(record, self._skip)
            if measured_s is None:
                return None
            self._remember(cut, measured_s)
            found_s = self.m[cut]
        else:
            found_s = math.inf  # the trial was refused
        while True:
            try:
                self._wanted = self._search.send(found_s)
            except StopIteration as end:
                self._search, chosen = None, int(end.value)
                self._smoothed_s, self._changed, self._skip = None, 0, record.frames
                return self._to(problem, chosen, f"cut {chosen} is best: {self._shown()}") if chosen != cut else None
            try:
                return self._to(problem, self._wanted, f"cut {self._wanted} is tried: {self._shown()}")
            except PlanError:
                found_s = math.inf

    def _remember(self, cut: int, period_s: float) -> None:
        before_s = self.m.get(cut, period_s)
        self.m[cut] = (1 - self._alpha) * before_s + self._alpha * period_s

    def _return_to_two_stages(self, problem: Problem) -> tuple[Plan, str] | None:
        """Return the plan of Algorithm 1 for the devices as slow as they are now; None where it has none."""
        if self._has_none:
            return None
        try:
            found = SCHEDULERS["algorithm-1"].run(
                replace(unlimited(self.scaled(problem)), objective="throughput", stages=None)
            )
        except (NoPlanError, ProfileError) as error:
            _log.warning("line-search has no cut to move: %s", error)
            self._has_none = True
            return None
        devices = _two_devices(problem, found)
        if devices != self._devices:
            self._devices = devices
            self.m.clear()
        return self._propose(
            problem, found.stages, "line-search moves the cut of two stages, and begins by Algorithm 1"
        )

    def _to(self, problem: Problem, cut: int, reason: str) -> tuple[Plan, str]:
        assert self._devices is not None
        return self._propose(problem, _stages(problem, self._devices, cut), reason)

    def _propose(self, problem: Problem, stages: tuple[Stage, ...], reason: str) -> tuple[Plan, str]:
        plan = Plan(problem.graph.name, "line-search", problem.objective, stages, Prediction())
        proposal = judged_now(self.scaled(problem), plan)
        self._proposed = stages
        return proposal, reason

    def _shown(self) -> str:
        """Return the periods around the running cut."""
        near = sorted(sorted(self.m, key=lambda cut: abs(cut - (self._cut or 0)))[:3])
        return ", ".join(f"{cut} takes {1e3 * self.m[cut]:.3g} ms" for cut in near)


def period(record: StageRecord, skip: int, *, latest: bool = False) -> float | None:
    """Return the mean seconds between results; None where too few have come.

    Args:
        record: of the last stage.
        skip: how many of its first frames are left out.
        latest: whether only the last frames count, as few as are enough.
    """
    samples = list(record.samples)
    done_s = [sample.done_s for sample in samples[max(0, skip - (record.frames - len(samples))) :]]
    if len(done_s) <= LEAST_FRAMES or done_s[-1] - done_s[0] < WINDOW_S:
        return None
    if latest:
        done_s = done_s[min(len(done_s) - LEAST_FRAMES, bisect_right(done_s, done_s[-1] - WINDOW_S)) - 1 :]
    return (done_s[-1] - done_s[0]) / (len(done_s) - 1)


def _stages(problem: Problem, devices: tuple[str, str], cut: int) -> tuple[Stage, ...]:
    names = tuple(problem.graph.operator_names)
    parts = zip(devices, (names[:cut], names[cut:]), strict=True)
    return tuple(Stage((device,), part) for device, part in parts if part)


def _cut_of(problem: Problem, plan: Plan, devices: tuple[str, str]) -> int | None:
    """Return n where the plan is a cut of the graph's order on the two devices in their order; else None."""
    counts = {stage.devices: len(stage.operators) for stage in plan.stages}
    cut = counts.get((devices[0],), 0)
    parts = [(stage.devices, frozenset(stage.operators)) for stage in plan.stages]
    wanted = [(stage.devices, frozenset(stage.operators)) for stage in _stages(problem, devices, cut)]
    return cut if parts == wanted else None


def _two_devices(problem: Problem, plan: Plan) -> tuple[str, str] | None:
    """Return the devices of a cut in two, or a single device and the first other one that shares no cores with it."""
    if any(len(stage.devices) > 1 for stage in plan.stages) or len(plan.stages) > 2:
        return None
    if len(plan.stages) == 2:
        first, second = (stage.devices[0] for stage in plan.stages)
        return (first, second) if _cut_of(problem, plan, (first, second)) is not None else None
    only = problem.platform.device(plan.devices[0])
    others = [device.name for device in problem.platform.devices if not device.overlaps(only)]
    return (only.name, others[0]) if others else None
