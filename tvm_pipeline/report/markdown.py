"""The report of a run as a Markdown file and pictures: the chosen plan and the reason, predicted and measured figures.

Every figure in it is measured, or is called a prediction; the report ends with the command that repeats the run. Read
next: `tables.py`, whose tables it holds.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from tvm_pipeline.core.plan import Decision, Plan, describe
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import Profile
from tvm_pipeline.core.statistics import RunStatistics, StageRecord
from tvm_pipeline.cost.evaluate import Evaluation, evaluate
from tvm_pipeline.cost.frame_time import frame_time
from tvm_pipeline.files import write_bytes
from tvm_pipeline.report.drawing import draw_graph
from tvm_pipeline.report.frame_bars import draw_frame_time
from tvm_pipeline.report.gantt import draw_gantt, measured_frames
from tvm_pipeline.report.tables import (
    TextTable,
    candidates_table,
    comparison_table,
    duration,
    fps,
    stages_table,
    statistics_table,
)


def write_report(
    folder: Path,
    problem: Problem,
    decision: Decision,
    statistics: RunStatistics,
    records: Sequence[StageRecord] = (),
    *,
    remarks: Sequence[str] = (),
    command: Sequence[str] = (),
    paced: bool = False,
) -> Path:
    """Write the report of one run of `decision.plan`, `report.md`, and its pictures; return the file.

    Args:
        folder: it must exist.
        problem: that the plan was made for; the environment and the warnings of its profile are reported.
        statistics: the measured figures of the run of the chosen plan.
        records: of its workers, as `Pipeline.records` gives them; without any, nothing is drawn.
        remarks: lines to add to the measured figures.
        command: the arguments that made this report (`sys.argv`), printed as the way to reproduce it.
        paced: as of `statistics_table`.

    Raises:
        PipelineError: a file cannot be written, or matplotlib is not installed.
    """
    plan, profile, evaluation = decision.plan, problem.profile, evaluate(problem, decision.plan.stages)
    path = folder / "report.md"
    parts = [
        f"# {problem.graph.name} on {' and '.join(plan.devices)}",
        f"{statistics.frames} frames ran through `{describe(plan)}` at **{fps(statistics.throughput_fps)} frames a "
        f"second**, with a median latency of **{duration(statistics.latency_p50_s)}**.",
        *(f"> **Warning:** {warning}" for warning in profile.warnings),
        "## The plan",
        f"`{describe(plan)}` was chosen for best {plan.objective}: {decision.why}.",
        candidates_table(decision).markdown(),
        *_verification(decision),
        "## Predicted and measured",
        statistics_table(plan.predicted, statistics, inside=plan.frames_inside, paced=paced).markdown(),
        "\n".join(f"- {remark}" for remark in remarks),
        "## Stages",
        _bottleneck(evaluation, plan),
        stages_table(evaluation, plan, statistics).markdown(),
        *(_pictures(folder, problem, plan, statistics, records) if records else ()),
        "## Environment",
        _environment(profile).markdown(),
        "## How to reproduce",
        *_reproduce(plan, profile, command),
    ]
    write_bytes(path, ("\n\n".join(part.strip("\n") for part in parts if part) + "\n").encode())
    return path


def _verification(decision: Decision) -> list[str]:
    """Return what chose the plan: the predictions, or the candidates as they were measured."""
    if not decision.measured:
        return ["Its prediction decided: no candidate was measured for the choice."]
    return [
        "Measurement decided: these candidates ran in turns before the choice.",
        comparison_table(decision.measured).markdown(),
    ]


def _bottleneck(evaluation: Evaluation, plan: Plan) -> str:
    devices = " + ".join(plan.stages[evaluation.bottleneck].devices)
    return f"Stage {evaluation.bottleneck} on {devices} sets the pace."


def _pictures(
    folder: Path, problem: Problem, plan: Plan, statistics: RunStatistics, records: Sequence[StageRecord]
) -> list[str]:
    """Draw the run; return the links."""
    title = "Where the time of a frame goes: the work as predicted, the idle time as measured"
    draw_frame_time(frame_time(problem, plan.stages, statistics.throughput_fps), title, folder / "frame.png")
    draw_gantt(evaluate(problem, plan.stages), plan, measured_frames(records), folder / "gantt.png", statistics)
    draw_graph(problem.graph, plan, folder / "graph.png")
    return [
        "## Pictures",
        "![Where the time of a frame goes](frame.png)",
        "![Frames on the devices, as measured](gantt.png)",
        "![Operators by stage](graph.png)",
    ]


def _environment(profile: Profile) -> TextTable:
    return TextTable("", ("measured with", ""), tuple(profile.environment.items()))


def _reproduce(plan: Plan, profile: Profile, command: Sequence[str]) -> list[str]:
    parts = [f"```\n{shlex.join(command)}\n```"] if command else []
    return [
        *parts,
        f"The graph is {profile.graph}, fingerprint `{profile.fingerprint}`.",
        "The plan, which reads back from a file:",
        f"```\n{str(plan).rstrip()}\n```",
    ]
