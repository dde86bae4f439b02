"""Segmentation: the class of each pixel, as a mask for each class that a frame shows.

    argmax     scores [1, classes, h, w] or [1, h, w, classes], or the classes themselves, [1, h, w] of integers
    sigmoid    [1, 1, h, w] or [1, h, w, 1]: one class and its background

Read next: masks.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from tvm_pipeline import Tensor
from tvm_pipeline_video.annotations import Annotation, Mask
from tvm_pipeline_video.decoders.boxes import probabilities
from tvm_pipeline_video.decoders.interface import Format, Interface, Options, Outputs
from tvm_pipeline_video.decoders.masks import grid_positions, interpolated, nearest
from tvm_pipeline_video.preprocessing import Transform

THRESHOLD = 0.5
# Pascal VOC and its background, Cityscapes, ADE20K and its background or not.
KNOWN_CLASSES = (19, 21, 150, 151)
BACKGROUND = ("background", "__background__", "bg")
LEAST_SHARE = 0.001  # of the picture, for a class to be listed


def forms(model: Interface, name: str) -> list[Format]:
    """Return the form of maps over the input; without being named, where the number of classes is a known one."""
    if not model.width or not model.outputs:
        return []
    tensor, shape = model.outputs[0], model.outputs[0].shape
    size = (model.width, model.height)
    if len(shape) == 3 and "int" in tensor.dtype and _covers(shape[1:], model):
        return [Format("segmentation-argmax", (tensor,), partial(ArgMax, tensor, size, -1))]
    if len(shape) != 4 or shape[0] != 1:
        return []
    axis = next((axis for axis, extents in ((0, shape[2:]), (2, shape[1:3])) if _covers(extents, model)), None)
    if axis is None:
        return []
    classes = shape[1:][axis]
    if classes == 1:
        if not name:  # depth, saliency and text look the same
            return []
        return [Format("segmentation-sigmoid", (tensor,), partial(Sigmoid, tensor, size, axis), threshold=THRESHOLD)]
    alike = all(other.shape == shape for other in model.outputs)  # others are for training
    if not name and not (alike and classes in (*KNOWN_CLASSES, len(model.labels))):
        return []
    return [Format("segmentation-argmax", (tensor,), partial(ArgMax, tensor, size, axis), classes)]


def _covers(extents: tuple[int, ...], model: Interface) -> bool:
    """Return whether a map has the aspect of the input and at least an eighth of its extents."""
    down, across = extents
    return min(down, across) > 1 and down * model.width == across * model.height and down * 8 >= model.height


@dataclass(frozen=True)
class ArgMax:
    """Finds the pixels of each class; the background, class 0 of such a name or of 21 or 151, is left out."""

    tensor: Tensor
    size: tuple[int, int]
    axis: int  # of the classes, without the batch; -1 where the output holds classes
    options: Options

    def __call__(self, outputs: Outputs, transform: Transform) -> list[Annotation]:
        values = outputs[self.tensor.name][0]
        classes = values if self.axis < 0 else values.argmax(axis=self.axis)
        down, across = grid_positions(transform, self.size, classes.shape)
        seen = classes[nearest(down)][:, nearest(across)]
        counts = np.bincount(seen.ravel())
        if self._has_background(0 if self.axis < 0 else values.shape[self.axis]):
            counts[0] = 0
        found = np.flatnonzero(counts >= max(1, LEAST_SHARE * seen.size)).tolist()
        return [
            Annotation(self.options.label(index), None, bounds(seen == index), mask=Mask.of(seen == index))
            for index in sorted(found, key=lambda index: -counts[index])
        ]

    def _has_background(self, classes: int) -> bool:
        if self.options.labels:
            return self.options.labels[0].lower() in BACKGROUND
        return classes in (21, 151)


@dataclass(frozen=True)
class Sigmoid:
    """Finds the pixels that reach the threshold, as one mask."""

    tensor: Tensor
    size: tuple[int, int]
    axis: int
    options: Options

    def __call__(self, outputs: Outputs, transform: Transform) -> list[Annotation]:
        grid = outputs[self.tensor.name][0].take(0, axis=self.axis)
        if grid.min() < 0 or grid.max() > 1:  # the model leaves the sigmoid to others
            grid = probabilities(grid)
        seen = interpolated(grid, *grid_positions(transform, self.size, grid.shape))
        inside = seen >= self.options.threshold
        if not inside.any():
            return []
        return [Annotation(self.options.label(0), float(seen[inside].mean()), bounds(inside), mask=Mask.of(inside))]


def bounds(pixels: np.ndarray) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of the pixels of a mask that is not empty."""
    rows, columns = np.flatnonzero(pixels.any(axis=1)), np.flatnonzero(pixels.any(axis=0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)
