"""The report of a run as one Markdown file: the model, the chosen plan and the reason, predicted and measured figures.

Every figure in it is measured, or is called a prediction; the report ends with the command that repeats the run. Read
next: `tables.py`, whose tables it holds.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from tvm_pipeline.core.plan import Decision, Measured, Plan, describe
from tvm_pipeline.core.profile import Profile
from tvm_pipeline.core.statistics import RunStatistics
from tvm_pipeline.cost.evaluate import Evaluation
from tvm_pipeline.files import write_bytes
from tvm_pipeline.report.tables import (
    TextTable,
    candidates_table,
    comparison_table,
    duration,
    fps,
    percent,
    stages_table,
    statistics_table,
)


def write_report(
    path: Path | str,
    *,
    model: str,
    decision: Decision,
    evaluation: Evaluation,
    profile: Profile,
    statistics: RunStatistics,
    comparison: Sequence[Measured] = (),
    remarks: Sequence[str] = (),
    pictures: Mapping[str, Path | str] | None = None,
    command: Sequence[str] = (),
) -> None:
    """Write the report of one run of `decision.plan`.

    Args:
        path: the file, usually `report.md`; its folder must exist.
        model: the model as the user named it: a file or a built-in network.
        evaluation: that of the chosen plan.
        profile: the profile that the plan was made from; its environment and warnings are reported.
        statistics: the measured figures of the run of the chosen plan.
        comparison: the candidates, run side by side (`runtime.comparison.compare`), the chosen plan first.
        remarks: paragraphs to add to the measured figures.
        pictures: caption -> file; linked relative to the report.
        command: the arguments that made this report (`sys.argv`), printed as the way to reproduce it.

    Raises:
        PipelineError: the file cannot be written.
    """
    path, plan = Path(path), decision.plan
    parts = [
        f"# {model} on {' and '.join(plan.devices)}",
        _summary(plan, statistics, comparison),
        *(f"> **Warning:** {warning}" for warning in profile.warnings),
        "## The plan",
        f"`{describe(plan)}` was chosen for best {plan.objective}: {decision.why}.",
        candidates_table(decision).markdown(),
        *_verification(decision),
        "## Predicted and measured",
        statistics_table(plan.predicted, statistics, inside=plan.frames_inside).markdown(),
        *remarks,
        *(_side_by_side(comparison) if comparison else ()),
        "## Stages",
        _bottleneck(evaluation, plan),
        stages_table(evaluation, plan, statistics).markdown(),
        *_pictures(path.parent, pictures or {}),
        "## Environment",
        _environment(profile).markdown(),
        "## How to reproduce",
        *_reproduce(plan, profile, command),
    ]
    write_bytes(path, ("\n\n".join(part.strip("\n") for part in parts) + "\n").encode())


def _summary(plan: Plan, statistics: RunStatistics, comparison: Sequence[Measured]) -> str:
    text = (
        f"{statistics.frames} frames ran through `{describe(plan)}` at **{fps(statistics.throughput_fps)} frames a "
        f"second**, with a median latency of **{duration(statistics.latency_p50_s)}**."
    )
    if len(comparison) < 2:
        return text
    chosen, *others = comparison
    best = max(others, key=lambda result: result.throughput_fps)
    lead = percent(chosen.throughput_fps / best.throughput_fps - 1, signed=True)
    text += (
        f" Side by side with the other candidates it reached {fps(chosen.throughput_fps)} (predicted "
        f"{fps(plan.predicted.throughput_fps)}), {lead} against the fastest other, `{describe(best.plan)}`."
    )
    if chosen.throughput_fps < best.throughput_fps and plan.objective == "throughput":
        text += " **The chosen plan was not the fastest**; profile again on a quiet machine."
    return text


def _verification(decision: Decision) -> list[str]:
    """Return what chose the plan: the predictions, or the candidates as they were measured."""
    if not decision.measured:
        return ["Its prediction decided: no candidate was measured for the choice."]
    return [
        "Measurement decided: these candidates ran in turns before the choice.",
        comparison_table(decision.measured).markdown(),
    ]


def _side_by_side(comparison: Sequence[Measured]) -> list[str]:
    return [
        "The candidates side by side, in turns, on noise instead of the source: nothing decodes or draws meanwhile. "
        "`full, 99 %` is the latency in a full pipeline, queues included.",
        comparison_table(comparison).markdown(),
    ]


def _bottleneck(evaluation: Evaluation, plan: Plan) -> str:
    devices = " + ".join(plan.stages[evaluation.bottleneck].devices)
    return f"Stage {evaluation.bottleneck} on {devices} sets the pace."


def _pictures(folder: Path, pictures: Mapping[str, Path | str]) -> list[str]:
    links = []
    for caption, picture in pictures.items():
        relative = Path(os.path.relpath(picture, folder)).as_posix()
        links.append(f"![{caption}]({quote(relative)})")
    return ["## Pictures", *links] if links else []


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
