"""One connection of a live source: a thread that opens it and hands on its frames.

Read next: live_source.py, which starts one after another where connections break.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from tvm_pipeline.errors import RunError
from tvm_pipeline_video.sources import Frame, Source


class SourceReader(threading.Thread):
    """One connection, from opening to closing; the only thread that touches its Source.

    Args:
        open: opens the source.
        opened: is called, in this thread, once the source is open.
        receive: takes a frame, with the seconds for which this thread computed to get it; returns whether to go on.

    Attributes:
        source: once it is open.
        failure: why it ended; None where the source ended.
        frames: how many it handed on.
        began_s, clock_s: the monotonic time at which opening began, and of the source's time 0; None before a frame.
        owing_since_s: since when a frame is missing; None while one waits for a place in the queue.
        ready: set once it is open, or failed to open.
        over: set once it has ended, or is not waited for any more.
    """

    def __init__(
        self,
        name: str,
        open: Callable[[], Source],
        opened: Callable[[SourceReader], None],
        receive: Callable[[SourceReader, Frame, float], bool],
    ) -> None:
        super().__init__(name=f"reader of {name}", daemon=True)  # a hanging driver must not hold up the exit
        self.source: Source | None = None
        self.failure: Exception | None = None
        self.frames = 0
        self.began_s = time.monotonic()
        self.clock_s: float | None = None
        self.owing_since_s: float | None = self.began_s
        self.ready = threading.Event()
        self.over = threading.Event()
        self.abandoned = False
        self._open, self._opened, self._receive = open, opened, receive

    def place(self, cores: Sequence[int]) -> None:
        """Run on these cores alone; on any where there are none."""
        if cores and self.native_id is not None:
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(self.native_id, cores)

    def run(self) -> None:
        try:
            with self._open() as self.source:
                self._opened(self)
                self.ready.set()
                computed_s = time.thread_time()
                for frame in self.source:
                    self.frames += 1
                    self.owing_since_s = None
                    if not self._receive(self, frame, time.thread_time() - computed_s):
                        break
                    self.owing_since_s = time.monotonic()
                    computed_s = time.thread_time()
        except Exception as error:  # the keeper decides what it means
            self.failure = error
        except BaseException as error:  # would end this thread alone
            self.failure = RunError(
                f"{self.name} was ended by {type(error).__name__}: {error}; mend the kind of source"
            )
        finally:
            self.ready.set()
            self.over.set()
