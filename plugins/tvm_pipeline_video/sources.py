"""An open source of frames: what every kind of source gives, whatever its frames come from.

A source gives frames as fast as it is asked (a camera: as fast as it films). Queueing, dropping and coming back after
a stall are the work of `live_source.py`. Read next: kinds.py (which kinds of sources there are, and how each is
opened), decoding.py (what damage does), preprocessing.py (a frame becomes a model's input).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline_video.decoding import USUAL_FPS, Picture
from tvm_pipeline_video.errors import VideoError

UNORDERED_S = 1.0  # by which times may fall and come back: these pictures are out of order, or their clock is coarse
JUMP_S = 10.0  # by more than this, the clock of a live source does not go ahead of its pictures


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One picture of a source.

    Attributes:
        index: counts from 0 without gaps.
        time_s: seconds since the first frame; it never falls.
        image: uint8 HxWx3 RGB.
        source: name of the source.
    """

    index: int
    time_s: float
    image: NDArray[np.uint8]
    source: str

    @property
    def clock_s(self) -> float:
        """Seconds on the clock by which results are cut into segments."""
        return self.time_s

    @property
    def age_s(self) -> float | None:
        """Seconds since it was decoded; None for a source that is not read ahead, where no frame waits."""
        return None

    @property
    def tag(self) -> str:
        """The text that its source was given by whoever opened it; empty for a source that is not read ahead."""
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class LiveFrame(Frame):
    """A frame of a LiveSource. `index` and `time_s` go on over reconnections; a dropped frame leaves a gap.

    Attributes:
        captured_s: the monotonic time at which it was decoded: no program can see for how long a camera or a network
            held it back before.
        read_s: seconds for which the reader's thread computed to get it.
        tag: of its source.
        live: whether its source films by itself.
    """

    captured_s: float
    read_s: float = 0.0
    tag: str = ""
    live: bool = False

    @property
    def clock_s(self) -> float:
        """When it was decoded, if its source films by itself: the clock of a camera may run wrong."""
        return self.captured_s if self.live else self.time_s

    @property
    def age_s(self) -> float:
        """Seconds since it was decoded."""
        return time.monotonic() - self.captured_s


class Source:
    """An open source: iterate over it once, close it or use it in a `with` block.

    The first frame is decoded on opening, so that a source that opens does give frames. Iterating and closing
    may happen in different threads; closing waits for the frame that is being decoded.

    The times of the pictures may fall, stand or jump: a camera restarts, a video is played in a loop. The times of the
    frames then go on from the last one: by the seconds that a live source took for the picture, else by one period.

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
        self._period_s = 1 / (fps or USUAL_FPS)
        self._time_s, self._shift_s = -self._period_s, 0.0  # of the last frame; what its picture's clock lacks
        self._read_s = time.monotonic() - self._period_s  # when it came
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
            return Frame(self._given - 1, self._next_time_s(picture.time_s), picture.image, self.name)

    def _next_time_s(self, stated_s: float) -> float:
        """Return the time of the next frame, whose picture states this one."""
        now_s = time.monotonic()
        waited_s, self._read_s = now_s - self._read_s, now_s
        time_s = stated_s + self._shift_s
        ahead_s = time_s - self._time_s
        if self.live:
            is_right, step_s = 0 < ahead_s < waited_s + JUMP_S, waited_s
        else:
            is_right, step_s = 0 <= ahead_s < math.inf, self._period_s
        if not is_right:
            time_s = self._time_s + step_s
            if not -UNORDERED_S < ahead_s <= 0:  # also where it is NaN
                self._shift_s = time_s - stated_s
        self._time_s = time_s
        return time_s

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
