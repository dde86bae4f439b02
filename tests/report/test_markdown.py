"""The report: every figure that went in is in it, links lead to the pictures, and it does not flatter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tvm_pipeline import planning
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Decision, Measured, Plan, describe
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.core.statistics import RunStatistics, StageStatistics
from tvm_pipeline.errors import PipelineError
from tvm_pipeline.report import comparison_table, write_report

TENSORS = [Tensor(f"t{index}", (1, 1000)) for index in range(4)]
GRAPH = OperatorGraph(
    "net",
    (TENSORS[0],),
    tuple(Operator(f"op_{i}", "dense", (TENSORS[i].name,), (TENSORS[i + 1],)) for i in range(3)),
    ("t3",),
)
PROFILE = Profile(
    "net",
    GRAPH.fingerprint,
    {
        "big": DeviceProfile.in_order(GRAPH, (0.010, 0.004, 0.020)),
        "little": DeviceProfile.in_order(GRAPH, (0.050, 0.012, 0.016)),
    },
    environment={"processor": "Quantum 9000", "tvm": "0.19.0"},
    warnings=("device big was busy with something else",),
)
PROBLEM = Problem(GRAPH, Platform("board", (Device("big"), Device("little"))), PROFILE)


def measured(throughput_fps: float) -> RunStatistics:
    stages = (StageStatistics(0, "big", 100, 0.0147, 0.0, 0.001, 0.02),)
    return RunStatistics(100, throughput_fps, 0.0401, 0.0412, 0.0423, 0.0434, stages)


def report(folder: Path) -> tuple[str, Decision]:
    decision = planning.plan(PROBLEM)
    command = ["tvm-pipeline", "run", "my net.onnx"]
    path = write_report(folder, PROBLEM, decision, measured(60.0), remarks=["it rained"], command=command)
    return path.read_text(encoding="utf-8"), decision


def test_report_holds_what_was_given(tmp_path: Path) -> None:
    text, decision = report(tmp_path)
    assert text.startswith("# net on big and little\n")
    # Stages of 14 ms on big and 16 ms on little.
    assert "**60.0 frames a second**" in text
    assert "| throughput, fps | 62.5 | 60.0 | +4.2% |" in text
    assert "\n- it rained\n" in text
    assert decision.why in text
    assert "the chosen one is the best possible" in text
    assert "> **Warning:** device big was busy with something else" in text
    assert "| processor | Quantum 9000 |" in text
    assert "Pictures" not in text
    assert "tvm-pipeline run 'my net.onnx'" in text
    assert GRAPH.fingerprint in text
    assert "Stage 1 on little sets the pace" in text
    for shown in ("14.7 ms", "40.1 ms", "41.2 ms", "42.3 ms", "43.4 ms"):
        assert shown in text
    for plan in decision.candidates:
        assert describe(plan).replace("|", "\\|") in text


def test_it_says_what_decided(tmp_path: Path) -> None:
    text, decision = report(tmp_path)
    assert "Its prediction decided: no candidate was measured" in text
    chosen, other, *_ = decision.candidates
    ran = (Measured(chosen, 61.0, 0.02, 0.03, measured(61.0)), Measured(other, 42.0, 0.02, 0.03, measured(42.0)))
    path = write_report(tmp_path, PROBLEM, replace(decision, measured=ran), measured(60.0))
    text = path.read_text(encoding="utf-8")
    assert "Measurement decided" in text
    assert comparison_table(ran).markdown().strip() in text


def test_the_plan_in_it_parses_back(tmp_path: Path) -> None:
    text, decision = report(tmp_path)
    block = next(part for part in text.split("```\n") if part.startswith("plan "))
    assert Plan.parse(block) == decision.plan


def test_a_run_too_short_to_measure_and_an_unproven_plan(tmp_path: Path) -> None:
    decision = planning.plan(PROBLEM)
    plan = replace(decision.plan, status="feasible", bound=(decision.plan.predicted.throughput_fps / 0.9,))
    statistics = RunStatistics(1, None, None, None, None, None, ())
    path = write_report(tmp_path, PROBLEM, Decision(plan, (plan,), "it was asked for"), statistics)
    text = path.read_text(encoding="utf-8")
    assert "**- frames a second**" in text
    assert "(11.1% above the chosen one)" in text
    with pytest.raises(PipelineError, match="cannot write"):
        write_report(tmp_path / "absent", PROBLEM, decision, measured(1.0))
