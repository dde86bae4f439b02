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

Seen = TypeVar("Seen")


class Preview(Generic[Seen]):
    """The latest frame as JPEG, at most five times a second and for a tenth of a core, however many look.

    The thread of a request draws, so nothing is drawn while nobody looks, and who takes a picture slowly holds up no
    frame and no other viewer.

    Args:
        latest: returns what was seen last; another object for each frame, None before the first.
        drawn: returns its picture, uint8 HxWx3 RGB.
    """

    def __init__(self, latest: Callable[[], Seen | None], drawn: Callable[[Seen], NDArray[np.uint8]]) -> None:
        self._latest, self._drawn = latest, drawn
        self._drawing = threading.Lock()
        self._shown: Seen | None = None
        self._jpeg: bytes | None = None
        self._next_s = 0.0  # the earliest time of the next picture

    def __call__(self) -> bytes | None:
        """Return the picture, None before the first frame."""
        with self._drawing:
            began_s, latest = time.monotonic(), self._latest()
            if latest is not None and latest is not self._shown and began_s >= self._next_s:
                self._jpeg, self._shown = jpeg(self._drawn(latest), LARGEST), latest
                self._next_s = began_s + max(PERIOD_S, (time.monotonic() - began_s) / MOST_WORK)
            return self._jpeg
