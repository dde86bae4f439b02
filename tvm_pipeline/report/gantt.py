"""The Gantt chart of a plan: which device works on which frame, and when.

`first_frames` simulates what a plan promises, `draw_gantt` draws it, or whatever else `cost/simulate.py` has simulated.
The real times of a run are in its statistics and traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tvm_pipeline.core.plan import Plan, Stage, describe
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.statistics import Bar
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


def draw_gantt(evaluation: Evaluation, plan: Plan, bars: Sequence[Bar], path: Path | str) -> None:
    """Draw what was simulated of a plan: a row for each device, a colour for each frame.

    Transfers are hatched; the bottleneck is named in the title and its devices are in bold.

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
    axes.set_title(_title(evaluation, plan), loc="left", fontsize=10)
    save_figure(figure, path)


def _title(evaluation: Evaluation, plan: Plan) -> str:
    predicted, devices = evaluation.predicted, " + ".join(plan.stages[evaluation.bottleneck].devices)
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
