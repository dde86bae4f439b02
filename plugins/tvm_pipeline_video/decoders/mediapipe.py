"""MediaPipe's detectors of faces, palms and persons (BlazeFace, palm and pose detection): boxes with key points.

    face    896 anchors at 128 x 128 (short range, front) or 256 x 256 (back), 2304 at 192 x 192 (full range); 6 points
    palm    2016 anchors at 192 x 192, 2944 at 256 x 256; 7 points
    pose    2254 anchors at 224 x 224; 4 points

Outputs are [1, N, 4 + 2 * points] with scores [1, N, 1]; some exports part both into two or more, in order. Boxes and
points are relative to the center of their anchor, in pixels of the input (MediaPipe's TensorsToDetections and
NonMaxSuppression calculators with their graphs' options, Apache-2.0). Read next: anchors.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from tvm_pipeline import Tensor
from tvm_pipeline_video.annotations import Annotation
from tvm_pipeline_video.decoders import anchors
from tvm_pipeline_video.decoders.boxes import annotated, from_centers, groups, probabilities
from tvm_pipeline_video.decoders.interface import Format, Interface, Options, Outputs
from tvm_pipeline_video.preprocessing import Transform

OVERLAP = 0.3


@dataclass(frozen=True, slots=True)
class Kind:
    """A detector of MediaPipe: the points of a box, and what its graph says of scores and pictures."""

    name: str
    label: str
    points: int
    options: anchors.AnchorOptions
    preset: str
    threshold: float = 0.5


KINDS = (
    Kind("face-short", "face", 6, anchors.FACE_SHORT, "mediapipe-face"),
    Kind("face-back", "face", 6, anchors.FACE_BACK, "mediapipe-face"),
    Kind("face-full", "face", 6, anchors.FACE_FULL, "mediapipe-face", 0.6),
    Kind("palm", "palm", 7, anchors.PALM, "mediapipe"),
    Kind("palm-256", "palm", 7, anchors.PALM_256, "mediapipe"),
    Kind("pose-detection", "person", 4, anchors.POSE, "mediapipe-face"),
)


def forms(model: Interface, name: str) -> list[Format]:
    """Return the detector whose input, anchors and points the model has."""
    for kind in KINDS:
        boxes, scores = (
            tuple(tensor for tensor in model.outputs if len(tensor.shape) == 3 and tensor.shape[2] == columns)
            for columns in (4 + 2 * kind.points, 1)
        )
        fits = model.width == model.height == kind.options.size and len(boxes) + len(scores) == len(model.outputs)
        counts = [sum(tensor.shape[1] for tensor in tensors) for tensors in (boxes, scores)]
        if fits and counts == [kind.options.count] * 2:
            make = partial(MediaPipe, kind, boxes, scores)
            return [
                Format(
                    kind.name,
                    (*boxes, *scores),
                    make,
                    labels=(kind.label,),
                    threshold=kind.threshold,
                    preset=kind.preset,
                )
            ]
    return []


@dataclass(frozen=True)
class MediaPipe:
    """Finds boxes and points around anchors; boxes of the same thing become one, weighted by their scores."""

    kind: Kind
    boxes: tuple[Tensor, ...]
    scores: tuple[Tensor, ...]
    options: Options

    def __call__(self, outputs: Outputs, transform: Transform) -> list[Annotation]:
        scores = probabilities(np.concatenate([outputs[part.name].reshape(-1) for part in self.scores]))
        found = np.flatnonzero(scores >= self.options.threshold)
        scores = scores[found]
        size = self.kind.options.size
        values = np.concatenate([outputs[part.name][0] for part in self.boxes])[found].astype(np.float32)
        centers = anchors.anchors(self.kind.options)[found, :2] * size
        boxes = from_centers(np.concatenate([values[:, :2] + centers, values[:, 2:4]], axis=1))
        points = values[:, 4:].reshape(len(found), self.kind.points, 2) + centers[:, None]
        merged = []
        for alike in groups(boxes, scores, None, OVERLAP):
            weights = scores[alike] / scores[alike].sum()
            merged.append((weights @ boxes[alike], scores[alike[0]], np.tensordot(weights, points[alike], axes=1)))
        if not merged:
            return []
        all_boxes, all_scores, all_points = (np.array(column) for column in zip(*merged, strict=True))
        one_class = np.zeros(len(merged), np.intp)
        return annotated(all_boxes, all_scores, one_class, self.options.label, transform, all_points)
