"""The layout of a graph in a picture: rows and columns of operators, and the paths of the tensors between them.

Layered layout (Sugiyama, Tagawa and Toda, 1981): each operator is one row below its lowest producer (longest path), a
tensor that passes rows gets a position in each of them, barycentres order the rows. A stage has rows of its own, so
that a cut is a line between two rows. The rows are then folded into as many columns as give a picture of pleasant
proportions: down the first column, up the second. All lengths are inches.

Read next: `drawing.py`, which paints the layout with matplotlib.
"""

from __future__ import annotations

import itertools
import math
import operator as op
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tvm_pipeline.core.graph import OperatorGraph, Tensor, crossing_tensors
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.errors import PlanError
from tvm_pipeline.report.tables import size

PITCH, BOX, CHARACTER, GAP, GUTTER = 0.42, 0.25, 0.059, 0.14, 0.45
LABEL, THREAD_WIDTH, PROPORTIONS, SWEEPS, PULL = 22, 0.06, 1.5, 12, 0.9

Kind = Literal["operator", "terminal", "cut", "thread"]


@dataclass(slots=True, eq=False)
class Vertex:
    """Something with a position in a row: an operator, an input or output, the label of a cut, or a thread.

    A thread is a tensor on its way past a row.
    """

    kind: Kind
    row: int
    label: str = ""
    stage: int = 0
    x: float = 0.0
    above: list[Vertex] = field(default_factory=list)
    below: list[Vertex] = field(default_factory=list)

    @property
    def width(self) -> float:
        return CHARACTER * len(self.label) + 0.12 if self.label else THREAD_WIDTH


def layered(graph: OperatorGraph, plan: Plan) -> list[list[Vertex]]:
    """Return the vertices of each row, ordered, with x and neighbours set."""
    rows = _rows(graph, plan)
    _order(rows)
    _set_x(rows)
    return rows


def _rows(graph: OperatorGraph, plan: Plan) -> list[list[Vertex]]:
    stage_of = {name: index for index, stage in enumerate(plan.stages) for name in stage.operators}
    if set(stage_of) != set(graph.operator_names):
        raise PlanError(f"the plan of {plan.graph} does not hold the operators of {graph.name}; make it again")
    boundaries = crossing_tensors(graph, [stage.operators for stage in plan.stages])
    source = {tensor.name: Vertex("terminal", 0, f"{tensor.name}: {size(tensor.bytes)}") for tensor in graph.inputs}
    vertices = list(source.values())
    readers: dict[Vertex, list[Vertex]] = defaultdict(list)
    row = 0
    for stage in range(len(plan.stages)):
        base = row = row + 1
        for operator in graph.operators:
            if stage_of[operator.name] != stage:
                continue
            producers = list(dict.fromkeys(source[read] for read in operator.inputs))
            level = max([base, *(producer.row + 1 for producer in producers)])
            vertex = Vertex("operator", level, _short(operator.name), stage)
            row = max(row, level)
            vertices.append(vertex)
            source.update((tensor.name, vertex) for tensor in operator.outputs)
            for producer in producers:
                readers[producer].append(vertex)
        if stage + 1 < len(plan.stages):
            row += 1
            vertices.append(Vertex("cut", row, _cut_label(stage + 1, boundaries[stage + 1]), stage))
    for name in graph.outputs:
        label = f"{_short(name)}: {size(graph.tensors[name].bytes)}"
        vertices.append(Vertex("terminal", row + 1, label))
        readers[source[name]].append(vertices[-1])
    rows: list[list[Vertex]] = [[] for _ in range(row + 2)]
    for vertex in vertices:
        rows[vertex.row].append(vertex)
        _thread(rows, vertex, readers[vertex])
    return rows


def _thread(rows: list[list[Vertex]], source: Vertex, readers: Sequence[Vertex]) -> None:
    """Lead a path from `source` down to its readers: one thread for all of them, with branches."""
    at = source
    by_row: dict[int, list[Vertex]] = defaultdict(list)
    for reader in readers:
        by_row[reader.row].append(reader)
    last = max(by_row, default=0)
    for row in range(source.row + 1, last + 1):
        lower = by_row[row]
        if row < last:
            thread = Vertex("thread", row, stage=source.stage)
            rows[row].append(thread)
            lower = [*lower, thread]
        for vertex in lower:
            at.below.append(vertex)
            vertex.above.append(at)
        if row < last:
            at = thread


def _order(rows: list[list[Vertex]]) -> None:
    """Order each row by the mean position of the neighbours, downwards and upwards in turn."""
    position = {vertex: float(index) for row in rows for index, vertex in enumerate(row)}
    for sweep in range(SWEEPS):
        side = op.attrgetter("above" if sweep % 2 == 0 else "below")
        for row in rows if sweep % 2 == 0 else reversed(rows):
            keys = {vertex: _mean(side(vertex), position.__getitem__, position[vertex]) for vertex in row}
            # The label of a cut is beside the tensors that cross it.
            row.sort(key=lambda vertex: (vertex.kind != "cut", keys[vertex]))
            for index, vertex in enumerate(row):
                position[vertex] = index - (len(row) - 1) / 2


def _set_x(rows: list[list[Vertex]]) -> None:
    """Set x: under the neighbours as far as the order and the widths of the row allow."""
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


