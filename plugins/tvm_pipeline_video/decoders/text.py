"""Boxes of text: DBNet (Liao et al., 2020), as PaddleOCR's detectors are: a map [1, 1, h, w] of what is text.

Pixels above a threshold are shrunken text lines. Each connected component becomes the smallest turned rectangle around
it, which grows by area * ratio / perimeter on every side (PaddleOCR's DBPostProcess). Read next: components.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from tvm_pipeline import Tensor
from tvm_pipeline_video.annotations import Annotation
from tvm_pipeline_video.decoders.boxes import to_picture
from tvm_pipeline_video.decoders.components import components, smallest_rectangle
from tvm_pipeline_video.decoders.interface import Format, Interface, Options, Outputs
from tvm_pipeline_video.preprocessing import Transform

THRESHOLD = 0.6  # of the mean over a line
PIXEL_THRESHOLD = 0.3
UNCLIP_RATIO = 1.5
LEAST_SIDE = 3.0  # in cells of the map; what is smaller is noise
MOST_LINES = 1000


def forms(model: Interface, name: str) -> list[Format]:
    """Return the form of one map over the input, where it is named: depth and segmentation look the same."""
    if not name or len(model.outputs) != 1 or not model.width:
        return []
    tensor = model.outputs[0]
    if len(tensor.shape) != 4 or tensor.shape[:2] != (1, 1) or min(tensor.shape[2:]) < 2:
        return []
    if tensor.shape[2] * model.width != tensor.shape[3] * model.height:
        return []
    make = partial(Text, tensor, (model.width, model.height))
    return [Format("text", (tensor,), make, labels=("text",), threshold=THRESHOLD, preset="paddleocr")]


@dataclass(frozen=True)
class Text:
    """Finds lines of text: a turned rectangle each, from the top."""

    tensor: Tensor
    size: tuple[int, int]
    options: Options

    def __call__(self, outputs: Outputs, transform: Transform) -> list[Annotation]:
        values = np.asarray(outputs[self.tensor.name][0, 0], np.float32)
        runs = components(values > PIXEL_THRESHOLD)
        count = int(runs.component.max(initial=-1)) + 1
        sums = np.pad(np.cumsum(values, axis=1, dtype=np.float64), ((0, 0), (1, 0)))
        lengths = np.bincount(runs.component, runs.end - runs.start, count)
        totals = np.bincount(runs.component, sums[runs.row, runs.end] - sums[runs.row, runs.start], count)
        scores = totals / np.maximum(lengths, 1)
        cell = np.array(self.size) / values.shape[::-1]  # pixels of the input
        order = np.argsort(runs.component, kind="stable")
        parts = np.split(order, np.cumsum(np.bincount(runs.component, minlength=count))[:-1])
        found = []
        likely = np.flatnonzero((scores >= self.options.threshold) & (lengths >= LEAST_SIDE))
        for index in likely[np.argsort(-lengths[likely], kind="stable")][:MOST_LINES]:
            own = parts[index]
            left_and_right = np.concatenate([runs.start[own], runs.end[own] - 1])
            around = smallest_rectangle(np.stack([left_and_right, np.tile(runs.row[own], 2)], axis=1))
            sides = 2 * around.half + 1  # from the outer edges of its pixels
            if sides.min() < LEAST_SIDE:
                continue
            more = 0.5 + np.prod(sides) * UNCLIP_RATIO / (2 * sides.sum())
            outline = to_picture((around.corners(more) + 0.5) * cell, transform)
            box = (*outline.min(axis=0).tolist(), *outline.max(axis=0).tolist())
            polygon = tuple((float(x), float(y)) for x, y in outline)
            found.append(Annotation(self.options.label(0), float(scores[index]), box, polygon=polygon))
        return sorted(found, key=lambda one: (one.box or (0.0, 0.0))[1])
