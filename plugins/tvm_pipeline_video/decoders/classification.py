"""Scores of classes: the best of them, as annotations of the whole frame.

Read next: interface.py (what a form is).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tvm_pipeline_video.annotations import Annotation
from tvm_pipeline_video.decoders.interface import Format, Interface, Options, Outputs
from tvm_pipeline_video.preprocessing import Transform

BEST = 5
THRESHOLD = 0.01
IMAGENET_CLASSES = (1000, 1001)  # 1001: the first is none of them


def forms(model: Interface, name: str) -> list[Format]:
    """Return the form for one output of N scores, [1, N] or [1, N, 1, 1] and the like.

    Without being named it takes the output for scores where the file names so many classes or says that it
    classifies, or where there are as many as ImageNet has.
    """
    if len(model.outputs) != 1:
        return []
    shape = model.outputs[0].shape
    count = max(shape, default=0)
    if count < 2 or int(np.prod(shape)) != count:
        return []
    is_imagenet = count in IMAGENET_CLASSES
    if not (name or is_imagenet or model.task == "classify" or len(model.labels) == count):
        return []
    preset = ""
    if model.task == "classify":
        preset = "yolo-classify"
    elif is_imagenet and not model.nhwc and model.metadata.get("producer_name") == "pytorch":
        preset = "imagenet"
    return [Format("classification", model.outputs, Classification, count, threshold=THRESHOLD, preset=preset)]


@dataclass(frozen=True)
class Classification:
    """Finds the best classes, the surest first, as shares of one: by softmax, where the model has none of its own."""

    options: Options

    def __call__(self, outputs: Outputs, _: Transform) -> list[Annotation]:
        scores = next(iter(outputs.values())).reshape(-1).astype(np.float64)
        if scores.min() < 0 or not np.isclose(scores.sum(), 1, atol=0.01):
            scores = np.exp(scores - scores.max())
            scores /= scores.sum()
        best = [index for index in np.argsort(-scores)[:BEST].tolist() if scores[index] >= self.options.threshold]
        return [Annotation(self.options.label(index), float(scores[index])) for index in best]