def _settle(row: list[Vertex], targets: Sequence[float]) -> None:
    """Set x as close to `targets` as possible (least squares) without overlap, by isotonic regression."""
    if not row:
        return
    blocks: list[tuple[float, float, int]] = []  # mean offset-free x, weight, vertices
    offsets = [0.0]
    for left, right in itertools.pairwise(row):
        offsets.append(offsets[-1] + (left.width + right.width) / 2 + GAP)
    for vertex, target, offset in zip(row, targets, offsets, strict=True):
        # A bent thread is uglier than a shifted operator; the label of a cut takes the space that is left.
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


@dataclass(frozen=True, slots=True)
class Sheet:
    """The position of everything, from the top left; `spans` are the left and right ends of each column."""

    width: float
    height: float
    at: dict[Vertex, tuple[float, float]]
    column: dict[Vertex, int]
    spans: list[tuple[float, float]]

    def forward(self, vertex: Vertex) -> int:
        """Return +1 if the rows of its column run downwards, -1 if they run upwards."""
        return -1 if self.column[vertex] % 2 else 1


def folded_sheet(rows: list[list[Vertex]]) -> Sheet:
    """Fold the rows into the number of columns whose picture comes closest to PROPORTIONS."""
    sheets = [_folded(rows, math.ceil(len(rows) / columns)) for columns in range(1, math.isqrt(len(rows)) + 1)]
    return min(sheets, key=lambda sheet: abs(math.log(sheet.width / sheet.height / PROPORTIONS)))


def _folded(rows: list[list[Vertex]], rows_a_column: int) -> Sheet:
    at: dict[Vertex, tuple[float, float]] = {}
    column_of: dict[Vertex, int] = {}
    spans: list[tuple[float, float]] = []
    left = 0.0
    for column, first in enumerate(range(0, len(rows), rows_a_column)):
        part = rows[first : first + rows_a_column]
        low = min((v.x - v.width / 2 for row in part for v in row), default=0.0)
        high = max((v.x + v.width / 2 for row in part for v in row), default=0.0)
        for index, row in enumerate(part):
            # In a column that runs upwards left and right are exchanged, so that threads turn without crossing.
            height = rows_a_column - 1 - index if column % 2 else index
            for vertex in row:
                x = high - vertex.x if column % 2 else vertex.x - low
                at[vertex] = (left + x, (height + 1) * PITCH)
                column_of[vertex] = column
        spans.append((left, left + high - low))
        left += high - low + GUTTER
    return Sheet(left - GUTTER, (rows_a_column + 1) * PITCH, at, column_of, spans)


Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class PathSegment:
    """A piece of a tensor's path: the points of a cubic curve, or the two ends of a line.

    Attributes:
        crosses: whether it crosses a cut.
        arrives: +1 or -1, downwards or upwards, if it ends at a box; 0 if it goes on.
    """

    points: tuple[Point, ...]
    crosses: bool
    arrives: int


def tensor_paths(sheet: Sheet) -> Iterator[PathSegment]:
    """Yield the paths of all tensors, piece by piece."""
    cut_rows = {vertex.row for vertex in sheet.at if vertex.kind == "cut"}
    for upper, (x, y) in sheet.at.items():
        if upper.kind == "thread":
            # A thread passes straight between the boxes of its row.
            yield PathSegment(((x, y - BOX / 2), (x, y + BOX / 2)), upper.row in cut_rows, 0)
        begin = y + sheet.forward(upper) * BOX / 2
        for lower in upper.below:
            end_x, lower_y = sheet.at[lower]
            forward = sheet.forward(lower)
            end = lower_y - forward * BOX / 2
            if sheet.column[upper] == sheet.column[lower]:
                bend = abs(end - begin) / 2
            else:
                bend = min(0.15 + 0.08 * abs(end_x - x), 1.3 * PITCH)
            points = (x, begin), (x, begin + sheet.forward(upper) * bend), (end_x, end - forward * bend), (end_x, end)
            crosses = not cut_rows.isdisjoint((upper.row, lower.row))
            yield PathSegment(points, crosses, 0 if lower.kind == "thread" else forward)


def legend(graph: OperatorGraph, plan: Plan) -> list[str]:
    """Return a line for each stage: its devices, its operators and its parameters."""
    param_bytes = {operator.name: operator.param_bytes for operator in graph.operators}
    return [
        f"stage {index} on {' + '.join(stage.devices)}: {counted(len(stage.operators))}, "
        f"{size(sum(param_bytes[name] for name in stage.operators))} of parameters"
        for index, stage in enumerate(plan.stages)
    ]


def counted(count: int) -> str:
    """Return `1 operator`, `2 operators` and so on."""
    return f"{count} operator{'' if count == 1 else 's'}"


def _cut_label(number: int, crossing: Sequence[Tensor]) -> str:
    count = f" in {len(crossing)} tensors" if len(crossing) > 1 else ""
    return f"cut {number}: {size(sum(tensor.bytes for tensor in crossing))}{count}"


def _short(name: str) -> str:
    """Return a name that fits into a box; its end is kept, because names differ there."""
    return name if len(name) <= LABEL else f"{name[: LABEL - 11]}…{name[-10:]}"


def _mean(vertices: Sequence[Vertex], of: Callable[[Vertex], float], otherwise: float) -> float:
    return sum(map(of, vertices)) / len(vertices) if vertices else otherwise
