"""What a decoder found in a frame, and the frame with it drawn on, for people."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont


@dataclass(frozen=True, slots=True)
class Annotation:
    """One thing that was found in a frame, in pixels of that frame.

    Attributes:
        label: what it is.
        score: how sure the model is, usually 0 to 1.
        box: left, top, right, bottom; None if it concerns the whole frame.
        points: key points, (x, y) each.
    """

    label: str
    score: float | None = None
    box: tuple[float, float, float, float] | None = None
    points: tuple[tuple[float, float], ...] = ()


def draw(image: NDArray[np.uint8], annotations: Sequence[Annotation]) -> NDArray[np.uint8]:
    """Return a copy of a frame (uint8 HxWx3 RGB) with the annotations; those without a box are lines at top left."""
    picture = Image.fromarray(image)
    pen = ImageDraw.Draw(picture)
    size = max(10, image.shape[0] // 30)
    font = ImageFont.load_default(size)
    line_y = 0
    for annotation in annotations:
        color = _color(annotation.label)
        text = annotation.label if annotation.score is None else f"{annotation.label} {annotation.score:.2f}"
        at = (0.0, float(line_y))
        if annotation.box is None:
            line_y += size + 4
        else:
            left, right = sorted(annotation.box[0::2])
            top, bottom = sorted(annotation.box[1::2])
            pen.rectangle((left, top, right, bottom), outline=color, width=max(1, size // 8))
            at = (max(0.0, left), max(0.0, top - size - 4))
        if text:
            pen.rectangle((*at, at[0] + pen.textlength(text, font=font) + 4, at[1] + size + 3), fill=color)
            pen.text((at[0] + 2, at[1] + 1), text, fill="black", font=font)
        radius = max(1, size // 6)
        for x, y in annotation.points:
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
    return np.asarray(picture)


def _color(label: str) -> str:
    """Return a light colour, always the same for the same label."""
    return f"hsl({zlib.crc32(label.encode()) % 360}, 90%, 65%)"
