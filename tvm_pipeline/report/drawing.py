"""The operator graph as a picture: operators coloured by stage, cuts marked with the bytes that cross them.

Figures are made and written here, also for `gantt.py` and `memory_tables.py`. Read next: `layered.py`, the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Plan, describe
from tvm_pipeline.errors import OptionError, PipelineError
from tvm_pipeline.files import replacing
from tvm_pipeline.report.layered import BOX, Point, Sheet, counted, folded_sheet, layered, legend, tensor_paths

# Light enough to be written on in black; neighbours differ in lightness as well as in hue.
PALETTE = ("#9ecae9", "#ffbf79", "#88d27a", "#f2a0a0", "#d3c0e8", "#f2dc6b", "#83bcb6", "#d8b5a5", "#c8c8c8")

MARGIN = 0.3
INK, PALE, CUT = "#222222", "#8a8a8a", "#c1272d"


def new_figure(width_in: float, height_in: float) -> Any:
    """Return an empty matplotlib Figure, without pyplot and its global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PipelineError(
            f"pictures need matplotlib ({error}); install it with `pip install 'tvm-pipeline[plot]'`"
        ) from error
    figure = Figure(figsize=(width_in, height_in))
    FigureCanvasAgg(figure)
    return figure


def check_picture(path: Path | str) -> None:
    """Raise OptionError unless the name is that of a picture, and PipelineError where nothing can draw one."""
    if Path(path).suffix.lower() not in (".png", ".svg"):
        raise OptionError(f"cannot draw {path}: pictures are .png or .svg")
    new_figure(1.0, 1.0)


def save_figure(figure: Any, path: Path | str) -> None:
    """Write a figure as PNG or SVG, by the suffix of `path`; the file is complete or absent."""
    check_picture(path)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=130, facecolor="white")


def draw_graph(graph: OperatorGraph, plan: Plan, path: Path | str) -> None:
    """Draw the graph as `plan` splits it; `path` ends in .png or .svg.

    Raises:
        PlanError: the plan is of another graph.
        PipelineError: matplotlib is not installed, or the file cannot be written.
        OptionError: `path` is neither .png nor .svg.
    """
    sheet = folded_sheet(layered(graph, plan))
    title = f"{graph.name}, {describe(plan)}: {counted(len(graph))}"
    lines = legend(graph, plan)
    header = MARGIN + 0.22 * (len(lines) + 1) + 0.1
    text_width = max([0.09 * len(title), *(0.4 + 0.068 * len(line) for line in lines)])
    width, height = max(sheet.width, text_width) + 2 * MARGIN, sheet.height + header + MARGIN
    figure = new_figure(width, height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-MARGIN, width - MARGIN)
    axes.set_ylim(height - header, -header)
    _paint_header(axes, title, lines, MARGIN - header)
    _paint_links(axes, sheet)
    _paint_vertices(axes, sheet)
    save_figure(figure, path)


def _paint_header(axes: Any, title: str, lines: Sequence[str], top: float) -> None:
    from matplotlib.patches import Rectangle

    axes.text(0, top, title, fontsize=11, fontweight="bold", va="center")
    for index, line in enumerate(lines):
        y = top + 0.22 * (index + 1)
        colour = PALETTE[index % len(PALETTE)]
        axes.add_patch(Rectangle((0, y - 0.07), 0.28, 0.14, facecolor=colour, edgecolor=INK, linewidth=0.5))
        axes.text(0.38, y, line, fontsize=8, va="center_baseline")


def _paint_links(axes: Any, sheet: Sheet) -> None:
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path as Curve

    heads: dict[int, list[Point]] = {1: [], -1: []}
    curves, colours = [], []
    for way in tensor_paths(sheet):
        curve = [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4] if len(way.points) == 4 else None
        curves.append(Curve(way.points, curve))
        colours.append(CUT if way.crosses else INK)
        if way.arrives:
            heads[way.arrives].append(way.points[-1])
    links = PathCollection(curves, facecolors="none", edgecolors=colours, linewidths=0.8, zorder=1)
    axes.add_collection(links, autolim=False)
    for forward, marker in ((1, "v"), (-1, "^")):
        if heads[forward]:
            axes.scatter(*zip(*heads[forward], strict=True), marker=marker, s=13, color=INK, linewidths=0, zorder=2)


def _paint_vertices(axes: Any, sheet: Sheet) -> None:
    from matplotlib.patches import FancyBboxPatch

    for vertex, (x, y) in sheet.at.items():
        if vertex.kind == "thread":
            continue
        colour = {"operator": PALETTE[vertex.stage % len(PALETTE)]}.get(vertex.kind, "white")
        edge = {"cut": "white", "terminal": PALE}.get(vertex.kind, INK)
        if vertex.kind == "cut":
            axes.plot(sheet.spans[sheet.column[vertex]], [y, y], color=CUT, linestyle="--", linewidth=1, zorder=0)
        corner = (x - vertex.width / 2 + 0.02, y - BOX / 2 + 0.02)
        box = FancyBboxPatch(corner, vertex.width - 0.04, BOX - 0.04, boxstyle="round,pad=0.02,rounding_size=0.04")
        box.set(facecolor=colour, edgecolor=edge, linewidth=0.6, zorder=3)
        axes.add_patch(box)
        text_colour = CUT if vertex.kind == "cut" else INK
        axes.text(x, y, vertex.label, fontsize=6.5, ha="center", va="center_baseline", color=text_colour, zorder=4)
