"""YOLO: boxes in rows, by grids of strides 8, 16, 32 (and 64), with or without objectness, anchors and suppression.

    yolov5    [1, N, 5 + classes]   center, size, objectness, scores; N: three anchors a cell, or one (YOLOv6, YOLOX
                                    with its grids decoded)
    yolov8    [1, 4 + classes, N]   center, size, scores: v8 to v12; or transposed
    yolox     [1, N, 5 + classes]   as yolov5, with center and size still relative to the cell
    yolov10   [1, K, 6]             corners, score, class: end to end, v10 and YOLO26; nothing is to be suppressed

Coordinates are pixels of the model's input, or shares of it, as Ultralytics exports TFLite: grids that cover the
input have centers beyond two pixels, so the two cannot be confused. Read next: yolo_variants.py (masks, key points,
turned boxes), boxes.py (suppression).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from tvm_pipeline import Tensor
from tvm_pipeline_video.annotations import Annotation
from tvm_pipeline_video.decoders.boxes import Floats, Indices, annotated, from_centers, kept
from tvm_pipeline_video.decoders.interface import Format, Interface, Options, Outputs
from tvm_pipeline_video.preprocessing import Transform

THRESHOLD = 0.25  # as Ultralytics has it
OVERLAP = 0.45
STRIDES = ((8, 16, 32), (8, 16, 32, 64))
SHARES = 2.0  # coordinates that are all below are shares of the input


@dataclass(frozen=True, slots=True)
class Rows:
    """An output that has a row for each cell of the grids.

    Attributes:
        columns: of each row.
        last: whether the columns are the last extent, as in [1, N, columns].
        anchors: rows for each cell.
    """

    tensor: Tensor
    columns: int
    last: bool
    anchors: int


def rows_of(model: Interface) -> Rows | None:
    """Return the one output that has a row for each cell; None where there is none."""
    cells = {model.cells(*strides) * anchors: anchors for strides in STRIDES for anchors in (1, 3)}
    found = [
        Rows(tensor, tensor.shape[3 - axis], axis == 1, cells[tensor.shape[axis]])
        for tensor in model.outputs
        if len(tensor.shape) == 3 and tensor.shape[0] == 1 and model.width
        for axis in (1, 2)
        if tensor.shape[axis] in cells and tensor.shape[3 - axis] > 4
    ]
    return found[0] if len(found) == 1 else None


def forms(model: Interface, name: str) -> list[Format]:
    """Return the forms whose rows fit the grids over the input; several where the shape does not tell them apart."""
    if ends := _end_to_end(model):
        return [ends]
    rows = rows_of(model)
    if rows is None or model.task in ("segment", "pose", "obb"):
        return []
    others = [tensor for tensor in model.outputs if tensor is not rows.tensor]
    if any(len(tensor.shape) < 5 for tensor in others):  # the heads [1, 3, 80, 80, 85] beside v5's rows are no matter
        return []
    size = (model.width, model.height)
    count = rows.columns
    v8 = _form("yolov8", rows, count - 4, partial(Yolo, rows, size, False, False))
    v5 = _form("yolov5", rows, count - 5, partial(Yolo, rows, size, True, False))
    x = _form("yolox", rows, count - 5, partial(Yolo, rows, size, True, True), "yolox")
    if rows.anchors == 3:
        found = [v5]
    elif not rows.last:
        found = [v8]
    else:
        found = [v8, v5, x]
        if model.labels:  # the number of classes tells columns with objectness from those without
            found = [form for form in found if form.classes == len(model.labels)]
    return [form for form in found if form.classes > 0]


def _form(name: str, rows: Rows, classes: int, make: partial[Yolo], preset: str = "yolo") -> Format:
    return Format(name, (rows.tensor,), make, classes, threshold=THRESHOLD, preset=preset)


def _end_to_end(model: Interface) -> Format | None:
    if len(model.outputs) != 1 or not model.width:
        return None
    tensor = model.outputs[0]
    shape = tensor.shape
    if len(shape) != 3 or shape[0] != 1 or shape[2] != 6 or shape[1] > 1000 or rows_of(model):
        return None
    make = partial(EndToEnd, tensor.name, (model.width, model.height))
    return Format("yolov10", (tensor,), make, len(model.labels), threshold=THRESHOLD, preset="yolo")


@dataclass(frozen=True)
class Yolo:
    """Finds boxes in rows of grids."""

    rows: Rows
    size: tuple[int, int]
    objectness: bool
    relative: bool  # to the cell: YOLOX
    options: Options

    def __call__(self, outputs: Outputs, transform: Transform) -> list[Annotation]:
        table = flat(outputs, self.rows)
        first = 5 if self.objectness else 4
        weights = table[4] if self.objectness else None
        boxes, scores, classes, _ = candidates(table, slice(first, None), self.options.threshold, self.grid(), weights)
        boxes = from_centers(boxes if self.relative else in_pixels(boxes, self.size, table))
        best = kept(boxes, scores, classes, OVERLAP)
        return annotated(boxes[best], scores[best], classes[best], self.options.label, transform)

    def grid(self) -> Floats | None:
        """Return (3, N): left, top and stride of each cell, where coordinates are relative to it."""
        if not self.relative:
            return None
        count = self.rows.tensor.shape[1 if self.rows.last else 2]
        for strides in STRIDES:
            parts = []
            for stride in strides:
                down, across = -(-self.size[1] // stride), -(-self.size[0] // stride)
                y, x = np.mgrid[:down, :across].reshape(2, -1)
                parts.append(np.stack([x, y, np.full(down * across, stride)]))
            cells = np.concatenate(parts, axis=1).astype(np.float32)
            if cells.shape[1] == count:
                return cells
        return None


@dataclass(frozen=True)
class EndToEnd:
    """Reads boxes that the model has sorted and suppressed itself."""

    name: str
    size: tuple[int, int]
    options: Options

    def __call__(self, outputs: Outputs, transform: Transform) -> list[Annotation]:
        rows = only(outputs, self.name)[0]
        rows = rows[rows[:, 4] >= self.options.threshold]
        boxes = in_pixels(rows[:, :4], self.size, rows[:, :4].T)
        return annotated(boxes, rows[:, 4], rows[:, 5].astype(np.intp), self.options.label, transform)


def only(outputs: Outputs, name: str) -> Floats:
    """Return an output by its name."""
    return np.asarray(outputs[name], np.float32)


def flat(outputs: Outputs, rows: Rows) -> Floats:
    """Return the columns of the rows first: (columns, N)."""
    table = only(outputs, rows.tensor.name)[0]
    return np.asarray(table.T if rows.last else table)


def candidates(
    table: Floats, scored: slice, threshold: float, grid: Floats | None = None, weights: Floats | None = None
) -> tuple[Floats, Floats, Indices, Indices]:
    """Return the rows that reach the threshold: center and size (count, 4), score, best class, and their indices.

    Args:
        table: (columns, N).
        scored: the columns of the classes' scores.
        grid: see `Yolo.grid`.
        weights: what scores are multiplied by, (N,): objectness.
    """
    if weights is None:
        scores = table[scored].max(axis=0)
        found = np.flatnonzero(scores >= threshold)
    else:  # no score is above one, so that most rows need no look at their classes
        likely = np.flatnonzero(weights >= threshold)
        scores = np.zeros_like(weights)
        scores[likely] = table[scored, likely].max(axis=0) * weights[likely]
        found = np.flatnonzero(scores >= threshold)
    classes = table[scored, found].argmax(axis=0)
    boxes = table[:4, found].T
    if grid is not None:
        left, top, stride = grid[:, found]
        x, y, width, height = boxes.T
        boxes = np.stack([x + left, y + top, np.exp(width), np.exp(height)], axis=1) * stride[:, None]
    return boxes, scores[found], classes, found


def in_pixels(boxes: Floats, size: tuple[int, int], table: Floats) -> Floats:
    """Return coordinates in pixels of the input: as they are, or times its size where they are shares of it.

    Args:
        boxes: (count, 4).
        table: (columns, N), all rows, whose first two columns are coordinates.
    """
    if table.shape[1] and float(table[:4].max()) < SHARES:
        return np.asarray(boxes * np.array([*size, *size], np.float32))
    return boxes
