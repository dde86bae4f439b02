"""Boxes: overlap, suppression of those that mean the same thing, and the way back to the picture.

A box is left, top, right, bottom; arrays of boxes are (count, 4). Read next: interface.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline_video.annotations import Annotation
from tvm_pipeline_video.preprocessing import Transform

Floats = NDArray[np.float32]
Indices = NDArray[np.intp]

MOST_CANDIDATES = 1000  # the best boxes that suppression looks at
MOST_BOXES = 300  # that it leaves


def from_centers(boxes: NDArray[Any]) -> Floats:
    """Return boxes (count, 4) of center x, center y, width, height as left, top, right, bottom."""
    half = boxes[:, 2:4] / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1).astype(np.float32, copy=False)


def overlaps(box: Floats, others: Floats) -> Floats:
    """Return the intersection over union of one box with others.

    Examples:
        >>> overlaps(np.array([0, 0, 2, 2]), np.array([[0, 0, 2, 2], [1, 0, 3, 2], [5, 5, 6, 6]])).round(2).tolist()
        [1.0, 0.33, 0.0]
    """
    shared = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    area = np.prod(np.clip(shared, 0, None), axis=1)
    total = np.prod(box[2:] - box[:2]) + np.prod(others[:, 2:] - others[:, :2], axis=1) - area
    return np.asarray(area / np.maximum(total, 1e-9))


def groups(boxes: Floats, scores: Floats, classes: Indices | None, overlap: float) -> list[Indices]:
    """Return groups of boxes that mean the same thing: non-maximum suppression, which keeps the first of each.

    Boxes of different classes never mean the same. Each group has the box of the highest score first, and the groups
    come by that score, at most MOST_BOXES.

    Args:
        classes: of each box; None where there is one class.
        overlap: the intersection over union above which two boxes mean the same.
    """
    order = np.argsort(-scores, kind="stable")[:MOST_CANDIDATES]
    if classes is not None and len(order):  # each class in a place of its own, so that boxes of two never overlap
        extent = float(np.ptp(boxes[order])) + 1
        boxes = boxes + (classes * (2 * extent))[:, None].astype(np.float64)
    found: list[Indices] = []
    while len(order) and len(found) < MOST_BOXES:
        alike = overlaps(boxes[order[0]], boxes[order]) > overlap
        alike[0] = True
        found.append(order[alike])
        order = order[~alike]
    return found


def kept(boxes: Floats, scores: Floats, classes: Indices | None, overlap: float) -> Indices:
    """Return the boxes that suppression keeps, the surest first; see `groups`."""
    return np.array([group[0] for group in groups(boxes, scores, classes, overlap)], np.intp)


def to_picture(points: NDArray[Any], transform: Transform) -> NDArray[np.float64]:
    """Return points (..., 2) of the model's input as points of the picture."""
    moved = points - np.array([transform.offset_x, transform.offset_y])
    return np.asarray(moved / np.array([transform.scale_x, transform.scale_y]))


def annotated(
    boxes: Floats,
    scores: Floats,
    classes: Indices,
    label: Callable[[int], str],
    transform: Transform,
    points: NDArray[Any] | None = None,
) -> list[Annotation]:
    """Return boxes as annotations of the picture.

    Args:
        boxes: (count, 4), in pixels of the model's input.
        label: gives the name of a class.
        points: (count, points, 2) of the model's input.
    """
    corners = to_picture(boxes.reshape(-1, 2, 2), transform).reshape(-1, 4).tolist()
    dots = [()] * len(corners) if points is None else to_picture(points, transform).tolist()
    return [
        Annotation(label(int(index)), float(score), (box[0], box[1], box[2], box[3]), tuple((x, y) for x, y in own))
        for box, score, index, own in zip(corners, scores, classes, dots, strict=True)
    ]


def probabilities(values: NDArray[Any]) -> Floats:
    """Return the logistic function of values; outputs of the sigmoid kind become scores from 0 to 1."""
    return np.asarray(1 / (1 + np.exp(-np.clip(values, -80, 80, dtype=np.float32))))
