"""Reads the outputs of CenterFace (Xu et al., 2019): a heat map of face centres, and for each centre size, offset
and five landmarks, all on a grid of one cell per 4 x 4 pixels.

    tvm-pipeline run centerface.tar --source bikes.mp4 --decoder examples/face_detector/centerface.py:decode
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline_video import Annotation, Transform

STRIDE = 4
THRESHOLD = 0.35
OVERLAP = 0.3  # two boxes that share more (intersection over union) are one face


def decode(outputs: Mapping[str, NDArray[np.float32]], transform: Transform) -> list[Annotation]:
    """The faces of one frame, in pixels of the original picture, the surest first."""
    heat, size, offset, landmarks = (array[0] for array in outputs.values())
    rows, columns = np.nonzero(heat[0] > THRESHOLD)
    scores = heat[0, rows, columns]
    height, width = np.exp(size[:, rows, columns]) * STRIDE
    top = (rows + offset[0, rows, columns] + 0.5) * STRIDE - height / 2
    left = (columns + offset[1, rows, columns] + 0.5) * STRIDE - width / 2
    boxes = np.stack([left, top, left + width, top + height], axis=1)
    faces = []
    for index in _without_overlaps(boxes, scores):
        points = [
            transform.to_image(
                float(landmarks[2 * point + 1, rows[index], columns[index]] * width[index] + left[index]),
                float(landmarks[2 * point, rows[index], columns[index]] * height[index] + top[index]),
            )
            for point in range(5)
        ]
        corners = (*transform.to_image(*boxes[index, :2]), *transform.to_image(*boxes[index, 2:]))
        faces.append(Annotation("face", float(scores[index]), tuple(map(float, corners)), tuple(points)))
    return faces


def _without_overlaps(boxes: NDArray[np.float32], scores: NDArray[np.float32]) -> list[int]:
    """Greedy non-maximum suppression: the indices that stay, the surest first."""
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    left = list(np.argsort(-scores))
    kept = []
    while left:
        best = left.pop(0)
        kept.append(int(best))
        low = np.maximum(boxes[left, :2], boxes[best, :2])
        high = np.minimum(boxes[left, 2:], boxes[best, 2:])
        shared = np.clip(high - low, 0, None).prod(axis=1)
        union = areas[left] + areas[best] - shared
        left = [index for index, overlap in zip(left, shared / union, strict=True) if overlap <= OVERLAP]
    return kept
