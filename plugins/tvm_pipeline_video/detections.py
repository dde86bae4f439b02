"""Annotations as those of supervision, a package of tools for detections: tracking, counting, drawing.

The package is no dependency: `pip install supervision`. Read next: annotations.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tvm_pipeline import PipelineError
from tvm_pipeline_video.annotations import Annotation

if TYPE_CHECKING:
    import supervision  # type: ignore[import-not-found,unused-ignore]

CLASS_IDS = 1 << 15


def detections(annotations: Sequence[Annotation], labels: Sequence[str] = ()) -> supervision.Detections:
    """Return the annotations that have a box as `supervision.Detections`, with masks where all of these have one.

    Args:
        labels: the class of an annotation is the index of its label in these; a label that is not among them has a
            number of its own, from 32768 on, always the same.

    Raises:
        PipelineError: the package is not installed.
    """
    try:
        from supervision import Detections
    except ImportError as error:
        raise PipelineError(f"detections need a package: pip install supervision ({error})") from error
    boxed = [found for found in annotations if found.box is not None]
    if not boxed:
        return Detections.empty()
    known = {label: index for index, label in enumerate(labels)}
    ids = [known.get(found.label, CLASS_IDS + zlib.crc32(found.label.encode()) % CLASS_IDS) for found in boxed]
    masks = [found.mask.pixels() for found in boxed if found.mask is not None]
    return Detections(
        xyxy=np.array([found.box for found in boxed], np.float32),
        confidence=np.array([1.0 if found.score is None else found.score for found in boxed], np.float32),
        class_id=np.array(ids),
        mask=np.stack(masks) if len(masks) == len(boxed) else None,
        data={"class_name": np.array([found.label for found in boxed])},
    )
