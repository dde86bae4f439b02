"""The operator graph as a picture: operators coloured by stage, cuts marked with the bytes that cross them.

Layered layout (Sugiyama, Tagawa and Toda, 1981): each operator stands one row below its lowest producer
(longest path), a tensor that passes rows gets a place in each of them, barycentres order the rows. A stage owns
its rows, so that a cut is a line between two of them. The rows then snake over as many columns as make a picture
of pleasant proportions: down the first column, up the second. All lengths are inches.

Also here, for `gantt.py`: how a figure is made and written.
"""

from __future__ import annotations

import itertools
import math
import operator as op
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tvm_pipeline.errors import OptionError, PipelineError, PlanError
from tvm_pipeline.files import replacing
from tvm_pipeline.graph import OperatorGraph, Tensor, crossing_tensors
from tvm_pipeline.plan import Plan
from tvm_pipeline.report.tables import size
from tvm_pipeline.scheduling import describe

# Light enough to be written on in black; neighbours differ in lightness as well as in hue.
PALETTE = ("#9ecae9", "#ffbf79", "#88d27a", "#f2a0a0", "#d3c0e8", "#f2dc6b", "#83bcb6", "#d8b5a5", "#c8c8c8")

PITCH, BOX, CHARACTER, GAP, GUTTER, MARGIN = 0.42, 0.25, 0.059, 0.14, 0.45, 0.3
LABEL, THREAD_WIDTH, PROPORTIONS, SWEEPS, PULL = 22, 0.06, 1.5, 12, 0.9
INK, PALE, CUT = "#222222", "#8a8a8a", "#c1272d"


def new_figure(width_in: float, height_in: float) -> Any:
    """An empty matplotlib Figure, without pyplot and its global state."""
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


def save_figure(figure: Any, path: Path | str) -> None:
    """Writes a figure as PNG or SVG, by the suffix of `path`; the file is whole or absent."""
    if Path(path).suffix.lower() not in (".png", ".svg"):
        raise OptionError(f"cannot draw {path}: pictures are .png or .svg")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=130, facecolor="white")


def draw_graph(graph: OperatorGraph, plan: Plan, path: Path | str) -> None:
    """Draws the graph as `plan` splits it; `path` ends in .png or .svg.

    Raises:
        PlanError: the plan is of another graph.
        PipelineError: matplotlib is not installed, or the file cannot be written.
        OptionError: `path` is neither .png nor .svg.
    """
    sheet = _fold(_layout(graph, plan))
    title = f"{graph.name}, {describe(plan)}: {_operators(len(graph))}"
    legend = _legend(graph, plan)
    header = MARGIN + 0.22 * (len(legend) + 1) + 0.1
    text_width = max([0.09 * len(title), *(0.4 + 0.068 * len(line) for line in legend)])
    width, height = max(sheet.width, text_width) + 2 * MARGIN, sheet.height + header + MARGIN
    figure = new_figure(width, height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-MARGIN, width - MARGIN)
    axes.set_ylim(height - header, -header)
    _paint_header(axes, title, legend, MARGIN - header)
    _paint_links(axes, sheet)
    _paint_vertices(axes, sheet)
    save_figure(figure, path)


# --- layout: vertices in rows, x in inches about a common axis ---------------------------------------------

Kind = Literal["operator", "terminal", "cut", "thread"]


@dataclass(slots=True, eq=False)
class _Vertex:
    """Something with a place in a row: an operator, an end of the model, the label of a cut, or a thread.

    A thread is a tensor on its way past a row.
    """

    kind: Kind
    row: int
    label: str = ""
    stage: int = 0
    x: float = 0.0
    above: list[_Vertex] = field(default_factory=list)
    below: list[_Vertex] = field(default_factory=list)

    @property
    def width(self) -> float:
        return CHARACTER * len(self.label) + 0.12 if self.label else THREAD_WIDTH


def _layout(graph: OperatorGraph, plan: Plan) -> list[list[_Vertex]]:
    """The vertices of each row, ordered, with x and neighbours set."""
    rows = _rows(graph, plan)
    _order(rows)
    _place(rows)
    return rows


