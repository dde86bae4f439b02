"""An open source of frames: what every kind of source gives, whatever its frames come from.

A source gives frames as fast as it is asked (a camera: as fast as it films). Queueing, dropping and coming back after
a stall are the work of `live_source.py`. Read next: kinds.py (which kinds of sources there are, and how each is
opened), decoding.py (what damage does), preprocessing.py (a frame becomes a model's input).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline.errors import VideoError
from tvm_pipeline.video.decoding import Picture


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One picture of a source.

    Attributes:
        index: counts from 0 without gaps.
        time_s: seconds since the first frame.
        image: uint8 HxWx3 RGB.
        source: name of the source.
    """

    index: int
    time_s: float
    image: NDArray[np.uint8]
    source: str

    @property
    def age_s(self) -> float | None:
        """Seconds since it was decoded; None for a source that is not read ahead, where no frame waits."""
        return None

    @property
    def tag(self) -> str:
        """The text that its source was given by whoever opened it; empty for a source that is not read ahead."""
        return ""


class Source:
    """An open source: iterate over it once, close it or use it in a `with` block.

    The first frame is decoded on opening, so that a source that opens does give frames. Iterating and closing
    may happen in different threads; closing waits for the frame that is being decoded.

    Attributes:
        name: what it was opened as, without passwords.
        width, height: of the first frame; later ones may differ in a stream that changes size.
        fps: frames a second as the container says it, None for pictures and where it does not say.
        frames: how many it will give as the container says it, None for live sources and where it does not
            say.
        live: whether it has no end of its own: a camera, or an address that does not say how long it is.
        codec: of the video, as FFmpeg calls it; empty where the frames are not decoded from a video.
        hardware: the kind of device that decodes it, such as `cuda`; empty for software.
        damaged: damaged packets and pictures met so far, see decoding.py.

    Raises:
        VideoError: it gives no picture.
    """

    def __init__(
        self,
        name: str,
        pictures: Iterator[Picture],
        *,
        fps: float | None,
        frames: int | None,
        limit: int | None,
        live: bool = False,
        codec: str = "",
    ) -> None:
        self.name = name
        self.codec = codec
        self.hardware = ""
        self.fps = fps
        self.frames = min((n for n in (frames, limit) if n is not None), default=None)
        self.live = live and self.frames is None
        self.damaged = 0
        self._pictures = pictures
        self._limit = limit
        self._given = 0
        self._lock = threading.Lock()
        self._first = next(pictures, None)
        if self._first is None:
            raise VideoError(f"{name} holds no picture; check that it was recorded whole, or choose another source")
        self.height, self.width = self._first.image.shape[:2]

    def __iter__(self) -> Source:
        return self

    def __next__(self) -> Frame:
        with self._lock:
            if self._given == self._limit:
                raise StopIteration
            picture, self._first = self._first or next(self._pictures), None
            self.damaged += picture.damage
            self._given += 1
            return Frame(self._given - 1, picture.time_s, picture.image, self.name)

    def close(self) -> None:
        """Release the file, camera or connection; iterating afterwards ends immediately."""
        with self._lock:
            self._limit = self._given
            self._first = None
            if close := getattr(self._pictures, "close", None):
                close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
