"""Key points of one thing that fills the picture: a body, a hand, a face.

    movenet      [1, 1, 17, 3]: y, x as shares of the input, and the score of each point
    landmarks    [1, 3 * points] (or [1, 1, 1, 3 * points]): x, y, z in pixels of the input; MediaPipe's hand (21) and
                 face mesh (468); a score of the whole [1, 1] beside it

Read next: yolo_variants.py, for key points of many things.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from tvm_pipeline import Tensor
from tvm_pipeline_video.annotations import Annotation
from tvm_pipeline_video.decoders.boxes import probabilities, to_picture
from tvm_pipeline_video.decoders.interface import Format, Interface, Options, Outputs
from tvm_pipeline_video.preprocessing import Transform

MOVENET = (1, 1, 17, 3)
LANDMARKS = {(224, 21): "hand", (192, 468): "face", (256, 468): "face"}  # by the extent of the input and the points


def forms(model: Interface, name: str) -> list[Format]:
    """Return the form whose number of points and input the model has."""
    if not model.width or not model.outputs:
        return []
    first = model.outputs[0]
    if first.shape == MOVENET and len(model.outputs) == 1:
        make = partial(MoveNet, first, (model.width, model.height))
        return [Format("movenet", (first,), make, labels=("person",), threshold=0.3, preset="movenet")]
    points, odd = divmod(int(np.prod(first.shape)), 3)
    label = LANDMARKS.get((model.width, points))
    if odd or label is None or model.width != model.height or len(model.outputs) < 2:
        return []
    score = model.outputs[1]
    if int(np.prod(score.shape)) != 1:
        return []
    make_points = partial(Landmarks, first, score)
    return [Format("landmarks", (first, score), make_points, labels=(label,), threshold=0.5, preset="mediapipe")]


@dataclass(frozen=True)
class MoveNet:
    """Finds the body of one person; points below the threshold are left out."""

    tensor: Tensor
    size: tuple[int, int]
    options: Options

    def __call__(self, outputs: Outputs, transform: Transform) -> list[Annotation]:
        rows = outputs[self.tensor.name].reshape(-1, 3)
        rows = rows[rows[:, 2] >= self.options.threshold]
        if not len(rows):
            return []
        return [_around(self.options.label(0), float(rows[:, 2].mean()), rows[:, 1::-1] * self.size, transform)]


@dataclass(frozen=True)
class Landmarks:
    """Finds the points of the one hand or face that the picture shows, where the model is sure that it does."""

    points: Tensor
    score: Tensor
    options: Options

    def __call__(self, outputs: Outputs, transform: Transform) -> list[Annotation]:
        score = float(outputs[self.score.name].reshape(()))
        if not 0 <= score <= 1:  # the model leaves the sigmoid to others
            score = float(probabilities(np.array(score)))
        if score < self.options.threshold:
            return []
        points = outputs[self.points.name].reshape(-1, 3)[:, :2]
        return [_around(self.options.label(0), score, points, transform)]


def _around(label: str, score: float, points: np.ndarray, transform: Transform) -> Annotation:
    """Return points (count, 2) of the input as an annotation, with the box around them."""
    found = to_picture(points, transform)
    (left, top), (right, bottom) = found.min(axis=0).tolist(), found.max(axis=0).tolist()
    return Annotation(label, score, (left, top, right, bottom), tuple((float(x), float(y)) for x, y in found))
