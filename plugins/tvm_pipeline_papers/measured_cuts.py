"""Every cut measured beside its prediction: was the cut that is predicted to be the best one really the best?

The cuts take turns, one pipeline at a time, each of some frames: a cut needs no compilation, so a turn costs little
more than its frames. The best of many noisy figures looks better than it is. Therefore those that were measured and
those that are predicted to be best run in turns once more, and these figures alone decide between them.

Read next: runtime/comparison.py, which runs one turn; every_cut.py, which makes the plans.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm_pipeline import PipelineError
from tvm_pipeline.core.plan import Measured
from tvm_pipeline.errors import OptionError, PlanError
from tvm_pipeline.runtime.comparison import SINGLE_FRAMES, TURN_FRAMES, Run, Turn, in_turn, measured
from tvm_pipeline_papers.every_cut import Cut

_log = logging.getLogger(__name__)

TURN_S = 0.3  # a turn of less has too few frames in steady state, or hardly more than the scheduler's time slices
PREDICTED_FINALISTS = 3  # those that are predicted to be best
FINALISTS = 6  # with those that were measured to be best
FINAL_ROUNDS = 3  # of the finalists, for each round of all cuts


@dataclass(frozen=True, slots=True)
class MeasuredCut:
    """A cut with what was measured of it; `result` is None where the cut is no plan, or where its pipeline failed."""

    cut: Cut
    result: Measured | None

    @property
    def predicted_s(self) -> float | None:
        """Predicted seconds of the objective: the period of a full pipeline, or the latency of a frame alone."""
        return _predicted_s(self.cut)

    @property
    def measured_s(self) -> float | None:
        """Measured seconds of the objective."""
        return _measured_s(self.result) if self.result else None


@dataclass(frozen=True, slots=True)
class CutComparison:
    """All cuts, and the two that matter.

    Attributes:
        objective: `throughput`, whose seconds are those of a period, or `latency`.
        chosen: the cut that is predicted to be the best of those that ran.
        best: the cut that was measured to be the best.
    """

    objective: str
    cuts: tuple[MeasuredCut, ...]
    chosen: MeasuredCut
    best: MeasuredCut

    @property
    def ratio(self) -> float:
        """The measured seconds of the chosen cut over those of the best: 1 where they are one cut, never less."""
        return (self.chosen.measured_s or 0.0) / (self.best.measured_s or 1.0)


def expected_s(cuts: Sequence[Cut], seconds: float, rounds: int) -> float:
    """Return about how long `measured_cuts` will take, by the predictions."""
    plans = [cut.plan.predicted for cut in cuts if cut.plan]
    turns = [
        max(seconds, TURN_FRAMES / (predicted.throughput_fps or 1.0)) + SINGLE_FRAMES * (predicted.latency_s or 0.0)
        for predicted in plans
    ]
    finals = min(FINALISTS, len(turns)) * FINAL_ROUNDS
    return rounds * sum(turns) * (1 + finals / max(len(turns), 1))


def measured_cuts(cuts: Sequence[Cut], run: Run, *, seconds: float = TURN_S, rounds: int = 3) -> CutComparison:
    """Run every cut in turns of about `seconds`, in so many rounds, and the best of them in more.

    Args:
        run: runs a plan for one turn; see `runner`.

    Raises:
        OptionError: the objective of the cuts is neither throughput nor latency, which are what a turn measures.
        PlanError: no cut is a plan; the message has the reason for the first.
        PipelineError: no cut ran; it is the error of the first.
    """
    plans = [cut.plan for cut in cuts if cut.plan]
    if not plans:
        raise PlanError(f"none of the {len(cuts)} cuts is a plan; the first: {cuts[0].obstacle if cuts else '-'}")
    objective = plans[0].objective
    if objective not in ("throughput", "latency"):
        raise OptionError(
            f"all cuts are compared by throughput or latency, which every run measures; `objective` is {objective}",
            option="objective",
            value=objective,
        )
    obstacles: dict[int, PipelineError] = {}
    everyone = [index for index, cut in enumerate(cuts) if cut.plan]
    results = _results(cuts, everyone, run, seconds, rounds, "cut", obstacles)
    by_prediction = sorted(results, key=lambda index: _predicted_s(cuts[index]) or float("inf"))
    others = sorted(by_prediction[PREDICTED_FINALISTS:], key=lambda index: _measured_s(results[index]))
    finalists = [*by_prediction[:PREDICTED_FINALISTS], *others[: FINALISTS - PREDICTED_FINALISTS]]
    if finalists:
        finals = _results(cuts, finalists, run, seconds, FINAL_ROUNDS * rounds, "finalist", obstacles)
    if not finalists or not finals:
        raise next(iter(obstacles.values()))
    results.update(finals)
    chosen = next(index for index in finalists if index in finals)
    found = tuple(
        MeasuredCut(replace(cut, plan=None, obstacle=str(obstacles[index])), None)
        if index in obstacles
        else MeasuredCut(cut, results.get(index))
        for index, cut in enumerate(cuts)
    )
    best = min(finals, key=lambda index: _measured_s(results[index]))
    return CutComparison(objective, found, found[chosen], found[best])


def _results(
    cuts: Sequence[Cut],
    indices: Sequence[int],
    run: Run,
    seconds: float,
    rounds: int,
    what: str,
    obstacles: dict[int, PipelineError],
) -> dict[int, Measured]:
    """Return what was measured of these cuts; put the error of a cut that did not run into `obstacles`."""
    turns: dict[int, list[Turn]] = {index: [] for index in indices}
    for round_ in range(rounds):
        for count, index in enumerate(in_turn(indices, round_), 1):
            plan = cuts[index].plan
            if plan is None or index in obstacles:
                continue
            _log.info(f"{what} {count} of {len(indices)}, {cuts[index]}, round {round_ + 1} of {rounds}")
            try:
                turns[index].append(run(plan, seconds))
            except PipelineError as error:
                obstacles[index] = error
    plans = {index: cuts[index].plan for index in indices if index not in obstacles}
    return {index: measured(plan, turns[index]) for index, plan in plans.items() if plan}


def _predicted_s(cut: Cut) -> float | None:
    if cut.plan is None:
        return None
    predicted = cut.plan.predicted
    if cut.plan.objective == "latency":
        return predicted.latency_s
    return 1 / predicted.throughput_fps if predicted.throughput_fps else None


def _measured_s(result: Measured) -> float:
    if result.plan.objective == "latency":
        return result.latency_s
    return 1 / result.throughput_fps if result.throughput_fps else float("inf")
