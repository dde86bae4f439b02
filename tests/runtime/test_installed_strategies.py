"""Strategies of installed packages: they are listed, and load when a run asks for them alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.installed import install_entries
from tvm_pipeline.errors import OptionError, PipelineError
from tvm_pipeline.runtime import Adaptation
from tvm_pipeline.runtime.adaptation import STRATEGIES, check_strategy, strategy_of
from tvm_pipeline.runtime.strategy import Strategy

MODULE = """
from tvm_pipeline.runtime.strategy import Strategy

class Patient(Strategy):
    def look(self, records, problem):
        return None

def not_one():
    return Patient()
"""


def test_an_installed_strategy_is_listed_and_loads_when_a_run_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "patient_strategy.py").write_text(MODULE)
    entries = (
        "patient = patient_strategy:Patient",
        "replan = patient_strategy:Patient",
        "wrong = patient_strategy:not_one",
    )
    install_entries(tmp_path, "tvm_pipeline.strategies", *entries)
    monkeypatch.syspath_prepend(tmp_path)
    assert "patient" in STRATEGIES
    check_strategy("patient")
    assert isinstance(strategy_of("replan"), Adaptation)
    assert strategy_of("off") is None
    assert "patient_strategy" not in sys.modules
    patient = strategy_of("patient")
    assert isinstance(patient, Strategy)
    assert patient.look([], None) is None
    with pytest.raises(OptionError, match=r"there is no strategy hasty; there are off, replan, .*patient"):
        check_strategy("hasty")
    with pytest.raises(
        PipelineError, match=r"the strategy wrong of the package fair .* is a function; docs/schedulers.md"
    ):
        strategy_of("wrong")
