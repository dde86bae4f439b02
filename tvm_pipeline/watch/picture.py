"""A frame as JPEG, for the page."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

LARGEST = 960  # pixels: what a page shows; a whole frame of a large camera would take a core each second


def jpeg(image: NDArray[np.uint8]) -> bytes:
    """A frame (uint8 HxWx3 RGB) as JPEG, made smaller where a side is longer than 960 pixels."""
    picture = Image.fromarray(image)
    picture.thumbnail((LARGEST, LARGEST))
    file = BytesIO()
    picture.save(file, "JPEG", quality=80)
    return file.getvalue()
