"""Every cut as a table and as a picture: predicted beside measured, with the chosen and the best one marked.

Next: `measured_cuts.py`, which measures; `report/drawing.py`, which makes and writes figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tvm_pipeline.report import TextTable, duration, size
from tvm_pipeline.report.drawing import CUT, INK, new_figure, save_figure
from tvm_pipeline.report.tables import joules, percent, relative_error
from tvm_pipeline_papers.measured_cuts import CutComparison, MeasuredCut

COLOURS = ("#1f77b4", "#e07b00")  # one for each order of the devices


def cuts_table(comparison: CutComparison) -> TextTable:
    """Return a row for each cut; the one that is predicted to be the best and the one measured to be it are marked.

    A cut that is no plan, or that did not run, has the reason in its last column.
    """
    what = "period" if comparison.objective == "throughput" else "latency"
    has_energy = any(found.cut.plan and found.cut.plan.predicted.energy_j is not None for found in comparison.cuts)
    by = next((found.result.energy.by for found in comparison.cuts if found.result and found.result.energy), "")
    rows, marked = [], set()
    for index, found in enumerate(comparison.cuts):
        note = _note(comparison, found)
        if found in (comparison.chosen, comparison.best):
            marked.add(index)
        row = [str(found.cut), size(found.cut.crossing_bytes), duration(found.predicted_s)]
        row += [duration(found.measured_s), relative_error(found.predicted_s, found.measured_s)]
        row.append(percent(found.result.spread if found.result else None))
        if has_energy:
            row.append(joules(found.cut.plan.predicted.energy_j if found.cut.plan else None))
        if by:
            energy = found.result.energy if found.result else None
            row.append(joules(energy.energy_j if energy else None))
        rows.append((*row, note))
    columns = ["operators", "crossing", "predicted", "measured", "error", "spread"]
    columns += ["J/frame predicted"] if has_energy else []
    columns += [f"J/frame by {by}"] if by else []
    title = (
        f"The {what} of every cut. Predicted best: {comparison.chosen.cut}. Measured best: {comparison.best.cut}. "
        f"The first takes {comparison.ratio:.3f} times as long."
    )
    return TextTable(title, (*columns, ""), tuple(rows), frozenset(marked))


def _note(comparison: CutComparison, found: MeasuredCut) -> str:
    if found.cut.obstacle:
        return f"not possible: {found.cut.obstacle}"
    marks = [(comparison.chosen, "predicted best"), (comparison.best, "measured best")]
    return ", ".join(mark for marked, mark in marks if found == marked)


def draw_cuts(comparison: CutComparison, path: Path | str, title: str = "") -> None:
    """Draw predicted and measured seconds against the cut, for both orders of the devices.

    Both ends of a line are one device alone. A cut that is not possible is a gap.

    Raises:
        PipelineError: matplotlib is not installed, or the file cannot be written.
        OptionError: `path` is neither .png nor .svg.
    """
    figure = new_figure(9, 4.6)
    figure.set_layout_engine("constrained")
    plot_cuts(figure.add_subplot(), comparison, title)
    save_figure(figure, path)


def plot_cuts(axes: Any, comparison: CutComparison, title: str = "") -> None:
    """Draw the same on the axes of a figure of the caller's."""
    orders = list(dict.fromkeys(found.cut.devices for found in comparison.cuts))
    for devices, colour in zip(orders, COLOURS, strict=False):
        line = _line(comparison.cuts, devices)
        counts = range(len(line))
        name = f"{devices[0]} | {devices[1]}"
        predicted = _in_ms(line, lambda found: found.predicted_s)
        axes.plot(counts, predicted, "--", color=colour, linewidth=1.2, label=f"{name}, predicted")
        axes.plot(
            counts,
            _in_ms(line, lambda found: found.measured_s),
            "o-",
            color=colour,
            markersize=3.5,
            linewidth=1.2,
            label=f"{name}, measured",
        )
    marks = [(comparison.chosen, "*", 15, CUT, "predicted best"), (comparison.best, "o", 12, INK, "measured best")]
    for found, marker, width, colour, label in marks:
        at = (found.cut.operators, (found.measured_s or math.nan) * 1e3)
        axes.plot(*at, marker, color=colour, markersize=width, fillstyle="none", linestyle="", label=label)
    what = "period" if comparison.objective == "throughput" else "latency"
    axes.set_xlabel("operators on the first device")
    axes.set_ylabel(f"{what}, ms")
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _line(cuts: Sequence[MeasuredCut], devices: tuple[str, str]) -> list[MeasuredCut | None]:
    """Return the cuts of one order by the operators of the first device; with none of them, the second one is alone."""
    alone = [found for found in cuts if found.cut.devices == devices[::-1] and found.cut.operators == found.cut.total]
    inner = sorted((found for found in cuts if found.cut.devices == devices), key=lambda found: found.cut.operators)
    return [alone[0] if alone else None, *inner]


def _in_ms(line: Sequence[MeasuredCut | None], seconds: Callable[[MeasuredCut], float | None]) -> list[float]:
    found = [seconds(each) if each else None for each in line]
    return [math.nan if each is None else each * 1e3 for each in found]
