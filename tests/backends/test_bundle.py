"""A bundle keeps how its plan was chosen."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import msgspec
import pytest

from tvm_pipeline import Bundle, Decision, Plan, open_bundle, plan, write_bundle
from tvm_pipeline.core.statistics import RunStatistics, StageStatistics
from tvm_pipeline.errors import BundleError
from tvm_pipeline.runtime.comparison import Turn
from tvm_pipeline.runtime.verification import verified
from tvm_pipeline.testing import example_backend, example_bundle, example_model, example_problem, installed


def turn(plan: Plan, seconds: float) -> Turn:
    stages = (StageStatistics(0, "d0", 24, 0.02, 0.0, 0.001, 0.05),)
    return Turn(
        RunStatistics(24, 50.0 / len(plan.devices), 0.04, None, None, 0.06, stages), 0.03, times_s=((0.02, 0.03),)
    )


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


def test_the_measured_times_of_stages_travel_and_older_files_lack_them() -> None:
    decision = verified(example_problem(), plan(example_problem()), turn, 100.0)
    times_s = decision.measured[0].times_s
    assert len(times_s[0]) >= 6  # two of each round
    assert set(times_s[0]) == {0.02, 0.03}
    written = msgspec.json.decode(msgspec.json.encode(decision))
    assert msgspec.convert(written, Decision) == decision
    for found in written["measured"]:
        del found["times_s"]
    assert msgspec.convert(written, Decision).measured[0].times_s == ()


def test_a_model_that_another_backend_saved_is_not_loaded(tmp_path: Path) -> None:
    """The manifest says who saved it; no backend is given files of another one to read."""
    with installed(example_backend()):
        write_bundle(tmp_path / "net.tar", example_bundle())
        with tarfile.open(tmp_path / "net.tar") as tar:
            files = {entry.name: tar.extractfile(entry).read() for entry in tar}  # type: ignore[union-attr]
        files["manifest.json"] = files["manifest.json"].replace(b'"backend": "fake"', b'"backend": "host"')
        with tarfile.open(tmp_path / "other.tar", "w") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        match = r"other\.tar: its compiled model: the backend host saved it, and fake serves its platform; compile"
        with pytest.raises(BundleError, match=match), open_bundle(tmp_path / "other.tar"):
            pass


def test_a_bundle_of_before_has_no_decision(tmp_path: Path) -> None:
    with installed(example_backend()):
        write_bundle(tmp_path / "old.tar", example_bundle())
        with open_bundle(tmp_path / "old.tar") as opened:
            assert opened.decision is None
