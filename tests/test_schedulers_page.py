"""The programs of docs/schedulers.md, installed as the page says, are found by name and do what it says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.runtime.machine import Machine, plan_of, problem_of
from tests.support.command import run_command
from tests.support.installed import install_entries
from tvm_pipeline.runtime import STRATEGIES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/schedulers.md").read_text()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write both modules, and the entries of both packages."""
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    tables = re.findall(r'```toml\n\[project.entry-points."([\w.]+)"\]\n(.*?)\n```', PAGE)
    for name, program, (group, entry) in zip(("halves", "fastest"), programs, tables, strict=True):
        (tmp_path / f"{name}.py").write_text(program)
        install_entries(tmp_path, group, entry, package=name)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_the_scheduler_is_listed_chosen_and_judged(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    command = next(line for line in PAGE.splitlines() if line.startswith("tvm-pipeline plan"))
    outcome = run_command(capfd, monkeypatch, *command.split()[1:], "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["scheduler"] == "halves"
    counts = [len(stage["operators"]) for stage in outcome.json["stages"]]
    assert len(counts) == 2
    assert abs(counts[0] - counts[1]) <= 1
    assert outcome.json["gap"] > 0
    refused = run_command(capfd, monkeypatch, *command.split()[1:], "--stages", 3)
    assert refused.code == 2
    assert "the plans of scheduler halves have 2" in refused.err
    refused = run_command(capfd, monkeypatch, *command.replace("halves", "thirds").split()[1:])
    assert refused.code == 2
    assert re.search("there is no scheduler thirds; there are best, single, .*halves", refused.err)


@pytest.mark.usefixtures("installed")
def test_the_strategy_exchanges_the_plan_where_a_device_becomes_slow(tmp_path: Path) -> None:
    problem = problem_of({"d0": [4e-3] * 4, "d1": [5e-3] * 4})
    first = plan_of(problem, ("d0", 4))
    machine = Machine(
        problem, first, STRATEGIES["fastest"](), tmp_path / "stat", loads=lambda now: {"d0": 0.7 if now > 2 else 0}
    )
    machine.run(2)
    assert machine.switches == []
    machine.run(3)
    assert machine.switches[0][1].devices == ("d1",)
    assert "times slower" in machine.switches[0][2]
