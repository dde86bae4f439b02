"""Heat maps of centers: CenterNet (Zhou et al., 2019) and CenterFace (Xu et al., 2019).

    centernet     heat [1, classes, h, w], size [1, 2, h, w] and offset [1, 2, h, w], in cells of 4 x 4 pixels
    centerface    heat [1, 1, h, w], log of height and width [1, 2, h, w], offset of y and x [1, 2, h, w], and five
                  points as shares of the box [1, 10, h, w]

Read next: interface.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from tvm_pipeline import Tensor
from tvm_pipeline_video.annotations import Annotation
from tvm_pipeline_video.decoders.boxes import Floats, annotated, from_centers, kept, probabilities
from tvm_pipeline_video.decoders.interface import Format, Interface, Options, Outputs
from tvm_pipeline_video.preprocessing import Transform

STRIDE = 4
FACE_OVERLAP = 0.3


def forms(model: Interface, name: str) -> list[Format]:
    """Return the form that the channels of the outputs fit, all of them maps of a quarter of the input's extents."""
    maps = model.outputs
    quarter = (-(-model.height // STRIDE), -(-model.width // STRIDE))
    if not model.width or any(len(tensor.shape) != 4 or tensor.shape[2:] != quarter for tensor in maps):
        return []
    channels = [tensor.shape[1] for tensor in maps]
    if channels == [1, 2, 2, 10]:
        face = partial(CenterFace, maps)
        return [Format("centerface", maps, face, labels=("face",), threshold=0.35, preset="raw")]
    if len(maps) == 3 and channels[1:] == [2, 2]:
        return [Format("centernet", maps, partial(CenterNet, maps), channels[0], threshold=0.3)]
    return []


@dataclass(frozen=True)
class CenterNet:
    """Finds the peaks of each class, which need no suppression."""

    maps: tuple[Tensor, ...]
    options: Options

    def __call__(self, outputs: Outputs, transform: Transform) -> list[Annotation]:
        heat, size, offset = (np.asarray(outputs[tensor.name][0], np.float32) for tensor in self.maps)
        if heat.min() < 0 or heat.max() > 1:  # the model leaves the sigmoid to others
            heat = probabilities(heat)
        classes, rows, columns = np.nonzero((heat >= self.options.threshold) & (heat == highest_around(heat)))
        centers = np.stack([columns, rows], axis=1) + offset[:, rows, columns].T
        boxes = from_centers(np.concatenate([centers, size[:, rows, columns].T], axis=1) * STRIDE)
        scores = heat[classes, rows, columns]
        order = np.argsort(-scores, kind="stable")
        return annotated(boxes[order], scores[order], classes[order], self.options.label, transform)


def highest_around(heat: Floats) -> Floats:
    """Return the largest value of the 3 x 3 cells around each cell of maps (classes, rows, columns)."""
    padded = np.pad(heat, ((0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    rows = np.maximum(np.maximum(padded[:, :-2], padded[:, 1:-1]), padded[:, 2:])
    return np.asarray(np.maximum(np.maximum(rows[:, :, :-2], rows[:, :, 1:-1]), rows[:, :, 2:]))


@dataclass(frozen=True)
class CenterFace:
    """Finds faces, each with five points: eyes, nose and corners of the mouth."""

    maps: tuple[Tensor, ...]
    options: Options

    def __call__(self, outputs: Outputs, transform: Transform) -> list[Annotation]:
        heat, size, offset, landmarks = (np.asarray(outputs[tensor.name][0], np.float32) for tensor in self.maps)
        rows, columns = np.nonzero(heat[0] > self.options.threshold)
        scores = heat[0, rows, columns]
        height, width = np.exp(size[:, rows, columns]) * STRIDE
        y = (rows + offset[0, rows, columns] + 0.5) * STRIDE
        x = (columns + offset[1, rows, columns] + 0.5) * STRIDE
        boxes = from_centers(np.stack([x, y, width, height], axis=1))
        best = kept(boxes, scores, None, FACE_OVERLAP)
        shares = landmarks[:, rows[best], columns[best]].T.reshape(len(best), 5, 2)[:, :, ::-1]
        corners = boxes[best]
        points = shares * (corners[:, None, 2:] - corners[:, None, :2]) + corners[:, None, :2]
        one_class = np.zeros(len(best), np.intp)
        return annotated(corners, scores[best], one_class, self.options.label, transform, points)