def _rows(graph: OperatorGraph, plan: Plan) -> list[list[_Vertex]]:
    stage_of = {name: index for index, stage in enumerate(plan.stages) for name in stage.operators}
    if set(stage_of) != {operator.name for operator in graph.operators}:
        raise PlanError(f"the plan of {plan.graph} does not hold the operators of {graph.name}; make it anew")
    boundaries = crossing_tensors(graph, [stage.operators for stage in plan.stages])
    source = {tensor.name: _Vertex("terminal", 0, f"{tensor.name}: {size(tensor.bytes)}") for tensor in graph.inputs}
    vertices = list(source.values())
    readers: dict[_Vertex, list[_Vertex]] = defaultdict(list)
    row = 0
    for stage in range(len(plan.stages)):
        base = row = row + 1
        for operator in graph.operators:
            if stage_of[operator.name] != stage:
                continue
            producers = list(dict.fromkeys(source[read] for read in operator.inputs))
            level = max([base, *(producer.row + 1 for producer in producers)])
            vertex = _Vertex("operator", level, _short(operator.name), stage)
            row = max(row, level)
            vertices.append(vertex)
            source.update((tensor.name, vertex) for tensor in operator.outputs)
            for producer in producers:
                readers[producer].append(vertex)
        if stage + 1 < len(plan.stages):
            row += 1
            vertices.append(_Vertex("cut", row, _cut_label(stage + 1, boundaries[stage + 1]), stage))
    for name in graph.outputs:
        label = f"{_short(name)}: {size(graph.tensors[name].bytes)}"
        vertices.append(_Vertex("terminal", row + 1, label))
        readers[source[name]].append(vertices[-1])
    rows: list[list[_Vertex]] = [[] for _ in range(row + 2)]
    for vertex in vertices:
        rows[vertex.row].append(vertex)
        _thread(rows, vertex, readers[vertex])
    return rows


def _thread(rows: list[list[_Vertex]], source: _Vertex, readers: Sequence[_Vertex]) -> None:
    """Leads what `source` writes down to its readers: one thread for all of them, with branches."""
    at = source
    by_row: dict[int, list[_Vertex]] = defaultdict(list)
    for reader in readers:
        by_row[reader.row].append(reader)
    last = max(by_row, default=0)
    for row in range(source.row + 1, last + 1):
        lower = by_row[row]
        if row < last:
            thread = _Vertex("thread", row, stage=source.stage)
            rows[row].append(thread)
            lower = [*lower, thread]
        for vertex in lower:
            at.below.append(vertex)
            vertex.above.append(at)
        if row < last:
            at = thread


def _order(rows: list[list[_Vertex]]) -> None:
    """Orders each row by the mean place of the neighbours, downwards and upwards in turn."""
    place = {vertex: float(index) for row in rows for index, vertex in enumerate(row)}
    for sweep in range(SWEEPS):
        side = op.attrgetter("above" if sweep % 2 == 0 else "below")
        for row in rows if sweep % 2 == 0 else reversed(rows):
            keys = {vertex: _mean(side(vertex), place.__getitem__, place[vertex]) for vertex in row}
            # The label of a cut stands beside what crosses.
            row.sort(key=lambda vertex: (vertex.kind != "cut", keys[vertex]))
            for index, vertex in enumerate(row):
                place[vertex] = index - (len(row) - 1) / 2


