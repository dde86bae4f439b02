"""Schedulers of installed packages: how they are found, and that they load when they are asked for alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.installed import install_entries
from tvm_pipeline import Problem, evaluate, plan
from tvm_pipeline.errors import NoPlanError, OptionError, PipelineError
from tvm_pipeline.planning import SCHEDULERS, check_scheduler
from tvm_pipeline.planning.registry import OWN
from tvm_pipeline.testing import example_problem

GROUP = "tvm_pipeline.schedulers"
MODULE = """
from dataclasses import replace
from tvm_pipeline import Plan, Prediction, plan
from tvm_pipeline.planning import Scheduler

def last(problem):
    stages = tuple(replace(stage, devices=("d1",)) for stage in plan(problem, "single").plan.stages)
    return Plan(problem.graph.name, "last", problem.objective, stages, Prediction())

LAST = Scheduler(last, "the whole model on the last device", objectives=frozenset({"throughput"}))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "last_device.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "last_device", raising=False)
    return tmp_path


def test_an_installed_scheduler_is_listed_and_loads_when_it_plans(folder: Path) -> None:
    install_entries(folder, GROUP, "last = last_device:LAST", "chain = last_device:LAST")
    assert "last" in SCHEDULERS
    assert list(SCHEDULERS)[: len(OWN)] == list(OWN)
    assert len(SCHEDULERS) == len(list(SCHEDULERS))
    check_scheduler("last")
    problem = example_problem()
    assert plan(problem, "chain").plan.scheduler == "chain"  # a package cannot replace a scheduler of the engine
    assert "last_device" not in sys.modules
    decision = plan(problem, "last")
    assert decision.plan.devices == ("d1",)
    assert decision.plan.predicted == evaluate(problem, decision.plan.stages).predicted
    assert decision.plan.gap is not None
    with pytest.raises(OptionError, match="scheduler last does not plan for objective latency, only for throughput"):
        plan(Problem(problem.graph, problem.platform, problem.profile, "latency"), "last")


def test_a_name_that_is_not_installed_lists_those_that_are(folder: Path) -> None:
    install_entries(folder, GROUP, "last = last_device:LAST")
    with pytest.raises(OptionError, match=r"there is no scheduler thirds; there are best, single, .*chain.*last"):
        check_scheduler("thirds")


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("no_such_module:X", "cannot be loaded: ModuleNotFoundError: .*no_such_module.*; install what it needs"),
        ("last_device:NONE", "cannot be loaded: AttributeError"),
        ("last_device:last", "is a function; docs/schedulers.md says what to register"),
    ],
)
def test_an_entry_that_is_no_scheduler_is_told_in_one_line(folder: Path, entry: str, told: str) -> None:
    install_entries(folder, GROUP, f"last = {entry}")
    with pytest.raises(PipelineError, match=rf"the scheduler last of the package fair \({entry}\) {told}"):
        plan(example_problem(), "last")


def test_two_packages_cannot_bring_one_name(folder: Path) -> None:
    install_entries(folder, GROUP, "last = last_device:LAST")
    install_entries(folder, GROUP, "last = other:LAST", package="other")
    with pytest.raises(PipelineError, match=r"two packages bring the scheduler last: fair .* and other .*; uninstall"):
        plan(example_problem(), "last")


def test_a_plan_that_is_not_legal_is_refused_with_the_name_of_its_scheduler(folder: Path) -> None:
    (folder / "last_device.py").write_text(MODULE.replace('devices=("d1",)', 'devices=("d9",)'))
    install_entries(folder, GROUP, "last = last_device:LAST")
    with pytest.raises(NoPlanError, match=r"the plan of scheduler last is refused: stage 0: .*d9.*; use chain or best"):
        plan(example_problem(), "last")
