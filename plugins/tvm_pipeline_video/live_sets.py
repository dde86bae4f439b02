"""Frames of several live sources as one stream: `merge` of sources that stay, a `LiveSet` of some that come and go.

Of the sources with a frame waiting, the one served longest ago is next. The order within a source holds. Read next:
live_source.py.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from tvm_pipeline_video.errors import VideoError

if TYPE_CHECKING:
    from tvm_pipeline_video.live_source import LiveSource
    from tvm_pipeline_video.sources import LiveFrame

_log = logging.getLogger(__name__)


class LiveSet:
    """Live sources of which some go and others come while one thread iterates over their frames.

    Sources that end leave it by themselves. Neither leaving nor removing closes a source.

    Args:
        sources: to begin with.
        over: is called, in the thread that iterates, with a source that has ended, after its last frame.
        waits: whether the iteration goes on without a source, until `close`.
    """

    def __init__(
        self,
        sources: Sequence[LiveSource] = (),
        over: Callable[[LiveSource], None] = lambda _: None,
        *,
        waits: bool = True,
    ) -> None:
        self._over, self._waits = over, waits
        self._lock = threading.Lock()  # over the turn
        self._turn: list[LiveSource] = []
        self._news = threading.Event()
        self._closed = False
        for source in sources:
            self.add(source)

    def add(self, source: LiveSource) -> None:
        """Let the frames of a source come from now on."""
        source.listen(self._news.set)
        with self._lock:
            self._turn.append(source)
        self._news.set()

    def remove(self, source: LiveSource) -> None:
        """Take no more frames of a source; it may have ended already."""
        with self._lock:
            if source in self._turn:
                self._turn.remove(source)
        self._news.set()

    def close(self) -> None:
        """End the iteration."""
        self._closed = True
        self._news.set()

    def __iter__(self) -> Iterator[LiveFrame]:
        while not self._closed:
            self._news.clear()  # before looking, so that a frame that comes meanwhile is not missed
            frame, over = self._take()
            for source in over:
                self._over(source)
            if frame is not None:
                yield frame
            elif self._turn or self._waits:
                if not self._closed:
                    self._news.wait()
            else:
                return

    def _take(self) -> tuple[LiveFrame | None, list[LiveSource]]:
        """Return the frame that is next, if one waits, and the sources that left because they ended."""
        over: list[LiveSource] = []
        with self._lock:
            for source in tuple(self._turn):
                frame = source.take()
                if frame is not None:
                    self._turn.remove(source)
                    self._turn.append(source)
                    return frame, over
                if source.ended:
                    self._turn.remove(source)
                    over.append(source)
        return None, over


def merge(sources: Sequence[LiveSource]) -> Iterator[LiveFrame]:
    """Yield frames of several sources as they come: of those with a frame waiting, the one served longest ago is next.

    The order within a source holds. A source that breaks for good is logged, keeps the reason in its `failure`, and
    the others go on.

    Raises:
        VideoError: every source broke; the frames before that have been yielded.
    """

    def over(source: LiveSource) -> None:
        if source.failure and len(sources) > 1:
            _log.warning("%s; the other sources go on", source.failure)

    yield from LiveSet(sources, over, waits=False)
    failures = [source.failure for source in sources if source.failure]
    if len(failures) == len(sources) == 1:
        raise failures[0]
    if failures and len(failures) == len(sources):
        raise VideoError(f"every source broke: {'; '.join(map(str, failures))}") from failures[0]
