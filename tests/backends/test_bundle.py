"""A bundle keeps how its plan was chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvm_pipeline import Bundle, Plan, open_bundle, plan, write_bundle
from tvm_pipeline.core.statistics import RunStatistics, StageStatistics
from tvm_pipeline.runtime.comparison import Turn
from tvm_pipeline.runtime.verification import verified
from tvm_pipeline.testing import example_backend, example_bundle, example_model, example_problem, installed


def turn(plan: Plan, seconds: float) -> Turn:
    stages = (StageStatistics(0, "d0", 24, 0.02, 0.0, 0.001, 0.05),)
    return Turn(RunStatistics(24, 50.0 / len(plan.devices), 0.04, None, None, 0.06, stages), 0.03)


@pytest.mark.thorough
def test_the_decision_comes_back_with_what_was_measured(tmp_path: Path) -> None:
    problem, model = example_problem(), example_model()
    decision = verified(problem, plan(problem), turn, 100.0)
    assert decision.measured
    bundle = Bundle(problem.graph, problem.platform, problem.profile, decision.plan, model, decision=decision)
    with installed(example_backend()):
        write_bundle(tmp_path / "net.tar", bundle)
        with open_bundle(tmp_path / "net.tar") as opened:
            assert opened.decision == decision
            assert opened.plan == decision.plan


def test_a_bundle_of_before_has_no_decision(tmp_path: Path) -> None:
    with installed(example_backend()):
        write_bundle(tmp_path / "old.tar", example_bundle())
        with open_bundle(tmp_path / "old.tar") as opened:
            assert opened.decision is None
