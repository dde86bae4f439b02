"""PicoDet and NanoDet: scores of each cell, and the distances to the four sides as distributions.

For each stride (8, 16, 32, 64) scores [1, N, classes] and distributions [1, N, 4 * bins] (Yu et al., 2021; distances
by Li et al., 2020, "Generalized focal loss"). Read next: yolo.py, for boxes of grids in one table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from tvm_pipeline import Tensor
from tvm_pipeline_video.annotations import Annotation
from tvm_pipeline_video.decoders.boxes import annotated, kept
from tvm_pipeline_video.decoders.interface import Format, Interface, Options, Outputs
from tvm_pipeline_video.preprocessing import Transform

STRIDES = (8, 16, 32, 64)
THRESHOLD = 0.4
OVERLAP = 0.5


def forms(model: Interface, name: str) -> list[Format]:
    """Return the form of scores for each stride and then distributions for each stride."""
    half, odd = divmod(len(model.outputs), 2)
    if odd or half not in (3, 4) or not model.width:
        return []
    scores, sides = model.outputs[:half], model.outputs[half:]
    cells = [(1, model.cells(stride)) for stride in STRIDES[:half]]
    shapes = [tensor.shape[2:] for tensor in model.outputs]
    rows = [tensor.shape[:2] for tensor in model.outputs]
    alike = len(set(shapes[:half])) == len(set(shapes[half:])) == 1 and len(shapes[0]) == len(shapes[-1]) == 1
    if rows != cells * 2 or not alike or shapes[-1][0] % 4 or shapes[-1][0] < 8:
        return []
    make = partial(PicoDet, scores, sides, (model.width, model.height))
    return [Format("picodet", model.outputs, make, shapes[0][0], threshold=THRESHOLD, preset="picodet")]


@dataclass(frozen=True)
class PicoDet:
    """Finds boxes by the expected distance from the center of a cell to each side."""

    scores: tuple[Tensor, ...]
    sides: tuple[Tensor, ...]
    size: tuple[int, int]
    options: Options

    def __call__(self, outputs: Outputs, transform: Transform) -> list[Annotation]:
        boxes, scores, classes = [], [], []
        for stride, scored, sided in zip(STRIDES, self.scores, self.sides, strict=False):
            table = np.asarray(outputs[scored.name][0], np.float32)
            best = table.max(axis=1)
            found = np.flatnonzero(best >= self.options.threshold)
            bins = np.asarray(outputs[sided.name][0][found], np.float32).reshape(len(found), 4, sided.shape[2] // 4)
            weights = np.exp(bins - bins.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
            distances = weights @ np.arange(bins.shape[2], dtype=np.float32) * stride
            y, x = np.divmod(found, -(-self.size[0] // stride))
            centers = (np.stack([x, y], axis=1) + 0.5) * stride
            boxes.append(np.concatenate([centers - distances[:, :2], centers + distances[:, 2:]], axis=1))
            scores.append(best[found])
            classes.append(table[found].argmax(axis=1))
        box, score, kind = (np.concatenate(parts) for parts in (boxes, scores, classes))
        best = kept(box, score, kind, OVERLAP)
        return annotated(box[best], score[best], kind[best], self.options.label, transform)
