"""The anchors of single-shot detectors, generated as MediaPipe's SsdAnchorsCalculator does (Apache-2.0).

The options are those of MediaPipe's graphs: face_detection_short_range, face_detection_full_range, palm_detection,
pose_detection, and the detector of objectron, which is that of TensorFlow's SSD MobileNet. Read next: mediapipe.py and
ssd.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class AnchorOptions:
    """The options of a set of anchors, under MediaPipe's names.

    Attributes:
        size: of the model's input, which is a square.
        strides: of each layer, in pixels of the input; layers of the same stride share one grid.
        min_scale, max_scale: of the anchors of the first and the last layer, as shares of the input.
        aspect_ratios: an anchor of each in each cell.
        interpolated_ratio: the aspect ratio of one more anchor, between two scales; 0 for none.
        reduced_lowest: the first layer has three anchors of its own.
        fixed_size: every anchor is as large as the input; only its center counts.
    """

    size: int
    strides: tuple[int, ...]
    min_scale: float = 0.1484375
    max_scale: float = 0.75
    aspect_ratios: tuple[float, ...] = (1.0,)
    interpolated_ratio: float = 1.0
    reduced_lowest: bool = False
    fixed_size: bool = True

    @property
    def count(self) -> int:
        return len(anchors(self))


FACE_SHORT = AnchorOptions(128, (8, 16, 16, 16))
FACE_BACK = AnchorOptions(256, (16, 32, 32, 32), 0.15625)
FACE_FULL = AnchorOptions(192, (4,), interpolated_ratio=0.0)
PALM = AnchorOptions(192, (8, 16, 16, 16))
PALM_256 = AnchorOptions(256, (8, 16, 32, 32, 32), 0.1171875)
POSE = AnchorOptions(224, (8, 16, 32, 32, 32))
SSD_300 = AnchorOptions(
    300,
    (16, 32, 64, 128, 256, 512),
    min_scale=0.2,
    max_scale=0.95,
    aspect_ratios=(1.0, 2.0, 0.5, 3.0, 1 / 3),
    reduced_lowest=True,
    fixed_size=False,
)


@lru_cache(maxsize=16)
def anchors(options: AnchorOptions) -> NDArray[np.float32]:
    """Return (count, 4): center x, center y, width, height of each anchor, as shares of the input.

    Examples:
        >>> [options.count for options in (FACE_SHORT, FACE_BACK, FACE_FULL, PALM, PALM_256, POSE, SSD_300)]
        [896, 896, 2304, 2016, 2944, 2254, 1917]
    """
    layers = list(enumerate(options.strides))
    made = []
    for stride, group in groupby(layers, key=lambda layer: layer[1]):
        sizes = np.array([size for index, _ in group for size in _sizes(options, index)], np.float32)
        if options.fixed_size:
            sizes[:] = 1
        cells = math.ceil(options.size / stride)
        centers = (np.arange(cells, dtype=np.float32) + 0.5) / cells
        y, x = np.meshgrid(centers, centers, indexing="ij")
        grid = np.stack([x, y], axis=-1).reshape(-1, 1, 2)
        shape = (cells * cells, len(sizes), 2)
        made.append(np.concatenate([np.broadcast_to(grid, shape), np.broadcast_to(sizes, shape)], -1).reshape(-1, 4))
    found = np.concatenate(made)
    found.setflags(write=False)
    return found


def _sizes(options: AnchorOptions, layer: int) -> list[tuple[float, float]]:
    """Return the width and the height of each anchor of a layer, as shares of the input."""
    scale = _scale(options, layer)
    if layer == 0 and options.reduced_lowest:
        pairs = [(0.1, 1.0), (scale, 2.0), (scale, 0.5)]
    else:
        pairs = [(scale, ratio) for ratio in options.aspect_ratios]
        if options.interpolated_ratio > 0:
            last = layer == len(options.strides) - 1
            following = 1.0 if last else _scale(options, layer + 1)
            pairs.append((math.sqrt(scale * following), options.interpolated_ratio))
    return [(size * math.sqrt(ratio), size / math.sqrt(ratio)) for size, ratio in pairs]


def _scale(options: AnchorOptions, layer: int) -> float:
    layers = len(options.strides)
    if layers == 1:
        return (options.min_scale + options.max_scale) / 2
    return options.min_scale + (options.max_scale - options.min_scale) * layer / (layers - 1)
