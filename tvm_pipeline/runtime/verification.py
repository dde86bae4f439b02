"""Chooses by measuring where predictions cannot decide: candidates whose intervals overlap run side by side.

`verified` takes the decision of `planning.plan`, which measures nothing, and these steps:

1. `_contenders`  take the candidates that may be the best one, and the obvious ones: one device, and replicas
2. `_Race.go`     let them run in turns; a plan that is clearly worse drops out, and the others get its time
3. `_Race.best`   choose the best one of those that keep the limits as measured; of equally fast ones the one with the
                  lower latency under load

`with_fewest_inside` then finds how few frames the chosen plan, or an equally fast one of fewer workers, may hold, since
each one more adds to the latency.

Where nothing can be measured, the prediction decides. It then takes no plan in which a device's own threads share
cores with host work, because no prediction tells how such threads wait for each other.

Read next: comparison.py, which runs a plan for one turn; core/plan.py, the Decision.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection
from dataclasses import replace
from statistics import median

import numpy as np

from tvm_pipeline.core.plan import Decision, Measured, Plan, describe
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.statistics import median_interval
from tvm_pipeline.errors import OptionError, PipelineError, PowerError
from tvm_pipeline.power import Meter
from tvm_pipeline.runtime.comparison import SINGLE_FRAMES, TURN_FRAMES, Run, Turn, in_turn, measured
from tvm_pipeline.runtime.metering import metered

_log = logging.getLogger(__name__)

VERIFY_S = 8.0
# The uncertainty of a prediction that states none. Predictions of stages on one core err by 2.5 % in the median and by
# 14 % at worst (docs/figures.md), so of two plans that are predicted to differ by less than twice this, either may be
# the faster one.
UNSTATED = 0.1
# A turn of less has too few frames in steady state, or hardly more than the scheduler's time slices.
TURN_S = 0.3
PERIODS = 5  # of the sensor of power that a turn takes, at least
# If two plans are equally fast, the three turns of one are all faster than those of the other once in ten times.
LEAST_ROUNDS = 3
# Plans that are not told apart in so many rounds are equally good.
MOST_ROUNDS = 100
# A plan that is slower than the fastest by less may be chosen for its latency.
TIED = 0.98
# The share of the rate with many frames inside that the fewest must keep, in the median of so many rounds if there is
# time for them; fewer rounds do where each of them says so. Turns of a shared machine differ by some percent; what
# keeps less than the second share is out at once.
KEPT_RATE, LOST_RATE = 0.99, 0.9
SLOT_ROUNDS, MOST_COUNTS = 5, 4


def verified(
    problem: Problem,
    decision: Decision,
    run: Run | None,
    verify_s: float = VERIFY_S,
    meter: Meter | None = None,
    rate_fps: float | None = None,
) -> Decision:
    """Return the decision after the candidates that may be the best have run side by side.

    The measured best is chosen. The prediction decides where there is one candidate, where the objective cannot be
    measured (bytes; energy without a meter), where a device is missing and has a stand-in, and where the time is too
    short for `LEAST_ROUNDS` turns of two candidates.

    Args:
        decision: of `planning.plan`; its candidates are best first.
        run: runs a plan for a turn; None where nothing can run. A candidate for which it raises PipelineError is left
            out, and `Decision.why` has the reason.
        verify_s: seconds that all turns may take together; the last turn may end later. 0 measures nothing.
        meter: samples a sensor of power; None where there is none.
        rate_fps: the frames a second at which a turn runs once more, after the full pipeline; None if it does not.

    Raises:
        OptionError: `verify_s` is negative or infinite.
    """
    check_seconds(verify_s)
    if len(decision.candidates) < 2:
        return decision
    if run is None or not verify_s:
        return _predicted(problem, decision)
    obstacle = _obstacle(problem, meter)
    if obstacle is not None:
        return _predicted(problem, decision, obstacle)
    least_s = PERIODS * meter.period_s if meter else 0.0
    race = _Race(problem, _contenders(problem, decision), verify_s, least_s, rate_fps)
    try:
        race.go(_with_joules(run, problem, meter) if meter and problem.objective == "energy" else run)
    except PowerError as error:
        return _predicted(problem, decision, f"no measurement decided, because {error}")
    if not race.is_decided:
        return _predicted(problem, decision, race.notes(), race.failed)
    return _chosen(decision, race.best(), race.why(decision.why), race)


def with_fewest_inside(problem: Problem, decision: Decision, run: Run | None, verify_s: float = VERIFY_S) -> Decision:
    """Measure in turns how few frames inside keep the rate, and return the decision for a plan with so few.

    The default is one frame in each worker and one that waits for it. Fewer often keep the rate, and each frame inside
    beyond them adds its period to every latency. An equally fast candidate of fewer workers may need the fewest, so one
    of these is tried beside the chosen plan. Only plans for throughput that were measured before are tried.

    Args:
        verify_s: seconds that the candidates were given; all turns may take half of them, and the last round may end
            later.
    """
    plan = decision.plan
    if run is None or not decision.measured or plan.objective != "throughput" or problem.max_latency_s is not None:
        return decision
    seconds, deadline_s = _full_s(plan, TURN_FRAMES, TURN_S), time.perf_counter() + verify_s / 2
    kept: dict[Plan, list[Turn]] = {few: [] for few in _with_fewer_inside(problem, decision)}
    most: list[Turn] = []

    def shares(few: Plan) -> list[float]:
        """Return the share of the rate with most frames inside that a plan keeps, in each round."""
        return [a.throughput_fps / max(b.throughput_fps, 1e-12) for a, b in zip(kept[few], most, strict=True)]

    def least_late() -> list[Plan]:
        """Return the plans that keep the rate in the median of enough rounds, the one of the least latency first."""
        enough = [few for few in kept if len(most) >= LEAST_ROUNDS and median(shares(few)) >= KEPT_RATE]
        return sorted(enough, key=lambda few: median(map(_loaded_s, kept[few])))

    for _ in range(SLOT_ROUNDS):
        found = least_late()
        if not kept or time.perf_counter() >= deadline_s or (found and min(shares(found[0])) >= KEPT_RATE):
            break
        tried = ", ".join(f"{few.calls_inside} in {few.scheduler}" for few in kept)
        _log.info(f"measuring {describe(plan)} with {plan.calls_inside} frames inside, and with {tried}")
        try:
            most.append(run(plan, seconds))  # first, so that all meet the same frames of a file
            for few, turns in kept.items():
                turns.append(run(few, seconds))
        except PipelineError:
            return decision
        kept = {few: turns for few, turns in kept.items() if median(shares(few)) >= LOST_RATE}
    if not (found := least_late()):
        return decision
    least = found[0]
    candidates = (least, *(other for other in decision.candidates if other.stages != least.stages))
    ran = (measured(least, kept[least]), *(found for found in decision.measured if found.plan.stages != least.stages))
    share, whose = median(shares(least)), "" if least.stages == plan.stages else f" of {describe(plan)}"
    why = (
        f"{describe(least)} with {least.calls_inside} frames inside keeps {share:.1%} of the rate{whose} "
        f"with {plan.calls_inside}, at {1e3 * median(map(_loaded_s, kept[least])):.4g} ms under load in place of "
        f"{1e3 * median(map(_loaded_s, most)):.4g} ms; {decision.why}"
    )
    return replace(decision, plan=least, candidates=candidates, measured=ran, why=why)


def _with_fewer_inside(problem: Problem, decision: Decision) -> list[Plan]:
    """Return the chosen plan with fewer frames inside, and the fastest tied candidate of fewer workers likewise."""
    chosen, *others = decision.measured
    tied = [found.plan for found in others if found.throughput_fps >= TIED * chosen.throughput_fps]
    smaller = [plan for plan in tied if plan.calls_inside < decision.plan.calls_inside][:1]
    # A pipeline without host work waits for the caller between two frames, so it needs one more than its workers.
    least = 1 if any(operator.is_host for operator in problem.graph.operators) else 2
    found = []
    for plan in (decision.plan, *smaller):
        busy = (plan.predicted.throughput_fps or 0.0) / plan.batch * (plan.predicted.latency_s or 0.0)
        counts = range(max(least, math.ceil(busy * (1 - 1e-6))), plan.calls_inside)
        step = math.ceil(len(counts) * (1 + len(smaller)) / MOST_COUNTS) or 1
        found += [replace(plan, in_flight=inside) for inside in counts[::step]]
    return found


def check_seconds(verify_s: float) -> None:
    """Raise OptionError where so many seconds cannot be spent on measuring."""
    if not 0 <= verify_s < math.inf:
        raise OptionError(
            f"`verify_s` {verify_s}: it must be a number of seconds, or 0 to choose by prediction",
            option="verify_s",
            value=verify_s,
        )


def _obstacle(problem: Problem, meter: Meter | None) -> str | None:
    """Return why no measurement can choose, empty where there is nothing to say; None where one can."""
    if problem.is_lexicographic:
        return ""  # bytes are counted, not predicted
    if problem.objective == "energy" and meter is None:
        return "nothing was run, because no sensor measures energy"
    if problem.platform.stand_ins:
        missing = ", ".join(problem.platform.stand_ins)
        return f"nothing was run, because a stand-in says nothing of the speed of {missing}"
    return None


def _chosen(decision: Decision, plan: Plan, why: str, race: _Race | None = None) -> Decision:
    others = (other for other in decision.candidates if other != plan)
    return replace(decision, plan=plan, candidates=(plan, *others), why=why, measured=race.measured() if race else ())


# ---------------------------------------------------------------------------------------------- by prediction


def _predicted(problem: Problem, decision: Decision, note: str = "", failed: Collection[Plan] = ()) -> Decision:
    """Return the decision by predictions: without plans that failed or must not be chosen unmeasured, if possible."""
    possible = [plan for plan in decision.candidates if plan not in failed] or [decision.plan]
    best = next((plan for plan in possible if not pool_meets_host_work(problem, plan)), possible[0])
    why = decision.why
    if best != possible[0]:
        why = (
            f"{describe(possible[0])} is not chosen unmeasured: its threads would share cores with the host work, "
            f"which no prediction covers. {describe(best)} is the best of the others; by prediction {why}"
        )
    return _chosen(decision, best, f"{why}; {note}" if note else why)


def pool_meets_host_work(problem: Problem, plan: Plan) -> bool:
    """Return whether a device with threads on several cores shares one of them with host work of the plan.

    The threads of a pool wait for each other at each operator, so all of them stall where anything else runs on a core
    of one.
    """
    host = {operator.name for operator in problem.graph.operators if operator.is_host}
    used = [(stage, problem.platform.device(name)) for stage in plan.stages for name in stage.devices]
    hosts = [device for stage, device in used if not host.isdisjoint(stage.operators)]
    pools = [device for stage, device in used if len(device.cores) > 1 and not host.issuperset(stage.operators)]
    # A device without cores may work on any core of the machine.
    return any(not host.cores or host.overlaps(pool) for host in hosts for pool in pools)


# ---------------------------------------------------------------------------------------------- by measurement


def _contenders(problem: Problem, decision: Decision) -> list[Plan]:
    """Return the candidates to run: those whose interval overlaps the best's, then the best device and replicas.

    The last two insure against a profile that is wrong, for little time. Where the platform has several backends, the
    best device and the replicas of each come first: an engine's own times say little of another engine's.
    """
    best, *others = decision.candidates
    least, _ = _interval(best)
    overlapping = [plan for plan in others if _interval(plan)[1] >= least]
    of_one_stage = [plan for plan in others if len(plan.stages) == 1]
    obvious: dict[object, Plan] = {}
    for plan in of_one_stage:
        obvious.setdefault(len(plan.devices) > 1, plan)
    owner = {device.name: device.backend for device in problem.platform.devices}
    of_engines: dict[object, Plan] = {}
    for plan in (best, *of_one_stage) if len(set(owner.values())) > 1 else ():
        engines = frozenset(owner[name] for name in plan.devices)
        if len(engines) == len(plan.stages) == 1:
            of_engines.setdefault((len(plan.devices) > 1, engines), plan)
    insurance = [obvious[many] for many in (False, True) if many in obvious]
    return list(dict.fromkeys((best, *of_engines.values(), *overlapping, *insurance)))


def _interval(plan: Plan) -> tuple[float, float]:
    """Return the interval of the predicted figure of the objective, as a rate: more is better."""
    uncertainty = UNSTATED if plan.predicted.uncertainty is None else plan.predicted.uncertainty
    predicted = plan.predicted
    if plan.objective == "energy":
        uncertainty = UNSTATED  # that of a prediction is of its seconds
    rate = _rate(plan.objective, predicted.throughput_fps, predicted.latency_s, predicted.energy_j)
    return rate * (1 - uncertainty), rate * (1 + uncertainty)


def _rate(objective: str, throughput_fps: float | None, latency_s: float | None, energy_j: float | None) -> float:
    """Return the figure of an objective as a rate: more is better."""
    if objective == "throughput":
        return throughput_fps or 0.0
    return 1 / max((energy_j if objective == "energy" else latency_s) or 0.0, 1e-12)


def _with_joules(run: Run, problem: Problem, meter: Meter) -> Run:
    """Return the function that runs a plan for a turn, and raises PowerError where its joules cannot be told."""
    measuring = metered(run, problem, meter)

    def measured_turn(plan: Plan, seconds: float) -> Turn:
        turn = measuring(plan, seconds)
        if turn.energy is None:
            raise meter.failure or PowerError(f"{meter.sensor.name} told nothing of the turn of {describe(plan)}")
        return turn

    return measured_turn


class _Race:
    """Plans that run in turns.

    Attributes:
        failed: why a plan does not run.
    """

    def __init__(
        self,
        problem: Problem,
        plans: list[Plan],
        verify_s: float,
        least_s: float = 0.0,
        rate_fps: float | None = None,
    ) -> None:
        self.failed: dict[Plan, PipelineError] = {}
        self._problem, self._verify_s, self._least_s = problem, verify_s, max(TURN_S, least_s)
        self._running: list[Plan] = []  # best first
        # A turn has twice the least number of frames, or the least one where the time is short for slow plans.
        for self._frames in (2 * TURN_FRAMES, TURN_FRAMES):
            # The seconds of a turn: as predicted, then those of the latest one.
            self._turn_s = {plan: _predicted_turn_s(plan, self._frames, self._least_s, rate_fps) for plan in plans}
            self._running = self._fitting(plans)
            if len(self._running) > 1:
                break
        self._turns: dict[Plan, list[Turn]] = {plan: [] for plan in self._running}
        self._rounds = 0

    def _fitting(self, plans: list[Plan]) -> list[Plan]:
        """Return the plans that fit into the time, by their predictions; none where the first one does not."""
        fitting: list[Plan] = []
        for plan in plans:
            if LEAST_ROUNDS * sum(self._turn_s[other] for other in (*fitting, plan)) <= self._verify_s:
                fitting.append(plan)
        return fitting if plans[0] in fitting else []

    def go(self, run: Run) -> None:
        """Run rounds until the time is over or one plan is left.

        Parts for several backends are compiled when they first run, and engines make their stages anew for each turn.
        Neither is time of measuring, so that candidates of all engines have the rounds that they need.
        """
        making_s = 0.0
        if len({device.backend for device in self._problem.platform.devices}) > 1:
            for plan in list(self._running):
                _log.info(f"compiling the stages of {describe(plan)}")
                self._take(run, plan, 0.0)
            for plan in list(self._running):
                begin_s = time.perf_counter()
                self._take(run, plan, 0.0)
                took_s = time.perf_counter() - begin_s
                self._turn_s[plan] += took_s
                making_s += took_s
                self._turns[plan].clear()
        deadline_s = time.perf_counter() + self._verify_s + LEAST_ROUNDS * making_s
        while self._has_time(deadline_s - time.perf_counter()):
            for plan in in_turn(self._running, self._rounds):
                begin_s = time.perf_counter()
                if begin_s >= deadline_s:
                    return  # turns took longer than they should
                _log.info(f"measuring {describe(plan)}, round {self._rounds + 1}, {deadline_s - begin_s:.0f} s left")
                self._take(run, plan, _full_s(plan, self._frames, self._least_s))
                self._turn_s[plan] = time.perf_counter() - begin_s
            self._rounds += 1
            self._drop()

    def _take(self, run: Run, plan: Plan, seconds: float) -> None:
        """Let a plan have a turn; take it out where it does not run."""
        try:
            self._turns[plan].append(run(plan, seconds))
        except PowerError:
            raise  # it is no fault of the plan
        except PipelineError as error:
            self.failed[plan] = error
            self._running.remove(plan)

    def _has_time(self, left_s: float) -> bool:
        """Return whether a round can decide more and fits into the time; drop plans if the first rounds would not."""
        missing = max(LEAST_ROUNDS - self._rounds, 1)
        if missing > 1:
            while len(self._running) > 2 and missing * self._round_s() > left_s:
                self._running.pop()
        is_undecided = len(self._running) > 1 and not self._is_tied()
        is_open = is_undecided or (bool(self.failed) and self._rounds < LEAST_ROUNDS)
        return is_open and self._rounds < MOST_ROUNDS and 0 < missing * self._round_s() <= left_s

    def _is_tied(self) -> bool:
        """Return whether no other plan can be faster than the one that is chosen now, by more than `TIED` allows."""
        if self._rounds <= LEAST_ROUNDS or not self._keeps(best := self.best()):
            return False
        own = self._rates(best)
        others = (self._rates(plan) for plan in self._running if plan != best)
        ratios = ([rate / max(its, 1e-12) for rate, its in zip(rates, own, strict=True)] for rates in others)
        return all(median_interval(each)[1] <= 1 / TIED for each in ratios)

    def _round_s(self) -> float:
        return sum(self._turn_s[plan] for plan in self._running)

    def _drop(self) -> None:
        """Put the best plan first; drop plans that miss a limit or are worse than the best that keeps them all."""
        self._running.sort(key=lambda plan: -median(self._rates(plan)))
        keeping = [plan for plan in self._running if self._keeps(plan)]
        if self._rounds < LEAST_ROUNDS or not keeping:
            return
        least, _ = median_interval(self._rates(keeping[0]))
        self._running = [
            plan
            for plan in self._running
            if median_interval(self._rates(plan))[1] >= TIED * least and self._keeps(plan, at_best=True)
        ]

    @property
    def _finished(self) -> list[Plan]:
        """The plans that had enough turns to be compared."""
        return [plan for plan, turns in self._turns.items() if plan not in self.failed and len(turns) >= LEAST_ROUNDS]

    @property
    def is_decided(self) -> bool:
        """Whether plans can be compared, or all others failed."""
        return len(self._finished) > (0 if self.failed else 1)

    def best(self) -> Plan:
        """Return the best plan that keeps the limits; where none does, the plan that comes nearest to them.

        Plans are compared within rounds, since what slows the machine for some seconds slows all of them. Of plans that
        are equally fast the one with the lower latency under load is best, then the one with fewer stages.
        """
        keeping = [plan for plan in self._finished if self._keeps(plan)]
        known = keeping or self._finished
        finalists = [plan for plan in known if plan in self._running] or known
        objective = self._problem.objective
        if not keeping:
            objective = "latency" if objective == "throughput" else "throughput"
        rounds = min(len(self._turns[plan]) for plan in finalists)
        rates = np.array([self._rates(plan, objective)[:rounds] for plan in finalists])
        relative = np.median(rates / np.maximum(rates.mean(axis=0), 1e-12), axis=1)
        if objective != "throughput":
            return finalists[int(np.argmax(relative))]
        tied = [plan for plan, rate in zip(finalists, relative, strict=True) if rate >= TIED * relative.max()]
        return min(tied, key=lambda plan: (median(map(_loaded_s, self._turns[plan])), len(plan.stages)))

    def measured(self) -> tuple[Measured, ...]:
        """Return the figures of the plans that can be compared, the best one first."""
        best = self.best()
        plans = sorted(self._finished, key=lambda plan: (plan != best, -median(self._rates(plan))))
        return tuple(measured(plan, self._turns[plan]) for plan in plans)

    def why(self, prediction: str) -> str:
        """Return the reason for the choice, in words; `prediction` is that of the choice by prediction."""
        best, *others = self.measured()
        against = ", ".join(f"{self._shown(other)} of {describe(other.plan)}" for other in others)
        text = f"{describe(best.plan)} measured {self._shown(best)}"
        text += f" against {against}" if against else ""
        notes = self.notes()
        return f"{text}, in turns; by prediction {prediction}{'; ' if notes else ''}{notes}"

    def notes(self) -> str:
        """Return what went wrong, in words; empty where nothing did."""
        notes = [f"{describe(plan)} does not run: {error}" for plan, error in self.failed.items()]
        if not self.is_decided and not notes:
            notes.append(f"{self._verify_s:g} s are too short to measure {LEAST_ROUNDS} turns of two candidates")
        missed = [plan for plan in self._finished if not self._keeps(plan)]
        limit = "max_latency_s" if self._problem.objective == "throughput" else "min_throughput_fps"
        if missed:
            names = "no candidate" if len(missed) == len(self._finished) else ", ".join(map(describe, missed))
            notes.append(f"{names} {'keeps' if names == 'no candidate' else 'missed'} `{limit}` as measured")
        return "; ".join(notes)

    def _rates(self, plan: Plan, objective: str = "") -> list[float]:
        by = objective or plan.objective
        return [
            _rate(by, turn.throughput_fps, turn.latency_s, turn.energy.energy_j if turn.energy else None)
            for turn in self._turns[plan]
        ]

    def _keeps(self, plan: Plan, at_best: bool = False) -> bool:
        """Return whether a plan keeps the limits as measured, with its whole interval or at the best end of it."""
        floor_fps, most_s = self._problem.min_throughput_fps, self._problem.max_latency_s
        turns = self._turns[plan]
        slow, fast = median_interval([turn.throughput_fps for turn in turns])
        quick, late = median_interval([_loaded_s(turn) for turn in turns])
        if floor_fps is not None and (fast if at_best else slow) < floor_fps:
            return False
        return most_s is None or (quick if at_best else late) <= most_s

    def _shown(self, found: Measured) -> str:
        if self._problem.objective == "latency":
            return f"{1e3 * found.latency_s:.4g} ms"
        if self._problem.objective == "energy" and found.energy:
            return f"{found.energy.energy_j:.4g} J a frame by {found.energy.sensor}"
        return f"{found.throughput_fps:.4g} fps"


def _loaded_s(turn: Turn) -> float:
    """Return the median latency of the full pipeline, or that of frames alone where too few came out."""
    return turn.statistics.latency_p50_s or turn.latency_s


def _full_s(plan: Plan, frames: int, least_s: float) -> float:
    """Return for how many seconds a plan is kept full in its turn, in which it makes so many calls."""
    return max(least_s, frames * plan.batch / max(plan.predicted.throughput_fps or 0.0, 1e-12))


def _predicted_turn_s(plan: Plan, frames: int, least_s: float, rate_fps: float | None) -> float:
    """Return the seconds of a turn if the prediction is right and the plan is opened in no time."""
    full_s = _full_s(plan, frames, least_s)
    paced_s = max(full_s, TURN_FRAMES / rate_fps) if rate_fps else 0.0
    return full_s + paced_s + SINGLE_FRAMES * (plan.predicted.latency_s or 0.0)