def _place(rows: list[list[_Vertex]]) -> None:
    """Sets x: under the neighbours as far as the order and the widths of the row allow."""
    for row in rows:
        _settle(row, [0.0] * len(row))
    for sweep in range(2 * SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            if sweep >= SWEEPS:
                near = [vertex.above + vertex.below for vertex in row]
            else:
                near = [vertex.above if sweep % 2 == 0 else vertex.below for vertex in row]
            # The pull to the common axis keeps a long network from drifting off to one side.
            _settle(row, [PULL * _mean(vertices, lambda v: v.x, 0.0) for vertices in near])


def _settle(row: list[_Vertex], wanted: Sequence[float]) -> None:
    """Gives x closest to `wanted` (least squares) without overlap, by isotonic regression."""
    blocks: list[tuple[float, float, int]] = []  # mean offset-free x, weight, vertices
    offsets = [0.0]
    for left, right in itertools.pairwise(row):
        offsets.append(offsets[-1] + (left.width + right.width) / 2 + GAP)
    for vertex, target, offset in zip(row, wanted, offsets, strict=True):
        # A bent thread is uglier than a shifted operator; the label of a cut goes where there is room.
        weight = {"thread": 3.0, "cut": 0.001}.get(vertex.kind, 1.0)
        x, count = target - offset, 1
        while blocks and blocks[-1][0] > x:
            other_x, other_weight, other_count = blocks.pop()
            x = (x * weight + other_x * other_weight) / (weight + other_weight)
            weight, count = weight + other_weight, count + other_count
        blocks.append((x, weight, count))
    settled = [x for x, _, count in blocks for _ in range(count)]
    for vertex, x, offset in zip(row, settled, offsets, strict=True):
        vertex.x = x + offset


# --- folding: rows into columns -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sheet:
    """Where everything stands, from the top left; `spans` are the ends of each column."""

    width: float
    height: float
    at: dict[_Vertex, tuple[float, float]]
    column: dict[_Vertex, int]
    spans: list[tuple[float, float]]

    def forward(self, vertex: _Vertex) -> int:
        """+1 where the rows of its column run downwards, -1 where they run upwards."""
        return -1 if self.column[vertex] % 2 else 1


def _fold(rows: list[list[_Vertex]]) -> _Sheet:
    """Snakes the rows over the number of columns whose picture comes closest to the wanted proportions."""
    sheets = [_folded(rows, math.ceil(len(rows) / columns)) for columns in range(1, math.isqrt(len(rows)) + 1)]
    return min(sheets, key=lambda sheet: abs(math.log(sheet.width / sheet.height / PROPORTIONS)))


def _folded(rows: list[list[_Vertex]], rows_a_column: int) -> _Sheet:
    at: dict[_Vertex, tuple[float, float]] = {}
    column_of: dict[_Vertex, int] = {}
    spans: list[tuple[float, float]] = []
    left = 0.0
    for column, first in enumerate(range(0, len(rows), rows_a_column)):
        part = rows[first : first + rows_a_column]
        low = min((v.x - v.width / 2 for row in part for v in row), default=0.0)
        high = max((v.x + v.width / 2 for row in part for v in row), default=0.0)
        for index, row in enumerate(part):
            # Going up, left and right change places, so that threads turn the corner without crossing.
            height = rows_a_column - 1 - index if column % 2 else index
            for vertex in row:
                x = high - vertex.x if column % 2 else vertex.x - low
                at[vertex] = (left + x, (height + 1) * PITCH)
                column_of[vertex] = column
        spans.append((left, left + high - low))
        left += high - low + GUTTER
    return _Sheet(left - GUTTER, (rows_a_column + 1) * PITCH, at, column_of, spans)


# --- painting -----------------------------------------------------------------------------------------------


def _legend(graph: OperatorGraph, plan: Plan) -> list[str]:
    """A line for each stage: its devices, and what it holds."""
    param_bytes = {operator.name: operator.param_bytes for operator in graph.operators}
    return [
        f"stage {index} on {' + '.join(stage.devices)}: {_operators(len(stage.operators))}, "
        f"{size(sum(param_bytes[name] for name in stage.operators))} of parameters"
        for index, stage in enumerate(plan.stages)
    ]


def _paint_header(axes: Any, title: str, legend: Sequence[str], top: float) -> None:
    from matplotlib.patches import Rectangle

    axes.text(0, top, title, fontsize=11, fontweight="bold", va="center")
    for index, line in enumerate(legend):
        y = top + 0.22 * (index + 1)
        colour = PALETTE[index % len(PALETTE)]
        axes.add_patch(Rectangle((0, y - 0.07), 0.28, 0.14, facecolor=colour, edgecolor=INK, linewidth=0.5))
        axes.text(0.38, y, line, fontsize=8, va="center_baseline")


def _paint_links(axes: Any, sheet: _Sheet) -> None:
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path as Curve

    cut_rows = {vertex.row for vertex in sheet.at if vertex.kind == "cut"}
    heads: dict[int, list[tuple[float, float]]] = {1: [], -1: []}
    curves, colours = [], []
    for upper, (x, y) in sheet.at.items():
        if upper.kind == "thread":
            # Straight past the boxes beside it.
            curves.append(Curve([(x, y - BOX / 2), (x, y + BOX / 2)]))
            colours.append(CUT if upper.row in cut_rows else INK)
        for lower in upper.below:
            start = (x, y + sheet.forward(upper) * BOX / 2)
            lower_x, lower_y = sheet.at[lower]
            end = (lower_x, lower_y - sheet.forward(lower) * BOX / 2)
            if sheet.column[upper] == sheet.column[lower]:
                bend = (end[1] - start[1]) / 2
            else:
                bend = sheet.forward(upper) * min(0.15 + 0.08 * abs(end[0] - start[0]), 1.3 * PITCH)
            bent_end = end[1] - sheet.forward(lower) * abs(bend)
            points = [start, (start[0], start[1] + bend), (end[0], bent_end), end]
            curves.append(Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4]))
            colours.append(CUT if {upper.row, lower.row} & cut_rows else INK)
            if lower.kind != "thread":
                heads[sheet.forward(lower)].append(end)
    links = PathCollection(curves, facecolors="none", edgecolors=colours, linewidths=0.8, zorder=1)
    axes.add_collection(links, autolim=False)
    for forward, marker in ((1, "v"), (-1, "^")):
        if heads[forward]:
            axes.scatter(*zip(*heads[forward], strict=True), marker=marker, s=13, color=INK, linewidths=0, zorder=2)


def _paint_vertices(axes: Any, sheet: _Sheet) -> None:
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


# --- small things -------------------------------------------------------------------------------------------


def _operators(count: int) -> str:
    return f"{count} operator{'' if count == 1 else 's'}"


def _cut_label(number: int, crossing: Sequence[Tensor]) -> str:
    count = f" in {len(crossing)} tensors" if len(crossing) > 1 else ""
    return f"cut {number}: {size(sum(tensor.bytes for tensor in crossing))}{count}"


def _short(name: str) -> str:
    """A name that fits a box; the end stays, since that is where names differ."""
    return name if len(name) <= LABEL else f"{name[: LABEL - 11]}…{name[-10:]}"


def _mean(vertices: Sequence[_Vertex], of: Callable[[_Vertex], float], otherwise: float) -> float:
    return sum(map(of, vertices)) / len(vertices) if vertices else otherwise
