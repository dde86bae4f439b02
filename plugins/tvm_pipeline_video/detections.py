"""Annotations as those of supervision, a package of tools for detections: tracking, counting, drawing.

The package is of the extra `tracking`. Read next: tracking.py.
"""

from __future__ import annotations

import importlib
import os
import sys
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tvm_pipeline import PipelineError
from tvm_pipeline_video.annotations import Annotation

if TYPE_CHECKING:
    import supervision  # type: ignore[import-not-found,unused-ignore]

CLASS_IDS = 1 << 15


def tracking_package(name: str) -> Any:
    """Import a package of the extra `tracking`, and leave the environment of this process as it was.

    OpenCV, which both packages import, sets LD_LIBRARY_PATH for its own copy of Qt, and every process that is started
    later would have it.

    Raises PipelineError where the package is not installed.
    """
    if loaded := sys.modules.get(name):
        return loaded
    before = dict(os.environ)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PipelineError(
            f"following objects needs an extra: pip install 'tvm-pipeline[tracking]' ({error})"
        ) from error
    finally:
        for variable in [variable for variable, value in os.environ.items() if before.get(variable) != value]:
            del os.environ[variable]
            os.environ.update({variable: before[variable]} if variable in before else {})


def detections(annotations: Sequence[Annotation], labels: Sequence[str] = ()) -> supervision.Detections:
    """Return the annotations that have a box as `supervision.Detections`, with masks where all of these have one.

    Args:
        annotations: `data["index"]` of a detection is the index of its annotation in these.
        labels: the class of an annotation is the index of its label in these; a label that is not among them has a
            number of its own, from 32768 on, always the same.

    Raises:
        PipelineError: the package is not installed.
    """
    made_of = tracking_package("supervision").Detections
    boxed = [found for found in annotations if found.box is not None]
    if not boxed:
        empty: supervision.Detections = made_of.empty()
        return empty
    known = {label: index for index, label in enumerate(labels)}
    ids = [known.get(found.label, CLASS_IDS + zlib.crc32(found.label.encode()) % CLASS_IDS) for found in boxed]
    masks = [found.mask.pixels() for found in boxed if found.mask is not None]
    made: supervision.Detections = made_of(
        xyxy=np.array([found.box for found in boxed], np.float32),
        confidence=np.array([1.0 if found.score is None else found.score for found in boxed], np.float32),
        class_id=np.array(ids),
        mask=np.stack(masks) if len(masks) == len(boxed) else None,
        data={
            "class_name": np.array([found.label for found in boxed]),
            "index": np.array([index for index, found in enumerate(annotations) if found.box is not None]),
        },
    )
    return made
