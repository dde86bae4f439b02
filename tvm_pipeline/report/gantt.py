"""The Gantt chart of a plan: which device works on which frame, and when.

`schedule` is data, `draw_gantt` its picture. It shows what the plan promises, from the seconds of
`evaluate.py` alone, or what `simulate.py` made of it; what a run really did stands in its statistics and traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tvm_pipeline.core.plan import Plan, describe
from tvm_pipeline.cost.evaluate import Evaluation, StageCost
from tvm_pipeline.cost.simulate import Bar
from tvm_pipeline.core.statistics import Bar
from tvm_pipeline.planning import describe
from tvm_pipeline.report.drawing import INK, PALETTE, new_figure, save_figure
from tvm_pipeline.report.tables import duration, fps


def schedule(costs: Iterable[StageCost], frames: int) -> list[Bar]:
    """The first `frames` frames through a pipeline whose source is never empty, in the order of their starts.

    As in the running pipeline, a stage takes frames in the order in which they left the stage before, the
    replica that is free first takes the next, and a device does one thing at a time. Where a device could
    start several things at once, the earlier frame goes first, then the lower stage. Queues between stages
    have no limit here.
    """
    costs = tuple(costs)
    stages = max((cost.stage for cost in costs), default=-1) + 1
    # What waits in front of each stage: (when it left the stage before, frame), first come first.
    queues: list[list[tuple[float, int]]] = [[(0.0, frame) for frame in range(frames)]]
    queues += [[] for _ in range(stages)]
    free_s = {cost.device: 0.0 for cost in costs}
    bars: list[Bar] = []
    while len(bars) < frames * stages:
        start_s, frame, stage, index = min(
            (max(free_s[cost.device], queues[cost.stage][0][0]), queues[cost.stage][0][1], cost.stage, index)
            for index, cost in enumerate(costs)
            if queues[cost.stage]
        )
        cost = costs[index]
        bar = Bar(stage, cost.device, frame, start_s, cost.transfer_s, cost.compute_s)
        bars.append(bar)
        free_s[cost.device] = bar.end_s
        del queues[stage][0]
        queues[stage + 1].append((bar.end_s, frame))
        queues[stage + 1].sort()
    return bars


def draw_gantt(
    evaluation: Evaluation, plan: Plan, path: Path | str, frames: int = 8, simulated: Sequence[Bar] | None = None
) -> None:
    """Draws the first `frames` frames of the plan, or all that was simulated: a row a device, a colour a frame.

    Transfers are hatched; the stage that sets the pace is named in the title and its devices are in bold.

    Raises:
        PipelineError: matplotlib is not installed, or the file cannot be written.
        OptionError: `path` is neither .png nor .svg.
    """
    bars = schedule(evaluation.costs, frames) if simulated is None else simulated
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
    title = _title(evaluation, plan) + ("" if simulated is None else "; simulated")
    axes.set_title(title, loc="left", fontsize=10)
    save_figure(figure, path)


def _title(evaluation: Evaluation, plan: Plan) -> str:
    predicted, devices = evaluation.predicted, " + ".join(plan.stages[evaluation.bottleneck].devices)
    return (
        f"{plan.graph}, {describe(plan)}\n"
        f"predicted {fps(predicted.throughput_fps)} fps, latency {duration(predicted.latency_s)}; "
        f"bottleneck: stage {evaluation.bottleneck} on {devices}"
    )


def _stages_of(plan: Plan, device: str) -> list[int]:
    return [index for index, stage in enumerate(plan.stages) if device in stage.devices]


def _row_label(plan: Plan, device: str) -> str:
    stages = _stages_of(plan, device)
    return f"{device}\nstage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
