"""YOLO's variants of v8 and later: masks (segment), key points (pose) and turned boxes (obb).

    yolov8-seg     [1, 4 + classes + 32, N] and prototypes of masks [1, 32, h, w]
    yolov8-pose    [1, 4 + 1 + points * 2 or 3, N]
    yolov8-obb     [1, 4 + classes + 1, N], the last column is the angle

Pose and obb look like a detector of other classes, so they are recognised by the file's metadata (`task`,
`kpt_shape`), or named. Read next: yolo.py, for the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from tvm_pipeline import Tensor
from tvm_pipeline.frontends.model_metadata import literal
from tvm_pipeline_video.annotations import Annotation, Mask
from tvm_pipeline_video.decoders.boxes import Floats, annotated, from_centers, kept, probabilities, to_picture
from tvm_pipeline_video.decoders.interface import Format, Interface, Options, Outputs
from tvm_pipeline_video.decoders.masks import grid_positions, interpolated
from tvm_pipeline_video.decoders.yolo import OVERLAP, THRESHOLD, Rows, candidates, flat, in_pixels, only, rows_of
from tvm_pipeline_video.preprocessing import Transform

SCORE = 4  # the column of the first class


def forms(model: Interface, name: str) -> list[Format]:
    """Return the forms of the variants: by the prototypes of masks, by the file's metadata, or because one is named."""
    rows = rows_of(model)
    if rows is None or rows.anchors != 1:
        return []
    size, columns = (model.width, model.height), rows.columns
    if len(model.outputs) == 2:
        protos = next(tensor for tensor in model.outputs if tensor is not rows.tensor)
        classes = columns - SCORE - protos.shape[1] if len(protos.shape) == 4 else 0
        if classes < 1 or protos.shape[2] * model.width != protos.shape[3] * model.height:
            return []
        return [_form("yolov8-seg", (rows.tensor, protos), partial(Segments, rows, protos, size, classes), classes)]
    if len(model.outputs) != 1:
        return []
    found = []
    if model.task == "pose" or name == "yolov8-pose":
        points, values = _key_points(model, columns)
        if points and (classes := columns - SCORE - points * values) > 0:
            found.append(_form("yolov8-pose", (rows.tensor,), partial(Pose, rows, size, classes, points), classes))
    if (model.task == "obb" or name == "yolov8-obb") and columns > SCORE + 1:
        classes = columns - SCORE - 1
        found.append(_form("yolov8-obb", (rows.tensor,), partial(OrientedBoxes, rows, size), classes))
    return found


def _form(
    name: str, read: tuple[Tensor, ...], make: partial[Segments] | partial[Pose] | partial[OrientedBoxes], classes: int
) -> Format:
    return Format(name, read, make, classes, threshold=THRESHOLD, preset="yolo")


def _key_points(model: Interface, columns: int) -> tuple[int, int]:
    """Return how many key points a row has and of how many values: by the metadata, else of one class, else 0."""
    match literal(model.metadata.get("kpt_shape", "")):
        case [int(points), int(values)] if points > 0 and values in (2, 3):
            return points, values
    rest = columns - SCORE - max(1, len(model.labels))
    return (rest // 3, 3) if rest > 0 and rest % 3 == 0 else (0, 0)


def level_boxes(
    table: Floats, size: tuple[int, int], classes: int, options: Options, transform: Transform
) -> tuple[list[Annotation], Floats]:
    """Return the boxes of a table (columns, N), the surest first, and for each the columns behind its classes."""
    boxes, scores, kinds, found = candidates(table, slice(SCORE, SCORE + classes), options.threshold)
    boxes = from_centers(in_pixels(boxes, size, table))
    best = kept(boxes, scores, kinds, OVERLAP)
    plain = annotated(boxes[best], scores[best], kinds[best], options.label, transform)
    return plain, table[SCORE + classes :, found[best]].T


@dataclass(frozen=True)
class Segments:
    """Finds boxes, and the mask of each: a sum of the prototypes, weighted by the last columns of its row."""

    rows: Rows
    protos: Tensor
    size: tuple[int, int]
    classes: int
    options: Options

    def __call__(self, outputs: Outputs, transform: Transform) -> list[Annotation]:
        table = flat(outputs, self.rows)
        plain, rest = level_boxes(table, self.size, self.classes, self.options, transform)
        protos = only(outputs, self.protos.name)[0]
        grids = probabilities(np.tensordot(rest, protos, axes=1))
        return [
            Annotation(one.label, one.score, one.box, mask=mask_within(grid, one.box, self.size, transform))
            for one, grid in zip(plain, grids, strict=True)
            if one.box
        ]


def mask_within(
    grid: np.ndarray, box: tuple[float, float, float, float], size: tuple[int, int], transform: Transform
) -> Mask:
    """Return the mask of a grid of probabilities over the model's input, cut to a box of the picture."""
    down, across = grid_positions(transform, size, grid.shape)
    height, width = len(down), len(across)
    left, top = max(0, round(box[0])), max(0, round(box[1]))
    right, bottom = min(width, round(box[2])), min(height, round(box[3]))
    pixels = np.zeros((height, width), bool)
    if left < right and top < bottom:
        pixels[top:bottom, left:right] = interpolated(grid, down[top:bottom], across[left:right]) > 0.5
    return Mask.of(pixels)


@dataclass(frozen=True)
class Pose:
    """Finds boxes with key points; points that the model is not sure of (the third value) are left out."""

    rows: Rows
    size: tuple[int, int]
    classes: int
    points: int
    options: Options

    def __call__(self, outputs: Outputs, transform: Transform) -> list[Annotation]:
        table = flat(outputs, self.rows)
        plain, rest = level_boxes(table, self.size, self.classes, self.options, transform)
        values = rest.reshape(len(rest), self.points, -1)
        shares = in_pixels(np.ones((1, 4), np.float32), self.size, table)[0, :2]  # 1, or the size of the input
        dots = to_picture(values[:, :, :2] * shares, transform)
        sure = values[:, :, 2] >= 0.5 if values.shape[2] > 2 else np.ones(values.shape[:2], bool)
        return [
            Annotation(one.label, one.score, one.box, tuple((float(x), float(y)) for x, y in own[seen]))
            for one, own, seen in zip(plain, dots, sure, strict=True)
        ]


@dataclass(frozen=True)
class OrientedBoxes:
    """Finds turned boxes: a polygon each, and the level box around it."""

    rows: Rows
    size: tuple[int, int]
    options: Options

    def __call__(self, outputs: Outputs, transform: Transform) -> list[Annotation]:
        table = flat(outputs, self.rows)
        boxes, scores, classes, found = candidates(table, slice(SCORE, -1), self.options.threshold)
        boxes = in_pixels(boxes, self.size, table)
        angle = table[-1, found]
        along = np.stack([np.cos(angle), np.sin(angle)], axis=1) * boxes[:, 2:3] / 2
        beside = np.stack([-np.sin(angle), np.cos(angle)], axis=1) * boxes[:, 3:4] / 2
        center = boxes[:, :2]
        sides = [center - along - beside, center + along - beside, center + along + beside, center - along + beside]
        corners = np.stack(sides, axis=1)
        level = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
        best = kept(level, scores, classes, OVERLAP)
        plain = annotated(level[best], scores[best], classes[best], self.options.label, transform)
        outlines = to_picture(corners[best], transform).tolist()
        return [
            Annotation(one.label, one.score, one.box, polygon=tuple((x, y) for x, y in outline))
            for one, outline in zip(plain, outlines, strict=True)
        ]
