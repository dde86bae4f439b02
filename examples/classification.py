"""A decoder of one's own: the five best classes of each frame (`--decoder classification` is the one in the box).

    tvm-pipeline compile mobilenet.onnx -o mobilenet.tar
    tvm-pipeline run mobilenet.tar --source bikes.mp4 --decoder examples/classification.py:decode --output out.mp4

Class names are read from labels.txt in the working directory, one a line, where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline_video import Annotation, Transform

BEST = 5


def decode(outputs: Mapping[str, NDArray[Any]], _: Transform) -> list[Annotation]:
    """The best classes, the surest first, as shares of one: softmax, where the model has none of its own."""
    scores = next(iter(outputs.values())).reshape(-1).astype(float)
    if scores.min() < 0 or not np.isclose(scores.sum(), 1, atol=0.01):
        scores = np.exp(scores - scores.max())
        scores /= scores.sum()
    names = labels()
    best = np.argsort(-scores)[:BEST].tolist()
    return [
        Annotation(names[index] if index < len(names) else f"class {index}", float(scores[index])) for index in best
    ]


@cache
def labels() -> list[str]:
    """The names of the classes; empty where no labels.txt is."""
    path = Path("labels.txt")
    return path.read_text().splitlines() if path.exists() else []
