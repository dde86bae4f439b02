"""A frame as JPEG, for the page."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

LARGEST = 960  # pixels: enough for a page; encoding whole frames of a large camera would take a core


def jpeg(image: NDArray[np.uint8]) -> bytes:
    """Return a frame (uint8 HxWx3 RGB) as JPEG, made smaller if a side is longer than 960 pixels."""
    picture = Image.fromarray(image)
    picture.thumbnail((LARGEST, LARGEST))
    file = BytesIO()
    picture.save(file, "JPEG", quality=80)
    return file.getvalue()
