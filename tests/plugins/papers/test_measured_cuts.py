"""Cuts in turns: which runs again, which is named the best, and what is said of a cut that does not run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runtime.machine import problem_of
from tests.support.fake_backend import chain_model
from tests.support.parts import needs
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.statistics import RunStatistics
from tvm_pipeline.errors import OptionError, PlanError, RunError
from tvm_pipeline.runtime.comparison import Turn, runner
from tvm_pipeline_papers.cut_tables import cuts_table, draw_cuts
from tvm_pipeline_papers.every_cut import Cut, every_cut
from tvm_pipeline_papers.measured_cuts import FINAL_ROUNDS, FINALISTS, expected_s, measured_cuts

PROBLEM = problem_of({"a": [0.01] * 8, "b": [0.02] * 8})


def cuts_of(**options) -> list[Cut]:
    return every_cut(replace(PROBLEM, **options), "a", "b")


class Runs:
    """Gives each cut its predicted figures times a factor of the test's, for the turn that this is."""

    def __init__(self, factor: Callable[[str, int], float], broken: Mapping[str, int] | None = None) -> None:
        self.factor, self.broken, self.turns = factor, broken or {}, Counter[str]()

    def __call__(self, plan: Plan, seconds: float) -> Turn:
        name = " ".join(f"{len(stage.operators)}{stage.devices[0]}" for stage in plan.stages)
        turn = self.turns[name]
        self.turns[name] += 1
        if self.broken.get(name, 99) <= turn:
            raise RunError(f"{name} fell over")
        fps, latency_s = plan.predicted.throughput_fps, plan.predicted.latency_s
        assert fps
        assert latency_s
        factor = self.factor(name, turn)
        return Turn(RunStatistics(24, fps / factor, None, None, None, None, ()), latency_s * factor)


def test_where_the_prediction_holds_its_best_is_the_best() -> None:
    runs = Runs(lambda name, turn: 1.1)
    found = measured_cuts(cuts_of(), runs, seconds=0.1, rounds=2)
    assert str(found.chosen.cut) == str(found.best.cut) == "5 a | 3 b"
    assert found.ratio == 1
    assert found.best.measured_s == pytest.approx(0.06 * 1.1)
    assert sorted(Counter(runs.turns.values()).items()) == [(2, 16 - FINALISTS), (2 + 2 * FINAL_ROUNDS, FINALISTS)]
    table = cuts_table(found)
    assert len(table.rows) == 16
    assert [(table.rows[index][0], table.rows[index][-1]) for index in table.marked] == [
        ("5 a | 3 b", "predicted best, measured best")
    ]


def test_a_better_cut_than_the_predicted_best_is_named_with_the_distance() -> None:
    found = measured_cuts(cuts_of(), Runs(lambda name, turn: 0.5 if name == "2b 6a" else 1.0), rounds=1)
    assert (str(found.chosen.cut), str(found.best.cut)) == ("5 a | 3 b", "2 b | 6 a")
    assert found.ratio == pytest.approx(2.0)
    assert "2.000 times" in cuts_table(found).title


def test_luck_in_the_first_rounds_does_not_choose() -> None:
    """A cut that looked twice as fast in the rounds of all cuts is no faster in those of the finalists."""
    found = measured_cuts(cuts_of(), Runs(lambda name, turn: 0.5 if (name, turn) == ("4a 4b", 0) else 1.0), rounds=1)
    assert str(found.best.cut) == "5 a | 3 b"
    by_name = {str(each.cut): each.measured_s for each in found.cuts}
    assert by_name["4 a | 4 b"] == pytest.approx(0.08)


def test_the_objective_latency_compares_frames_that_are_alone() -> None:
    found = measured_cuts(cuts_of(objective="latency"), Runs(lambda name, turn: 1.0), rounds=1)
    assert str(found.best.cut) == "8 a"
    assert found.best.measured_s == pytest.approx(0.08)


@pytest.mark.parametrize("turn", [0, 1])
def test_a_cut_that_does_not_run_is_shown_with_its_reason(turn: int, tmp_path: Path) -> None:
    """Also the predicted best, and also one that falls over among the finalists."""
    found = measured_cuts(cuts_of(), Runs(lambda name, turn: 1.0, {"5a 3b": turn}), rounds=1)
    (broken,) = [each for each in found.cuts if str(each.cut) == "5 a | 3 b"]
    assert (broken.result, broken.cut.obstacle) == (None, "5a 3b fell over")
    assert str(found.chosen.cut) == str(found.best.cut) == "3 b | 5 a"
    (row,) = [row for row in cuts_table(found).rows if row[0] == "5 a | 3 b"]
    assert row[-1] == "not possible: 5a 3b fell over"
    needs("matplotlib")
    draw_cuts(found, tmp_path / "cuts.svg", "net, every cut")
    text = (tmp_path / "cuts.svg").read_text()
    assert all(f"<!-- {label} -->" in text for label in ("net, every cut", "a | b, measured", "predicted best"))


def test_without_any_cut_that_runs_the_error_is_that_of_the_first() -> None:
    with pytest.raises(RunError, match="1a 7b fell over"):
        measured_cuts(cuts_of(), Runs(lambda name, turn: 1.0, dict.fromkeys(names(), 0)))
    impossible = [replace(cut, plan=None, obstacle="too large") for cut in cuts_of()]
    with pytest.raises(PlanError, match="none of the 16 cuts is a plan; the first: too large"):
        measured_cuts(impossible, Runs(lambda name, turn: 1.0))
    joules = every_cut(problem_of({"a": [0.01], "b": [0.02]}, {"a": 1.0, "b": 2.0}, objective="energy"), "a", "b")
    with pytest.raises(OptionError, match="all cuts are compared by throughput or latency"):
        measured_cuts(joules, Runs(lambda name, turn: 1.0))


def names() -> list[str]:
    runs = Runs(lambda name, turn: 1.0)
    for cut in cuts_of():
        assert cut.plan
        runs(cut.plan, 0.0)
    return list(runs.turns)


def test_the_time_that_is_told_is_that_of_the_turns() -> None:
    """Twelve frames and three alone: 16 cuts of 8 frames a second."""
    cuts = every_cut(problem_of({"a": [0.0625, 0.0625], "b": [0.0625, 0.0625]}), "a", "b")
    turns = 2 * [12 / 16 + 3 / 8, 12 / 8 + 3 / 8]
    assert expected_s(cuts, 0.1, 2) == pytest.approx(2 * sum(turns) * (1 + FINAL_ROUNDS))


def test_cuts_really_run() -> None:
    model = chain_model(3)
    problem = problem_of({"a": [1e-4] * 3, "b": [1e-4] * 3})
    found = measured_cuts(every_cut(problem, "a", "b"), runner(model, problem.platform), seconds=0.01, rounds=1)
    assert len(found.cuts) == 6
    assert all(each.result and each.result.statistics.frames >= 12 for each in found.cuts)
    assert found.ratio >= 1
