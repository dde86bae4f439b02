"""What a decoder found in a frame, and the frame with it drawn on, for people."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw, ImageFont


@dataclass(frozen=True, slots=True)
class Mask:
    """Some pixels of a picture, as COCO's uncompressed run-length encoding writes them.

    Attributes:
        size: height and width of the picture.
        counts: how many pixels are outside, inside, outside and so on, down the columns from the left.

    Examples:
        >>> mask = Mask.of(np.array([[0, 1, 1], [0, 1, 0]]))
        >>> mask
        Mask(size=(2, 3), counts=(2, 3, 1))
        >>> mask.pixels().astype(int).tolist()
        [[0, 1, 1], [0, 1, 0]]
    """

    size: tuple[int, int]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, pixels: NDArray[Any]) -> Mask:
        """Return the mask of the pixels (height, width) that are not 0."""
        flat = np.concatenate([[False], np.asarray(pixels, bool).ravel(order="F"), [False]])
        changes = np.flatnonzero(flat[1:] != flat[:-1])
        runs = np.diff(changes, prepend=0, append=pixels.size)
        counts = runs.tolist() if runs[-1] else runs[:-1].tolist()
        height, width = pixels.shape
        return cls((height, width), tuple(counts))

    def pixels(self) -> NDArray[np.bool_]:
        """Return the mask as an array (height, width)."""
        inside = np.arange(len(self.counts)) % 2 == 1
        return np.repeat(inside, self.counts).reshape(self.size, order="F")


LONGEST_LABEL = 100  # characters of a label that are drawn


@dataclass(frozen=True, slots=True)
class Annotation:
    """One thing that was found in a frame, in pixels of that frame.

    Attributes:
        label: what it is.
        score: how sure the model is, usually 0 to 1.
        box: left, top, right, bottom; None if it concerns the whole frame.
        points: key points, (x, y) each.
        polygon: its outline, (x, y) each, where a box would not do: text that is not level.
        mask: its pixels.
        track: the number of the object that it is of, where objects are followed: the same in each frame of a source.
        zones: the names of the zones that the object is in.
    """

    label: str
    score: float | None = None
    box: tuple[float, float, float, float] | None = None
    points: tuple[tuple[float, float], ...] = ()
    polygon: tuple[tuple[float, float], ...] = ()
    mask: Mask | None = None
    track: int | None = None
    zones: tuple[str, ...] = ()


class Overlay:
    """The frame rate and the latency of the moment, as a line to draw."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=26)  # when the last frames came

    def __call__(self, latency_s: float) -> str:
        """Return the figures at a frame that took so long."""
        self._times_s.append(time.perf_counter())
        seconds = self._times_s[-1] - self._times_s[0]
        rate = f"{(len(self._times_s) - 1) / seconds:.0f} fps, " if seconds else ""
        return f"{rate}{latency_s * 1e3:.0f} ms"


def draw(image: NDArray[np.uint8], annotations: Sequence[Annotation], figures: str = "") -> NDArray[np.uint8]:
    """Return a copy of a frame (uint8 HxWx3 RGB) with the annotations; those without a box are lines at top left.

    What lies outside of the frame is drawn at its edge, or not at all. The figures are a line at bottom left.
    """
    masks = [(one.mask.pixels(), one.label) for one in annotations if one.mask and one.mask.size == image.shape[:2]]
    if masks:
        image = image.copy()
        for pixels, label in masks:  # half of the picture shows through
            image[pixels] = image[pixels] // 2 + np.array(ImageColor.getrgb(_color(label)), np.uint8) // 2
    picture = Image.fromarray(image)
    pen = ImageDraw.Draw(picture)
    height, width = image.shape[:2]
    size = max(10, height // 30)
    font = _font(size)
    line_y = 0

    def label_at(x: float, y: float, text: str, color: str) -> None:
        pen.rectangle((x, y, x + pen.textlength(text, font=font) + 4, y + size + 3), fill=color)
        pen.text((x + 2, y + 1), text, fill="black", font=font)

    for annotation in annotations:
        label = " ".join(str(annotation.label).split())[:LONGEST_LABEL]
        color = _color(label)
        text = label if annotation.score is None else f"{label} {annotation.score:.2f}"
        if annotation.track is not None:
            text += f" #{annotation.track}"
        at = (0.0, float(line_y))
        if annotation.box is None:
            line_y += size + 4
        else:
            left, right = sorted(_within(x, width) for x in annotation.box[0::2])
            top, bottom = sorted(_within(y, height) for y in annotation.box[1::2])
            if annotation.polygon:
                corners = [(_within(x, width), _within(y, height)) for x, y in annotation.polygon]
                pen.polygon(corners, outline=color, width=max(1, size // 8))
            else:
                pen.rectangle((left, top, right, bottom), outline=color, width=max(1, size // 8))
            at = (max(0.0, left), max(0.0, top - size - 4))
        if text:
            label_at(*at, text, color)
        radius = max(1, size // 6)
        for x, y in ((_within(x, width), _within(y, height)) for x, y in annotation.points):
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
    if figures:
        label_at(0.0, height - size - 4.0, figures, "white")
    return np.asarray(picture)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _within(pixel: float, extent: int) -> float:
    """Return a coordinate that is far outside of the frame as one that is just outside."""
    return min(max(float(pixel), -float(extent)), 2.0 * extent)


def _color(label: str) -> str:
    """Return a light colour, always the same for the same label."""
    return f"hsl({zlib.crc32(label.encode()) % 360}, 90%, 65%)"


def jpeg(image: NDArray[np.uint8], largest: int = 0) -> bytes:
    """Return a picture (uint8 HxWx3 RGB) as JPEG, made smaller where a side is longer than `largest` (0: never)."""
    picture = Image.fromarray(image)
    if largest:
        picture.thumbnail((largest, largest))
    file = BytesIO()
    picture.save(file, "JPEG", quality=80)
    return file.getvalue()
