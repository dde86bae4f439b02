"""The Gantt chart of a plan: which device works on which frame, and when.

`first_frames` simulates what a plan promises, `measured_frames` takes some frames of a run, `draw_gantt` draws either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tvm_pipeline.core.plan import Plan, Stage, describe
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.statistics import Bar, RunStatistics, StageRecord
from tvm_pipeline.cost.evaluate import Evaluation, evaluate
from tvm_pipeline.cost.simulate import simulate
from tvm_pipeline.report.drawing import INK, PALETTE, new_figure, save_figure
from tvm_pipeline.report.tables import duration, fps

DRAWN_FRAMES = 8


def first_frames(problem: Problem, stages: tuple[Stage, ...], frames: int = DRAWN_FRAMES) -> tuple[Bar, ...]:
    """Return what each device does for the first frames of a source that is never empty, by their starts.

    Nothing is returned if nothing says how fast the devices are.

    Raises:
        PlanError: the stages do not fit the problem.
    """
    if not evaluate(problem, stages).costs:
        return ()
    return simulate(problem, stages, frames).events


def measured_frames(records: Sequence[StageRecord], frames: int = DRAWN_FRAMES) -> list[Bar]:
    """Return what each device did for some frames in the middle of a run, from 0 s on and by their starts.

    Args:
        records: of the workers, as `Pipeline.records` gives them.
    """
    bars = [
        Bar(record.stage, record.device, sample.frame, start_s, sample.transfer_s, sample.compute_s)
        for record in records
        for sample in record.samples
        for start_s in (sample.done_s - sample.transfer_s - sample.compute_s,)
    ]
    first = max((bar.frame for bar in bars), default=0) // 2
    kept = sorted((bar for bar in bars if 0 <= bar.frame - first < frames), key=lambda bar: bar.start_s)
    return [replace(bar, start_s=bar.start_s - kept[0].start_s) for bar in kept]


def draw_gantt(
    evaluation: Evaluation, plan: Plan, bars: Sequence[Bar], path: Path | str, measured: RunStatistics | None = None
) -> None:
    """Draw a plan or a run of it: a row for each device, a colour for each frame.

    Transfers are hatched; the bottleneck is named in the title and its devices are in bold.

    Args:
        measured: the figures of the run that the bars are of; None where they were simulated.

    Raises:
        PipelineError: matplotlib is not installed, or the file cannot be written.
        OptionError: `path` is neither .png nor .svg.
    """
    rows = {device: row for row, device in enumerate(plan.devices)}
    end_s = max((bar.end_s for bar in bars), default=0.0) or 1.0
    unit_s, unit = next(((u, n) for u, n in ((1.0, "s"), (1e-3, "ms")) if end_s >= u), (1e-6, "µs"))
    figure = new_figure(11, 1.7 + 0.62 * len(rows))
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    for bar in bars:
        row, colour = rows[bar.device], PALETTE[bar.frame % len(PALETTE)]
        left, transfer, compute = bar.start_s / unit_s, bar.transfer_s / unit_s, bar.compute_s / unit_s
        if transfer:
            axes.barh(row, transfer, 0.76, left, facecolor=colour, edgecolor=INK, linewidth=0, hatch="//////")
        axes.barh(row, compute, 0.76, left + transfer, facecolor=colour)
        axes.plot([left, left], [row - 0.38, row + 0.38], color="white", linewidth=1.2)
        label = f"{bar.frame}" if _stages_of(plan, bar.device) == [bar.stage] else f"{bar.frame}\ns{bar.stage}"
        if bar.compute_s > 0.015 * end_s:
            axes.text(left + transfer + compute / 2, row, label, ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [_row_label(plan, device) for device in rows])
    for tick, device in zip(axes.get_yticklabels(), rows, strict=True):
        if evaluation.bottleneck in _stages_of(plan, device):
            tick.set_fontweight("bold")
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(0, end_s / unit_s * 1.01)
    axes.set_xlabel(f"time, {unit} (a colour and a number for each frame, hatched while its tensors are received)")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(_title(evaluation, plan, measured), loc="left", fontsize=10)
    save_figure(figure, path)


def _title(evaluation: Evaluation, plan: Plan, measured: RunStatistics | None) -> str:
    predicted, devices = evaluation.predicted, " + ".join(plan.stages[evaluation.bottleneck].devices)
    if measured is not None:
        return (
            f"{plan.graph}, {describe(plan)}\n"
            f"measured {fps(measured.throughput_fps)} fps, predicted {fps(predicted.throughput_fps)}; "
            f"latency under load {duration(measured.latency_p50_s)}"
        )
    return (
        f"{plan.graph}, {describe(plan)}\n"
        f"predicted {fps(predicted.throughput_fps)} fps, latency {duration(predicted.latency_s)}; "
        f"bottleneck: stage {evaluation.bottleneck} on {devices}; simulated"
    )


def _stages_of(plan: Plan, device: str) -> list[int]:
    return [index for index, stage in enumerate(plan.stages) if device in stage.devices]


def _row_label(plan: Plan, device: str) -> str:
    stages = _stages_of(plan, device)
    return f"{device}\nstage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
