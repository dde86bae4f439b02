"""Frames as JPEG, for the page: drawn only when someone looks, and for all who look together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline_video.annotations import jpeg

LARGEST = 960  # pixels: enough for a page; encoding whole frames of a large camera would take a core
PERIOD_S = 0.2  # at least, between two pictures
MOST_WORK = 0.1  # of one core
FORGOTTEN_S = 60.0  # after which the picture of a source at which nobody looks is dropped

Seen = TypeVar("Seen")


class Preview(Generic[Seen]):
    """The latest frame of each source as JPEG, at most five times a second, and all for a tenth of a core.

    The thread of a request draws, so nothing is drawn while nobody looks, and who takes a picture slowly holds up no
    frame and no other viewer.

    Args:
        latest: returns what was seen last of a source; another object for each frame, None before the first.
        drawn: returns its picture, uint8 HxWx3 RGB.
    """

    def __init__(self, latest: Callable[[str], Seen | None], drawn: Callable[[Seen], NDArray[np.uint8]]) -> None:
        self._latest, self._drawn = latest, drawn
        self._drawing = threading.Lock()
        self._shown: dict[str, tuple[Seen, bytes, float]] = {}  # with the earliest time of the source's next picture

    def __call__(self, source: str = "") -> bytes | None:
        """Return the picture of a source, empty for that of any; None before the first frame."""
        with self._drawing:
            began_s, latest = time.monotonic(), self._latest(source)
            if latest is None:
                self._shown.pop(source, None)
                return None
            shown, picture, next_s = self._shown.get(source, (None, b"", 0.0))
            if latest is not shown and began_s >= next_s:
                picture = jpeg(self._drawn(latest), LARGEST)
                # A frame is large, and a source that is gone is not asked for again.
                self._shown = {name: one for name, one in self._shown.items() if began_s - one[2] < FORGOTTEN_S}
                work_s = (time.monotonic() - began_s) * len({*self._shown, source})
                self._shown[source] = latest, picture, began_s + max(PERIOD_S, work_s / MOST_WORK)
            return picture
