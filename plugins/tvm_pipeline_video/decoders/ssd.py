"""Single-shot detectors: boxes that the model has decoded itself, or boxes relative to TensorFlow's anchors.

    ssd            TFLite_Detection_PostProcess: boxes [1, N, 4] (top, left, bottom, right as shares), classes [1, N],
                   scores [1, N], count [1]; or scores, boxes, count, classes, as TensorFlow 2 writes them
    ssd-output     [1, 1, N, 7]: picture, class, score, left, top, right, bottom as shares (Caffe, OpenVINO)
    ssd-anchors    boxes [1, 1917, 4] or [1, 1917, 1, 4], scores [1, 1917, classes + 1], at 300 x 300: MobileNet SSD
                   of TensorFlow

Read next: anchors.py, boxes.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from tvm_pipeline import Tensor
from tvm_pipeline_video.annotations import Annotation
from tvm_pipeline_video.decoders import anchors
from tvm_pipeline_video.decoders.boxes import annotated, from_centers, kept, probabilities
from tvm_pipeline_video.decoders.interface import Format, Interface, Options, Outputs
from tvm_pipeline_video.preprocessing import Transform

THRESHOLD = 0.5
OVERLAP = 0.5
ANCHORS = (anchors.SSD_300,)
SCALES = np.array([10, 10, 5, 5], np.float32)  # of centers and sizes, as TensorFlow's box coder has them


def forms(model: Interface, name: str) -> list[Format]:
    """Return the form that the number and the shapes of the outputs fit."""
    if not model.width:
        return []
    size, outputs = (model.width, model.height), model.outputs
    found = []
    if len(outputs) == 1 and outputs[0].shape[:2] == (1, 1) and outputs[0].shape[3:] == (7,):
        found.append(Format("ssd-output", outputs, partial(DetectionOutput, size), threshold=THRESHOLD))
    if order := _postprocessed(outputs):
        make = partial(TflitePostProcess, size, *order)
        found.append(Format("ssd", order, make, threshold=THRESHOLD, preset="signed"))
    for options in ANCHORS:
        rows = (1, options.count)
        if len(outputs) == 2 and all(len(t.shape) >= 3 and t.shape[:2] == rows for t in outputs):
            boxes, scores = outputs if outputs[0].shape[-1] == 4 else outputs[::-1]
            fits = boxes.shape[2:] in ((4,), (1, 4)) and len(scores.shape) == 3 and scores.shape[2] > 1
            if fits and model.width == model.height == options.size:
                make_ssd = partial(AnchorBoxes, options, boxes, scores)
                classes = scores.shape[2] - 1
                found.append(Format("ssd-anchors", outputs, make_ssd, classes, threshold=THRESHOLD, preset="signed"))
    return found


def _postprocessed(outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return boxes, classes and scores of TFLite_Detection_PostProcess, in either of its two orders."""
    if len(outputs) != 4:
        return None
    for boxes, classes, scores, count in ((0, 1, 2, 3), (1, 3, 0, 2)):
        shape = outputs[boxes].shape
        same = outputs[classes].shape == outputs[scores].shape == shape[:2]
        if len(shape) == 3 and shape[2] == 4 and same and outputs[count].shape == (1,):
            return outputs[boxes], outputs[classes], outputs[scores]
    return None


def _corners(boxes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return top, left, bottom, right as shares as left, top, right, bottom in pixels of the input."""
    return boxes[:, [1, 0, 3, 2]].astype(np.float32) * np.array([*size, *size], np.float32)


@dataclass(frozen=True)
class TflitePostProcess:
    """Reads boxes that TFLite's own operator has decoded and suppressed."""

    size: tuple[int, int]
    boxes: Tensor
    classes: Tensor
    scores: Tensor
    options: Options

    def __call__(self, outputs: Outputs, transform: Transform) -> list[Annotation]:
        scores = outputs[self.scores.name][0]
        found = np.flatnonzero(scores >= self.options.threshold)
        boxes = _corners(outputs[self.boxes.name][0][found], self.size)
        classes = outputs[self.classes.name][0][found].astype(np.intp)
        return annotated(boxes, scores[found], classes, self.options.label, transform)


@dataclass(frozen=True)
class DetectionOutput:
    """Reads the rows of Caffe's DetectionOutput; class 0 is the background, and a picture of -1 ends them."""

    size: tuple[int, int]
    options: Options

    def __call__(self, outputs: Outputs, transform: Transform) -> list[Annotation]:
        rows = next(iter(outputs.values()))[0, 0]
        rows = rows[(rows[:, 0] >= 0) & (rows[:, 2] >= self.options.threshold)]
        boxes = rows[:, 3:7] * np.array([*self.size, *self.size], np.float32)
        return annotated(boxes, rows[:, 2], rows[:, 1].astype(np.intp), self.options.label, transform)


@dataclass(frozen=True)
class AnchorBoxes:
    """Finds boxes relative to anchors; the first class is the background."""

    anchors: anchors.AnchorOptions
    boxes: Tensor
    scores: Tensor
    options: Options

    def __call__(self, outputs: Outputs, transform: Transform) -> list[Annotation]:
        table = outputs[self.scores.name][0]
        if table.min() < 0 or table.max() > 1:  # the model leaves the sigmoid to others
            table = probabilities(table)
        table = table[:, 1:]
        scores = table.max(axis=1)
        found = np.flatnonzero(scores >= self.options.threshold)
        classes = table[found].argmax(axis=1)
        own = anchors.anchors(self.anchors)[found]
        y, x, height, width = (outputs[self.boxes.name].reshape(-1, 4)[found].astype(np.float32) / SCALES).T
        centers = np.stack([x, y], axis=1) * own[:, 2:] + own[:, :2]
        sizes = np.exp(np.stack([width, height], axis=1)) * own[:, 2:]
        boxes = from_centers(np.concatenate([centers, sizes], axis=1) * self.anchors.size)
        best = kept(boxes, scores[found], classes, OVERLAP)
        return annotated(boxes[best], scores[found][best], classes[best], self.options.label, transform)
